"""Runs that begin at a branch of one of another length, with its weights, optimizer and rows."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from qkablate.disk import read_file, write_atomic
from qkablate.errors import UserError
from qkablate.runs import predictions
from qkablate.runs.prefix import (
    ORIGIN_FILE,
    ROWS_FILE,
    Branching,
    BranchOrigin,
    find_prefix,
    read_origin,
)
from qkablate.runs.records import decode_row
from qkablate.training import checkpoint, environment
from qkablate.training.checkpoint import Checkpoint
from qkablate.training.resolve import RunPlan
from qkablate.training.warm_start.restore import check_shapes


def start_from_branch(
    plan: RunPlan,
    branching: Branching,
    device: str,
    note: Callable[[str], None],
    verify: Callable[[], None] = lambda: None,
) -> Checkpoint | None:
    """Return the checkpoint of a branch, which becomes the run's own, with its rows.

    None, unless the run would have come to the same state by itself: then it trains alone. `verify`
    raises if the run is another process's by now.
    """
    path = branching.start
    if path is None:
        return None
    try:
        origin = _check_origin(plan, path)
        if other := _compare_environments(plan, origin):
            if not branching.extends:
                raise ValueError(f"it was computed with {other}")
            note(f"the steps before were computed with {other}")
        state = checkpoint.load(path, device)
        rows = _read_rows(plan, path, state)
        check_shapes(plan.build(), state, path)
        if state.progress.step != origin.step:
            raise ValueError(f"it is of step {state.progress.step}, not {origin.step}")
        _copy_predictions(plan, path, origin)
    except (OSError, ValueError, TypeError, UserError) as reason:
        note(f"'{path}' is not used, and the run trained from its start: {reason}")
        return None
    note(f"starting from step {origin.step} of run {path.parent.parent.name}")
    verify()
    environment.record_branch(plan.run.folder, origin)
    write_atomic(plan.run.metrics, rows)
    # Last: from now on the run resumes from it.
    checkpoint.save(plan.run.checkpoints, state, verify=verify)
    return state


def _check_origin(plan: RunPlan, path: Path) -> BranchOrigin:
    """Return the origin of a branch; ValueError unless it is of this run's prefix."""
    checkpoint.check_sums(path, ORIGIN_FILE, ROWS_FILE)
    origin, prefix = read_origin(path), find_prefix(plan.config, plan.identity)
    if origin is None:
        raise ValueError(f"{ORIGIN_FILE} is not what a run writes")
    if prefix is None or origin.prefix != prefix.id or not 0 < origin.step <= prefix.steps:
        raise ValueError("it is not a part of this run")
    return origin


def _compare_environments(plan: RunPlan, origin: BranchOrigin) -> str:
    """Return in what the environment of a branch differs from the run's; '' if in nothing."""
    own, other = environment.describe_computation(plan.run.folder), origin.computed
    keys = sorted(own.keys() | other.keys())
    return ", ".join(f"{k} {other.get(k)}" for k in keys if own.get(k) != other.get(k))


def _read_rows(plan: RunPlan, path: Path, state: Checkpoint) -> bytes:
    """Return the rows of metrics until a branch; ValueError unless they are those of this run.

    A run that was resumed with another `tracking.log_every` has others.
    """
    content, config = read_file(path / ROWS_FILE), plan.config
    if len(content) != state.progress.metrics_end or content[-1:] not in (b"", b"\n"):
        raise ValueError(f"{ROWS_FILE} is not complete")
    rows = [decode_row(line) for line in content.splitlines()]
    log_every, end = config.tracking.log_every, state.progress.step + 1
    for name, first, every in (
        ("train/loss", log_every, log_every),
        ("val/loss", 0, int(config.train.eval_every)),
        ("diagnostics", 0, int(config.diagnostics.every)),
    ):
        expected = [*range(first, end, every)] if every else []
        if [row.get("step") for row in rows if name in row] != expected:
            raise ValueError(f"{ROWS_FILE} has {name} at other steps")
    return content


def _copy_predictions(plan: RunPlan, path: Path, origin: BranchOrigin) -> None:
    """Copy the predictions that the run would have recorded until a branch."""
    if not predictions.position_count(plan.data.vocabulary):
        return
    branches, folder = path.parent, plan.run.folder
    recorded = predictions.find_predictions(branches)
    recorded |= predictions.find_predictions(branches.parent)
    for step in predictions.recorded_steps(plan.config):
        if step > origin.step:
            break
        if step not in recorded:
            raise ValueError(f"predictions of step {step} are missing")
        header, log_PV = predictions.read_predictions(recorded[step])
        expected = origin.run, plan.data.fingerprint, plan.config.model.context
        if (header.run, header.data_fingerprint, header.context) != expected:
            raise ValueError(f"predictions of step {step} are those of another run")
        header = dataclasses.replace(header, run=plan.run.id)
        predictions.write_predictions(folder, header, log_PV)
