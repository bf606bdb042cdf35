"""Judgement of a claim by its runs: the verdict, the audits, and what would decide open parts."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from qkablate.analysis.claims.claim import Claim, Comparison, find_comparisons
from qkablate.analysis.claims.measures import (
    MEASURES,
    Unit,
    find_unmeasured,
    measure_failures,
    measure_lead,
    measure_sample,
)
from qkablate.analysis.claims.registry import edits_since, find_registrations
from qkablate.analysis.claims.verdict import (
    ClaimVerdict,
    Part,
    SeedsNeeded,
    judge_parts,
    merge_verdicts,
    spend_alpha,
)
from qkablate.analysis.comparison.audit import (
    BROKEN,
    LIMITS,
    NOTE,
    OK,
    WARNING,
    AuditCheck,
    audit,
    worst_state,
)
from qkablate.analysis.comparison.curves import slope_weights
from qkablate.analysis.comparison.decision import Verdict
from qkablate.analysis.comparison.gaps import Gap, is_sensitive, measure_gap
from qkablate.analysis.comparison.lr_curves import LrCurve, find_lr_curves
from qkablate.analysis.comparison.scaling import fit_growth
from qkablate.analysis.left_behind import measure_risks
from qkablate.analysis.stats import ALPHA, Interval
from qkablate.analysis.study.study import Entry, Study, read_study
from qkablate.errors import UserError
from qkablate.sweeps.planning.manifest import Manifest
from qkablate.sweeps.running.solo_results import SoloRow, read_measurements

MAX_LOAD = 0.5  # cores that other processes may use beside what is measured alone


@dataclass(frozen=True)
class PartJudgement:
    """One comparison of a claim, with its gaps and their audit."""

    part: Part
    comparison: Comparison
    gaps: list[Gap]  # the last one is subtracted, if the part has `than`
    checks: list[AuditCheck]

    @property
    def unit(self) -> Unit:
        return MEASURES[self.comparison.spec.of].unit

    def interval(self, level: float) -> Interval:
        """Return the interval as it is shown, unbounded where runs diverged; nan is unknown."""
        part = self.part
        interval = part.sample.interval(level) or (math.nan, math.nan)
        low = -math.inf if part.open_below else interval[0]
        high = math.inf if part.open_above else interval[1]
        return self.unit.natural_interval(low, high)

    def is_warned(self, name: str) -> bool:
        """Return whether the audit's check of this name is a warning."""
        return any(check.name == name and check.is_warning for check in self.checks)


@dataclass(frozen=True)
class Judgement:
    """A claim judged by the runs of one sweep."""

    claim: Claim
    study: Study
    n: int  # planned seeds per arm
    alpha: float
    verdict: ClaimVerdict | None  # None until all runs have ended
    parts: list[PartJudgement]
    exploratory: list[str]  # reasons why it confirms nothing

    @property
    def manifest(self) -> Manifest:
        assert self.study.manifest is not None  # claims are judged by sweeps
        return self.study.manifest

    @property
    def word(self) -> Verdict:
        return self.verdict.word if self.verdict else Verdict.INCOMPLETE

    @property
    def part_words(self) -> list[Verdict]:
        return self.verdict.parts if self.verdict else [Verdict.INCOMPLETE] * len(self.parts)

    @property
    def unless(self) -> list[str]:
        """Failures of training, not excluded by the runs, that would overturn the verdict."""
        return self.verdict.unless if self.verdict else []

    @property
    def scope(self) -> list[str]:
        """Limits of the verdict by warnings of the audit, with the parts if not all are limited."""
        if not self.is_conclusive:
            return []
        # A claim is refuted by some of its parts: the others limit nothing.
        deciding = [
            judged
            for judged, word in zip(self.parts, self.part_words, strict=True)
            if self.word != Verdict.REFUTED or word == Verdict.REFUTED
        ]
        scope = []
        for name, words in LIMITS.items():
            if warned := [judged.part.name for judged in deciding if judged.is_warned(name)]:
                are_some = len(warned) < len(deciding)
                scope.append(f"{words} ({', '.join(warned)})" if are_some else words)
        return scope

    @property
    def worlds(self) -> dict[str, Verdict]:
        """Verdict on the text and on each task, if the claim is about several."""
        words: dict[str, list[Verdict]] = {}
        directed: dict[str, list[bool]] = {}
        for judged, word in zip(self.parts, self.part_words, strict=True):
            words.setdefault(judged.comparison.world, []).append(word)
            directed.setdefault(judged.comparison.world, []).append(judged.part.can_be_equivalent)
        if len(words) < 2 or self.verdict is None:
            return {}
        return {world: merge_verdicts(words[world], directed[world]) for world in words}

    @property
    def headline(self) -> str:
        """The verdict, limited to what it holds for."""
        return f"{self.word} {', '.join(self.scope)}".rstrip()

    @property
    def is_conclusive(self) -> bool:
        open_words = (Verdict.INCOMPLETE, Verdict.UNDERPOWERED, Verdict.INSENSITIVE)
        return self.word not in open_words

    def seeds_needed(self) -> dict[str, SeedsNeeded | None]:
        """Return the prediction interval of the seeds that decide each open part."""
        # At the α of this look: for a later one fewer would do.
        return {
            judged.part.name: judged.part.seeds_needed(self.alpha, len(self.parts))
            for judged, verdict in zip(self.parts, self.part_words, strict=True)
            if verdict == Verdict.UNDERPOWERED
        }


