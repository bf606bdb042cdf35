"""Samples of measures that are not means: medians, exact numbers, the largest gap of a training.

They answer the questions of `stats.Sample`, each with an interval of its own kind.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from scipy import special, stats

from qkablate.analysis.stats import ALPHA, Interval, Sample

MIN_OF_MEDIAN = 5  # numbers: the sign test of fewer rejects nothing
MOST_READINGS = 16  # of a simultaneous band: more make it wider


class _NoMean(Sample):
    """Numbers of which the statistics of means tell nothing."""

    bca = None
    sign_flip = None

    def detectable(self, alpha: float = ALPHA) -> float | None:
        return None


class Median(_NoMean):
    """The median of independent numbers of any distribution, by their order.

    Interval and tests are those of the sign test: they hold for skewed, heavy-tailed and censored
    numbers. A number beyond all others is ±∞: it takes part by its order, and a bound is infinite
    where too many are.
    """

    @cached_property
    def mean(self) -> float:
        return statistics.median(self.values) if self.values else math.nan

    @cached_property
    def sd(self) -> float | None:
        """Standard deviation; None with a number that is not known."""
        return Sample(self.values).sd if all(map(math.isfinite, self.values)) else None

    def interval(self, level: float = 1 - ALPHA) -> Interval | None:
        if self.n < 2:
            return None
        x = sorted(self.values)
        rank = _bounding_rank(self.n, (1 - level) / 2)
        return (x[rank - 1], x[-rank]) if rank else (-math.inf, math.inf)

    def p_below(self, bound: float) -> float:
        return _sign_test(sum(x < bound for x in self.values), self.n)

    def p_above(self, bound: float) -> float:
        return _sign_test(sum(x > bound for x in self.values), self.n)

    def power(
        self, n: int, mean: float, sd: float, bound: float, alpha: float, *, above: bool
    ) -> float:
        """Return the power of the sign test if the numbers are normal."""
        rank = _bounding_rank(n, alpha)
        if not rank:
            return 0.0
        distance = (mean - bound if above else bound - mean) / max(sd, 1e-300)
        return float(stats.binom.sf(n - rank, n, special.ndtr(distance)))

    def power_within(self, n: int, mean: float, sd: float, bound: float, alpha: float) -> float:
        sides = ((bound, False), (-bound, True))
        return max(0.0, sum(self.power(n, mean, sd, b, alpha, above=a) for b, a in sides) - 1)


@dataclass(frozen=True)
class Censored(Median):
    """The median of numbers of which some are known only to lie above or below a bound.

    Such a number is ±∞ among the values, and has its bound in `bounds`, where the others have
    themselves twice. In a test it counts where its bound decides.
    """

    bounds: tuple[Interval, ...] = ()

    def interval(self, level: float = 1 - ALPHA) -> Interval | None:
        lows, highs = (Median(tuple(bound[i] for bound in self.bounds)) for i in (0, 1))
        low, high = lows.interval(level), highs.interval(level)
        return low and high and (low[0], high[1])

    def p_below(self, bound: float) -> float:
        return _sign_test(sum(high < bound for _, high in self.bounds), self.n)

    def p_above(self, bound: float) -> float:
        return _sign_test(sum(low > bound for low, _ in self.bounds), self.n)


@lru_cache(maxsize=4096)
def _bounding_rank(n: int, tail: float) -> int:
    """Return the rank of the number that bounds the median with this error; 0 if none does."""
    # The median lies below x_(k) with probability P(B ≤ k - 1), where B ~ Bin(n, ½).
    k = int(stats.binom.ppf(tail, n, 0.5))
    while k and stats.binom.cdf(k - 1, n, 0.5) > tail * (1 + 1e-12):
        k -= 1
    return k


def _sign_test(hits: int, n: int) -> float:
    """Return the probability of so many hits or more if each has probability one half."""
    return float(stats.binom.sf(hits - 1, n, 0.5)) if n else 1.0


class Exact(_NoMean):
    """A number that is counted, not sampled: it has no uncertainty."""

    min_n = 1

    def interval(self, level: float = 1 - ALPHA) -> Interval | None:
        return (self.mean, self.mean) if self.values else None

    def p_below(self, bound: float) -> float:
        return float(not self.values or self.mean >= bound)

    def p_above(self, bound: float) -> float:
        return float(not self.values or self.mean <= bound)


@dataclass(frozen=True)
class Course(_NoMean):
    """The largest mean |gap| over the readings of one training, with a simultaneous band.

    It is below a bound if it is so at every reading: each is tested at the whole α. It is above one
    if it is so at any of at most MOST_READINGS of them, on either side: the p-values are adjusted
    by Bonferroni. The interval reaches from the lower end of a band with 95 % simultaneous coverage
    to the upper end of one that covers each reading.
    """

    # The values are those of the reading where the mean is largest.
    readings: tuple[Sample, ...] = ()

    is_signed = False

    @classmethod
    def from_readings(cls, readings: Sequence[Sample]) -> "Course":
        largest = max(readings, key=lambda sample: abs(sample.mean))
        sign = math.copysign(1.0, largest.mean)
        values = tuple(sign * value for value in largest.values)
        return cls(values, largest.extra_variance, tuple(readings))

    @property
    def banded(self) -> tuple[Sample, ...]:
        """Readings of the simultaneous band, evenly spaced, the last one included."""
        step = math.ceil(len(self.readings) / MOST_READINGS)
        return self.readings[::-1][:: step or 1]

    def interval(self, level: float = 1 - ALPHA) -> Interval | None:
        if self.sd is None:
            return None
        tail = (1 - level) / 2
        band = [r.interval(1 - tail / len(self.banded)) for r in self.banded]
        each = [reading.interval(level) for reading in self.readings]
        low = max(max(ends[0], -ends[1]) for ends in filter(None, band))
        return max(0.0, low), max(max(-ends[0], ends[1]) for ends in filter(None, each))

    def p_below(self, bound: float) -> float:
        return max(max(r.p_below(bound), r.p_above(-bound)) for r in self.readings)

    def p_above(self, bound: float) -> float:
        least = min(min(r.p_above(bound), r.p_below(-bound)) for r in self.banded)
        return min(1.0, 2 * len(self.banded) * least)

    def power(
        self, n: int, mean: float, sd: float, bound: float, alpha: float, *, above: bool
    ) -> float:
        """Return the power at the reading where the mean is largest."""
        alpha /= 2 * len(self.banded) if above else 1
        return super().power(n, mean, sd, bound, alpha, above=above)
