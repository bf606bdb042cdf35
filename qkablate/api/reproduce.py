"""Train the runs of a published claim again: for `qkablate reproduce`."""

import dataclasses
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any

from qkablate.analysis.claims.claim import Claim
from qkablate.analysis.claims.registry import Registration, claim_grid
from qkablate.analysis.publication.archive import Archive
from qkablate.analysis.publication.replication import (
    RunAgreement,
    check_places,
    check_trainable,
    compare_run,
    sample_runs,
)
from qkablate.api.train import make_interrupt
from qkablate.compose.grid import SweepRequest, read_request
from qkablate.config import GridConfig, SweepConfig, TrackingConfig
from qkablate.errors import UserError
from qkablate.runs.run import package_versions, read_cpu_name
from qkablate.sweeps.engines.factory import open_engine
from qkablate.sweeps.planning.manifest import Arm, Manifest, freeze, read_manifest
from qkablate.sweeps.planning.packing import pack
from qkablate.sweeps.running.launcher import Launcher
from qkablate.sweeps.running.progress_table import ProgressTable

PURPOSE = "reproduction"  # of the seeds: none of the published runs has them


def reproduction_request(claim: Claim, n: int, words: Iterable[str]) -> SweepRequest:
    """Return the claim's sweep with seeds of its own, which follow from its hash, too."""
    grid, claim_words = claim_grid(claim, n)
    seeds = claim.seeds_of(PURPOSE, n + claim.tuning_seeds)
    own: GridConfig = dataclasses.replace(
        grid,
        name=f"reproduce-{claim.name}",
        axes={"seed": ",".join(map(str, seeds[:n]))},
        tuning_seeds=seeds[n:] or grid.tuning_seeds,
    )
    return read_request([*claim_words, *words], own)


def check_runs(
    archive: Archive, registration: Registration, count: int, data: Mapping[str, str]
) -> list[RunAgreement]:
    """Train some published runs again in a temporary folder, and compare their losses.

    `data` has the user's keys of the data: its cache, and where files of the claim are.
    """
    ids = sample_runs(archive, count)
    if not ids:
        raise UserError(f"{archive.name}: no published run is done, so that none can be checked")
    found: list[RunAgreement] = []
    manifests = [read_manifest(sweep) for sweep in registration.sweeps.values()]
    with tempfile.TemporaryDirectory() as out:
        for id in ids:
            run = archive.runs[id]
            arm = next((m.arms[run["arm"]] for m in manifests if run["arm"] in m.arms), None)
            if arm is None:
                raise UserError(f"{archive.name}: run {id} is of no arm of its sweeps")
            own = _as_published(arm, run["result"].get("threads"), data)
            name, result = _train_alone(own, run, out, id)
            torch, cpu = package_versions()["torch"], read_cpu_name()
            device = own.config.device.partition(":")[0]
            found.append(compare_run(archive, id, name, result, torch, cpu, device))
    return found


def _as_published(arm: Arm, threads: int | None, data: Mapping[str, str]) -> Arm:
    """Return the arm with the threads of a run, the user's keys of the data, and no tracking."""
    check_trainable(arm)
    if isinstance(threads, int):
        arm = arm.with_threads(threads)
    own: dict[str, Any] = {key.removeprefix("data."): value for key, value in data.items()}
    config = dataclasses.replace(
        arm.config,
        tracking=TrackingConfig(wandb="disabled"),
        data=dataclasses.replace(arm.config.data, **{"cache": None} | own),
    )
    check_places(config, data, arm.name)
    return dataclasses.replace(arm, config=config)


def _train_alone(
    arm: Arm, run: dict[str, Any], out: str, id: str
) -> tuple[str, dict[str, Any] | None]:
    """Train one run as a sweep of its own; return its name and its result, None without one."""
    planned = arm.run(run["changes"], tuning=run["tuning"])
    if planned.id != id:
        raise UserError(
            f"run {id} would be {planned.id} now: its numbers are of another version of qkablate"
        )
    manifest = Manifest(
        name="check",
        out=out,
        arms={arm.name: arm},
        runs=[planned],
        finals=[],
        left_out=[],
        excluded=0,
    )
    settings = SweepConfig()
    manifest, slots = pack(manifest, settings)
    manifest = freeze(manifest, [])
    table = ProgressTable()
    engine = open_engine(settings, manifest, slots, wandb=False, note=table.note)
    launcher = Launcher(manifest, engine, table, share_prefix=False)
    code = launcher.run()
    if code > 128:
        raise make_interrupt(code)
    state = launcher.sweep_state.states[planned.id]
    if state.reason:
        table.note(f"{planned.name}: {state.reason}")
    return planned.name, dict(state.result) if state.result and launcher.trained else None
