"""Summary of a study: every result with its uncertainty, as frozen dataclasses."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from qkablate.analysis import stats
from qkablate.analysis.claims.verdict import Part
from qkablate.analysis.comparison import lr_curves
from qkablate.analysis.comparison.audit import AuditCheck, audit, find_limits
from qkablate.analysis.comparison.curves import CurveSummary, describe_curve
from qkablate.analysis.comparison.decision import (
    BEFORE_ATTENTION,
    BEFORE_NGRAMS,
    Decision,
    MarginTest,
    RateScope,
    TuningPlan,
    Verdict,
    decide,
    find_rate_scopes,
    plan_tuning,
)
from qkablate.analysis.comparison.function_distance import FunctionDistance, measure_distances
from qkablate.analysis.comparison.gaps import (
    ArmLosses,
    Family,
    Gap,
    NoiseFloor,
    adjust,
    describe_arm,
    describe_noise_floor,
    find_families,
    perplexity_percent,
)
from qkablate.analysis.comparison.ranking import Front, Ranking, find_fronts, find_rankings
from qkablate.analysis.scaling.asymptote import fit_asymptote
from qkablate.analysis.scaling.compute_gain import ScalingSummary
from qkablate.analysis.scaling.series import (
    Series,
    SeriesSummary,
    describe_series,
    find_series,
)
from qkablate.analysis.stats import Estimate, Interval
from qkablate.analysis.study.document_error import DocumentError
from qkablate.analysis.study.study import Study
from qkablate.config.sweep import split_control
from qkablate.runs.text_references import TextReferences
from qkablate.sweeps.planning.manifest import LeftOutArm


@dataclass(frozen=True)
class PairGap:
    """Gap of one pair of runs."""

    seeds: dict[str, int]
    gap: float


@dataclass(frozen=True, kw_only=True, repr=False)
class GapSummary(Estimate):
    """Gap of one arm to its baseline, with every test of it, its audit and the decision."""

    arm: str
    baseline: str
    decision: Decision
    rates: RateScope = RateScope.BEST
    before_attention: bool  # the baseline has not beaten the best n-gram on its text
    at_floor: bool  # the baseline does not clearly beat uniform attention
    params_percent: float | None
    flops_percent: float | None
    perplexity_percent: float | None
    perplexity_percent_interval: Interval | None
    p: float | None
    p_holm: float | None
    comparisons: int
    bca: Interval | None
    sign_flip: float | None
    sign_flip_min_n: int
    detectable: float | None
    correlation: float | None
    document_error: DocumentError | None
    arm_diverged: int
    baseline_diverged: int
    arm_outliers: int
    baseline_outliers: int
    unless: list[str]  # failures of training that would overturn "equivalent" or "not worse"
    pairs: list[PairGap]
    unpaired: list[str]
    margin: MarginTest | None
    audit: list[AuditCheck]

    def __repr__(self) -> str:
        at = "no pairs" if self.mean is None else f"{self.mean:+.4f} (n = {self.n})"
        return f"<GapSummary {self.arm} to {self.baseline}: {at}, {self.verdict}>"

    @property
    def bounds(self) -> tuple[float | None, float | None] | None:
        """Interval of the gap, without an end on a side where runs diverged."""
        if self.interval is None:
            return None
        low, high = self.interval
        return None if self.baseline_diverged else low, None if self.arm_diverged else high

    @property
    def scopes(self) -> list[str]:
        """Learning rates, documents and stage of training that the decision is limited to."""
        limits = [limit for limit in find_limits(self.audit) if limit != RateScope.THESE_RATES]
        # A loss shows without a floor that is beaten; but attention is not what was lost.
        if self.at_floor and (self.decision == Decision.WORSE or BEFORE_NGRAMS in limits):
            limits = [*(limit for limit in limits if limit != BEFORE_NGRAMS), BEFORE_ATTENTION]
        return [*filter(None, [self.rates, *limits])]

    @property
    def is_decided(self) -> bool:
        """True if the runs were enough for a decision."""
        undecided = (Decision.FEW_PAIRS, Decision.NO_PAIRS, Decision.INSENSITIVE)
        return not self.decision.is_divergence and self.decision not in undecided

    @property
    def short_verdict(self) -> str:
        """The decision alone, in three words at most."""
        is_open = self.decision == Decision.INSENSITIVE
        is_open |= self.is_decided and self.rates == RateScope.SIGN_DEPENDS
        return "no verdict" if is_open else str(self.decision).partition(" (")[0]

    @property
    def verdict(self) -> str:
        """The decision, limited to what it holds for."""
        if not self.is_decided:
            return str(self.decision)
        if self.rates == RateScope.SIGN_DEPENDS:
            return f"no verdict: {self.rates}"
        text = str(self.decision)
        found = self.p_holm is not None and self.p_holm < stats.ALPHA
        if self.decision == Decision.EQUIVALENT and found and self.mean is not None:
            text += f" ({'worse' if self.mean > 0 else 'better'} by {abs(self.mean):.4f})"
        text = f"{text} {', '.join(self.scopes)}".rstrip()
        return f"{text} unless {' or '.join(self.unless)}" if self.unless else text


@dataclass(frozen=True)
class StudySummary:
    """All results of a study."""

    sweep: str
    complete: bool
    loss_unit: str
    arms: list[ArmLosses]
    gaps: list[GapSummary]
    noise_floor: list[NoiseFloor]
    text_references: list[TextReferences]
    curves: list[CurveSummary]
    function_distance: list[FunctionDistance]
    series: list[SeriesSummary]
    scaling: list[ScalingSummary]
    learning_rates: list[lr_curves.LrCurveSummary]
    rankings: list[Ranking]
    fronts: list[Front]
    left_out: list[LeftOutArm]
    one_at_a_time: bool  # one factor: interactions between the axes are not estimated
    tuning: TuningPlan | None  # that would settle what the rates leave open


def describe_study(
    study: Study,
    milliseconds: Mapping[str, float] | None = None,
    margin: float | None = None,
    families: list[Family] | None = None,
    scaling: Sequence[ScalingSummary] = (),
) -> StudySummary:
    """Summarize a study; with a margin, also test which arms are not worse by it."""
    families = find_families(study) if families is None else families
    curves = lr_curves.find_lr_curves(study)
    places = [(family, number) for family in families for number in range(len(family.gaps))]
    gaps = [family.gaps[number] for family, number in places]
    tests: Sequence[MarginTest | None] = [None] * len(gaps)
    if margin is not None:
        tests = make_margin_tests(gaps, margin)
    described = [
        describe_gap(family, number, curves, test)
        for (family, number), test in zip(places, tests, strict=True)
    ]
    decisions = [one.decision for one in described]
    scopes = find_rate_scopes(list(zip(gaps, decisions, strict=True)), curves)
    limited = []
    for gap, one, scope in zip(gaps, described, scopes, strict=True):
        is_limited = RateScope.THESE_RATES in find_limits(one.audit)  # warned of tuned rates
        if scope == RateScope.BEST and gap.compares_variants and is_limited:
            scope = RateScope.THESE_RATES
        limited.append(dataclasses.replace(one, rates=scope))
    return StudySummary(
        sweep=study.name,
        complete=study.is_complete,
        loss_unit=study.loss_unit,
        arms=[describe_arm(entry) for entry in study.entries],
        gaps=limited,
        noise_floor=[describe_noise_floor(family) for family in families],
        text_references=study.text_references,
        curves=[curve for gap in gaps if (curve := describe_curve(gap)) is not None],
        function_distance=measure_distances(families),
        series=[describe_series(series, _find_limit(series)) for series in find_series(families)],
        scaling=[*scaling],
        learning_rates=lr_curves.describe_lr_curves(study, curves),
        rankings=find_rankings(families),
        fronts=find_fronts(study, milliseconds or {}),
        left_out=study.left_out,
        one_at_a_time=study.manifest is not None and study.manifest.combinations is not None,
        tuning=plan_tuning(study) if any(scopes) else None,
    )


def _find_limit(series: Series) -> stats.Sample | None:
    """Return the gap after infinitely many tokens, of trainings of several lengths."""
    fit = fit_asymptote(series.gaps) if series.along == "tokens" else None
    return None if fit is None else fit.sample


def describe_gap(
    family: Family,
    number: int,
    curves: dict[str, lr_curves.LrCurve],
    margin_test: MarginTest | None = None,
) -> GapSummary:
    """Summarize and audit one gap of a family."""
    margin = None if margin_test is None else margin_test.nats
    gap, p_holm = family.gaps[number], family.holm[number]
    sample, interval = gap.sample, gap.sample.interval()
    arm, baseline = gap.arm.arm, gap.baseline.arm
    diverged = gap.arm_diverged + gap.baseline_diverged > 0
    percent_interval = None
    if interval is not None and not diverged:
        percent_interval = perplexity_percent(interval[0]), perplexity_percent(interval[1])
    decision = decide(gap, p_holm, margin_test)
    kinds = {Decision.EQUIVALENT: "equivalent", Decision.NOT_WORSE: "noninferior"}
    unless = []
    if margin is not None and decision in kinds:
        part = Part.from_gap("", kinds[decision], margin, gap)
        unless = part.conditions(Verdict.SUPPORTED, stats.ALPHA / max(1, family.comparisons))
    return GapSummary(
        **vars(stats.describe_sample(sample)),
        arm=gap.arm.name,
        baseline=family.baseline.name,
        decision=decision,
        before_attention=gap.is_before_attention,
        at_floor=gap.is_at_floor,
        params_percent=_percent_more(arm.params, baseline.params),
        flops_percent=_percent_more(arm.flops, baseline.flops),
        perplexity_percent=perplexity_percent(sample.mean) if sample.n else None,
        perplexity_percent_interval=percent_interval,
        p=gap.p,
        p_holm=p_holm,
        comparisons=family.comparisons,
        bca=None if diverged else sample.bca,
        sign_flip=None if diverged else sample.sign_flip,
        sign_flip_min_n=stats.sign_flip_min_n(max(1, family.comparisons)),
        detectable=family.detectable(gap),
        correlation=gap.correlation,
        document_error=gap.document_error,
        arm_diverged=gap.arm_diverged,
        baseline_diverged=gap.baseline_diverged,
        arm_outliers=gap.arm_outliers,
        baseline_outliers=gap.baseline_outliers,
        unless=unless,
        pairs=[PairGap(dict(key), value) for key, value in gap.pairs.items()],
        unpaired=gap.unpaired,
        margin=margin_test,
        audit=audit_gap(family, number, curves, margin),
    )


def _percent_more(value: float, other: float) -> float | None:
    """Return by how many percent a value is larger; None if unknown, as without any result."""
    return 100 * (value / other - 1) if value and other else None


def audit_gap(
    family: Family, number: int, curves: dict[str, lr_curves.LrCurve], margin: float | None = None
) -> list[AuditCheck]:
    """Audit one gap of a family."""
    gap = family.gaps[number]
    controls, detectable = gap.arm.arm.controls, family.detectable(gap)
    axis = "tokens" if "none" in controls else split_control(controls[0])[0]
    return audit(gap, curves, axis, margin, family.rounding_gap, detectable)


def make_margin_tests(gaps: Sequence[Gap], margin: float) -> list[MarginTest]:
    """Test whether arms are not worse by the margin, and whether they lie within it."""
    parts = [Part.from_gap("", "equivalent", margin, gap) for gap in gaps]

    def adjusted(find_p: Callable[[Part], float]) -> list[float | None]:
        return adjust(
            [None if gap.p is None else find_p(part) for gap, part in zip(gaps, parts, strict=True)]
        )

    p_noninferior = adjusted(lambda part: part.p_below(margin))
    p_equivalent = adjusted(lambda part: part.p_equivalent)
    alpha = stats.ALPHA / max(1, sum(gap.p is not None for gap in gaps))
    return [
        MarginTest(margin)
        if gap.p is None
        else MarginTest(margin, below, within, _find_seeds(gap.sample, margin, alpha))
        for gap, below, within in zip(gaps, p_noninferior, p_equivalent, strict=True)
    ]


def _find_seeds(sample: stats.Sample, margin: float, alpha: float) -> int | None:
    """Return the number of seeds that show equivalence if the true gap is zero."""
    if not sample.sd and not sample.extra_variance:
        return stats.MIN_PAIRS
    return stats.required_n(
        lambda n: stats.power_equivalence(0.0, margin, sample.spread_at(n), n, alpha)
    )
