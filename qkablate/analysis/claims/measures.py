"""Measures: what a part of a claim compares two arms by, and how it is sampled.

A measure is a cost of the arm over that of its baseline, so that more is worse: a difference, in
nats or as a share, or the logarithm of a ratio.
"""

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from qkablate.analysis.claims.samples import Censored, Course, Exact, Median
from qkablate.analysis.claims.verdict import KINDS
from qkablate.analysis.comparison.curves import combine_curves
from qkablate.analysis.comparison.gaps import Gap
from qkablate.analysis.outliers import FailureRisk, measure_risks
from qkablate.analysis.stats import ALPHA, Interval, Sample, Spread, exp
from qkablate.analysis.study.loss_curves import MAX_READINGS, VAL, LossCurve
from qkablate.analysis.study.study import Record, Seeds
from qkablate.config import TEXT_SOURCES
from qkablate.config.data import has_masks
from qkablate.errors import UserError
from qkablate.sweeps.planning.manifest import Arm

MIN_READINGS = 8  # of a loss curve, where a measure reads it
TARGET = 0.5  # of the baseline's training: the loss that arms have to reach


class Unit(Enum):
    """Unit of a measure; its samples are costs, from which `natural` makes what is shown."""

    NATS = "nats"
    SHARE = "share"  # of answers that are right: more is better
    RATIO = "ratio"

    def natural(self, cost: float) -> float:
        """Return the value as it is shown: a difference, or a ratio."""
        if self is Unit.RATIO:
            return exp(cost)
        return -cost if self is Unit.SHARE else cost

    def natural_interval(self, low: float, high: float) -> tuple[float, float]:
        ends = self.natural(low), self.natural(high)
        return ends[::-1] if self is Unit.SHARE else ends

    def margin(self, margin: float) -> float:
        """Return the margin of a sample; that of a ratio is written as a part of one."""
        return math.log1p(margin) if self is Unit.RATIO else margin


# Cost of the arm over that of its baseline for each pair of runs; None: it was not measured.
PairCost = Callable[[Record, Record, Gap], float | None]
# Between which numbers it lies: equal where it is known, else one of them is infinite.
PairBounds = Callable[[Record, Record, Gap], Interval | None]


