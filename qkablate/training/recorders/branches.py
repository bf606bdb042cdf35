"""Branches: checkpoints from which a run of another length goes on (see runs/prefix.py)."""

import dataclasses
import json
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np

from qkablate.config import Config, flatten
from qkablate.config.schedule import stable_steps
from qkablate.disk import read_file
from qkablate.runs import predictions
from qkablate.runs.predictions import PredictionsHeader
from qkablate.runs.prefix import (
    FOLDER,
    LENGTH_KEYS,
    ORIGIN_FILE,
    ROWS_FILE,
    BranchOrigin,
    branch_path,
    find_prefix,
    read_origin,
    with_steps,
)
from qkablate.training import checkpoint, environment
from qkablate.training.checkpoint import Checkpoint
from qkablate.training.resolve import RunPlan


class BranchRecorder:
    """The branches that a run keeps, and the predictions that only shorter runs record."""

    def __init__(self, plan: RunPlan, horizons: Collection[int] | None) -> None:
        """Plan for runs of these numbers of steps; None: for longer ones than this, later."""
        config = plan.config
        own = stable_steps(config)
        lengths = (int(config.train.steps),) if horizons is None else horizons
        shorter = [with_steps(config, steps) for steps in lengths]
        self._configs: list[Config] = [c for c in shorter if 1 <= stable_steps(c) <= own]
        self._steps = {stable_steps(c) for c in self._configs}

    def is_due(self, step: int) -> bool:
        """Return whether a branch is kept at a step."""
        return step in self._steps

    def is_predicted(self, step: int) -> bool:
        """Return whether a run that branches off no earlier records predictions at a step."""
        return any(
            step <= stable_steps(config) and predictions.is_recorded(config, step)
            for config in self._configs
        )


def write_predictions_of_branches(
    folder: Path, header: PredictionsHeader, log_PV: np.ndarray
) -> None:
    """Write predictions that only shorter runs record."""
    predictions.write_predictions(folder / FOLDER, header, log_PV)


def write_branch(plan: RunPlan, state: Checkpoint, verify: Callable[[], None]) -> None:
    """Keep a checkpoint with the rows until then, unless there is one at this step."""
    run, step = plan.run, state.progress.step
    prefix, existing = find_prefix(plan.config, plan.identity), branch_path(run.folder, step)
    if prefix is None or ((found := read_origin(existing)) and found.prefix == prefix.id):
        return
    values = flatten(plan.config)
    origin = BranchOrigin(
        run=run.id,
        step=step,
        prefix=prefix.id,
        computed=environment.describe_computation(run.folder),
        settings={key: int(values[key]) for key in LENGTH_KEYS},
    )
    rows = read_file(run.metrics)[: state.progress.metrics_end]
    others = {ROWS_FILE: rows, ORIGIN_FILE: json.dumps(dataclasses.asdict(origin)).encode()}
    checkpoint.save(run.folder / FOLDER, state, keep=None, others=others, verify=verify)
