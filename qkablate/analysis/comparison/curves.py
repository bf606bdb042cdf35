"""Gap while training, with a simultaneous band: it describes, and decides nothing."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qkablate.analysis.comparison.gaps import Gap
from qkablate.analysis.stats import ALPHA, Estimate, Interval, Sample, describe_sample
from qkablate.analysis.study.loss_curves import VAL, LossCurve
from qkablate.analysis.study.study import Entry

READINGS = 48  # most readings of a shown curve: more widen its band and clarify nothing


@dataclass(frozen=True)
class Curve:
    """Samples over runs at the readings that all of them have."""

    tokens: list[int]
    samples: list[Sample]  # by reading
    growth: Sample  # nats per doubling of tokens, over the last doubling

    def band(self) -> list[Interval | None]:
        """Return intervals with 95 % simultaneous coverage (Bonferroni)."""
        # A band from correlations estimated on ten seeds would cover 92 %.
        level = 1 - ALPHA / max(1, len(self.samples))
        return [sample.interval(level) for sample in self.samples]


def gap_curve(gap: Gap, metric: str = VAL, most: int = READINGS) -> Curve | None:
    """Return the gap by tokens, pair by pair; None if no reading is common to all."""
    pairs = [(run.loss_curves[metric], other.loss_curves[metric]) for run, other in gap.runs]
    gaps = [{t: arm[t] - other[t] for t in arm if t in other} for arm, other in pairs]
    return combine_curves(gaps, most)


def arm_curve(entry: Entry, metric: str = VAL, most: int = READINGS) -> Curve | None:
    """Return the loss by tokens, over the runs that are done."""
    curves = (record.loss_curves[metric] for record in entry.with_status("done"))
    return combine_curves([*filter(None, curves)], most)  # damaged ones are empty


def combine_curves(curves: list[LossCurve], most: int) -> Curve | None:
    """Combine the curves of several runs at their common readings."""
    common = sorted(set.intersection(*map(set, curves))) if curves else []
    if not common:
        return None
    values_ST = np.array([[curve[t] for t in common] for curve in curves])
    late = [i for i, tokens in enumerate(common) if 2 * tokens >= common[-1]]
    growth = fit_slopes([common[i] for i in late], values_ST[:, late])
    shown = [common.index(t) for t in thin(common, most)]
    samples = [Sample(tuple(map(float, column))) for column in values_ST[:, shown].T]
    return Curve([common[i] for i in shown], samples, growth)


def thin(tokens: Sequence[int], most: int) -> list[int]:
    """Pick at most `most` rising numbers, evenly on a log scale, with the first and the last."""
    if len(tokens) <= most:
        return [*tokens]
    ideal = np.geomspace(tokens[0], tokens[-1], most)
    nearest = np.abs(np.log(np.array(tokens, float))[:, None] - np.log(ideal)).argmin(axis=0)
    return [tokens[i] for i in sorted({*map(int, nearest)})]


def slope_weights(tokens: list[int]) -> np.ndarray:
    """Return the weight of each length in a least-squares slope on log2 of tokens."""
    x_T = np.log2(np.array(tokens, float))
    x_T -= x_T.mean()
    return np.asarray(x_T / (x_T @ x_T))


def fit_slopes(tokens: list[int], gaps_ST: np.ndarray, extra_T: Sequence[float] = ()) -> Sample:
    """Return each seed's slope on log2 of tokens; `extra_T` are variances that all seeds share."""
    if len(tokens) < 2:
        return Sample(())
    weight_T = slope_weights(tokens)
    extra = float(np.square(weight_T) @ np.array(extra_T)) if extra_T else 0.0
    return Sample(tuple(float(v) for v in gaps_ST @ weight_T), extra)


@dataclass(frozen=True)
class Reading:
    """Mean over pairs at one moment of training, with its simultaneous interval."""

    tokens: int
    n: int
    mean: float
    band: Interval | None


@dataclass(frozen=True)
class CurveSummary:
    """Gap of one arm while training."""

    arm: str
    baseline: str
    readings: list[Reading]
    growth_per_doubling: Estimate


def describe_curve(gap: Gap) -> CurveSummary | None:
    """Return the validation gap by tokens; None without a common reading."""
    curve = gap_curve(gap)
    if curve is None:
        return None
    readings = [
        Reading(tokens, sample.n, sample.mean, band)
        for tokens, sample, band in zip(curve.tokens, curve.samples, curve.band(), strict=True)
        if math.isfinite(sample.mean)
    ]
    return CurveSummary(gap.arm.name, gap.baseline.name, readings, describe_sample(curve.growth))
