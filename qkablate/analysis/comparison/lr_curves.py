"""Learning rates: where the loss is least and how sure that is, what missing it costs, and the gap
at the rate one began with beside the gap at each arm's best. All on validation.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from qkablate.analysis.comparison.gaps import describe_sample
from qkablate.analysis.stats import ALPHA, Interval, Sample
from qkablate.analysis.study.study import Entry, Seeds, Study

# Each way of the best. Further out, bowls are steeper on the side where training breaks.
_FITTED = math.log(2) * 1.01  # a parabola
_TRIED = math.log(4) * 1.01  # sensitivity
Losses = dict[float, dict[Seeds, float | None]]  # by rate and seed; None: diverged


@dataclass(frozen=True)
class Parabola:
    least: float  # the rate at which it is least
    interval: Interval | None  # of that rate, by Fieller's theorem
    curvature: float  # nats per squared unit of ln lr


@dataclass(frozen=True)
class Bowl:
    """Validation loss of one arm by learning rate."""

    arm: str
    losses: Losses

    @property
    def means(self) -> dict[float, float]:
        """Where a seed diverges (or is missing yet) there is none: nobody would train there."""
        means = {}
        seeds = {key for by_seed in self.losses.values() for key in by_seed}
        for rate, by_seed in sorted(self.losses.items()):
            known = [loss for loss in by_seed.values() if loss is not None]
            if known and len(known) == len(seeds):  # means over other seeds are not compared
                means[rate] = math.fsum(known) / len(known)
        return means

    @property
    def best(self) -> float | None:
        return min(self.means, key=lambda rate: self.means[rate], default=None)

    @property
    def on_the_edge(self) -> bool:
        """No rate on one side of the best was worse: it may lie further out."""
        rates = sorted(self.losses)
        return self.best is None or self.best in (rates[0], rates[-1])

    @cached_property
    def parabola(self) -> "Parabola | None":
        """Least squares in the logarithm of the rate, near the best, with the spread of seeds taken
        out; None where it has no least.
        """
        best = self.best
        if best is None:
            return None
        points = [
            (math.log(rate / best), seeds, loss)
            for rate, by_seed in self.losses.items()
            if abs(math.log(rate / best)) <= _FITTED
            for seeds, loss in by_seed.items()
            if loss is not None
        ]
        seeds = sorted({key for _, key, _ in points})
        if len({x for x, _, _ in points}) < 3 or len(points) <= 2 + len(seeds):
            return None
        from statsmodels.regression.linear_model import OLS

        x = np.array([point[0] for point in points])
        own = np.array([[key == seed for seed in seeds] for _, key, _ in points], float)
        fit = OLS([point[2] for point in points], np.column_stack([x, x * x, own])).fit()
        slope, curvature = (float(value) for value in fit.params[:2])
        if curvature <= 0:
            return None
        ends = _fieller(fit, -slope, 2 * curvature)
        return Parabola(
            least=best * math.exp(-slope / (2 * curvature)),
            interval=ends and (best * math.exp(ends[0]), best * math.exp(ends[1])),
            curvature=curvature,
        )

    def short_of(self, rate: float) -> float | None:
        """What a rate costs beside the parabola's least, in nats."""
        found = self.parabola
        return None if found is None else found.curvature * math.log(rate / found.least) ** 2

    def sensitivity(self, at_start: float) -> float | None:
        """What a rate up to four times too high or too low costs on average, in nats: a loss above
        the one before training counts as that.
        """
        best = self.best
        if best is None:
            return None
        least = self.means[best]
        costs = [
            min(self.means.get(rate, math.inf), max(at_start, least)) - least
            for rate in self.losses
            if abs(math.log(rate / best)) <= _TRIED
        ]
        cost = math.fsum(costs) / len(costs)
        return cost if math.isfinite(cost) else None


def _fieller(fit: Any, above: float, below: float) -> Interval | None:
    """An interval for above/below, of which −above/1 and below/2 are the first two parameters."""
    from scipy import stats

    covariance = np.asarray(fit.cov_params())[:2, :2]
    v11, v22, v12 = covariance[0, 0], 4 * covariance[1, 1], -2 * covariance[0, 1]
    t2 = float(stats.t.isf(ALPHA / 2, fit.df_resid)) ** 2
    a = below**2 - t2 * v22
    b = above * below - t2 * v12
    c = above**2 - t2 * v11
    inside = b * b - a * c
    if a <= 0 or inside < 0:  # the curvature itself may be nothing
        return None
    return (b - math.sqrt(inside)) / a, (b + math.sqrt(inside)) / a


def bowls(study: Study) -> dict[str, Bowl]:
    """Of a sweep that tunes, by its tuning runs; else of arms run at three rates or more."""
    found: dict[str, Losses] = {}
    if study.tuning:
        for (arm, rate), records in study.tuning.items():
            found.setdefault(arm, {})[rate] = _settled(records)
    else:
        for entry in study.entries:
            if entry.rate is not None:
                found.setdefault(entry.arm.name, {})[entry.rate] = _settled(entry.records)
        found = {arm: losses for arm, losses in found.items() if len(losses) >= 3}
    return {
        arm: Bowl(arm, known)
        for arm, losses in found.items()
        if (known := {rate: by_seed for rate, by_seed in losses.items() if by_seed})
    }


def _settled(records: Any) -> dict[Seeds, float | None]:
    """By seed, of the runs that have come to a result."""
    return {
        key: record.val if record.status == "done" else None
        for key, record in records.items()
        if record.status in ("done", "diverged")
    }


def gap_at(own: Bowl, own_rate: float, other: Bowl, other_rate: float) -> Sample:
    """The paired gap on validation, each arm at a rate of its own."""
    one, two = own.losses.get(own_rate, {}), other.losses.get(other_rate, {})
    pairs = [(one[key], two[key]) for key in sorted(one) if key in two]
    return Sample(tuple(a - b for a, b in pairs if a is not None and b is not None))


def describe_bowls(study: Study) -> list[dict[str, Any]]:
    found = bowls(study)
    described = []
    for name, bowl in found.items():
        arm = study.manifest.arms[name]
        vocabulary = arm.facts.get("vocabulary")
        start = math.log(vocabulary) if isinstance(vocabulary, int) and vocabulary > 1 else math.inf
        fit = bowl.parabola
        tuned = study.bowls.get(name)
        other = found.get(arm.baseline or "")
        default = arm.config.optim.lr
        best, beside = bowl.best, other.best if other else None
        described.append(
            {
                "arm": name,
                "baseline": arm.baseline,
                "best": best,
                "chosen": tuned.rate if tuned else None,
                "on_the_edge": bowl.on_the_edge,
                "optimum": fit and fit.least,
                "optimum_interval": fit and fit.interval and [*fit.interval],
                "curvature": fit and fit.curvature,
                "best_short_of_optimum": None if best is None else bowl.short_of(best),
                "sensitivity": bowl.sensitivity(start),
                "default": default,
                "val_loss": [
                    {"lr": rate, "by_seed": [*by_seed.values()]}
                    for rate, by_seed in sorted(bowl.losses.items())
                ],
                "gap_at_default": other and describe_sample(gap_at(bowl, default, other, default)),
                "gap_at_best": other
                and describe_sample(
                    Sample(())
                    if best is None or beside is None
                    else gap_at(bowl, best, other, beside)
                ),
            }
        )
    return described


def bracketed(entry: Entry, found: dict[str, Bowl]) -> bool | None:
    """Whether rates on both sides of the best were tried and worse; None: it was not tuned."""
    bowl = found.get(entry.arm.name)
    if bowl is None:
        return None
    return not bowl.on_the_edge
