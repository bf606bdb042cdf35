"""Verdicts: each part of a claim says where a gap lies, with a margin, and is tested one-sidedly.

    noninferior  gap < margin            not worse by the margin
    equivalent   −margin < gap < margin
    better       gap < −margin
    worse        gap > margin

SUPPORTED     every part's bound lies inside: all must hold, so nothing is adjusted
REFUTED       a part's interval lies wholly outside, by Holm over the parts
EQUIVALENT    the interval of every part that says better or worse lies within ± margin, by Holm
              over the parts, and the others are supported: there is no such difference
INSENSITIVE   the runs would say SUPPORTED or EQUIVALENT, or refute a difference, but the baseline
              does not beat the floor by several margins: no difference could have shown
MIXED         some parts are EQUIVALENT, and others that could be are SUPPORTED
UNDERPOWERED  none of these: too few seeds for this margin

A verdict that failures of training could overturn holds "unless one run in k is an outlier": see
`outliers.FailureRisk.unseen_shift` for the bound that makes it unconditional.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from scipy import optimize, stats

from qkablate.analysis.claims.samples import Exact
from qkablate.analysis.comparison.decision import Verdict
from qkablate.analysis.comparison.gaps import Gap, is_sensitive
from qkablate.analysis.outliers import FailureRisk, measure_risks
from qkablate.analysis.stats import ALPHA, Sample, Spread, holm, required_n

KINDS = ("noninferior", "equivalent", "better", "worse")
PREDICTION_LEVEL = 0.8  # of the interval of the seeds needed
_SPREAD_STEPS = 7  # of the region of the prediction interval


class SeedsNeeded(NamedTuple):
    """Prediction interval of the seeds that decide a part, those it has included."""

    low: int | None  # None: no number of seeds decides it
    high: int | None  # None: there is no upper end


@dataclass(frozen=True)
class Part:
    """One statement of a claim, with the sample that it is tested on."""

    name: str
    kind: str
    margin: float
    sample: Sample
    open_above: bool = False  # a run of the arm diverged: its mean has no upper bound
    open_below: bool = False  # a run of the baseline diverged
    raising: tuple[FailureRisk, ...] = ()  # failures that move the mean up, as those of the arm
    lowering: tuple[FailureRisk, ...] = ()  # and down, as those of the baseline
    is_sensitive: bool = True  # the experiment could have shown a gap of the margin

    @classmethod
    def from_gap(cls, name: str, kind: str, margin: float, gap: Gap) -> "Part":
        """Return a part about the mean gap."""
        above, below = gap.arm_diverged > 0, gap.baseline_diverged > 0
        raising, lowering = measure_risks(*gap.sides)
        is_told = is_sensitive(gap.lead, margin)
        return cls(name, kind, margin, gap.sample, above, below, (raising,), (lowering,), is_told)

    def p_below(self, bound: float) -> float:
        """Return the p-value against a mean at or above the bound."""
        is_known = self.sample.n >= self.sample.min_n and not self.open_above
        return self.sample.p_below(bound) if is_known else 1.0

    def p_above(self, bound: float) -> float:
        """Return the p-value against a mean at or below the bound."""
        is_known = self.sample.n >= self.sample.min_n and not self.open_below
        return self.sample.p_above(bound) if is_known else 1.0

    @property
    def _bound(self) -> float:
        """Bound of a one-sided part: above the gap, or below it if the kind is `worse`."""
        return -self.margin if self.kind == "better" else self.margin

    @property
    def p_supported(self) -> float:
        """P-value against the part's being false."""
        if self.kind == "equivalent":
            return self.p_equivalent
        return (self.p_above if self.kind == "worse" else self.p_below)(self._bound)

    @property
    def can_be_equivalent(self) -> bool:
        """True if the part claims a direction, so that equivalence would be another outcome."""
        return self.kind in ("better", "worse") and self.sample.is_signed and self.margin > 0

    @property
    def p_equivalent(self) -> float:
        """P-value of two one-sided tests against a gap as large as the margin."""
        return max(self.p_below(self.margin), self.p_above(-self.margin))

    @property
    def p_opposite(self) -> float:
        """P-value against a gap of the other sign than the part claims; 1 if it claims none."""
        if self.kind == "better":
            return self.p_above(0.0)
        return self.p_below(0.0) if self.kind == "worse" and self.sample.is_signed else 1.0

    @property
    def p_refuted(self) -> float:
        """P-value against the part's being true."""
        if isinstance(self.sample, Exact):  # also where it lies on the bound
            return 1 - self.p_supported if self.sample.values else 1.0
        if self.kind == "equivalent":
            return min(1.0, 2 * min(self.p_above(self.margin), self.p_below(-self.margin)))
        return (self.p_below if self.kind == "worse" else self.p_above)(self._bound)

    def conditions(self, verdict: Verdict, alpha: float = ALPHA, parts: int = 1) -> list[str]:
        """Return the failures, not excluded by the runs, that would overturn the verdict.

        A failure of the arm moves the gap up, one of the baseline moves it down: the bound that the
        verdict rests on has to hold when moved by the `unseen_shift` of all arms whose failures
        move it to its side. Each of several parts is judged at its share of α, except that all
        parts of a supported claim must hold.
        """
        is_supported, is_refuted = verdict == Verdict.SUPPORTED, verdict == Verdict.REFUTED
        is_two_sided = is_refuted and self.kind == "equivalent"
        share = alpha if is_supported else alpha / parts
        interval = self.sample.interval(1 - share if is_two_sided else 1 - 2 * share)
        if interval is None:
            return []
        low, high = interval
        rooms: list[float | None] = [None, None]  # up to the bound above, and below
        if verdict == Verdict.EQUIVALENT or (is_supported and self.kind == "equivalent"):
            rooms = [self.margin - high, low + self.margin]
        elif is_two_sided:
            is_above = self.sample.mean > 0
            rooms = [None, low - self.margin] if is_above else [-self.margin - high, None]
        elif is_supported or is_refuted:
            is_below = is_supported != (self.kind == "worse")
            rooms = [self._bound - high, None] if is_below else [None, low - self._bound]
        conditions = []
        for risks, room in zip((self.raising, self.lowering), rooms, strict=True):
            shift = sum(risk.unseen_shift(share / len(risks)) for risk in risks)
            if risks and room is not None and shift >= room:
                conditions += [risk.describe_condition(room / len(risks)) for risk in risks]
        return conditions

    def power(self, n: int, mean: float, sd: float, alpha: float = ALPHA) -> float:
        """Return the probability that n seeds support the part, given the true mean and spread."""
        if self.kind == "equivalent":
            return self.sample.power_within(n, mean, sd, self.margin, alpha)
        return self.sample.power(n, mean, sd, self._bound, alpha, above=self.kind == "worse")

    def power_to_refute(self, n: int, mean: float, sd: float, alpha: float = ALPHA) -> float:
        """Return the probability that n seeds refute the part, given the true mean and spread."""
        if self.kind == "equivalent":
            return self.sample.power(n, -abs(mean), sd, -self.margin, alpha / 2, above=False)
        return self.sample.power(n, mean, sd, self._bound, alpha, above=self.kind != "worse")

    def seeds_needed(self, alpha: float = ALPHA, parts: int = 1) -> SeedsNeeded | None:
        """Return an 80 % prediction interval of the seeds that decide it with 80 % power.

        The seeds needed, N, are a function of the true mean μ and spread σ. A pilot only knows a
        region of the two: N is computed over all (μ, σ) whose deviance, less that of the best fit,
        is at most c. With ν = n − 1 it is ν ln(σ²/s²) + ν (s²/σ² − 1) + n (m − μ)² / σ², and
        c = ν ln(1 + t²/ν), for which the region's μ are exactly the 80 % t interval; for σ this c
        is 3 % larger than needed at n = 6. So the range of N over the region holds its true value
        as often as that, or more often. It has no upper end if the interval of μ holds the bound,
        where no number of seeds would do. Of the spread of gaps N is a function of σ alone.
        None where nothing was measured.
        """
        if not self.sample.sd:
            return None

        def needed_at(mean: float, sd: float) -> int | None:
            return required_n(lambda n: max(self._outcomes(n, mean, sd, alpha, parts)))

        needed = [needed_at(*truth) for truth in self._plausible_truths()]
        known = [n for n in needed if n is not None]
        interval = self.sample.interval(PREDICTION_LEVEL)
        assert interval is not None  # there is a spread
        edges = {self.margin, -self.margin} if self.kind == "equivalent" else {self._bound}
        is_open = any(interval[0] <= edge <= interval[1] for edge in edges)
        is_bounded = len(known) == len(needed) and not is_open
        return SeedsNeeded(min(known, default=None), max(known) if is_bounded else None)

    def _plausible_truths(self) -> list[tuple[float, float]]:
        """Return means and spreads of the 80 % region at which the seeds needed are extreme."""
        sample, sd, freedom = self.sample, self.sample.sd or 0.0, self.sample.n - 1
        low, high = sample.interval(PREDICTION_LEVEL) or (sample.mean, sample.mean)
        if isinstance(sample, Spread):
            return [(end, end) for end in (low, high) if 0 < end < math.inf]
        t2 = float(stats.t.isf((1 - PREDICTION_LEVEL) / 2, freedom)) ** 2
        limit = freedom * math.log1p(t2 / freedom)

        def deviance(log_ratio: float) -> float:
            return freedom * (2 * log_ratio + math.expm1(-2 * log_ratio))

        ends: list[float] = [
            optimize.brentq(lambda x: deviance(x) - limit, *sorted((0.0, far))) for far in (-9, 99)
        ]
        truths = []
        for log_ratio in np.linspace(ends[0], ends[1], _SPREAD_STEPS).tolist():
            spread = sd * math.exp(log_ratio)
            variance = spread**2 / sample.n + sample.extra_variance
            half = math.sqrt(max(0.0, limit - deviance(log_ratio)) * variance)
            means = {max(low, sample.mean - half), min(high, sample.mean + half)}
            # Equivalence takes the fewest seeds at a mean of zero.
            means |= {0.0} if abs(sample.mean) < half else set()
            truths += [(mean, spread) for mean in means]
        return truths

    def _outcomes(
        self, n: int, mean: float, sd: float, alpha: float, parts: int
    ) -> Iterator[float]:
        """Yield the probability of each conclusive verdict with n seeds, given the truth."""
        sd = math.sqrt(sd**2 + n * self.sample.extra_variance)
        above, below = not self.open_above, not self.open_below  # sides that have a bound
        supports, refutes = (below, above) if self.kind == "worse" else (above, below)
        if self.kind == "equivalent":
            supports, refutes = above and below, below if mean > 0 else above
        yield 0.0
        if not self.is_sensitive:  # more seeds do not make it so
            supports, refutes = False, refutes and self.kind in ("noninferior", "equivalent")
        if supports:
            yield self.power(n, mean, sd, alpha)
        if refutes:
            yield self.power_to_refute(n, mean, sd, alpha / parts)
        if above and below and self.can_be_equivalent and self.is_sensitive:
            yield self.sample.power_within(n, mean, sd, self.margin, alpha / parts)


