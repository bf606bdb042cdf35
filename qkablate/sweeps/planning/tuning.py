"""Learning rates chosen on validation, per arm and with seeds of their own: a ladder of factor two,
extended while the best lies on its edge. What follows from what is a function of the results alone,
so that whoever asks, whenever, gets the same runs.
"""

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from qkablate.config import RANGES, Config
from qkablate.errors import UserError
from qkablate.sweeps.planning.manifest import Arm, Manifest, SweepRun

FACTOR = 2.0
POINTS = 5
EXTENSIONS = 6  # rates beyond the ladder, at most
_LEAST, _MOST = RANGES["optim.lr"]
Result = Callable[[SweepRun], Mapping[str, Any] | None]


@dataclass(frozen=True)
class Bowl:
    """Validation loss by learning rate, of one arm."""

    arm: str
    losses: dict[float, list[float | None]]  # by rate: a loss for every tuning seed; null: diverged
    rate: float | None  # what was chosen, once it is
    state: str  # tuning, chosen, on the edge, stuck (a run failed), diverged (everywhere)


def ladder(given: list[float], config: Config) -> list[float]:
    """The rates to begin with: those given, or five around the one there is."""
    if len(given) > 1:
        rates = sorted({*given})
        if len(rates) < POINTS:
            raise UserError(
                f"optim.lr: {len(rates)} rates are too few to tune by: {POINTS} at least,"
                " or one for the middle"
            )
        if any(high / low > FACTOR * 1.01 for low, high in itertools.pairwise(rates)):
            raise UserError("optim.lr: rates to tune by are at most a factor of two apart")
        return rates
    middle = given[0] if given else config.optim.lr
    rates = [middle * FACTOR**k for k in range(-(POINTS // 2), POINTS // 2 + 1)]
    if not all(_LEAST <= rate <= _MOST for rate in rates):
        raise UserError(f"optim.lr: {middle} leaves no room for rates around it")
    return rates


def further(
    manifest: Manifest, result: Result, settled: dict[str, tuple[list[SweepRun], Bowl]]
) -> tuple[list[SweepRun], list[Bowl]]:
    """The runs that follow from the results so far, and the bowls. Arms whose rate is chosen are
    kept in `settled`: they do not change any more.
    """
    tried = defaultdict(list)
    for run in manifest.runs:
        tried[run.arm].append(run)
    found = []
    for arm in manifest.arms.values():
        if arm.name not in settled:
            more, bowl = _arm(arm, tried[arm.name], result)
            if bowl.rate is not None:
                more += [arm.run({**one, "optim.lr": bowl.rate}) for one in manifest.finals]
            if bowl.state in ("chosen", "on the edge", "diverged"):
                settled[arm.name] = more, bowl
            found.append((more, bowl))
        else:
            found.append(settled[arm.name])
    return [run for runs, _ in found for run in runs], [bowl for _, bowl in found]


def _arm(arm: Arm, tried: list[SweepRun], result: Result) -> tuple[list[SweepRun], Bowl]:
    """The rates beyond the ladder that this arm needs, and its bowl."""
    seeds = sorted({int(run.changes["seed"]) for run in tried})
    rates = sorted({float(run.changes["optim.lr"]) for run in tried})
    beyond: list[SweepRun] = []
    while True:
        losses: dict[float, list[float | None]] = {}
        for run in tried + beyond:
            found = result(run)
            if found is None or found["status"] == "failed":
                state = "tuning" if found is None else "stuck"
                return beyond, Bowl(arm.name, losses, None, state)
            done = found["status"] == "done"
            losses.setdefault(float(run.changes["optim.lr"]), []).append(
                found["loss"]["val"] if done else None
            )
        best = min(sorted(losses), key=lambda rate: _mean(losses[rate]))
        nowhere = not math.isfinite(_mean(losses[best]))
        next_rate = None
        if nowhere or best == min(losses):
            next_rate = min(losses) / FACTOR
        elif best == max(losses):
            next_rate = max(losses) * FACTOR
        if next_rate is None:
            return beyond, Bowl(arm.name, losses, best, "chosen")
        if len(losses) - len(rates) >= EXTENSIONS or not _LEAST <= next_rate <= _MOST:
            state = "diverged" if nowhere else "on the edge"
            return beyond, Bowl(arm.name, losses, None if nowhere else best, state)
        beyond += [arm.run({"seed": s, "optim.lr": next_rate}, tuning=True) for s in seeds]


def _mean(losses: list[float | None]) -> float:
    """A rate at which one seed diverges is no rate to train at."""
    known = [loss for loss in losses if loss is not None]
    return statistics.fmean(known) if len(known) == len(losses) else math.inf
