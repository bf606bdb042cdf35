"""Judgement of a claim by its runs: the verdict, the audits, and what would decide open parts."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from qkablate.analysis.claims.claim import OVER_LENGTHS, Claim, Comparison, find_comparisons
from qkablate.analysis.claims.measures import Unit
from qkablate.analysis.claims.references import References, add_reference, find_references
from qkablate.analysis.claims.registry import (
    STATISTICS,
    Registration,
    edits_since,
    find_registrations,
    registered_names,
)
from qkablate.analysis.claims.verdict import (
    Part,
    SeedsNeeded,
    is_deciding,
    judge_parts,
    merge_verdicts,
    spend_alpha,
)
from qkablate.analysis.comparison.audit import (
    INVALID,
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
from qkablate.analysis.comparison.gaps import (
    MARGINS,
    Gap,
    is_sensitive,
    measure_gap,
    measure_gap_with_references,
)
from qkablate.analysis.comparison.lr_curves import LrCurve, find_lr_curves
from qkablate.analysis.outliers import measure_risks
from qkablate.analysis.scaling.asymptote import fit_asymptote
from qkablate.analysis.scaling.series import fit_growth, has_diverged
from qkablate.analysis.stats import ALPHA, Interval, Sample
from qkablate.analysis.study.study import Entry, Study, read_study
from qkablate.errors import UserError
from qkablate.sweeps.planning.manifest import Manifest
from qkablate.sweeps.running.results import resume_command
from qkablate.sweeps.running.solo_results import SoloRow, read_measurements

_NO_WEIGHT = 1e-9  # of the length in the middle of three
MAX_LOAD = 0.5  # cores that other processes may use beside what is measured alone


@dataclass(frozen=True)
class PartJudgement:
    """One comparison of a claim, with its gaps and their audit."""

    part: Part
    word: Verdict  # INCOMPLETE until all runs of the claim have ended
    comparison: Comparison
    gaps: list[Gap]  # the last one is subtracted, if the part has `than`
    checks: list[AuditCheck]
    unless: list[str] = field(default_factory=list)  # failures that would overturn its word

    @property
    def unit(self) -> Unit:
        return self.comparison.spec.measure.unit

    def interval(self, level: float) -> Interval:
        """Return the interval as it is shown, unbounded where runs diverged; nan is unknown."""
        low, high = self.part.sample.interval(level) or (math.nan, math.nan)
        return self.unit.natural_interval(
            -math.inf if self.part.open_below else low, math.inf if self.part.open_above else high
        )

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
    word: Verdict  # INCOMPLETE until all runs have ended
    unless: list[str]  # failures, not excluded by the runs, that would overturn the verdict
    parts: list[PartJudgement]
    exploratory: list[str]  # reasons why it confirms nothing

    @property
    def has_ended(self) -> bool:
        """True if all runs have ended, so that there is a verdict."""
        return self.word != Verdict.INCOMPLETE

    @property
    def resume_commands(self) -> list[list[str]]:
        """The command that trains, or measures, what is missing."""
        if self.has_ended or self.study.manifest is None:
            return []
        return self.study.resume_commands or [resume_command(self.study.manifest)]

    @property
    def limits(self) -> dict[str, str]:
        """Limits of the verdict, by the audit's check that warns; with its parts if not all."""
        if not self.is_conclusive:
            return {}
        # A claim is refuted by some of its parts: the others limit nothing.
        deciding = [judged for judged in self.parts if is_deciding(judged.word, self.word)]
        limits = {}
        for name, words in LIMITS.items():
            if warned := [judged.part.name for judged in deciding if judged.is_warned(name)]:
                are_some = len(warned) < len(deciding)
                limits[name] = f"{words} ({', '.join(warned)})" if are_some else words
        return limits

    @property
    def scope(self) -> list[str]:
        """Limits of the verdict in words."""
        return [*self.limits.values()]

    @property
    def datasets(self) -> dict[str, Verdict]:
        """Verdict on the text and on each task, if the claim is about several."""
        by_dataset: dict[str, list[PartJudgement]] = {}
        for judged in self.parts:
            by_dataset.setdefault(judged.comparison.dataset, []).append(judged)
        if len(by_dataset) < 2 or not self.has_ended:
            return {}
        return {
            dataset: merge_verdicts([j.word for j in parts], [j.part for j in parts])
            for dataset, parts in by_dataset.items()
        }

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
            for judged in self.parts
            if judged.word == Verdict.UNDERPOWERED
        }


