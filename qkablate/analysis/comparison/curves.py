"""The gap while training: a band that holds at every reading at once, and whether it still grows.
Runs in the middle of their schedule are no basis for a ranking: this describes, and decides
nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qkablate.analysis.comparison.gaps import Gap, describe_sample
from qkablate.analysis.stats import ALPHA, Interval, Sample
from qkablate.analysis.study.study import VAL, Course, Entry

READINGS = 48  # that a curve is shown at: more make its band wider, and nothing clearer


@dataclass(frozen=True)
class Curve:
    """Numbers of several runs, over the readings that all of them have."""

    tokens: list[int]
    samples: list[Sample]  # by reading
    growth: Sample  # nats per doubling of tokens, over the last doubling

    def band(self) -> list[Interval | None]:
        """Intervals that hold together in 95 of 100 studies, however the readings hang together
        (Bonferroni's: a band from the correlations measured on ten seeds covers 92 %).
        """
        level = 1 - ALPHA / max(1, len(self.samples))
        return [sample.interval(level) for sample in self.samples]


def curve(found: Gap, metric: str = VAL, most: int = READINGS) -> Curve | None:
    """Of the gap, pair by pair; None where no reading is common to all."""
    pairs = [
        (found.arm.records[key].courses[metric], found.baseline.records[key].courses[metric])
        for key in found.pairs
    ]
    gaps = [{t: one[t] - other[t] for t in one if t in other} for one, other in pairs]
    return together(gaps, most)


def arm_curve(entry: Entry, metric: str = VAL, most: int = READINGS) -> Curve | None:
    """Of the loss, over the runs that are done."""
    courses = (record.courses[metric] for record in entry.having("done"))
    done = [course for course in courses if course]  # of what is damaged there is none
    return together(done, most)


def together(courses: list[Course], most: int) -> Curve | None:
    """Of runs that were read at the same moments."""
    common = sorted(set.intersection(*map(set, courses))) if courses else []
    if not common:
        return None
    values_ST = np.array([[course[t] for t in common] for course in courses])
    late = [i for i, tokens in enumerate(common) if 2 * tokens >= common[-1]]
    growth = slopes([common[i] for i in late], values_ST[:, late])
    shown = [common.index(t) for t in thinned(common, most)]
    samples = [Sample(tuple(map(float, column))) for column in values_ST[:, shown].T]
    return Curve([common[i] for i in shown], samples, growth)


def thinned(tokens: Sequence[int], most: int) -> list[int]:
    """At most so many of the rising numbers, evenly on a logarithmic scale; first and last stay."""
    if len(tokens) <= most:
        return [*tokens]
    ideal = np.geomspace(tokens[0], tokens[-1], most)
    nearest = np.abs(np.log(np.array(tokens, float))[:, None] - np.log(ideal)).argmin(axis=0)
    return [tokens[i] for i in sorted({*map(int, nearest)})]


def slopes(tokens: list[int], gaps_ST: Any) -> Sample:
    """Of each seed's gap on the logarithm of tokens to base 2, by least squares."""
    if len(tokens) < 2:
        return Sample(())
    x_T = np.log2(np.array(tokens, float))
    x_T -= x_T.mean()
    return Sample(tuple(float(v) for v in gaps_ST @ x_T / (x_T @ x_T)))


def describe_curve(found: Gap) -> dict[str, Any] | None:
    shown = curve(found)
    if shown is None:
        return None
    readings = [
        {
            "tokens": tokens,
            "n": sample.n,
            "mean": sample.mean,
            "band": band and [*band],
        }
        for tokens, sample, band in zip(shown.tokens, shown.samples, shown.band(), strict=True)
        if math.isfinite(sample.mean)
    ]
    return {
        "arm": found.arm.name,
        "baseline": found.baseline.name,
        "readings": readings,
        "growth_per_doubling": describe_sample(shown.growth),
    }
