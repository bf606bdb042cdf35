"""Gaps: test loss of an arm minus that of its paired baseline, in nats, seed by seed."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from scipy import stats

from qkablate.analysis.outliers import find_outliers
from qkablate.analysis.stats import ALPHA, Estimate, Interval, Sample, describe_sample, holm
from qkablate.analysis.study.document_error import (
    DocumentError,
    document_error,
    error_of_difference,
)
from qkablate.analysis.study.study import Entry, Record, Seeds, Study
from qkablate.runs.document_losses import DocumentLosses
from qkablate.table import format_part

ROUNDING_PAIR = {"standard", "standard_reassociated"}
MARGINS = 3  # by which the baseline has to beat the floor


@dataclass(frozen=True)
class Gap:
    """Paired gaps of one arm to its baseline."""

    arm: Entry
    baseline: Entry
    pairs: Mapping[Seeds, float]
    unpaired: list[str]  # what each incomplete pair lacks
    arm_diverged: int
    baseline_diverged: int
    floor: "Gap | None" = None  # that of uniform attention, at the arm's sites, to the baseline
    content: "Gap | None" = None  # that of weights by position alone, which see no content
    content_source: str = ""  # the claim that measured it, if it is another

    @property
    def sides(self) -> tuple[Entry, Entry]:
        return self.arm, self.baseline

    @property
    def runs(self) -> list[tuple[Record, Record]]:
        """The two runs of each pair."""
        return [(self.arm.records[key], self.baseline.records[key]) for key in self.pairs]

    @property
    def compares_variants(self) -> bool:
        """True if the two sides have different parametrizations of attention."""
        variant, baseline = (entry.arm.config.variant for entry in self.sides)
        return (variant.name, variant.file) != (baseline.name, baseline.file)

    @property
    def compares_attention(self) -> bool:
        """True if the two sides have different parametrizations or starts of attention."""
        variant, baseline = (entry.arm.config.variant for entry in self.sides)
        return self.compares_variants or variant.init != baseline.init

    @cached_property
    def lead(self) -> float | None:
        """One-sided 95 % bound by which the baseline beats the floor.

        None if it is unknown: also where a run of the baseline diverged.
        """
        if not self.compares_attention:
            return math.inf  # no floor is needed
        if self.floor and self.floor.baseline_diverged:
            return None
        interval = self.floor.bounds(1 - 2 * ALPHA) if self.floor else None
        return interval[0] if interval else None

    @property
    def is_before_attention(self) -> bool:
        """True if attention is compared whose baseline has not beaten the best n-gram."""
        lead = self.baseline.lead_over_ngrams
        return self.compares_attention and lead is not None and lead <= 0

    @property
    def is_at_floor(self) -> bool:
        """True if attention is compared whose baseline does not clearly beat uniform attention."""
        return self.lead is not None and self.lead <= 0

    @cached_property
    def sample(self) -> Sample:
        """Gaps of the pairs; their mean has the uncertainty of both arms' tuning, too."""
        return Sample(tuple(self.pairs.values()), sum(e.tuning_variance for e in self.sides))

    def bounds(self, level: float = 1 - ALPHA) -> Interval | None:
        """Return the interval, unbounded on a side where runs diverged."""
        interval = self.sample.interval(level)
        return interval and (
            -math.inf if self.baseline_diverged else interval[0],
            math.inf if self.arm_diverged else interval[1],
        )

    @cached_property
    def p(self) -> float | None:
        """Two-sided p-value against zero; a gap is never shown on a side where it has no bound."""
        if self.sample.n < 2:
            return None
        below = 1.0 if self.arm_diverged else self.sample.p_below(0)
        above = 1.0 if self.baseline_diverged else self.sample.p_above(0)
        return min(1.0, 2 * min(below, above))

    @property
    def arm_outliers(self) -> int:
        return len(find_outliers(self.arm.losses))

    @property
    def baseline_outliers(self) -> int:
        return len(find_outliers(self.baseline.losses))

    @cached_property
    def document_error(self) -> DocumentError | None:
        """Standard error over the documents of the test split, which no interval here includes."""
        return document_error(self._document_losses)

    def document_error_beside(self, other: "Gap") -> DocumentError | None:
        """Return that standard error of this gap less another one on the same documents."""
        return error_of_difference(self._document_losses, other._document_losses)

    @property
    def _document_losses(self) -> list[tuple[DocumentLosses | None, DocumentLosses | None]]:
        return [(run.document_losses, other.document_losses) for run, other in self.runs]

    @cached_property
    def correlation(self) -> float | None:
        """Correlation of the two arms over seeds: the benefit of pairing."""
        if len(self.pairs) < 3:
            return None
        both = [[entry.losses[key] for key in self.pairs] for entry in self.sides]
        if any(len({*losses}) == 1 for losses in both):
            return None
        return float(stats.pearsonr(*both).statistic)