def judge_claim(
    claim: Claim, study: Study, exploratory: list[str], references: References | None = None
) -> Judgement:
    """Judge the claim, as it is worded now, by the runs of a study.

    Its setting is also read by other claims of the folder, or by the given references.
    """
    manifest = study.manifest
    assert manifest is not None  # claims are judged by sweeps
    if references is None:
        references = find_references(str(manifest.folder.resolve().parent.parent))
    entries = {entry.arm.name: entry for entry in study.entries}
    curves, parts = find_lr_curves(study), []
    comparisons = find_comparisons(claim, study.arms.values())
    alone = solo_arms(comparisons)
    solo = read_measurements(manifest.folder) if alone else {}
    for comparison in comparisons:
        gaps = [
            add_reference(measure_gap_with_references(study, arm, other), study, references)
            for first, second in filter(None, [*comparison.pairs, comparison.than])
            for arm, other in [(entries[first], entries[second])]
        ]
        checks = _audit_part(comparison, gaps, curves, entries)
        if comparison.spec.measure.is_solo:
            checks.append(_check_alone(solo, solo_arms([comparison])))
        part = _make_part(comparison, gaps, solo)
        parts.append(PartJudgement(part, Verdict.INCOMPLETE, comparison, gaps, checks))
    n = len(manifest.finals) or sum(run.arm == manifest.runs[0].arm for run in manifest.runs)
    alpha = dict(zip(claim.seeds, spend_alpha(claim.seeds), strict=True)).get(n, ALPHA)
    reasons = [*exploratory]
    if not exploratory and not _has_derived_seeds(claim, manifest, n):
        reasons.append("the seeds of these runs were not derived from the claim's hash")
    if n not in claim.seeds:
        reasons.append(
            f"{n} seeds were run, but {' or '.join(map(str, claim.seeds))} were declared"
        )
    reasons += [
        f"{judged.part.name}: {check.name}: {check.message}"
        for judged in parts
        for check in judged.checks
        if check.state == INVALID
    ]
    is_measured = all(arm in solo and len(solo[arm]) >= n for arm in alone)
    if not (study.is_complete and is_measured):
        return Judgement(claim, study, n, alpha, Verdict.INCOMPLETE, [], parts, reasons)
    verdict = judge_parts([judged.part for judged in parts], alpha)
    parts = [
        dataclasses.replace(judged, word=word, unless=unless)
        for judged, word, unless in zip(parts, verdict.parts, verdict.conditions, strict=True)
    ]
    parts = _warn_of_documents(parts, alpha)
    return Judgement(claim, study, n, alpha, verdict.word, verdict.unless, parts, reasons)


def _warn_of_documents(parts: list[PartJudgement], alpha: float) -> list[PartJudgement]:
    """Warn where the verdict of a part would change with the error over documents."""
    wider = [_add_document_error(judged) for judged in parts]
    warned = []
    for judged, part, word in zip(parts, wider, judge_parts(wider, alpha).parts, strict=True):
        checks = judged.checks
        if word != judged.word and part != judged.part:
            text = f"; with this error the verdict would be {word}"
            checks = [
                AuditCheck(check.name, WARNING, check.message + text)
                if check.name == "documents"
                else check
                for check in checks
            ]
        warned.append(dataclasses.replace(judged, checks=checks))
    return warned


def _add_document_error(judged: PartJudgement) -> Part:
    """Return a part about a gap with the variance over documents, which no decision includes."""
    part, spec = judged.part, judged.comparison.spec
    if spec.of != "gap" or spec.horizon in OVER_LENGTHS:
        return part
    if spec.than is not None and (shared := judged.gaps[0].document_error_beside(judged.gaps[1])):
        errors = [shared]  # the same documents: the two errors are not independent
    else:
        errors = [error for gap in judged.gaps if (error := gap.document_error) is not None]
    variance = math.fsum(error.se**2 for error in errors)
    extra = part.sample.extra_variance + variance
    return dataclasses.replace(part, sample=dataclasses.replace(part.sample, extra_variance=extra))


def solo_arms(comparisons: Iterable[Comparison]) -> list[str]:
    """Return the arms that are also measured alone."""
    solo = [c for c in comparisons if c.spec.measure.is_solo]
    return [*dict.fromkeys(arm for c in solo for pair in c.pairs for arm in pair)]


