"""Validation losses of an arm's tuning runs, and those of them that training failed."""

import math
import statistics
from collections.abc import Mapping
from typing import Any

from qkablate.sweeps.planning.manifest import Rates

OUTLIER = 0.05  # nats: a loss so far above those beside it is a failure of training
# Of the choice of rates. Of earlier sweeps: by 1 the least loss also where a task is solved, by 2
# without a confirmation on other seeds.
RULES = 3
SOLVED = 0.01  # nats: a task is solved there; of two such losses the smaller is no better
Seed = Any  # one seed of several, or all of a run
Losses = Mapping[Rates, Mapping[Seed, float | None]]  # None: diverged


def mean_losses(losses: Losses) -> dict[Rates, float]:
    """Return the mean loss by rates; those at which a seed diverged or is missing have none."""
    seeds = {seed for by_seed in losses.values() for seed in by_seed}
    means = {}
    for rates, by_seed in sorted(losses.items()):
        known = [loss for loss in by_seed.values() if loss is not None]
        if known and len(known) == len(seeds):  # means over other seeds are not comparable
            means[rates] = math.fsum(known) / len(known)
    return means


def seed_residuals(losses: Losses) -> dict[Rates, list[float]]:
    """Return each loss minus the effect of its seed and the median of its rates.

    The effect of a seed is its median distance from the median of all seeds.
    """
    known = {
        rates: {seed: loss for seed, loss in losses[rates].items() if loss is not None}
        for rates in mean_losses(losses)
    }
    medians = {rates: statistics.median(own.values()) for rates, own in known.items()}
    seeds = {seed for own in known.values() for seed in own}
    effect = {
        seed: statistics.median(own[seed] - medians[rates] for rates, own in known.items())
        for seed in seeds
    }
    residuals = {}
    for rates, own in known.items():
        adjusted = [loss - effect[seed] for seed, loss in own.items()]
        residuals[rates] = [value - statistics.median(adjusted) for value in adjusted]
    return residuals


def find_solved_rates(losses: Losses) -> list[Rates]:
    """Return the rates at which all seeds solve a task."""
    known = {rates: losses[rates].values() for rates in mean_losses(losses)}
    return [
        rates
        for rates, own in known.items()
        if all(loss is not None and loss <= SOLVED for loss in own)
    ]


def choose_middle(solved: list[Rates]) -> Rates:
    """Return those of some rates that are nearest to the mean of their logarithms.

    At the edge of the rates that solve a task, other seeds may fail.
    """
    middle = [statistics.fmean(map(math.log, values)) for values in zip(*solved, strict=True)]
    return min(solved, key=lambda rates: math.dist(map(math.log, rates), middle))


def find_best_rates(losses: Losses, rules: int = RULES) -> Rates | None:
    """Return the rates of the least mean loss; of those with outliers only if all have.

    Where a task is solved they are in the middle of the rates that solve it.
    """
    if rules > 1 and (solved := find_solved_rates(losses)):
        return choose_middle(solved)
    means, failed = mean_losses(losses), find_outlying_rates(losses)
    return min(means, key=lambda rates: (rates in failed, means[rates]), default=None)


def loss_near(losses: Losses, rates: Rates) -> float | None:
    """Return the mean loss at the rates that were tried nearest to some; None if unknown."""

    def distance(tried: Rates) -> float:
        return math.hypot(*(math.log(a / b) for a, b in zip(tried, rates, strict=True)))

    means = mean_losses(losses)
    nearest = min(means, key=distance, default=None)
    return None if nearest is None else means[nearest]


def lower_rates(losses: Losses, rates: Rates, step: float, most: int) -> list[Rates]:
    """Return the best rates tried at lower and lower values of `optim.lr`, a step apart at least.

    Those with outliers are left out.
    """
    means, failed = mean_losses(losses), find_outlying_rates(losses)
    found: list[Rates] = []
    for lr in sorted({tried.lr for tried in means}, reverse=True):
        above = found[-1].lr if found else rates.lr
        row = [tried for tried in means if tried.lr == lr and tried not in failed]
        if row and above / lr > step * 0.99 and len(found) < most:
            found.append(min(row, key=means.__getitem__))
    return found


def find_outlying_rates(losses: Losses) -> list[Rates]:
    """Return the rates at which a run ended far above the other seeds, or both rates beside."""
    means, residuals, found = mean_losses(losses), seed_residuals(losses), []
    spreads = [statistics.stdev(own) for own in residuals.values() if len(own) > 1]
    limit = max(OUTLIER, 5 * statistics.median(spreads or [0.0]))
    for rates, mean in means.items():
        row = sorted(other for other in means if other.circuit == rates.circuit)
        place = row.index(rates)
        beside = [means[other] for other in (*row[place - 1 : place], *row[place + 1 : place + 2])]
        is_bump = len(beside) == 2 and mean > max(beside) + limit
        if is_bump or max(residuals[rates]) > limit:
            found.append(rates)
    return found
