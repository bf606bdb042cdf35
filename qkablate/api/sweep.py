"""Plan and run a sweep: for `qkablate.sweep`, `qkablate sweep` and `qkablate claim run`."""

from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

from qkablate.api.train import make_interrupt
from qkablate.api.words import format_words, reject_unnamed
from qkablate.compose.configs import make_config, open_hydra
from qkablate.compose.grid import EmptyGrid, SweepRequest, read_request
from qkablate.config import Config
from qkablate.dashboard.sweep_run import make_sweep_tables
from qkablate.disk import make_folder
from qkablate.errors import UserError
from qkablate.runs.run import NoMatch
from qkablate.sweeps.planning.manifest import Manifest, find_sweep, freeze
from qkablate.sweeps.running import results
from qkablate.sweeps.running.progress_table import ProgressTable
from qkablate.sweeps.running.state import SweepState
from qkablate.tracking.wandb.mode import resolve_mode

if TYPE_CHECKING:
    from qkablate.analysis.study.study import Study

MANY = 10_000  # runs: more need the command's --yes


@dataclass(frozen=True)
class SweepOutcome:
    """Outcome of a session of a sweep."""

    code: int  # 0: every run is done or has diverged; 1: some are not; 128 + signal: stopped
    manifest: Manifest
    sweep_state: SweepState
    wandb: str | None  # address of the sweep's own run in W&B


def sweep(*unnamed: Never, retry_failed: bool = False, **keys: Any) -> "Study":
    """Train a grid of runs, as `qkablate sweep` does, and return them by arm.

    A list, a tuple or a range gives several values of a key: an axis of the grid. Runs that are
    done are not repeated, so the same call resumes a sweep that was stopped. A run that fails or
    diverges raises no exception: check `study.is_complete` and the `status` of each record.

    >>> study = sweep(variant=["standard", "no_q"], seed=range(5), **{"train.steps": 300})
    """
    from qkablate.analysis.study.study import read_study

    for name in map(str, unnamed):
        with suppress(NoMatch):
            find_sweep(name, str(keys.get("out", "outputs")))
            raise UserError(f"'{name}' is a sweep in outputs: load_sweep({name!r}) reads it")
    reject_unnamed("sweep", unnamed)
    words = format_words(keys, axes=True)
    with open_hydra():
        try:
            request = read_request(words)
        except EmptyGrid:
            raise UserError(
                "the grid is empty: give sweep='quick', or axes such as"
                " variant=['standard', 'merged_w'], seed=range(3)"
            ) from None
        if request.count() > MANY:
            raise UserError(
                f"this grid has {request.count():,} runs, before anything is left out, and Python"
                f" plans {MANY:,} at most; for more there is qkablate sweep --yes"
            )
        manifest, slots = plan_sweep(request, ["sweep", *words])
    outcome = run_sweep(manifest, slots, request, retry=retry_failed)
    if outcome.code > 128:
        raise make_interrupt(outcome.code)
    return read_study(outcome.manifest.folder)


def load_sweep(name: str | Path | None = None, out: str | Path = "outputs") -> "Study":
    """Read a sweep, given as a folder or by the beginning of its name; the default is the newest.

    The archive of a published claim is read, too.

    >>> study = load_sweep("quick")
    """
    from qkablate.analysis.claims.judgement import counting_sweep
    from qkablate.analysis.publication.unpack import open_archives, unpacked_claims
    from qkablate.analysis.study.study import read_study

    if name is not None and (unpacked := open_archives(name)):
        claims = unpacked_claims(unpacked)
        if len(claims) > 1:
            names = ", ".join(claim.claim.folder_name for claim in claims)
            raise UserError(
                f"'{name}' holds {len(claims)} claims; give the archive of one: {names}"
            )
        return read_study(counting_sweep(claims[0]))
    return read_study(find_sweep(None if name is None else str(name), str(out)))


def plan_sweep(
    request: SweepRequest, command: list[str], check: Callable[[Config], None] | None = None
) -> tuple[Manifest, list[str | None]]:
    """Return the manifest, and a slot for every run that can run at once.

    `check` raises UserError for a config, before the data and the circuits that it names are read.
    """
    from tqdm import tqdm

    from qkablate.analysis.publication.archive import refuse_archives
    from qkablate.sweeps.engines.factory import check_engine
    from qkablate.sweeps.planning.arms import Overrides
    from qkablate.sweeps.planning.expand import Grid, expand_grid

    engine = request.settings.engine
    check_engine(engine)
    is_remote = engine.name != "local"
    grid = Grid(request.settings.sweep, request.controls, request.choices, is_remote)
    with tqdm(desc="expanding", unit=" arms", leave=False, disable=None, delay=0.5) as bar:

        def note(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        def compose(overrides: Overrides) -> Config:
            config = make_config(overrides)
            if check is not None:
                check(config)
            return config

        manifest = expand_grid(grid, compose, ["qkablate", *command], note)
    refuse_archives(manifest.out)
    return pack_manifest(manifest, request)


def pack_manifest(manifest: Manifest, request: SweepRequest) -> tuple[Manifest, list[str | None]]:
    """Return the manifest with the threads of its runs, and a slot for every one at a time."""
    from qkablate.sweeps.engines.factory import check_resources
    from qkablate.sweeps.planning.packing import pack

    try:
        make_folder(Path(manifest.out).expanduser() / "sweeps")
    except OSError as error:
        raise UserError(f"out: cannot write in '{manifest.out}': {error.strerror}") from None
    manifest, slots = pack(manifest, request.settings)
    check_resources(request.settings.engine, manifest)
    return manifest, slots


def run_sweep(
    manifest: Manifest, slots: list[str | None], request: SweepRequest, *, retry: bool
) -> SweepOutcome:
    """Train the runs that are not done."""
    from qkablate.sweeps.engines.factory import open_engine
    from qkablate.sweeps.planning import text
    from qkablate.sweeps.running.launcher import Launcher

    wandb = resolve_mode(manifest.tracking) != "disabled"
    engine = request.settings.engine
    share = request.settings.sweep.share_prefix
    plan = text.format_plan(manifest, len(slots), engine=engine, share_prefix=share)
    has_threads = request.choices.get("threads", ["auto"]) != ["auto"]
    # On a cluster a run gets the cores it asks for; a run that is resumed keeps its threads anyway.
    keep_threads = not has_threads and engine.name == "local"
    manifest = freeze(manifest, plan, keep_threads=keep_threads)
    table = ProgressTable()
    summary = text.format_plan(
        manifest, len(slots), engine=engine, share_prefix=share, is_summary=True
    )
    for line in (f"sweep    {manifest.folder}", *summary):
        table.note(line)
    opened = open_engine(request.settings, manifest, slots, wandb=wandb, note=table.note)
    with closing(opened):  # also if this is interrupted before it trains
        launcher = Launcher(
            manifest,
            opened,
            table,
            retry_failed=retry,
            stop_on_failure=request.settings.on_failure == "stop",
            share_prefix=share,
        )
        code = launcher.run()
    # Who ends last logs the sweep, even if all runs were trained by the others beside it.
    is_last = launcher.saw_an_end and not launcher.sweep_state.is_running()
    address = None
    if is_last and wandb:
        tables = make_sweep_tables(manifest.folder, table.note)
        address = results.log_summary(launcher.sweep_state, table.note, tables)
    return SweepOutcome(code, manifest, launcher.sweep_state, address)
