"""Decisions: outcomes of comparisons and claims, and the learning rates for which they hold."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from qkablate.analysis.comparison.gaps import Gap, is_sensitive
from qkablate.analysis.comparison.lr_curves import LrCurve
from qkablate.analysis.stats import ALPHA, MIN_PAIRS
from qkablate.analysis.study.study import Study
from qkablate.sweeps.planning.tuning import TUNING_RUNS


class Decision(StrEnum):
    """Outcome of comparing one arm with its baseline."""

    BETTER = "better"
    WORSE = "worse"
    EQUIVALENT = "equivalent"
    NOT_WORSE = "not worse"
    NO_DIFFERENCE_FOUND = "no difference found"
    INSENSITIVE = "insensitive"  # the baseline did not beat the floor
    FEW_PAIRS = f"too few pairs (under {MIN_PAIRS})"
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
    INSENSITIVE = "INSENSITIVE"  # the baseline did not beat the floor: no difference could show
    MIXED = "MIXED"  # some parts show no such difference, others do not
    UNDERPOWERED = "UNDERPOWERED"
    INCOMPLETE = "INCOMPLETE"  # runs are missing


@dataclass(frozen=True)
class MarginTest:
    """One-sided tests of a gap against a margin, adjusted by Holm over all gaps shown."""

    nats: float
    p_noninferior: float | None = None
    p_equivalent: float | None = None
    seeds_if_zero: int | None = None  # that show equivalence if the true gap is zero


def decide(gap: Gap, p_holm: float | None, margin: MarginTest | None = None) -> Decision:
    """Return the outcome of one comparison, given its adjusted p-value."""
    sample, lead = gap.sample, gap.lead
    if gap.arm_diverged:
        return Decision.ARM_DIVERGED
    if gap.baseline_diverged:
        return Decision.BASELINE_DIVERGED
    if sample.n < MIN_PAIRS:
        return Decision.FEW_PAIRS if sample.n else Decision.NO_PAIRS

    def is_found(p: float | None) -> bool:
        return p is not None and p < ALPHA

    # A gap that is surely smaller than what matters is no "worse", even if it is surely not zero.
    if margin is not None and is_found(margin.p_equivalent):
        if is_sensitive(lead, margin.nats):
            return Decision.EQUIVALENT
        if not is_found(p_holm):
            return Decision.INSENSITIVE
    if is_found(p_holm):
        return Decision.WORSE if sample.mean > 0 else Decision.BETTER
    if margin is not None and is_found(margin.p_noninferior):
        return Decision.NOT_WORSE if is_sensitive(lead, margin.nats) else Decision.INSENSITIVE
    if gap.is_at_floor:  # a difference could show, but not that there is none
        return Decision.INSENSITIVE
    return Decision.NO_DIFFERENCE_FOUND


# What a decision is limited to whose baseline has not beaten the best n-gram on its text, and a
# "worse" whose baseline has not beaten the floor.
BEFORE_NGRAMS = "before the model beats an n-gram"
BEFORE_ATTENTION = "before attention mattered"
WITHOUT_CONTENT = "where content is not shown to matter"


class RateScope(StrEnum):
    """Learning rates for which a decision holds: at the next one the sign may be another."""

    BEST = ""  # the arms were tuned, or have the same parametrization
    THESE_RATES = "at these rates"  # tuned, and the audit warns that better ones may exist
    ONE_RATE = "at this rate (not tuned)"
    BOTH_RATES = "at both rates (not tuned)"
    SIGN_DEPENDS = "the sign depends on the rate"


def find_rate_scopes(
    decided: list[tuple[Gap, Decision]], curves: Mapping[str, LrCurve]
) -> list[RateScope]:
    """Return the scope of each gap.

    Arms that differ in `variant.lr` alone, and are compared with the same variant, are the same arm
    at several rates of its circuit.
    """
    at_rates: dict[str, list[tuple[Gap, Decision]]] = {}
    for gap, decision in decided:
        at_rates.setdefault(_without_rate(gap), []).append((gap, decision))

    def find_scope(gap: Gap) -> RateScope:
        if not gap.compares_variants:
            return RateScope.BEST
        same = at_rates[_without_rate(gap)]
        has_several = len({other.arm.arm.default_rates.circuit for other, _ in same}) > 1
        if has_several and len({other.sample.mean > 0 for other, _ in same if other.sample.n}) > 1:
            return RateScope.SIGN_DEPENDS
        known = [(curves[e.arm.name], e.rates) for e in gap.sides if e.arm.name in curves]
        tuned = [curve for curve, rates in known if curve.is_tuned(rates)]
        if len(tuned) == 2:
            is_limited = any(curve.lacks_circuit_rates for curve in tuned)
            return RateScope.THESE_RATES if is_limited else RateScope.BEST
        is_agreed = has_several and len({decision for _, decision in same}) == 1
        return RateScope.BOTH_RATES if is_agreed else RateScope.ONE_RATE

    return [find_scope(gap) for gap, _ in decided]


def _without_rate(gap: Gap) -> str:
    sides = [entry.settings_without("variant.lr") for entry in gap.sides]
    return str((sides, gap.arm.arm.controls, gap.arm.rate))


@dataclass(frozen=True)
class TuningPlan:
    """The sweep that would tune the arms of another one."""

    command: list[str]  # without out=…
    runs: int
    seconds: float | None  # of computing, at the mean time of the runs so far


def plan_tuning(study: Study) -> TuningPlan | None:
    """Return the sweep that tunes the arms of a study; None if they are, or without a sweep."""
    manifest = study.manifest
    if manifest is None or manifest.finals or manifest.command[1:2] != ["sweep"]:
        return None
    dropped = ("variant.lr=", "out=", "optim.lr=", "sweep.tune=", "sweep.name=")
    given = [word for word in manifest.command[1:] if not word.startswith(dropped)]
    rates = sorted({entry.rates.lr for entry in study.entries if entry.rates is not None})
    if any(word.startswith("optim.lr=") for word in manifest.command) and rates:
        # The middle one, around which others are tried.
        given.append(f"optim.lr={rates[len(rates) // 2]:g}")
    arms = {entry.settings_without("variant.lr") for entry in study.entries}
    runs = len(arms) * (TUNING_RUNS + len({record.seeds for record in study.records}))
    seconds = [s for record in study.records if (s := record.training_seconds) is not None]
    total = runs * statistics.fmean(seconds) if seconds else None
    # The finished sweep keeps its name: two of one name would be ambiguous.
    given += [f"sweep.name={manifest.name}-tuned", "sweep.tune=true"]
    return TuningPlan(given, runs, total)