def _has_derived_seeds(claim: Claim, manifest: Manifest, n: int) -> bool:
    finals = manifest.finals or [run.changes for run in manifest.runs]
    tuning = {run.changes["seed"] for run in manifest.runs if run.tuning}
    if tuning:  # some are kept to confirm a choice, and have no runs in the plan
        tuning |= {*manifest.tuning_seeds}
    derived = {*claim.seeds_of("final", n)}, {*claim.seeds_of("tuning", claim.tuning_seeds)}
    return ({changes["seed"] for changes in finals}, tuning) == derived


def _audit_part(
    comparison: Comparison, gaps: list[Gap], curves: dict[str, LrCurve], entries: dict[str, Entry]
) -> list[AuditCheck]:
    spec, measure = comparison.spec, comparison.spec.measure
    margin = spec.margin_of_loss
    audits = []
    for gap in gaps:
        rounding_gap = _rounding_gap(gap, entries)
        audits.append(audit(gap, curves, spec.axis, margin, rounding_gap, in_claim=True))
    checks = _merge_audits(audits)
    if spec.horizon == "asymptote":
        text = "one exponent is taken for both arms, which so few lengths do not test"
        checks.append(AuditCheck("extrapolation", WARNING, text))
    if not measure.is_of_runs:
        # Nothing of the training moves what is counted, or measured apart from it.
        return [check for check in checks if check.name in ("matched", "machine", "kernel")]
    if spec.of not in ("gap", "accuracy", "exact", "spread"):
        other = AuditCheck("documents", OK, f"not needed: {measure.noun} is not of the test split")
        checks = [other if check.name == "documents" else check for check in checks]
    if unmeasured := [run.seed_label for gap in gaps for run in measure.find_unmeasured(gap)]:
        pairs = f"{len(unmeasured)} of {sum(len(gap.runs) for gap in gaps)} pairs"
        text = f"the {measure.noun} of {pairs} is not known: {', '.join(unmeasured)}"
        lost = AuditCheck("pairs", INVALID, text)
        checks = [lost if check.name == "pairs" else check for check in checks]
    if measure.unit is not Unit.NATS:
        text = f"the rates were tuned for the validation loss, not for {measure.noun}"
        untuned, tuned = AuditCheck("learning rate", WARNING, text), ("learning rate", OK)
        checks = [untuned if (check.name, check.state) == tuned else check for check in checks]
        leads = [lead for gap in gaps if (lead := measure.lead(gap)) is not None]
        is_share = measure.unit is Unit.SHARE
        if is_share and leads and not is_sensitive(min(leads), spec.margin):
            beaten = f"in {measure.noun} the baseline beats `uniform` by {min(leads):.4f} or more"
            text = f"{beaten}, less than {MARGINS} margins of {spec.margin:g}; raise train.steps"
            low = AuditCheck("floor", WARNING, text)
            checks = [low if check.name == "floor" else check for check in checks]
    return checks


def _check_alone(solo: Mapping[str, list[SoloRow]], arms: list[str]) -> AuditCheck:
    """Check that nothing else kept the machine busy while arms were measured."""
    load = max((row.load for arm in arms for row in solo.get(arm, [])), default=None)
    if load is None:
        return AuditCheck("alone", NOTE, "not measured yet")
    text = f"other processes used {load:.2f} cores at most"
    return AuditCheck("alone", WARNING if load > MAX_LOAD else OK, text)


def _make_part(comparison: Comparison, gaps: list[Gap], solo: Mapping[str, list[SoloRow]]) -> Part:
    spec, measure = comparison.spec, comparison.spec.measure
    margin = measure.unit.margin(spec.margin)
    gap, than = gaps[0], gaps[1] if comparison.than else None
    repeated = {
        arm: [row.seconds if spec.of == "seconds" else row.memory for row in rows]
        for arm, rows in solo.items()
    }
    failures = [risks for g in gaps if (risks := measure.failures(g)) is not None]
    raising, lowering = zip(*failures, strict=True) if failures else ((), ())
    above, below = gap.arm_diverged, gap.baseline_diverged
    if than is not None and gap.baseline.name == than.baseline.name:  # what it loses cancels
        raising, lowering = raising[:1], raising[1:]
        above, below = gap.arm_diverged, than.arm_diverged
    elif than is not None:  # what raises the gap that is subtracted lowers the rest
        raising, lowering = raising[:1] + lowering[1:], lowering[:1] + raising[1:]
        above, below = above + than.baseline_diverged, below + than.arm_diverged
    if not measure.sample.is_signed:  # whichever arm fails, the size of a gap may grow or shrink
        above, below = above + below, 0
        raising = lowering = (*raising, *lowering)
    part = Part(
        name=comparison.name,
        kind=spec.kind,
        margin=margin,
        sample=measure.sample_gap(gap, than, repeated),
        open_above=measure.is_of_runs and above > 0,
        open_below=measure.is_of_runs and below > 0,
        raising=raising,
        lowering=lowering,
        is_sensitive=all(is_sensitive(measure.lead(g), margin) for g in gaps),
    )
    return _over_lengths(part, spec.horizon, gaps) if spec.horizon in OVER_LENGTHS else part


