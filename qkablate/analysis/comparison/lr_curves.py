"""Validation loss by learning rate: the optimum, its uncertainty, and the cost of missing it."""

import math
from dataclasses import dataclass
from functools import cached_property

from scipy import stats

from qkablate.analysis.stats import ALPHA, Estimate, Interval, Sample, describe_sample
from qkablate.analysis.study.study import Study, known_losses, tuning_losses
from qkablate.sweeps.planning.manifest import Rates
from qkablate.sweeps.planning.surface import Surface, choose_rates, find_surface
from qkablate.sweeps.planning.tuning_losses import (
    RULES,
    Losses,
    find_best_rates,
    find_outlying_rates,
    find_solved_rates,
    loss_near,
    mean_losses,
)

_FAR = math.log(4) * 1.01  # distance from the best rate in ln lr that its sensitivity covers
_WIDEST = math.log(1e4)  # largest distance in ln lr at which an end of an interval is reported


@dataclass(frozen=True)
class LrCurve:
    """Validation loss of one arm by learning rates."""

    arm: str
    losses: Losses
    matched_lr: float = 1.0  # of the arm's circuit
    chosen: Rates | None = None  # by the search, if there was one
    rules: int = RULES  # of the search

    @property
    def lacks_circuit_rates(self) -> bool:
        """True if the circuit has a multiplier of which a single value was tried."""
        return self.matched_lr != 1 and len({rates.circuit for rates in self.losses}) < 2

    @cached_property
    def means(self) -> dict[Rates, float]:
        """Mean loss by rates; those at which a seed diverged or is missing have none."""
        return mean_losses(self.losses)

    @cached_property
    def outliers(self) -> list[Rates]:
        """Rates at which a run was an outlier."""
        return find_outlying_rates(self.losses)

    @cached_property
    def solved(self) -> list[Rates]:
        """Rates at which a task is solved."""
        return find_solved_rates(self.losses)

    @cached_property
    def best(self) -> Rates | None:
        """Rates with the smallest mean loss, or in the middle of those that solve a task."""
        return find_best_rates(self.losses, self.rules)

    def is_tuned(self, rates: Rates | None) -> bool:
        """Return whether these are the best rates tried, those that tuning chooses, or between."""
        if rates not in self.losses or rates in self.solved or rates == self.chosen:
            return True
        return rates in (self.best, choose_rates(self.losses, rules=1)[0])

    def loss_near(self, rates: Rates) -> float | None:
        """Return the mean loss at the rates that were tried nearest to some; None if unknown."""
        return loss_near(self.losses, rates)

    @property
    def is_on_edge(self) -> bool:
        """True if the best rates are not bracketed by finite losses in each dimension.

        They are the lowest or the highest at which training did not diverge, or beside such rates
        of the same circuit: where it begins to diverge the loss tells nothing of a minimum.
        """
        if self.best is None:
            return True
        finite = [rates for rates, own in self.losses.items() if None not in own.values()]
        for value, tried in zip(self.best, map(sorted, zip(*finite, strict=True)), strict=True):
            if value in (tried[0], tried[-1]) and (value is self.best.lr or tried[0] < tried[-1]):
                return True
        row = sorted(rates for rates in self.losses if rates.circuit == self.best.circuit)
        place = row.index(self.best)
        return any(rates not in finite for rates in row[max(0, place - 1) : place + 2])

    @cached_property
    def surface(self) -> Surface | None:
        """Least-squares surface near the best rates, if it has a minimum."""
        surface = find_surface(self.losses)
        return surface if surface is not None and surface.is_convex else None

    @property
    def optimum_interval(self) -> Interval | None:
        """Interval of the best `optim.lr`: Fieller's, or of the delta method in two dimensions.

        None without a minimum, or if an end is more than a factor of 10⁴ from the center: the
        surface may be flat.
        """
        fit = self.surface
        if fit is None:
            return None
        if fit.size == 1:
            ends = _fieller(fit)
        else:
            half = float(stats.t.isf(ALPHA / 2, fit.freedom))
            half *= math.sqrt(float(fit.offset_covariance[0, 0]))
            ends = float(fit.offset[0]) - half, float(fit.offset[0]) + half
        if ends is None or max(map(abs, ends)) > _WIDEST:
            return None
        return fit.center.lr * math.exp(ends[0]), fit.center.lr * math.exp(ends[1])

    def sensitivity(self, initial_loss: float) -> float | None:
        """Return the mean cost, in nats, of a rate up to four times too high or too low."""
        best = self.best
        if best is None:
            return None
        least = self.means[best]
        costs = [
            # Losses above the one before training count as that one.
            min(self.means.get(rates, math.inf), max(initial_loss, least)) - least
            for rates in self.losses
            if rates.circuit == best.circuit and abs(math.log(rates.lr / best.lr)) <= _FAR
        ]
        cost = math.fsum(costs) / len(costs)
        return cost if math.isfinite(cost) else None


