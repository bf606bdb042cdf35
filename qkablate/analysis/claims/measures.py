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

from qkablate.analysis.claims.samples import Course, Exact, Median
from qkablate.analysis.claims.verdict import KINDS
from qkablate.analysis.comparison.curves import combine_curves
from qkablate.analysis.comparison.gaps import Gap
from qkablate.analysis.left_behind import FailureRisk, measure_risks
from qkablate.analysis.stats import ALPHA, Sample, Spread
from qkablate.analysis.study.loss_curves import VAL, LossCurve
from qkablate.analysis.study.study import Entry, Record, Seeds
from qkablate.config import TEXT_SOURCES
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
            return math.exp(cost) if cost < 700 else math.inf
        return -cost if self is Unit.SHARE else cost

    def natural_interval(self, low: float, high: float) -> tuple[float, float]:
        ends = self.natural(low), self.natural(high)
        return ends[::-1] if self is Unit.SHARE else ends

    def margin(self, margin: float) -> float:
        """Return the margin of a sample; that of a ratio is written as a part of one."""
        return math.log1p(margin) if self is Unit.RATIO else margin


# Cost of the arm over that of its baseline for each pair of runs; None: it was not measured.
PairCost = Callable[[Record, Record, Gap], float | None]


@dataclass(frozen=True)
class Measure:
    """One measure of two arms."""

    noun: str
    unit: Unit
    sample: type[Sample] = Sample
    pair_cost: PairCost | None = None  # None: it is no number of each pair of runs
    kinds: tuple[str, ...] = KINDS
    needs_curve: bool = False
    needs_task: bool = False
    is_solo: bool = False  # measured alone, after the runs
    is_censored: bool = False  # some runs tell only that it is larger than all that was seen
    arm_cost: Callable[[Arm], float] | None = None  # of a measure that no run is needed for

    @property
    def is_of_runs(self) -> bool:
        """True if the runs of the arms are measured."""
        return not self.is_solo and self.arm_cost is None


def _test_loss(run: Record, other: Record, gap: Gap) -> float | None:
    return gap.pairs[run.seeds]


def _train_loss(run: Record, other: Record, gap: Gap) -> float | None:
    return _excess(run.final_train_loss, other.final_train_loss)


def _accuracy(run: Record, other: Record, gap: Gap) -> float | None:
    return _excess(other.accuracy, run.accuracy)


def _exact(run: Record, other: Record, gap: Gap) -> float | None:
    return _excess(other.exact, run.exact)


def _excess(value: float | None, other: float | None) -> float | None:
    return None if value is None or other is None else value - other


def _tokens_to_loss(run: Record, other: Record, gap: Gap) -> float | None:
    """Return the log ratio of the tokens after which each reaches the baseline's loss halfway.

    The noise of a pair must not choose what it has to reach: the loss is the mean of the baseline's
    other runs.
    """
    curve, baseline_curve = run.loss_curves[VAL], other.loss_curves[VAL]
    if not curve or not baseline_curve:
        return None
    curves = [r.loss_curves[VAL] for _, r in gap.runs if r.seeds != other.seeds]
    return log_tokens_ratio(curve, baseline_curve, loss_halfway([*filter(None, curves)]))


def loss_halfway(curves: Sequence[LossCurve]) -> float:
    """Return the mean loss of some runs after half of their training; nan without runs."""
    losses = [_loss_at(curve, TARGET * max(curve)) for curve in curves]
    return statistics.fmean(losses) if losses else math.nan


def log_tokens_ratio(curve: LossCurve, other: LossCurve, target: float) -> float | None:
    """Return the logarithm of the ratio of the tokens that two runs need to reach a loss.

    It is ±∞ if one of them does not reach it, and None, not known, if neither does.
    """
    tokens, other_tokens = _first_below(curve, target), _first_below(other, target)
    if math.inf in (tokens, other_tokens):
        return None if tokens == other_tokens else math.copysign(math.inf, tokens - other_tokens)
    return math.log(tokens / other_tokens)


def _loss_at(curve: LossCurve, tokens: float) -> float:
    """Return the loss, interpolated on the logarithm of tokens."""
    at = sorted(curve)
    return float(np.interp(math.log(tokens), np.log(at), [curve[t] for t in at]))


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


def _steps_to_loss(run: Record, other: Record, gap: Gap) -> float | None:
    cost = _tokens_to_loss(run, other, gap)
    tokens = [entry.tokens / int(entry.arm.config.train.steps) for entry in gap.sides]  # of a step
    return None if cost is None else cost + math.log(tokens[1] / tokens[0])


_SIZES = ("noninferior", "worse")  # kinds of a measure that is never negative
MEASURES = {
    "gap": Measure("test loss", Unit.NATS, pair_cost=_test_loss),
    "spread": Measure("spread of the gap from pair to pair", Unit.NATS, Spread, kinds=_SIZES),
    "course": Measure(
        "largest gap of the training", Unit.NATS, Course, kinds=_SIZES, needs_curve=True
    ),
    "train_loss": Measure("training loss", Unit.NATS, pair_cost=_train_loss),
    "accuracy": Measure("accuracy", Unit.SHARE, pair_cost=_accuracy, needs_task=True),
    "exact": Measure("exact match", Unit.SHARE, pair_cost=_exact, needs_task=True),
    "tokens_to_loss": Measure(
        "tokens to the loss",
        Unit.RATIO,
        Median,
        _tokens_to_loss,
        needs_curve=True,
        is_censored=True,
    ),
    "steps_to_loss": Measure(
        "steps to the loss",
        Unit.RATIO,
        Median,
        _steps_to_loss,
        needs_curve=True,
        is_censored=True,
    ),
    "seconds": Measure("seconds per step", Unit.RATIO, Median, is_solo=True),
    "memory": Measure("peak memory", Unit.RATIO, Median, is_solo=True),
    "kv_bytes": Measure(
        "bytes of the KV cache",
        Unit.RATIO,
        Exact,
        arm_cost=lambda arm: float(arm.kv_cache_numbers or 0),
    ),
    "params": Measure("parameters", Unit.RATIO, Exact, arm_cost=lambda arm: float(arm.params)),
}