@dataclass(frozen=True)
class ClaimVerdict:
    """Verdict of a claim and of each of its parts."""

    word: Verdict
    parts: list[Verdict]
    unless: list[str] = field(default_factory=list)  # failures that would overturn it
    conditions: list[list[str]] = field(default_factory=list)  # and each of its parts


def judge_parts(parts: Sequence[Part], alpha: float = ALPHA) -> ClaimVerdict:
    """Judge one claim: each kind of error occurs in at most `alpha` of the studies."""
    refuted = holm([part.p_refuted for part in parts])
    equivalent = holm([part.p_equivalent if part.can_be_equivalent else 1.0 for part in parts])
    opposite = holm([part.p_opposite for part in parts])
    verdicts = []
    for part, p_refuted, p_equivalent, p_opposite in zip(
        parts, refuted, equivalent, opposite, strict=True
    ):
        if part.p_supported < alpha or p_equivalent < alpha:
            shown = Verdict.SUPPORTED if part.p_supported < alpha else Verdict.EQUIVALENT
            verdicts.append(shown if part.is_sensitive else Verdict.INSENSITIVE)
        else:
            # To refute a difference is to find none, which takes an experiment that could show one,
            # or the opposite difference.
            is_blind = part.kind in ("better", "worse") and not part.is_sensitive
            is_blind = is_blind and p_opposite >= alpha
            refuted_word = Verdict.INSENSITIVE if is_blind else Verdict.REFUTED
            verdicts.append(refuted_word if p_refuted < alpha else Verdict.UNDERPOWERED)
    word = merge_verdicts(verdicts, parts)
    conditions = [
        part.conditions(verdict, alpha, len(parts))
        for part, verdict in zip(parts, verdicts, strict=True)
    ]
    deciding = [
        own for own, verdict in zip(conditions, verdicts, strict=True) if is_deciding(verdict, word)
    ]
    if word == Verdict.REFUTED and not all(deciding):
        return ClaimVerdict(word, verdicts, [], conditions)  # a part is refuted whatever fails
    unless = [*dict.fromkeys(itertools.chain(*deciding))]
    return ClaimVerdict(word, verdicts, unless, conditions)


