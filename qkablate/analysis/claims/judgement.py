"""Judgement of a claim by its runs: the verdict, the audits, and what would decide open parts."""

import dataclasses
from dataclasses import dataclass

from qkablate.analysis.claims.claim import Claim, Comparison, find_comparisons
from qkablate.analysis.claims.registry import edits_since, find_registrations
from qkablate.analysis.claims.verdict import (
    ClaimVerdict,
    Part,
    SeedsNeeded,
    judge_parts,
    spend_alpha,
)
from qkablate.analysis.comparison.audit import BROKEN, LIMITS, AuditCheck, audit, worst_state
from qkablate.analysis.comparison.curves import slope_weights
from qkablate.analysis.comparison.decision import Verdict
from qkablate.analysis.comparison.gaps import Gap, is_sensitive, measure_gap
from qkablate.analysis.comparison.lr_curves import find_lr_curves
from qkablate.analysis.comparison.scaling import fit_growth
from qkablate.analysis.left_behind import measure_risks
from qkablate.analysis.stats import ALPHA, Spread
from qkablate.analysis.study.study import Entry, Study, read_study
from qkablate.errors import UserError
from qkablate.sweeps.planning.manifest import Manifest


@dataclass(frozen=True)
class PartJudgement:
    """One comparison of a claim, with its gaps and their audit."""

    part: Part
    comparison: Comparison
    gaps: list[Gap]
    checks: list[AuditCheck]

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
    entries = {entry.arm.name: entry for entry in study.entries}
    lr_curves = find_lr_curves(study)
    parts = []
    for comparison in find_comparisons(claim, study.arms.values()):
        gaps = [
            measure_gap(entries[arm], entries[other], study.floor_of(entries[other]))
            for arm, other in comparison.pairs
        ]
        spec = comparison.spec
        # Growth is in nats per doubling, and has no margin at a single length.
        margin = None if spec.horizon == "growth" else spec.margin
        audits = [
            audit(gap, lr_curves, spec.axis, margin, _rounding_gap(gap, study, entries))
            for gap in gaps
        ]
        part = _make_part(comparison, gaps)
        parts.append(PartJudgement(part, comparison, gaps, _merge_audits(audits)))
    manifest = study.manifest
    assert manifest is not None  # claims are judged by sweeps
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
    verdict = judge_parts([judged.part for judged in parts], alpha) if study.is_complete else None
    return Judgement(claim, study, n, alpha, verdict, parts, reasons)


def _has_derived_seeds(claim: Claim, manifest: Manifest, n: int) -> bool:
    finals = manifest.finals or [run.changes for run in manifest.runs]
    tuning = {run.changes["seed"] for run in manifest.runs if run.tuning}
    derived = {*claim.seeds_of("final", n)}, {*claim.seeds_of("tuning", claim.tuning_seeds)}
    return ({changes["seed"] for changes in finals}, tuning) == derived


def _make_part(comparison: Comparison, gaps: list[Gap]) -> Part:
    spec = comparison.spec
    if spec.of == "spread":
        spread = Spread(gaps[0].sample.values)
        diverged = bool(gaps[0].arm_diverged or gaps[0].baseline_diverged)
        return Part(comparison.name, spec.kind, spec.margin, spread, open_above=diverged)
    if spec.horizon != "growth":
        return Part.from_gap(comparison.name, spec.kind, spec.margin, gaps[0])
    # A diverged run tilts the line up or down, depending on its place in it.
    diverged = any(gap.arm_diverged or gap.baseline_diverged for gap in gaps)
    sensitive = all(is_sensitive(gap.lead, spec.margin) for gap in gaps)
    tokens = [gap.arm.tokens for gap in gaps]
    # A failure tilts the line most at the longest training.
    weight = float(max(slope_weights(tokens)))
    first, second = measure_risks(gaps[-1].arm, gaps[-1].baseline)
    risks = dataclasses.replace(first, weight=weight), dataclasses.replace(second, weight=weight)
    sample, is_open = fit_growth(tokens, gaps), (diverged, diverged)
    return Part(
        comparison.name, spec.kind, spec.margin, sample, *is_open, risks, is_sensitive=sensitive
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