@dataclass(frozen=True)
class Measure:
    """One measure of two arms."""

    name: str  # as claims give it: `of: gap`
    noun: str
    unit: Unit
    sample: type[Sample] = Sample
    pair_cost: PairCost | None = None  # None: it is no number of each pair of runs
    kinds: tuple[str, ...] = KINDS
    needs_curve: bool = False
    needs_task: bool = False
    is_solo: bool = False  # measured alone, after the runs
    pair_bounds: PairBounds | None = None  # of a cost of which some runs tell only a bound
    arm_cost: Callable[[Arm], float] | None = None  # of a measure that no run is needed for

    @property
    def is_censored(self) -> bool:
        """True if some runs may tell only a bound of it."""
        return self.pair_bounds is not None

    @property
    def is_of_runs(self) -> bool:
        """True if the runs of the arms are measured."""
        return not self.is_solo and self.arm_cost is None

    def check_arms(self, where: str, arms: Sequence[Arm]) -> None:
        """Raise UserError if arms cannot be compared by the measure."""
        for arm in arms:
            source, train = arm.config.data.source, arm.config.train
            steps, every = int(train.steps), int(train.eval_every)
            has_accuracy = has_masks(arm.config.data) and self.name == "accuracy"
            if self.needs_task and source in TEXT_SOURCES and not has_accuracy:
                raise UserError(
                    f"{where}: {self.name} needs a task, and {source} is a text; add data:"
                    " induction to the part"
                )
            if self.is_solo and source not in TEXT_SOURCES:
                raise UserError(
                    f"{where}: {self.name} is measured on text alone, and {source} is a task; leave"
                    " out data"
                )
            if self.needs_curve and steps // every < MIN_READINGS:
                raise UserError(
                    f"{where}: {self.name} needs {MIN_READINGS} evaluations or more, and"
                    f" train.eval_every={every} gives {steps // every} on {source};"
                    f" set train.eval_every={max(1, steps // (2 * MIN_READINGS))}"
                )
            evaluations = steps // every + (steps % every > 0)  # besides that of step 0
            if self.sample is Course and evaluations >= MAX_READINGS:
                raise UserError(
                    f"{where}: {self.name} tests every evaluation, of {MAX_READINGS - 1} at most,"
                    f" and train.eval_every={every} gives {evaluations} on {source};"
                    f" set train.eval_every={math.ceil(steps / (MAX_READINGS // 2))}"
                )
            if self.arm_cost is not None and not self.arm_cost(arm):
                raise UserError(f"{where}: {arm.name} has no {self.noun}")

    def costs(self, gap: Gap) -> dict[Seeds, float]:
        """Return the cost of the arm over that of its baseline, pair by pair."""
        assert self.pair_cost is not None
        found = {run.seeds: self.pair_cost(run, other, gap) for run, other in gap.runs}
        return {seeds: cost for seeds, cost in found.items() if cost is not None}

    def find_unmeasured(self, gap: Gap) -> list[Record]:
        """Return the runs of the arm that lack, or whose baselines lack, what the measure reads."""
        if self.sample is Course:
            measured = {seeds for seeds, curve in _gap_curves(gap).items() if curve}
        else:
            measured = {*(gap.pairs if self.pair_cost is None else self.costs(gap))}
        return [run for run, _ in gap.runs if run.seeds not in measured]

    def sample_gap(self, gap: Gap, than: Gap | None, solo: Mapping[str, Sequence[float]]) -> Sample:
        """Return the sample, less that of `than`; `solo` are repeated measurements of the arms."""
        if self.arm_cost is not None:
            cost, other_cost = (self.arm_cost(entry.arm) for entry in gap.sides)
            return Exact((math.log(cost / other_cost),))
        if self.is_solo:
            repeated = (solo.get(entry.arm.name, ()) for entry in gap.sides)
            ratios = (arm / other for arm, other in zip(*repeated, strict=False))
            return Median(tuple(map(math.log, ratios)))
        if self.sample is Course:
            return _measure_course(gap)
        if self.sample is Spread:
            return Spread(gap.sample.values)
        costs, gaps = self.costs(gap), [gap]
        if than is not None:
            others = self.costs(than)
            costs = {seeds: costs[seeds] - others[seeds] for seeds in costs if seeds in others}
            gaps.append(than)
        variance = 0.0
        if self.unit is Unit.NATS:
            sides = [entry for gap in gaps for entry in gap.sides]
            names = [entry.name for entry in sides]
            # An arm on both sides of the difference cancels, with its error.
            variance = sum(e.tuning_variance for e in sides if names.count(e.name) == 1)
        if self.pair_bounds is None:
            return self.sample(tuple(costs.values()), variance)
        found = (self.pair_bounds(run, other, gap) for run, other in gap.runs)
        return Censored(tuple(costs.values()), variance, tuple(filter(None, found)))

    def lead(self, gap: Gap) -> float | None:
        """Return the bound by which the baseline beats the floor; None if it is unknown.

        It is ∞ for measures that tell something also of arms that have learned nothing.
        """
        is_lead_in_costs = self.unit is Unit.SHARE or self.is_censored
        if is_lead_in_costs and gap.compares_attention:
            if gap.floor is None or gap.floor.baseline_diverged:
                return None
            # A floor that never reaches the loss is behind by more than any margin.
            sample = Median if self.is_censored else self.sample
            interval = sample(tuple(self.costs(gap.floor).values())).interval(1 - 2 * ALPHA)
            return interval and interval[0]
        return gap.lead if self.unit is Unit.NATS and self.name != "spread" else math.inf

    def failures(self, gap: Gap) -> tuple[FailureRisk, FailureRisk] | None:
        """Return the failures of both arms in this unit; None if they hardly move the measure."""
        if self.unit is Unit.RATIO or self.name == "spread":
            return None
        risks = measure_risks(*gap.sides)
        if self.unit is Unit.NATS:
            return risks
        # An outlier answers as one that guesses.
        if self.name == "exact":
            size = max(entry.exact or 0.0 for entry in gap.sides)
        else:
            best = max(entry.accuracy or 0.0 for entry in gap.sides)
            size = max(0.0, best - (gap.baseline.chance or 0.0))
        unit = f"of {self.noun}"
        arm, baseline = (dataclasses.replace(risk, size=size, unit=unit) for risk in risks)
        return arm, baseline


def _excess(read: Callable[[Record], float | None]) -> PairCost:
    """Return the excess of the arm in a number that every run may have."""

    def pair_cost(run: Record, other: Record, gap: Gap) -> float | None:
        value, reference = read(run), read(other)
        return None if value is None or reference is None else value - reference

    return pair_cost


def _lack(read: Callable[[Record], float | None]) -> PairCost:
    """Return what the arm lacks of a number of which more is better."""
    excess = _excess(read)
    return lambda run, other, gap: excess(other, run, gap)


def _tokens_to_loss(run: Record, other: Record, gap: Gap) -> Interval | None:
    """Return bounds of the log ratio of tokens to the loss that the baseline has halfway.

    It is the mean of its other runs: the noise of a pair must not choose its target.
    """
    curve, baseline_curve = run.loss_curves[VAL], other.loss_curves[VAL]
    if not curve or not baseline_curve:
        return None
    curves = [r.loss_curves[VAL] for _, r in gap.runs if r.seeds != other.seeds]
    return log_tokens_ratio(curve, baseline_curve, loss_halfway([*filter(None, curves)]))


