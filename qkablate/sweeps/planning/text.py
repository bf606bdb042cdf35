"""The plan of a sweep, for a person and for a program: what is run, how large, and what is not."""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from typing import Any

from qkablate.config import EngineConfig
from qkablate.sweeps.planning.estimate import Estimate, total_seconds
from qkablate.sweeps.planning.manifest import Arm, Manifest
from qkablate.sweeps.planning.packing import gpus_of_a_run, memory_of_a_run
from qkablate.sweeps.running.state import duration
from qkablate.table import aligned, counted, short, some

Estimates = Mapping[str, Estimate]


def lines(
    manifest: Manifest,
    slots: int,
    estimates: Estimates | None = None,
    done: Collection[str] = (),
    engine: EngineConfig | None = None,
) -> list[str]:
    """All of it. `done` are the ids of runs that need not be trained."""
    head = ["arm", "params", "with embeddings", "mismatch", "MLP", "FLOPs/token", "runs"]
    head += ["a run", "memory"] if estimates is not None else []
    counts = Counter(run.arm for run in manifest.runs)
    rows = []
    for arm in manifest.arms.values():
        model = arm.config.model
        cells = [_title(arm), f"{arm.params:,}", f"{arm.total_params:,}"]
        cells += [_mismatch(arm, manifest)]
        cells += [f"{round(model.mlp_ratio * model.d_model):,}", short(arm.flops)]
        cells += [_runs(manifest, counts[arm.name])]
        if estimates is not None:
            own = estimates[arm.name]
            cells += [f"{'~' * own.beyond}{duration(own.seconds)}", f"{short(own.bytes)}B"]
        rows.append(cells)
    left = _left_out(manifest)
    said = summary(manifest, slots, estimates, done, engine, "above")
    return [*aligned(head, rows), "", *left, *said]


def summary(
    manifest: Manifest,
    slots: int,
    estimates: Estimates | None = None,
    done: Collection[str] = (),
    engine: EngineConfig | None = None,
    where: str = "in plan.txt",
) -> list[str]:
    """In a few lines."""
    arms, runs = manifest.arms, len(manifest.runs)
    baselines = [name for name in dict.fromkeys(a.baseline for a in arms.values()) if name]
    said = [f"runs     {counted(runs, 'run')} of {counted(len(arms), 'arm')}"]
    said[0] += f"; baselines: {some(baselines)}" if baselines else ""
    if manifest.finals:
        finals = len(manifest.finals)
        said = [
            f"runs     {runs:,} to choose the learning rates of {counted(len(arms), 'arm')} (more"
            f" where the best lies on the edge), then {finals * len(arms):,} at the best"
            f" ({finals} an arm)"
        ]
    if manifest.left_out:
        kinds = Counter(left.kind for left in manifest.left_out)
        told = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        said.append(f"left out {counted(len(manifest.left_out), 'arm')}: {told} (reasons {where})")
    if manifest.excluded:
        said.append(f"         {counted(manifest.excluded, 'arm')} excluded by sweep.where")
    said.append(f"packing  {_packing(manifest, slots, engine)}; the largest first")
    if done:
        said.append(f"done     {counted(len(done), 'run')} already, in this sweep or another")
    if estimates is not None:
        most = max(estimates.values(), key=lambda one: one.bytes)
        total = total_seconds(manifest, estimates, slots, done)
        work = sum(arms[run.arm].work for run in manifest.runs if run.id not in done)
        work += len(manifest.finals) * sum(arm.work for arm in arms.values())
        said.append(
            f"cost     about {duration(total)}, {short(work)}FLOP; memory {short(most.bytes)}B at"
            f" most for one run, {short(slots * most.bytes)}B for {slots} of them"
        )
        if engine is not None and engine.name != "local":
            said.append("         timed on this machine, one run alone, without waiting in a queue")
        if any(one.beyond for one in estimates.values()):
            said.append("         ~ larger than what could be timed here: a guess by FLOPs")
    return said


def _packing(manifest: Manifest, slots: int, engine: EngineConfig | None) -> str:
    """How many run at once, where, and what each of them has."""
    arms = manifest.arms.values()
    device = next(iter(arms)).facts["device"]
    if engine is None or engine.name == "local":
        threads = sorted({int(arm.config.threads) for arm in arms})
        each = f", {some([counted(n, 'thread') for n in threads])} each" if device == "cpu" else ""
        return f"{slots} at once on {device}{each}"
    parts = [f"{slots} at once at most on {engine.name}"]
    parts += [f"partition {engine.partition}"] if engine.partition else []
    parts += [f"on {device}", f"{counted(engine.cpus or 1, 'core')}"]
    if gpus := gpus_of_a_run(manifest, engine):
        parts[-1] += f" and {gpus:g} GPU{'s' * (gpus > 1)}"
    if engine.name == "slurm":
        parts[-1] += f", {memory_of_a_run(manifest, engine):g} GB, {engine.hours:g} h"
    return f"{', '.join(parts)} each"


def as_json(
    manifest: Manifest, slots: int, estimates: Estimates | None, done: Collection[str]
) -> dict[str, Any]:
    """For a program."""
    known = estimates or {}
    return {
        "sweep": f"{manifest.name}-{manifest.id}",
        "slots": slots,
        "seconds": total_seconds(manifest, known, slots, done) if known else None,
        "done": sorted(done),
        "arms": [
            {
                "arm": arm.name,
                "variant": arm.variant,
                "controls": arm.controls,
                "baseline": arm.baseline,
                "params": arm.params,
                "params_with_embeddings": arm.total_params,
                "mismatch": arm.mismatch,
                "flops_per_token": arm.flops,
                "seconds_per_run": known[arm.name].seconds if known else None,
                "bytes_per_run": known[arm.name].bytes if known else None,
                "words": arm.words,
            }
            for arm in manifest.arms.values()
        ],
        "runs": [
            {"id": run.id, "arm": run.arm, "tuning": run.tuning, **run.changes}
            for run in manifest.runs
        ],
        "finals": manifest.finals,
        "left_out": [vars(left) for left in manifest.left_out],
        "excluded": manifest.excluded,
    }


def _mismatch(arm: Arm, manifest: Manifest) -> str:
    """To what the control asked for; in brackets, where it asked nothing, in parameters."""
    if arm.mismatch is not None:
        return f"{100 * arm.mismatch:+.2f} %"
    if arm.baseline is None:
        return ""
    return f"({100 * (arm.params / manifest.arms[arm.baseline].params - 1):+.1f} %)"


def _title(arm: Arm) -> str:
    """The arm, with the controls under which it stands if its name does not say them."""
    said = arm.controls == ["none"] or arm.name.endswith(f"-{','.join(arm.controls)}")
    return arm.name if said else f"{arm.name} ({', '.join(arm.controls)})"


def _runs(manifest: Manifest, count: int) -> str:
    return f"{count} + {len(manifest.finals)}" if manifest.finals else f"{count}"


def _left_out(manifest: Manifest) -> list[str]:
    """What is left out, gathered by reason."""
    by_reason = defaultdict(list)
    for left in manifest.left_out:
        by_reason[(left.kind, left.reason)].append(left.arm)
    said = []
    for (kind, reason), names in by_reason.items():
        said.append(f"left out, {kind}: {reason}")
        said.append(f"  {some(names, 6)}")
    return [*said, ""] if said else []