def is_deciding(part: Verdict, claim: Verdict) -> bool:
    """Return whether a part with this verdict decides its claim: all do, unless one is enough."""
    return part == claim or claim in (Verdict.SUPPORTED, Verdict.EQUIVALENT, Verdict.MIXED)


def merge_verdicts(verdicts: list[Verdict], parts: Sequence[Part]) -> Verdict:
    """Return the verdict of all parts; directed ones can be equivalent."""
    for word in (Verdict.REFUTED, Verdict.INSENSITIVE):  # one such part is enough
        if word in verdicts:
            return word
    if Verdict.UNDERPOWERED in verdicts:  # more seeds could still decide it
        return Verdict.UNDERPOWERED
    if Verdict.EQUIVALENT in verdicts:
        directed = [part.can_be_equivalent for part in parts]
        expected = [Verdict.EQUIVALENT if d else Verdict.SUPPORTED for d in directed]
        return Verdict.EQUIVALENT if verdicts == expected else Verdict.MIXED
    return verdicts[0]


def spend_alpha(looks: Sequence[int]) -> list[float]:
    """Return the α of each look by O'Brien and Fleming's spending function; they add up to α."""
    z = float(stats.norm.isf(ALPHA / 2))
    total = [2 * float(stats.norm.sf(z / math.sqrt(n / looks[-1]))) for n in looks[:-1]]
    return [after - before for before, after in itertools.pairwise([0.0, *total, ALPHA])]