def judge_claim(claim: Claim, study: Study, exploratory: list[str]) -> Judgement:
    """Judge the claim, as it is worded now, by the runs of a study."""
    manifest = study.manifest
    assert manifest is not None  # claims are judged by sweeps
    entries = {entry.arm.name: entry for entry in study.entries}
    lr_curves = find_lr_curves(study)
    parts = []
    comparisons = find_comparisons(claim, study.arms.values())
    solo = read_measurements(manifest.folder) if solo_arms(comparisons) else {}
    for comparison in comparisons:
        pairs = [*comparison.pairs, *([comparison.than] if comparison.than else [])]
        gaps = [
            measure_gap(entries[arm], entries[other], study.floor_of(entries[other]))
            for arm, other in pairs
        ]
        checks = _audit_part(comparison, gaps, lr_curves, study, entries)
        if MEASURES[comparison.spec.of].is_solo:
            checks.append(_check_alone(solo, solo_arms([comparison])))
        parts.append(PartJudgement(_make_part(comparison, gaps, solo), comparison, gaps, checks))
    per_arm = sum(run.arm == manifest.runs[0].arm for run in manifest.runs)
    n = len(manifest.finals) or per_arm
    alpha = dict(zip(claim.seeds, spend_alpha(claim.seeds), strict=True)).get(n, ALPHA)
    reasons = [*exploratory]
    if not exploratory and not _has_derived_seeds(claim, manifest, n):
        reasons.append("these runs do not have the seeds derived from its hash")
    if n not in claim.seeds:
        reasons.append(f"{n} seeds, and {' or '.join(map(str, claim.seeds))} were declared")
    reasons += [
        f"{judged.part.name}: {check.name}: {check.message}"
        for judged in parts
        for check in judged.checks
        if check.state == BROKEN
    ]
    is_measured = all(arm in solo and len(solo[arm]) >= n for arm in solo_arms(comparisons))
    has_ended = study.is_complete and is_measured
    verdict = judge_parts([judged.part for judged in parts], alpha) if has_ended else None
    return Judgement(claim, study, n, alpha, verdict, parts, reasons)


def solo_arms(comparisons: Iterable[Comparison]) -> list[str]:
    """Return the arms that are also measured alone."""
    solo = [c for c in comparisons if MEASURES[c.spec.of].is_solo]
    return [*dict.fromkeys(arm for c in solo for pair in c.pairs for arm in pair)]


def _has_derived_seeds(claim: Claim, manifest: Manifest, n: int) -> bool:
    finals = manifest.finals or [run.changes for run in manifest.runs]
    tuning = {run.changes["seed"] for run in manifest.runs if run.tuning}
    derived = {*claim.seeds_of("final", n)}, {*claim.seeds_of("tuning", claim.tuning_seeds)}
    return ({changes["seed"] for changes in finals}, tuning) == derived


def _audit_part(
    comparison: Comparison,
    gaps: list[Gap],
    lr_curves: dict[str, LrCurve],
    study: Study,
    entries: dict[str, Entry],
) -> list[AuditCheck]:
    spec, measure = comparison.spec, MEASURES[comparison.spec.of]
    # Growth is in nats per doubling, and has no margin at a single length.
    has_margin = spec.horizon != "growth" and measure.unit is Unit.NATS
    margin = spec.margin if has_margin else None
    rounding_gaps = [_rounding_gap(gap, study, entries) for gap in gaps]
    checks = _merge_audits(
        [
            audit(gap, lr_curves, spec.axis, margin, rounding_gap, in_claim=True)
            for gap, rounding_gap in zip(gaps, rounding_gaps, strict=True)
        ]
    )
    if not measure.is_of_runs:
        # Nothing of the training moves what is counted, or measured apart from it.
        return [check for check in checks if check.name in ("matched", "machine", "kernel")]
    found = [(gap, run) for gap in gaps for run in find_unmeasured(spec.of, gap)]
    if found:
        seeds = ", ".join(str(run.seed) for _, run in found)
        lacking = f"the {measure.noun} of {len(found)} of {sum(len(g.runs) for g in gaps)} pairs"
        lost = AuditCheck("pairs", BROKEN, f"{lacking} is not known: {seeds}")
        checks = [lost if check.name == "pairs" else check for check in checks]
    if measure.unit is Unit.NATS:
        return checks
    tuned = f"the rates were tuned for the validation loss, not for {measure.noun}"
    return [
        AuditCheck(check.name, WARNING, tuned)
        if check.name == "learning rate" and check.state == OK
        else check
        for check in checks
    ]


