"""The plan of a sweep as text and as JSON: its arms and runs, their cost, and what is left out."""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from qkablate.config import EngineConfig
from qkablate.config.variant import mlp_units
from qkablate.screen import PLAIN, Screen
from qkablate.sweeps.planning.estimate import RunEstimate, estimate_sweep
from qkablate.sweeps.planning.manifest import Arm, Manifest
from qkablate.sweeps.planning.packing import gpus_per_run, memory_gb_per_run
from qkablate.sweeps.planning.tuning import refinement_sizes
from qkablate.sweeps.prefixes import TrainedSteps, count_trained_steps
from qkablate.table import format_count, format_duration, format_list, format_short, format_table

Estimates = Mapping[str, RunEstimate]


def format_plan(
    manifest: Manifest,
    slots: int,
    estimates: Estimates | None = None,
    done: Mapping[str, str] = MappingProxyType({}),
    engine: EngineConfig | None = None,
    *,
    share_prefix: bool = True,
    is_summary: bool = False,
    screen: Screen = PLAIN,
) -> list[str]:
    """Return the lines of the plan. `done` are the arms of runs that need not be trained, by id.

    A summary has no table of arms, and no reasons of those left out.
    """
    table = [] if is_summary else _format_arms(manifest, estimates, screen)
    lines = []
    arms = format_count(len(manifest.arms), "arm")
    baselines = dict.fromkeys(arm.baseline for arm in manifest.arms.values() if arm.baseline)
    if finals := len(manifest.finals):
        tuning = len(manifest.runs) + sum(refinement_sizes(manifest).values())
        lines.append(
            f"runs     {tuning:,} to choose the learning rates of {arms} (more where the best lies"
            f" on the edge), then {finals * len(manifest.arms):,} at the best ({finals} per arm)"
        )
    else:
        beside = f"; baselines: {format_list([*baselines])}" if baselines else ""
        lines.append(f"runs     {format_count(len(manifest.runs), 'run')} of {arms}{beside}")
    if manifest.combinations is not None:
        few, all_ = manifest.combinations
        lines.append(
            f"design   one factor at a time: {few:,} of the {all_:,} combinations of the grid;"
            " interactions are not estimated"
        )
    if manifest.left_out:
        kinds = Counter(left.kind for left in manifest.left_out)
        by_kind = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        count = format_count(len(manifest.left_out), "arm")
        place = "in plan.txt" if is_summary else "above"
        lines.append(f"left out {count}: {by_kind} (reasons {place})")
    if manifest.excluded:
        lines.append(f"         {format_count(manifest.excluded, 'arm')} excluded by sweep.filter")
    steps = _count_steps(manifest, done, share_prefix)
    if branching := len(steps.fractions):
        lines.append(
            f"prefix   {branching:,} of {format_count(len(manifest.runs), 'run')} branch off a"
            f" longer one: {steps.trained:,} of {steps.whole:,} steps are trained"
        )
    lines.append(f"packing  {_packing(manifest, slots, engine)}; the largest first")
    lines += _describe_vmap(manifest)
    if others := _find_namesakes(manifest):
        have = "have" if len(others) > 1 else "has"
        lines.append(
            f"name     {format_list(others, 2)} {have} the same name; sweep.name=… tells them apart"
        )
    if done:
        lines.append(f"done     {format_count(len(done), 'run')} already, in this sweep or another")
    if estimates is not None:
        cost = estimate_sweep(manifest, estimates, slots, done, steps.fractions)
        at_once = slots * max(int(arm.config.train.vmap) for arm in manifest.arms.values())
        at_once = min(at_once, max(slots, len(manifest.runs)))
        one, all_slots = format_short(cost.max_bytes), format_short(at_once * cost.max_bytes)
        lines.append(
            f"cost     about {format_duration(cost.seconds)}, {format_short(cost.flops)}FLOP;"
            f" memory {one}B at most for one run, {all_slots}B for {at_once} of them"
        )
        if engine is not None and engine.name != "local":
            lines.append("         timed on this machine, one run alone, without queueing")
        if cost.extrapolated:
            lines.append("         ~ larger than what could be timed here: extrapolated by FLOPs")
    return table + [part for line in lines for part in screen.wrap(line, " " * 9)]


def _count_steps(manifest: Manifest, done: Collection[str], share_prefix: bool) -> TrainedSteps:
    """Count the steps of the runs that are left."""
    left = [run for run in manifest.runs if run.id not in done]
    steps = count_trained_steps(manifest, left)
    return steps if share_prefix else TrainedSteps(steps.whole, steps.whole, {})


def _find_namesakes(manifest: Manifest) -> list[str]:
    """Return the folders of other sweeps with the same name; those of a claim share one."""
    if manifest.command[1:2] != ["sweep"]:
        return []
    folders = sorted(path.parent for path in manifest.folder.parent.glob("*/manifest.json"))
    return [
        str(folder)
        for folder in folders
        if folder.name.rpartition("-")[0] == manifest.name and folder.name != manifest.folder.name
    ]


