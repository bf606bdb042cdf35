"""Learning rates chosen on validation loss, per arm and on seeds of their own.

A ladder of factor two is extended while the best rate lies on its edge. The next runs are a pure
function of the results, so that every process derives the same ones at any time.
"""

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from qkablate.config import KEYS, Config
from qkablate.errors import UserError
from qkablate.sweeps.planning.manifest import Arm, Manifest, SweepRun

FACTOR = 2.0
POINTS = 5
EXTENSIONS = 6  # the most rates beyond the ladder
_MIN_LR, _MAX_LR = KEYS["optim.lr"].bounds or (0, 1)
FindResult = Callable[[SweepRun], Mapping[str, Any] | None]


@dataclass(frozen=True)
class LrSearch:
    """Validation loss by learning rate, of one arm."""

    arm: str
    losses: dict[float, list[float | None]]  # by rate, for every tuning seed; None: diverged
    rate: float | None  # the choice, once there is one
    state: str  # tuning, chosen, on the edge, stuck (a run failed), diverged (everywhere)

    def to_json(self) -> dict[str, Any]:
        losses = [{"lr": rate, "by_seed": self.losses[rate]} for rate in sorted(self.losses)]
        return {"arm": self.arm, "state": self.state, "chosen": self.rate, "val_loss": losses}


Searches = dict[str, tuple[list[SweepRun], LrSearch]]  # by arm, with the runs that follow


def lr_ladder(rates: list[float], config: Config) -> list[float]:
    """Return the first rates to try: those given, or five around a single one."""
    if len(rates) > 1:
        rates = sorted({*rates})
        if len(rates) < POINTS:
            raise UserError(
                f"optim.lr: {len(rates)} rates are too few to tune by: {POINTS} at least,"
                " or one for the middle"
            )
        if any(high / low > FACTOR * 1.01 for low, high in itertools.pairwise(rates)):
            raise UserError("optim.lr: rates to tune by are at most a factor of two apart")
        return rates
    middle = rates[0] if rates else config.optim.lr
    rates = [middle * FACTOR**k for k in range(-(POINTS // 2), POINTS // 2 + 1)]
    if not all(_MIN_LR <= rate <= _MAX_LR for rate in rates):
        raise UserError(f"optim.lr: {middle} leaves no room for rates around it")
    return rates


def next_runs(
    manifest: Manifest, find_result: FindResult, finished: Searches
) -> tuple[list[SweepRun], list[LrSearch]]:
    """Return the runs that follow from the results, and the searches so far.

    Arms whose search has ended are kept in `finished`: they do not change any more.
    """
    tried = defaultdict(list)
    for run in manifest.runs:
        tried[run.arm].append(run)
    searches: Searches = {}
    for name, arm in manifest.arms.items():
        if name in finished:
            searches[name] = finished[name]
            continue
        runs, search = _search(arm, tried[name], find_result)
        if search.rate is not None:
            runs += [arm.run({**final, "optim.lr": search.rate}) for final in manifest.finals]
        searches[name] = runs, search
        if search.state in ("chosen", "on the edge", "diverged"):
            finished[name] = searches[name]
    runs = [run for runs, _ in searches.values() for run in runs]
    return runs, [search for _, search in searches.values()]


def _search(
    arm: Arm, tried: list[SweepRun], find_result: FindResult
) -> tuple[list[SweepRun], LrSearch]:
    """Return the runs beyond the ladder that this arm needs, and its search."""
    seeds = sorted({int(run.changes["seed"]) for run in tried})
    ladder = {float(run.changes["optim.lr"]) for run in tried}
    beyond: list[SweepRun] = []
    while True:
        losses: dict[float, list[float | None]] = {}
        for run in tried + beyond:
            result = find_result(run)
            if result is None or result["status"] == "failed":
                state = "tuning" if result is None else "stuck"
                return beyond, LrSearch(arm.name, losses, None, state)
            loss = result["loss"]["val"] if result["status"] == "done" else None
            losses.setdefault(float(run.changes["optim.lr"]), []).append(loss)
        best = min(sorted(losses), key=lambda rate: _mean(losses[rate]))
        all_diverged = not math.isfinite(_mean(losses[best]))
        if all_diverged or best == min(losses):
            next_rate = min(losses) / FACTOR
        elif best == max(losses):
            next_rate = max(losses) * FACTOR
        else:
            return beyond, LrSearch(arm.name, losses, best, "chosen")
        if len(losses) - len(ladder) >= EXTENSIONS or not _MIN_LR <= next_rate <= _MAX_LR:
            if all_diverged:
                return beyond, LrSearch(arm.name, losses, None, "diverged")
            return beyond, LrSearch(arm.name, losses, best, "on the edge")
        beyond += [arm.run({"seed": s, "optim.lr": next_rate}, tuning=True) for s in seeds]


def _mean(losses: list[float | None]) -> float:
    """Return the mean loss, infinite where one seed diverges: no rate to train at."""
    finite = [loss for loss in losses if loss is not None]
    return statistics.fmean(finite) if len(finite) == len(losses) else math.inf