def _check_alone(solo: Mapping[str, list[SoloRow]], arms: list[str]) -> AuditCheck:
    """Check that nothing else kept the machine busy while arms were measured."""
    if not any(arm in solo for arm in arms):
        return AuditCheck("alone", NOTE, "not measured yet")
    load = max(row.load for arm in arms for row in solo.get(arm, ()))
    text = f"other processes used {load:.2f} cores at most"
    return AuditCheck("alone", WARNING if load > MAX_LOAD else OK, text)


def _make_part(comparison: Comparison, gaps: list[Gap], solo: Mapping[str, list[SoloRow]]) -> Part:
    spec, measure = comparison.spec, MEASURES[comparison.spec.of]
    margin = measure.unit.margin(spec.margin)
    if spec.horizon == "growth":
        return _make_growth_part(comparison, gaps)
    gap, than = gaps[0], gaps[1] if comparison.than else None
    repeated = {
        arm: [row.seconds if spec.of == "seconds" else row.memory for row in rows]
        for arm, rows in solo.items()
    }
    failures = [risks for g in gaps if (risks := measure_failures(spec.of, g)) is not None]
    raising, lowering = zip(*failures, strict=True) if failures else ((), ())
    if than is not None and failures:  # what raises the gap that is subtracted lowers the rest
        (first, second), (other, another) = failures
        raising, lowering = (first, another), (second, other)
    # A diverged run of a subtracted gap opens the other side.
    above = gap.arm_diverged + (than.baseline_diverged if than else 0)
    below = gap.baseline_diverged + (than.arm_diverged if than else 0)
    if not measure.sample.is_signed:  # whichever arm fails, the size of a gap may grow or shrink
        above, below = above + below, 0
        raising = lowering = (*raising, *lowering)
    return Part(
        name=comparison.name,
        kind=spec.kind,
        margin=margin,
        sample=measure_sample(spec.of, gap, than, repeated),
        open_above=measure.is_of_runs and above > 0,
        open_below=measure.is_of_runs and below > 0,
        raising=raising,
        lowering=lowering,
        is_sensitive=all(_is_sensitive(spec.of, g, margin) for g in gaps),
    )


def _is_sensitive(measure: str, gap: Gap, margin: float) -> bool:
    return is_sensitive(measure_lead(measure, gap), margin)


def _make_growth_part(comparison: Comparison, gaps: list[Gap]) -> Part:
    spec = comparison.spec
    # A diverged run tilts the line up or down, depending on its place in it.
    diverged = any(gap.arm_diverged or gap.baseline_diverged for gap in gaps)
    tokens = [gap.arm.tokens for gap in gaps]
    # A failure tilts the line most at the longest training.
    weight = float(max(slope_weights(tokens)))
    first, second = measure_risks(gaps[-1].arm, gaps[-1].baseline)
    return Part(
        name=comparison.name,
        kind=spec.kind,
        margin=spec.margin,
        sample=fit_growth(tokens, gaps),
        open_above=diverged,
        open_below=diverged,
        raising=(dataclasses.replace(first, weight=weight),),
        lowering=(dataclasses.replace(second, weight=weight),),
        is_sensitive=all(is_sensitive(gap.lead, spec.margin) for gap in gaps),
    )


def _rounding_gap(gap: Gap, study: Study, entries: dict[str, Entry]) -> Gap | None:
    """Return the gap of standard attention to its reordered twin at the size of this gap."""
    sides = {entry.arm.name for entry in gap.sides}
    for arm in study.arms.values():
        if arm.variant == "standard_reassociated" and arm.baseline in sides:
            return measure_gap(entries[arm.name], entries[arm.baseline])
    return None


def _merge_audits(audits: list[list[AuditCheck]]) -> list[AuditCheck]:
    """Merge the audits of several gaps: of each check, the distinct worst answers."""
    merged = []
    for checks in zip(*audits, strict=True):
        state = worst_state(checks)
        messages = dict.fromkeys(check.message for check in checks if check.state == state)
        merged.append(AuditCheck(checks[0].name, state, "; ".join(messages)))
    return merged


def counting_judgement(looks: list[Judgement]) -> Judgement | None:
    """Return the newest judgement; undeclared additional seeds count only once all are done."""
    counting = (look for look in looks if look.verdict or look.n in look.claim.seeds)
    return next(counting, looks[0] if looks else None)


def judge_looks(claim: Claim, out: str) -> list[Judgement]:
    """Judge the claim by each of its looks, the newest first."""
    registered = find_registrations(out, claim.name)
    registration = next((r for r in registered if r.claim.hash == claim.hash), None)
    reasons = edits_since(claim, registered)
    if registration is None or not registration.sweeps:
        same = (claim.scale, claim.words)
        earlier = [r for r in registered if r.sweeps and (r.claim.scale, r.claim.words) == same]
        if not earlier:
            return []
        registration = earlier[-1]  # its runs, judged by the claim as it is worded now
        reasons.append(
            "the runs are those of an earlier wording; `qkablate claim run` trains its own"
        )
    try:
        looks = reversed(registration.sweeps.values())
        return [judge_claim(claim, read_study(sweep), reasons) for sweep in looks]
    except UserError:
        if registration.claim.hash == claim.hash:
            raise
        return []  # it needs arms that the earlier sweep lacks