def is_sensitive(lead: float | None, margin: float) -> bool:
    """Return whether an experiment with this lead over the floor could show a gap of the margin."""
    return lead is not None and lead > MARGINS * margin


def measure_gap_with_references(study: Study, arm: Entry, baseline: Entry) -> Gap:
    """Pair the runs of two arms, and those of the references beside which a gap is read."""
    references = study.floor_of(arm, baseline), study.content_reference_of(arm, baseline)
    return measure_gap(arm, baseline, *references)


def measure_gap(
    arm: Entry, baseline: Entry, floor: Entry | None = None, content: Entry | None = None
) -> Gap:
    """Pair the runs of two arms by their seeds."""
    pairs: dict[Seeds, float] = {}
    unpaired = []
    for key in sorted({*arm.records, *baseline.records}):
        run, other = arm.records.get(key), baseline.records.get(key)
        if run is None or other is None or run.loss is None or other.loss is None:
            reasons = filter(None, (_why_unpaired(arm, run), _why_unpaired(baseline, other)))
            unpaired.append(
                f"{next(r.seed_label for r in (run, other) if r)}: {'; '.join(reasons)}"
            )
        elif run.facts["data_fingerprint"] != other.facts["data_fingerprint"]:
            unpaired.append(f"{run.seed_label}: the two were trained on different data")
        elif bool(run.facts.get("vmap")) != bool(other.facts.get("vmap")):
            unpaired.append(f"{run.seed_label}: only one of the two was vmapped (train.vmap)")
        elif problem := explain_unequal_tests(run.facts, other.facts):
            unpaired.append(f"{run.seed_label}: {problem}")
        else:
            pairs[key] = run.loss - other.loss
    below = None if floor is None else measure_gap(floor, baseline)
    without_content = None if content is None else measure_gap(content, baseline)
    diverged, baseline_diverged = (len(e.with_status("diverged")) for e in (arm, baseline))
    return Gap(arm, baseline, pairs, unpaired, diverged, baseline_diverged, below, without_content)


def explain_unequal_tests(facts: Mapping[str, Any], others: Mapping[str, Any]) -> str:
    """Return why the test losses of two runs are not comparable; '' if they are.

    The losses of other documents differ by more than what variants differ by.
    """
    read, other = facts.get("test_tokens"), others.get("test_tokens")
    if read == other:
        return ""
    return (
        f"their test losses are of {format_part(read)} and of {format_part(other)};"
        " train.test_tokens=all reads all"
    )


def _why_unpaired(entry: Entry, record: Record | None) -> str:
    """Return the reason why a run cannot be paired; '' if it can."""
    if record is None:
        return f"{entry.name} has no such run"
    if record.status != "done":
        return f"{entry.name} {record.status}"
    return "" if record.loss is not None else f"{entry.name} did not evaluate the test split"


def adjust(p_values: Sequence[float | None]) -> list[float | None]:
    """Return p-values adjusted by Holm over all gaps that are shown together; None stays None."""
    adjusted = iter(holm([p for p in p_values if p is not None]))
    return [None if p is None else next(adjusted) for p in p_values]


