"""Validation loss by learning rate: the optimum, its uncertainty, and the cost of missing it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy import stats

from qkablate.analysis.stats import ALPHA, Estimate, Interval, Sample, describe_sample
from qkablate.analysis.study.study import Record, Seeds, Study

# Distances in ln lr from the best rate. Further out, curves are steeper where training breaks.
_FIT_RANGE = math.log(2) * 1.01  # of the parabola
_SENSITIVITY_RANGE = math.log(4) * 1.01
Losses = dict[float, dict[Seeds, float | None]]  # by rate and seed; None: diverged


@dataclass(frozen=True)
class Parabola:
    """Least-squares parabola of the loss in ln lr."""

    optimum: float  # learning rate
    interval: Interval | None  # of the optimum, by Fieller's theorem
    curvature: float  # nats per squared unit of ln lr


@dataclass(frozen=True)
class LrCurve:
    """Validation loss of one arm by learning rate."""

    arm: str
    losses: Losses

    @property
    def means(self) -> dict[float, float]:
        """Mean loss by rate; rates at which a seed diverged or is missing have none."""
        means = {}
        seeds = {key for by_seed in self.losses.values() for key in by_seed}
        for rate, by_seed in sorted(self.losses.items()):
            known = [loss for loss in by_seed.values() if loss is not None]
            if known and len(known) == len(seeds):  # means over other seeds are not comparable
                means[rate] = math.fsum(known) / len(known)
        return means

    @property
    def best(self) -> float | None:
        return min(self.means, key=lambda rate: self.means[rate], default=None)

    @property
    def is_on_edge(self) -> bool:
        """True if the best rate is the lowest or the highest one tried."""
        rates = sorted(self.losses)
        return self.best is None or self.best in (rates[0], rates[-1])

    @cached_property
    def parabola(self) -> Parabola | None:
        """Least-squares parabola near the best rate with an intercept for each seed.

        None where too few rates are known, or where it opens downwards.
        """
        best = self.best
        if best is None:
            return None
        points = [
            (math.log(rate / best), seeds, loss)
            for rate, by_seed in self.losses.items()
            if abs(math.log(rate / best)) <= _FIT_RANGE
            for seeds, loss in by_seed.items()
            if loss is not None
        ]
        seeds = sorted({key for _, key, _ in points})
        freedom = len(points) - 2 - len(seeds)
        if len({x for x, _, _ in points}) < 3 or freedom < 1:
            return None
        x_P = np.array([x for x, _, _ in points])
        loss_P = np.array([loss for _, _, loss in points])
        intercepts_PS = np.array([[key == seed for seed in seeds] for _, key, _ in points], float)
        design_PK = np.column_stack([x_P, x_P * x_P, intercepts_PS])
        beta_K = np.linalg.lstsq(design_PK, loss_P, rcond=None)[0]
        slope, curvature = map(float, beta_K[:2])
        if curvature <= 0:
            return None
        residuals_P = loss_P - design_PK @ beta_K
        variance = float(residuals_P @ residuals_P) / freedom
        covariance_KK = variance * np.linalg.inv(design_PK.T @ design_PK)
        ends = _fieller(slope, curvature, covariance_KK, freedom)
        return Parabola(
            optimum=best * math.exp(-slope / (2 * curvature)),
            interval=ends and (best * math.exp(ends[0]), best * math.exp(ends[1])),
            curvature=curvature,
        )

    def excess_loss(self, rate: float) -> float | None:
        """Return the loss at a rate beyond the parabola's minimum, in nats."""
        fit = self.parabola
        return None if fit is None else fit.curvature * math.log(rate / fit.optimum) ** 2

    def sensitivity(self, initial_loss: float) -> float | None:
        """Return the mean cost, in nats, of a rate up to four times too high or too low.

        Losses above the one before training count as that one.
        """
        best = self.best
        if best is None:
            return None
        least = self.means[best]
        costs = [
            min(self.means.get(rate, math.inf), max(initial_loss, least)) - least
            for rate in self.losses
            if abs(math.log(rate / best)) <= _SENSITIVITY_RANGE
        ]
        cost = math.fsum(costs) / len(costs)
        return cost if math.isfinite(cost) else None