def _over_lengths(part: Part, horizon: str, gaps: list[Gap]) -> Part:
    """Return the part, tested on the growth or the asymptote of the gap over several lengths."""
    gaps = sorted(gaps, key=lambda gap: gap.arm.tokens)
    # A diverged run tilts the line up or down, depending on its place in it.
    diverged = has_diverged(gaps)
    tokens = [gap.arm.tokens for gap in gaps]
    if horizon == "growth":
        sample, weights = fit_growth(tokens, gaps), slope_weights(tokens).tolist()
    else:
        fit = fit_asymptote(gaps)
        sample = Sample(()) if fit is None else fit.sample
        weights = [0.0] * len(gaps) if fit is None else [*fit.weights]
    raising, lowering = [], []
    for gap, weight in zip(gaps, weights, strict=True):
        # Of a gap that is subtracted, the arm's failures lower the estimate.
        arm, baseline = (
            dataclasses.replace(risk, weight=abs(weight)) for risk in measure_risks(*gap.sides)
        )
        if abs(weight) > _NO_WEIGHT:
            raising.append(arm if weight > 0 else baseline)
            lowering.append(baseline if weight > 0 else arm)
    return dataclasses.replace(
        part,
        sample=sample,
        open_above=diverged,
        open_below=diverged,
        raising=tuple(raising),
        lowering=tuple(lowering),
    )


def _rounding_gap(gap: Gap, entries: dict[str, Entry]) -> Gap | None:
    """Return the gap of standard attention to its reordered twin at the size of this gap."""
    sides = {entry.arm.name for entry in gap.sides}
    for twin in entries.values():
        if twin.arm.variant == "standard_reassociated" and twin.arm.baseline in sides:
            return measure_gap(twin, entries[twin.arm.baseline])
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
    counting = (look for look in looks if look.has_ended or look.n in look.claim.seeds)
    return next(counting, looks[0] if looks else None)


def counting_sweep(registration: Registration) -> Path:
    """Return the sweep by which a claim that has runs is judged, as `counting_judgement` does."""
    looks = [*reversed(registration.sweeps.items())]
    declared = registration.claim.seeds
    counting = (sweep for n, sweep in looks if n in declared or read_study(sweep).is_complete)
    return next(counting, looks[0][1])


def judge_looks(claim: Claim, out: str, references: References | None = None) -> list[Judgement]:
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
    reasons += _other_statistics(registration)
    try:
        looks = reversed(registration.sweeps.values())
        return [judge_claim(claim, read_study(sweep), reasons, references) for sweep in looks]
    except UserError:
        if registration.claim.hash == claim.hash:
            raise
        return []  # it needs arms that the earlier sweep lacks


def judge_sweep(sweep: Path, study: Study) -> Judgement | None:
    """Judge the registered claim that a sweep was trained for; None if there is none.

    UserError if a registration of its name cannot be read.
    """
    folder = sweep.resolve()
    out = str(folder.parent.parent)
    for name in registered_names(out):
        if not folder.name.startswith(f"claim-{name}-"):
            continue
        registered = find_registrations(out, name)
        for one in registered:
            if folder in [path.resolve() for path in one.sweeps.values()]:
                reasons = [*edits_since(one.claim, registered), *_other_statistics(one)]
                return judge_claim(one.claim, study, reasons)
    return None


def _other_statistics(registration: Registration) -> list[str]:
    """Return why a claim that was registered under other rules is exploratory; [] if it is not."""
    if registration.statistics == STATISTICS:
        return []
    return [
        f"registered under version {registration.statistics} of the statistics, and judged by"
        f" version {STATISTICS}: docs/study/registrations.md"
    ]
