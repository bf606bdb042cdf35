"""From gaps to a verdict. A claim has parts; every part says where a gap lies, with a margin. One
interval decides all of it, the two one-sided bounds of 95 %:

    noninferior  gap < margin            not worse by the margin
    equivalent   −margin < gap < margin
    better       gap < −margin
    worse        gap > margin

SUPPORTED     every part's bound lies inside: all must hold, so nothing is adjusted
REFUTED       a part's interval lies wholly outside, by Holm over the parts
EQUIVALENT    a part says better or worse, and its interval lies within ± margin, by Holm over the
              parts: there is no such difference
UNDERPOWERED  none of these: too few seeds for this margin
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from qkablate.analysis.comparison.gaps import Gap
from qkablate.analysis.stats import (
    ALPHA,
    Sample,
    Spread,
    holm,
    needed,
    power_below,
    power_spread,
    power_within,
)

KINDS = ("noninferior", "equivalent", "better", "worse")
SUPPORTED, REFUTED = "SUPPORTED", "REFUTED"
EQUIVALENT, UNDERPOWERED = "EQUIVALENT", "UNDERPOWERED"
VERDICTS = (SUPPORTED, REFUTED, EQUIVALENT, UNDERPOWERED)


@dataclass(frozen=True)
class Part:
    """One thing a claim says, and the numbers it is judged by."""

    name: str
    kind: str
    margin: float
    sample: Sample
    open_above: bool = False  # a run of the arm diverged: its mean has no upper bound
    open_below: bool = False  # one of the baseline's did

    @classmethod
    def of(cls, name: str, kind: str, margin: float, found: Gap) -> "Part":
        diverged = found.arm_diverged > 0, found.baseline_diverged > 0
        return cls(name, kind, margin, found.sample, *diverged)

    def p_below(self, bound: float) -> float:
        return 1.0 if self.open_above else self.sample.p_below(bound)

    def p_above(self, bound: float) -> float:
        return 1.0 if self.open_below else self.sample.p_above(bound)

    @property
    def p_supported(self) -> float:
        """Against the part's being false."""
        if self.kind == "noninferior":
            return self.p_below(self.margin)
        if self.kind == "better":
            return self.p_below(-self.margin)
        return self.p_above(self.margin) if self.kind == "worse" else self.p_nil

    @property
    def can_be_nil(self) -> bool:
        """Whether it says of a direction what may turn out to be no difference at all."""
        directed = self.kind in ("better", "worse") and not isinstance(self.sample, Spread)
        return directed and self.margin > 0

    @property
    def p_nil(self) -> float:
        """Against the gap's being as large as the margin, either way: two one-sided tests."""
        return max(self.p_below(self.margin), self.p_above(-self.margin))

    @property
    def p_refuted(self) -> float:
        """Against the part's being true."""
        if self.kind == "noninferior":
            return self.p_above(self.margin)
        if self.kind == "better":
            return self.p_above(-self.margin)
        if self.kind == "worse":
            return self.p_below(self.margin)
        return min(1.0, 2 * min(self.p_above(self.margin), self.p_below(-self.margin)))

    def power(self, n: int, mean: float, sd: float, alpha: float = ALPHA) -> float:
        """How often n seeds support the part, were its mean and spread these."""
        if isinstance(self.sample, Spread):
            return power_spread(sd, self.margin, n, alpha, above=self.kind == "worse")
        if self.kind == "noninferior":
            return power_below(mean, self.margin, sd, n, alpha)
        if self.kind == "better":
            return power_below(mean, -self.margin, sd, n, alpha)
        if self.kind == "worse":
            return power_below(-mean, -self.margin, sd, n, alpha)
        return power_within(mean, self.margin, sd, n, alpha)

    def power_to_refute(self, n: int, mean: float, sd: float, alpha: float = ALPHA) -> float:
        if isinstance(self.sample, Spread):
            return power_spread(sd, self.margin, n, alpha, above=self.kind != "worse")
        if self.kind == "noninferior":
            return power_below(-mean, -self.margin, sd, n, alpha)
        if self.kind == "better":
            return power_below(-mean, self.margin, sd, n, alpha)
        if self.kind == "worse":
            return power_below(mean, self.margin, sd, n, alpha)
        return power_below(-abs(mean), -self.margin, sd, n, alpha / 2)

    def needed(self, alpha: float = ALPHA, parts: int = 1) -> int | None:
        """Seeds that would settle it four times of five, were the gap and its spread what they were
        measured to be; None where it lies on the margin, or nothing was measured.
        """
        if not self.sample.sd:
            return None

        def power(n: int) -> float:
            return max(self._ways(n, alpha, parts).values())

        return needed(power)

    def would_be(self, n: int, alpha: float = ALPHA, parts: int = 1) -> str:
        """The word that n seeds would most probably give it."""
        ways = self._ways(n, alpha, parts)
        word = max(ways, key=lambda word: ways[word])
        # What lies within the margin is on the wrong side of it, too, and shows that first.
        nil = word == REFUTED and ways.get(EQUIVALENT, 0.0) > alpha
        return f"{EQUIVALENT} or {REFUTED}" if nil else word

    def _ways(self, n: int, alpha: float, parts: int) -> dict[str, float]:
        """How probable each word is with n seeds, were the gap and its spread what was measured."""
        sd, mean = self.sample.sd or 0.0, self.sample.mean
        above, below = not self.open_above, not self.open_below  # sides that have a bound
        supports = {"noninferior": above, "better": above, "worse": below}
        refutes = {"noninferior": below, "better": below, "worse": above}
        both = above and below
        can_support = supports.get(self.kind, both)
        can_refute = refutes.get(self.kind, below if mean > 0 else above)
        ways = {UNDERPOWERED: 0.0}
        if can_support:
            ways[SUPPORTED] = self.power(n, mean, sd, alpha)
        if can_refute:
            ways[REFUTED] = self.power_to_refute(n, mean, sd, alpha / parts)
        if both and self.can_be_nil:
            ways[EQUIVALENT] = power_within(mean, self.margin, sd, n, alpha / parts)
        return ways


@dataclass(frozen=True)
class Verdict:
    word: str
    parts: list[str]  # the word of each


def judge(parts: Sequence[Part], alpha: float = ALPHA) -> Verdict:
    """Of one claim: each error is made in at most `alpha` of the studies."""
    refuted = [p < alpha for p in holm([part.p_refuted for part in parts])]
    nil = [p < alpha for p in holm([part.p_nil if part.can_be_nil else 1.0 for part in parts])]
    words = []
    for part, out, nothing in zip(parts, refuted, nil, strict=True):
        if part.p_supported < alpha:
            words.append(SUPPORTED)
        elif nothing:
            words.append(EQUIVALENT)
        else:
            words.append(REFUTED if out else UNDERPOWERED)
    for word in (REFUTED, EQUIVALENT, UNDERPOWERED):  # one false part is enough
        if word in words:
            return Verdict(word, words)
    return Verdict(SUPPORTED, words)


def spent(looks: Sequence[int]) -> list[float]:
    """The α of each look at the runs, where several are declared: O'Brien and Fleming's spending
    function, in increments that add up to α whatever the looks have to do with each other.
    """
    from scipy import stats

    z = float(stats.norm.isf(ALPHA / 2))
    total = [2 * float(stats.norm.sf(z / math.sqrt(n / looks[-1]))) for n in looks[:-1]]
    total.append(ALPHA)
    return [after - before for before, after in zip([0.0, *total], total, strict=False)]