def check_measure(name: str, where: str, arms: Sequence[Arm]) -> None:
    """Raise UserError if arms cannot be compared by a measure."""
    measure = MEASURES[name]
    for arm in arms:
        config = arm.config
        source = config.data.source
        if measure.needs_task and source in TEXT_SOURCES:
            raise UserError(
                f"{where}.of: {name} is measured on tasks, and {source} is a text; data: induction"
            )
        readings = int(config.train.steps) // config.train.eval_every
        if measure.is_solo and source not in TEXT_SOURCES:
            raise UserError(f"{where}.of: {name} is measured on a text, and {source} is a task")
        if measure.needs_curve and readings < MIN_READINGS:
            raise UserError(
                f"{where}.of: {name} needs {MIN_READINGS} readings of the loss or more, and"
                f" train.eval_every={config.train.eval_every} gives {readings} on {source};"
                f" train.eval_every={max(1, int(config.train.steps) // (2 * MIN_READINGS))}"
            )
        if measure.arm_cost is not None and not measure.arm_cost(arm):
            raise UserError(f"{where}.of: {arm.name} has no {measure.noun}")


def measure_costs(name: str, gap: Gap) -> dict[Seeds, float]:
    """Return the cost of the arm over that of its baseline, pair by pair."""
    pair_cost = MEASURES[name].pair_cost
    assert pair_cost is not None
    found = {run.seeds: pair_cost(run, other, gap) for run, other in gap.runs}
    return {seeds: cost for seeds, cost in found.items() if cost is not None}


def find_unmeasured(name: str, gap: Gap) -> list[Record]:
    """Return the runs of the arm that lack, or whose opponents lack, what a measure reads."""
    measure = MEASURES[name]
    if measure.sample is Course:
        curves = _gap_curves(gap)
        return [run for run, _ in gap.runs if not curves[run.seeds]]
    if measure.pair_cost is None:
        return []
    costs = measure_costs(name, gap)
    return [run for run, _ in gap.runs if run.seeds not in costs]


def measure_sample(
    name: str, gap: Gap, than: Gap | None, solo: Mapping[str, Sequence[float]]
) -> Sample:
    """Return the sample of a measure; with `than`, that of the difference of two comparisons.

    `solo` are the repeated measurements of the arms.
    """
    measure = MEASURES[name]
    if measure.arm_cost is not None:
        cost, other_cost = (measure.arm_cost(entry.arm) for entry in gap.sides)
        return Exact((math.log(cost / other_cost),))
    if measure.is_solo:
        sides = (solo.get(entry.arm.name, ()) for entry in gap.sides)
        return Median(tuple(math.log(arm / other) for arm, other in zip(*sides, strict=False)))
    if measure.sample is Course:
        return _measure_course(gap)
    if measure.sample is Spread:
        return Spread(gap.sample.values)
    costs, gaps = measure_costs(name, gap), [gap]
    if than is not None:
        others = measure_costs(name, than)
        costs = {seeds: costs[seeds] - others[seeds] for seeds in costs if seeds in others}
        gaps.append(than)
    # An arm on both sides of the difference cancels, with its error.
    variance = sum(e.tuning_variance for e in _free_sides(gaps)) if measure.unit is Unit.NATS else 0
    return measure.sample(tuple(costs.values()), variance)


def _free_sides(gaps: Sequence[Gap]) -> list[Entry]:
    sides = [entry for gap in gaps for entry in gap.sides]
    return [e for e in sides if sum(e.name == other.name for other in sides) == 1]


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
    pairs = {run.seeds: (run.loss_curves[VAL], other.loss_curves[VAL]) for run, other in gap.runs}
    return {
        seeds: {t: a[t] - b[t] for t in a if t in b and t > warm_up}
        for seeds, (a, b) in pairs.items()
    }


def measure_lead(name: str, gap: Gap) -> float | None:
    """Return the bound by which the baseline beats the floor; None if it is unknown.

    It is ∞ for measures that tell something also of arms that have learned nothing.
    """
    measure = MEASURES[name]
    is_lead_in_costs = measure.unit is Unit.SHARE or measure.is_censored
    if is_lead_in_costs and gap.compares_variants:
        if gap.floor is None:
            return None
        sample = measure.sample(tuple(measure_costs(name, gap.floor).values()))
        interval = sample.interval(1 - 2 * ALPHA)
        return interval and interval[0]
    return gap.lead if measure.unit is Unit.NATS and name != "spread" else math.inf


def measure_failures(name: str, gap: Gap) -> tuple[FailureRisk, FailureRisk] | None:
    """Return the failures of both arms in the unit of the measure; None if they hardly move it."""
    measure = MEASURES[name]
    if measure.unit is Unit.RATIO or name == "spread":
        return None
    risks = measure_risks(*gap.sides)
    if measure.unit is Unit.NATS:
        return risks
    # A run that is left behind answers as one that guesses.
    best = max((e.accuracy or 0.0 for e in gap.sides), default=0.0)
    size = best if name == "exact" else best - (gap.baseline.chance or 0.0)
    unit = f"of {measure.noun}"
    rescale = functools.partial(dataclasses.replace, size=max(size, 0.0), unit=unit)
    return rescale(risks[0]), rescale(risks[1])