def _steps_to_loss(run: Record, other: Record, gap: Gap) -> Interval | None:
    bounds = _tokens_to_loss(run, other, gap)
    tokens = [entry.tokens / int(entry.arm.config.train.steps) for entry in gap.sides]  # of a step
    shift = math.log(tokens[1] / tokens[0])
    return bounds and (bounds[0] + shift, bounds[1] + shift)


def loss_halfway(curves: Sequence[LossCurve]) -> float:
    """Return the mean loss of some runs after half of their training; nan without runs."""
    losses = []
    for curve in curves:  # interpolated on the logarithm of tokens
        tokens, values = zip(*sorted(curve.items()), strict=True)
        halfway = math.log(TARGET * tokens[-1])
        losses.append(float(np.interp(halfway, np.log(tokens), values)))
    return statistics.fmean(losses) if losses else math.nan


def log_tokens_ratio(curve: LossCurve, other: LossCurve, target: float) -> Interval | None:
    """Return bounds of the log ratio of tokens to a loss; None if neither run reaches it.

    A run that does not reach it needs more tokens than it has trained on.
    """
    tokens, other_tokens = _first_below(curve, target), _first_below(other, target)
    if tokens == other_tokens == math.inf:
        return None
    low = min(tokens, max(curve)) / other_tokens
    high = tokens / min(other_tokens, max(other))
    return math.log(low) if low else -math.inf, math.log(high)


def known_number(bounds: Interval) -> float:
    """Return the number between two bounds: ±∞ where only one of them is known."""
    low, high = bounds
    return high if math.isfinite(low) else low


def _first_below(curve: LossCurve, loss: float) -> float:
    """Return the tokens after which a curve first has this loss; ∞ if it never does."""
    previous: tuple[float, float] | None = None
    for tokens, value in sorted(curve.items()):
        if value <= loss:
            if previous is None or previous[1] <= value:
                return tokens
            part = (previous[1] - loss) / (previous[1] - value)
            return math.exp(math.log(previous[0]) + part * math.log(tokens / previous[0]))
        previous = tokens, value
    return math.inf


def _until_loss(name: str, noun: str, pair_bounds: PairBounds) -> Measure:
    def pair_cost(run: Record, other: Record, gap: Gap) -> float | None:
        bounds = pair_bounds(run, other, gap)
        return None if bounds is None else known_number(bounds)

    return Measure(
        *(name, noun, Unit.RATIO, Censored),
        pair_cost=pair_cost,
        pair_bounds=pair_bounds,
        needs_curve=True,
    )


_counted = functools.partial(Measure, unit=Unit.RATIO, sample=Exact)
_SIZES = ("noninferior", "worse")  # kinds of a measure that is never negative
_ALL = (
    Measure("gap", "test loss", Unit.NATS, pair_cost=_excess(lambda r: r.loss)),
    Measure("spread", "spread of the gap from pair to pair", Unit.NATS, Spread, kinds=_SIZES),
    Measure(
        "course",
        "largest mean distance after the warm-up",
        Unit.NATS,
        Course,
        kinds=_SIZES,
        needs_curve=True,
    ),
    Measure(
        "train_loss", "training loss", Unit.NATS, pair_cost=_excess(lambda r: r.final_train_loss)
    ),
    Measure(
        "accuracy", "accuracy", Unit.SHARE, pair_cost=_lack(lambda r: r.accuracy), needs_task=True
    ),
    Measure(
        "exact", "exact match", Unit.SHARE, pair_cost=_lack(lambda r: r.exact), needs_task=True
    ),
    _until_loss("tokens_to_loss", "tokens to the loss", _tokens_to_loss),
    _until_loss("steps_to_loss", "steps to the loss", _steps_to_loss),
    Measure("seconds", "seconds per step", Unit.RATIO, Median, is_solo=True),
    Measure("memory", "peak memory", Unit.RATIO, Median, is_solo=True),
    _counted("kv_bytes", "bytes of the KV cache", arm_cost=lambda arm: arm.kv_cache_numbers or 0),
    _counted("params", "parameters", arm_cost=lambda arm: arm.params),
)
MEASURES = {measure.name: measure for measure in _ALL}


def _measure_course(gap: Gap) -> Sample:
    """Return the largest gap of the validation losses, after the warm-up."""
    curves = [*filter(None, _gap_curves(gap).values())]
    curve = combine_curves(curves, most=max(map(len, curves), default=0))
    if curve is None:
        return Course(())
    variance = gap.sample.extra_variance
    return Course.from_readings([Sample(s.values, variance) for s in curve.samples])


def _gap_curves(gap: Gap) -> dict[Seeds, LossCurve]:
    """Return the gap by tokens after the warm-up, for each pair."""
    warm_up = max(
        entry.tokens * int(entry.arm.config.optim.warmup) / int(entry.arm.config.train.steps)
        for entry in gap.sides
    )
    curves = {}
    for run, other in gap.runs:
        a, b = run.loss_curves[VAL], other.loss_curves[VAL]
        curves[run.seeds] = {t: a[t] - b[t] for t in a if t in b and t > warm_up}
    return curves