def _fieller(
    slope: float, curvature: float, covariance_KK: np.ndarray, freedom: int
) -> Interval | None:
    """Return Fieller's interval of the ratio −slope / (2 · curvature)."""
    above, below = -slope, 2 * curvature
    v11, v22, v12 = covariance_KK[0, 0], 4 * covariance_KK[1, 1], -2 * covariance_KK[0, 1]
    t2 = float(stats.t.isf(ALPHA / 2, freedom)) ** 2
    a, b, c = below**2 - t2 * v22, above * below - t2 * v12, above**2 - t2 * v11
    discriminant = b * b - a * c
    if a <= 0 or discriminant < -1e-12 * b * b:  # the curvature may be zero
        return None
    root = math.sqrt(max(0.0, discriminant))  # rounding may make it negative in an exact fit
    return float((b - root) / a), float((b + root) / a)


def find_lr_curves(study: Study) -> dict[str, LrCurve]:
    """Return the curve of each arm: from tuning runs, or of arms run at three rates or more."""
    losses: dict[str, Losses] = {}
    if study.tuning:
        for (arm, rate), records in study.tuning.items():
            losses.setdefault(arm, {})[rate] = _losses_by_seed(records)
    else:
        for entry in study.entries:
            if entry.rate is not None:
                losses.setdefault(entry.arm.name, {})[entry.rate] = _losses_by_seed(entry.records)
        losses = {arm: by_rate for arm, by_rate in losses.items() if len(by_rate) >= 3}
    return {
        arm: LrCurve(arm, known)
        for arm, by_rate in losses.items()
        if (known := {rate: by_seed for rate, by_seed in by_rate.items() if by_seed})
    }


def _losses_by_seed(records: Mapping[Seeds, Record]) -> dict[Seeds, float | None]:
    """Return the validation losses of the runs that have a result."""
    return {
        key: record.val if record.status == "done" else None
        for key, record in records.items()
        if record.status in ("done", "diverged")
    }


def gap_at_rates(
    arm: LrCurve, arm_rate: float | None, other: LrCurve, other_rate: float | None
) -> Sample:
    """Return the paired validation gap, with each arm at its own rate."""
    losses = arm.losses.get(arm_rate or math.nan, {})  # empty without a rate
    others = other.losses.get(other_rate or math.nan, {})
    pairs = [(losses[key], others[key]) for key in sorted(losses) if key in others]
    return Sample(tuple(a - b for a, b in pairs if a is not None and b is not None))


@dataclass(frozen=True)
class RateLosses:
    """Validation losses at one learning rate."""

    lr: float
    by_seed: list[float | None]


@dataclass(frozen=True)
class LrCurveSummary:
    """Learning-rate curve of one arm."""

    arm: str
    baseline: str | None
    best: float | None
    chosen: float | None
    on_the_edge: bool
    optimum: float | None
    optimum_interval: Interval | None
    curvature: float | None
    best_excess_loss: float | None
    sensitivity: float | None
    default: float
    val_loss: list[RateLosses]
    gap_at_default: Estimate | None
    gap_at_best: Estimate | None


def describe_lr_curves(study: Study) -> list[LrCurveSummary]:
    """Summarize the learning-rate curves of a study."""
    curves = find_lr_curves(study)
    summaries = []
    for name, curve in curves.items():
        arm = study.arms[name]
        size = arm.facts.get("vocabulary")
        initial_loss = math.log(size) if isinstance(size, int) and size > 1 else math.inf
        fit, search = curve.parabola, study.lr_searches.get(name)
        other = curves.get(arm.baseline or "")
        default, best = arm.config.optim.lr, curve.best
        at_default = at_best = None
        if other is not None:
            at_default = describe_sample(gap_at_rates(curve, default, other, default))
            at_best = describe_sample(gap_at_rates(curve, best, other, other.best))
        summaries.append(
            LrCurveSummary(
                arm=name,
                baseline=arm.baseline,
                best=best,
                chosen=search.rate if search else None,
                on_the_edge=curve.is_on_edge,
                optimum=fit.optimum if fit else None,
                optimum_interval=fit.interval if fit else None,
                curvature=fit.curvature if fit else None,
                best_excess_loss=None if best is None else curve.excess_loss(best),
                sensitivity=curve.sensitivity(initial_loss),
                default=default,
                val_loss=[
                    RateLosses(rate, [*curve.losses[rate].values()])
                    for rate in sorted(curve.losses)
                ],
                gap_at_default=at_default,
                gap_at_best=at_best,
            )
        )
    return summaries