@dataclass(frozen=True)
class Family:
    """The arms of one size with a common baseline, and all gaps of the study."""

    baseline: Entry
    gaps: list[Gap]
    shown: list[Gap]  # those of every size: their p-values are adjusted together

    @cached_property
    def holm(self) -> list[float | None]:
        """Adjusted p-value of each gap; None for fewer than two pairs."""
        return self.adjust(lambda gap: gap.p)

    def adjust(self, find_p: Callable[[Gap], float | None]) -> list[float | None]:
        """Return a p-value of each gap, adjusted over all gaps shown."""
        adjusted = adjust([find_p(gap) for gap in self.shown])
        by_gap = dict(zip(map(id, self.shown), adjusted, strict=True))
        return [by_gap[id(gap)] for gap in self.gaps]

    @cached_property
    def comparisons(self) -> int:
        return sum(gap.p is not None for gap in self.shown)

    def detectable(self, gap: Gap) -> float | None:
        """Return the smallest gap that would be found with 80 % power, adjusted for all shown."""
        return gap.sample.detectable(ALPHA / max(1, self.comparisons))

    @cached_property
    def rounding_gap(self) -> Gap | None:
        """Gap of standard attention to itself with reordered matmuls: the effect of rounding."""
        variant = self.baseline.arm.variant
        return next((g for g in self.gaps if {g.arm.arm.variant, variant} == ROUNDING_PAIR), None)


def find_families(study: Study) -> list[Family]:
    """Group the arms that have a baseline by that baseline, in the order of the plan."""
    families: dict[str, Family] = {}
    shown: list[Gap] = []
    for entry in study.entries:
        baseline = study.baseline_of(entry)
        if baseline is not None and baseline is not entry:
            gap = measure_gap_with_references(study, entry, baseline)
            families.setdefault(baseline.name, Family(baseline, [], shown)).gaps.append(gap)
            shown.append(gap)
    return list(families.values())


def perplexity_percent(nats: float) -> float:
    """Return the change in perplexity, in percent, that a gap in nats amounts to."""
    return 100 * math.expm1(min(nats, 700.0))


@dataclass(frozen=True)
class RunSummary:
    """One run of an arm."""

    run: str
    seeds: dict[str, int]
    status: str
    test_loss: float | None
    val_loss: float | None
    accuracy: float | None
    reason: str  # why it is not done
    outlier: float | None  # distance to the arm's median, in nats, if it is far above


@dataclass(frozen=True, kw_only=True)
class ArmLosses(Estimate):
    """Test loss of one arm over its runs."""

    arm: str
    variant: str
    controls: list[str]
    lr: float | None
    circuit_lr: float | None
    steps: int
    tokens: int
    params: int
    training_flops: float
    accuracy: float | None  # on the test split of a task, mean over the runs that are done
    chance: float | None  # accuracy of the best guess that does not depend on the sequence
    runs: list[RunSummary]


def describe_arm(entry: Entry) -> ArmLosses:
    """Return the losses of one arm, run by run."""
    failed = find_outliers(entry.losses)
    return ArmLosses(
        **vars(describe_sample(entry.sample)),
        arm=entry.name,
        variant=entry.arm.variant,
        controls=entry.arm.controls,
        lr=entry.rate,
        circuit_lr=entry.rates and entry.rates.circuit,
        steps=int(entry.arm.config.train.steps),
        tokens=entry.tokens,
        params=entry.arm.params,
        training_flops=entry.arm.train_flops,
        accuracy=entry.accuracy,
        chance=entry.chance,
        runs=[
            RunSummary(
                *(r.folder.name, dict(key), r.status, r.loss, r.val, r.accuracy, r.reason),
                failed.get(key),
            )
            for key, r in entry.records.items()
        ],
    )


@dataclass(frozen=True)
class NoiseFloor:
    """Differences that mean nothing at one size: between seeds, and by rounding alone."""

    baseline: str
    seeds_sd: float | None
    rounding: Estimate | None


def describe_noise_floor(family: Family) -> NoiseFloor:
    """Return the spread of the baseline between seeds and its gap by rounding."""
    rounding = family.rounding_gap
    estimate = None if rounding is None else describe_sample(rounding.sample)
    return NoiseFloor(family.baseline.name, family.baseline.sample.sd, estimate)