def _format_arms(manifest: Manifest, estimates: Estimates | None, screen: Screen) -> list[str]:
    """Return the table of arms, then those left out by reason."""
    is_moved = any(_is_of_another_width(arm) for arm in manifest.arms.values())
    head = ["arm", "params", "with embeddings", "mismatch", *["d_model"] * is_moved]
    head += ["MLP", "FLOPs/token", "runs"]
    head += ["time per run", "memory"] if estimates is not None else []
    counts = Counter(run.arm for run in manifest.runs) + Counter(refinement_sizes(manifest))
    finals = f" + {len(manifest.finals)}" if manifest.finals else ""
    rows = []
    for arm in manifest.arms.values():
        model = arm.config.model
        cells = [
            *(_title(arm), f"{arm.params:,}", f"{arm.total_params:,}", _mismatch(arm, manifest)),
            *[f"{model.d_model:,}"] * is_moved,
            *(f"{mlp_units(model):,}", format_short(arm.flops)),
            f"{counts[arm.name]}{finals}",
        ]
        if estimates is not None:
            run = estimates[arm.name]
            mark = "~" * run.extrapolated
            cells += [f"{mark}{format_duration(run.seconds)}", f"{format_short(run.bytes)}B"]
        rows.append(cells)
    lines = [*format_table(head, rows, screen=screen), ""]
    names = defaultdict(list)
    for left in manifest.left_out:
        names[left.kind, left.reason].append(left.arm)
    for kind, reason in names:
        lines += screen.wrap(f"left out, {kind}: {reason}", "  ")
        lines += screen.wrap(f"  {format_list(names[kind, reason], 6)}")
    return lines + [""] * bool(names)


def _packing(manifest: Manifest, slots: int, engine: EngineConfig | None) -> str:
    """Return how many runs train at once, where, and the resources of each."""
    arms = manifest.arms.values()
    device = next(iter(arms)).facts["device"]
    if engine is None or engine.name == "local":
        threads = sorted({int(arm.config.threads) for arm in arms})
        counts = format_list([format_count(number, "thread") for number in threads])
        each = f", {counts} each" if device == "cpu" else ""
        return f"{slots} at once on {device}{each}"
    parts = [f"{slots} at once at most on {engine.name}"]
    parts += [f"partition {engine.partition}"] if engine.partition else []
    parts += [f"on {device}", f"{format_count(engine.cpus or 1, 'core')}"]
    if gpus := gpus_per_run(manifest, engine):
        parts[-1] += f" and {gpus:g} GPU{'s' * (gpus > 1)}"
    if engine.name == "slurm":
        parts[-1] += f", {memory_gb_per_run(manifest, engine):g} GB, {engine.hours:g} h"
    return f"{', '.join(parts)} each"


def _describe_vmap(manifest: Manifest) -> list[str]:
    """Return how many runs train as programs, and why others that were to do so do not."""
    counts = Counter(run.arm for run in manifest.runs)
    most = {arm.name: int(arm.config.train.vmap) for arm in manifest.arms.values()}
    vmapped = sum(counts[name] for name, number in most.items() if number > 1)
    lines = []
    if vmapped:
        each = format_list(sorted({str(number) for number in most.values() if number > 1}, key=int))
        lines.append(
            f"vmap     {vmapped:,} of {format_count(len(manifest.runs), 'run')} train together, up"
            f" to {each} of an arm as one program"
        )
    reasons = Counter(arm.not_vmapped for arm in manifest.arms.values() if arm.not_vmapped)
    for reason, number in reasons.items():
        lines.append(f"         {format_count(number, 'arm')} not vmapped: {reason}")
    return lines


def plan_to_json(
    manifest: Manifest,
    slots: int,
    estimates: Estimates | None,
    done: Mapping[str, str],
    *,
    share_prefix: bool = True,
) -> dict[str, Any]:
    """Return the plan as JSON."""
    steps = _count_steps(manifest, done, share_prefix)
    cost = None
    if estimates:
        cost = estimate_sweep(manifest, estimates, slots, done, steps.fractions)
    return {
        "sweep": f"{manifest.name}-{manifest.id}",
        "slots": slots,
        "combinations": manifest.combinations,  # compared, and of the whole grid; null: all
        "seconds": cost.seconds if cost else None,
        "steps": {"whole": steps.whole, "trained": steps.trained},  # of the runs that are left
        "done": sorted(done),
        "arms": [
            {
                "arm": arm.name,
                **{key: getattr(arm, key) for key in ("variant", "controls", "baseline")},
                **{key: getattr(arm, key) for key in ("params", "mismatch", "overrides")},
                "vmap": arm.config.train.vmap,
                "params_with_embeddings": arm.total_params,
                "flops_per_token": arm.flops,
                "seconds_per_run": estimates[arm.name].seconds if estimates else None,
                "bytes_per_run": estimates[arm.name].bytes if estimates else None,
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


def _is_of_another_width(arm: Arm) -> bool:
    """Return whether a control has moved d_model, which the arm's name does not show."""
    return f"d{arm.config.model.d_model}" not in arm.name.split("-")


def _mismatch(arm: Arm, manifest: Manifest) -> str:
    """Format the mismatch to the control's target; in brackets that of parameters without one."""
    if arm.mismatch is not None:
        return f"{100 * arm.mismatch:+z.2f} %"
    if arm.baseline is None:
        return ""
    return f"({100 * (arm.params / manifest.arms[arm.baseline].params - 1):+z.1f} %)"


def _title(arm: Arm) -> str:
    """Return the arm's name, with its controls if the name does not contain them."""
    is_named = arm.name.endswith(f"-{','.join(arm.controls)}")
    is_plain = is_named or arm.controls == ["none"]
    return arm.name if is_plain else f"{arm.name} ({', '.join(arm.controls)})"
