"""The gap while training: a band that holds at every reading at once, and whether it still grows.
Runs in the middle of their schedule are no basis for a ranking: this describes, and decides
nothing."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from qkablate.analysis.gaps import Gap, describe_sample
from qkablate.analysis.sample import ALPHA, Interval, Sample
from qkablate.analysis.study import Seeds


@dataclass(frozen=True)
class Curve:
    """Of one gap, on validation, over the readings that all its runs have."""

    tokens: list[int]
    samples: list[Sample]  # by reading
    growth: Sample  # nats per doubling of tokens, over the last doubling

    def band(self) -> list[Interval | None]:
        """Intervals that hold together in 95 of 100 studies, however the readings hang together
        (Bonferroni's: a band from the correlations measured on ten seeds covers 92 %)."""
        level = 1 - ALPHA / max(1, len(self.samples))
        return [sample.interval(level) for sample in self.samples]


def curve(found: Gap) -> Curve | None:
    """None where no reading is common to all."""
    by_seed: dict[Seeds, tuple[dict[int, float], dict[int, float]]] = {}
    for key in found.pairs:
        by_seed[key] = found.arm.records[key].course, found.baseline.records[key].course
    every = [{*curve} for pair in by_seed.values() for curve in pair]
    common = sorted(set.intersection(*every)) if every else []
    if not common:
        return None
    gaps_ST = np.array([[a[t] - b[t] for t in common] for a, b in by_seed.values()])
    samples = [Sample(tuple(map(float, column))) for column in gaps_ST.T]
    late = [i for i, tokens in enumerate(common) if 2 * tokens >= common[-1]]
    return Curve(common, samples, slopes([common[i] for i in late], gaps_ST[:, late]))


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
