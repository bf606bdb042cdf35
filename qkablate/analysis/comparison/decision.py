"""Decisions: the outcomes of a comparison and of a claim."""

from dataclasses import dataclass
from enum import StrEnum

from qkablate.analysis.stats import ALPHA, Sample


class Decision(StrEnum):
    """Outcome of comparing one arm with its baseline."""

    BETTER = "better"
    WORSE = "worse"
    EQUIVALENT = "equivalent"
    NOT_WORSE = "not worse"
    NO_DIFFERENCE_FOUND = "no difference found"
    ONE_PAIR = "one pair only"
    NO_PAIRS = "no pairs"
    ARM_DIVERGED = "arm diverged"
    BASELINE_DIVERGED = "baseline diverged"

    @property
    def is_directed(self) -> bool:
        """True if a difference was found."""
        return self in (Decision.BETTER, Decision.WORSE)

    @property
    def is_divergence(self) -> bool:
        """True if runs diverged, so that the gap has no bound."""
        return self in (Decision.ARM_DIVERGED, Decision.BASELINE_DIVERGED)


class Verdict(StrEnum):
    """Outcome of a claim, or of one of its parts."""

    SUPPORTED = "SUPPORTED"
    REFUTED = "REFUTED"
    EQUIVALENT = "EQUIVALENT"
    UNDERPOWERED = "UNDERPOWERED"
    INCOMPLETE = "INCOMPLETE"  # runs are missing


@dataclass(frozen=True)
class MarginTest:
    """One-sided t tests of a gap against a margin, adjusted by Holm over the family."""

    nats: float
    p_noninferior: float | None = None
    p_equivalent: float | None = None
    seeds_needed: int | None = None  # to show equivalence if the true gap is zero


def decide(
    sample: Sample,
    p_holm: float | None,
    *,
    arm_diverged: bool,
    baseline_diverged: bool,
    margin: MarginTest | None = None,
) -> Decision:
    """Return the outcome of one comparison, given its gaps and its adjusted p-value."""
    if arm_diverged:
        return Decision.ARM_DIVERGED
    if baseline_diverged:
        return Decision.BASELINE_DIVERGED
    if sample.n < 2:
        return Decision.ONE_PAIR if sample.n else Decision.NO_PAIRS
    if p_holm is not None and p_holm < ALPHA:
        return Decision.WORSE if sample.mean > 0 else Decision.BETTER
    if margin is not None:
        if margin.p_equivalent is not None and margin.p_equivalent < ALPHA:
            return Decision.EQUIVALENT
        if margin.p_noninferior is not None and margin.p_noninferior < ALPHA:
            return Decision.NOT_WORSE
    return Decision.NO_DIFFERENCE_FOUND