def _fieller(fit: Surface) -> Interval | None:
    """Return Fieller's interval of the ratio −slope / second derivative."""
    above, below = -float(fit.slope_K[0]), float(fit.hessian_KK[0, 0])
    v11, v12, v22 = (float(fit.covariance_PP[at]) for at in ((0, 0), (0, 1), (1, 1)))
    t2 = float(stats.t.isf(ALPHA / 2, fit.freedom)) ** 2
    a, b, c = below**2 - t2 * v22, above * below + t2 * v12, above**2 - t2 * v11
    discriminant = b * b - a * c
    if a <= 0 or discriminant < -1e-12 * b * b:  # the curvature may be zero
        return None
    root = math.sqrt(max(0.0, discriminant))  # rounding may make it negative in an exact fit
    return float((b - root) / a), float((b + root) / a)


def find_lr_curves(study: Study) -> dict[str, LrCurve]:
    """Return the curve of each arm: from tuning runs, or of arms run at three rates or more."""
    losses = {arm: tuning_losses(study.tuning, arm) for arm, _ in study.tuning}
    if not study.tuning:
        for entry in study.entries:
            if entry.rates is not None and (known := known_losses(entry.records)):
                losses.setdefault(entry.arm.name, {})[entry.rates] = known
        losses = {arm: by_rates for arm, by_rates in losses.items() if len(by_rates) >= 3}
    chosen = {arm: search.rates for arm, search in study.lr_searches.items()}
    rules = RULES if study.manifest is None else study.manifest.tuning_rules
    return {
        arm: LrCurve(arm, by_rates, study.arms[arm].matched_lr, chosen.get(arm), rules)
        for arm, by_rates in losses.items()
        if by_rates
    }


def gap_at_rates(
    arm: LrCurve, arm_rates: Rates | None, other: LrCurve, other_rates: Rates | None
) -> Sample:
    """Return the paired validation gap, with each arm at its own rates."""
    losses = arm.losses.get(arm_rates, {}) if arm_rates else {}
    others = other.losses.get(other_rates, {}) if other_rates else {}
    pairs = [(losses[key], others[key]) for key in sorted(losses) if key in others]
    return Sample(tuple(a - b for a, b in pairs if a is not None and b is not None))


@dataclass(frozen=True)
class RateLosses:
    """Validation losses at one point of the search."""

    lr: float
    circuit: float
    by_seed: list[float | None]


@dataclass(frozen=True)
class LrCurveSummary:
    """Learning-rate curve of one arm; a `circuit` is a value of `variant.lr`."""

    arm: str
    baseline: str | None
    runs: int
    best: Rates | None
    chosen: Rates | None
    on_the_edge: bool
    outliers: list[Rates]
    optimum: Rates | None
    optimum_interval: Interval | None  # of optim.lr
    curvature: float | None  # along optim.lr
    best_excess_loss: float | None
    sensitivity: float | None
    default: Rates
    val_loss: list[RateLosses]
    gap_at_default: Estimate | None
    gap_at_best: Estimate | None


def describe_lr_curves(study: Study, curves: dict[str, LrCurve]) -> list[LrCurveSummary]:
    """Summarize the learning-rate curves of a study."""
    summaries = []
    for name, curve in curves.items():
        arm = study.arms[name]
        size = arm.facts.get("vocabulary")
        initial_loss = math.log(size) if isinstance(size, int) and size > 1 else math.inf
        fit, search = curve.surface, study.lr_searches.get(name)
        other = curves.get(arm.baseline or "")
        best, at_default, at_best = curve.best, None, None
        if other is not None:
            default = _nearest(arm.default_rates, curve)
            other_default = _nearest(study.arms[other.arm].default_rates, other)
            at_default = describe_sample(gap_at_rates(curve, default, other, other_default))
            at_best = describe_sample(gap_at_rates(curve, best, other, other.best))
        summaries.append(
            LrCurveSummary(
                arm=name,
                baseline=arm.baseline,
                runs=sum(map(len, curve.losses.values())),
                best=best,
                chosen=search.rates if search else None,
                on_the_edge=curve.is_on_edge,
                outliers=curve.outliers,
                optimum=fit.optimum if fit else None,
                optimum_interval=curve.optimum_interval,
                curvature=float(fit.hessian_KK[0, 0]) / 2 if fit else None,
                best_excess_loss=fit.excess_loss(best) if fit and best else None,
                sensitivity=curve.sensitivity(initial_loss),
                default=arm.default_rates,
                val_loss=[
                    RateLosses(*rates, [*by_seed.values()])
                    for rates, by_seed in sorted(curve.losses.items())
                ],
                gap_at_default=at_default,
                gap_at_best=at_best,
            )
        )
    return summaries


def _nearest(default: Rates, curve: LrCurve) -> Rates:
    """Return the default rates as they were tried: the circuit's ladder is rounded."""

    def distance(rates: Rates) -> float:
        return abs(math.log(rates.circuit / default.circuit))

    tried = [rates for rates in curve.losses if rates.lr == default.lr]
    nearest = min(tried, key=distance, default=default)
    return nearest if distance(nearest) < 0.01 else default
