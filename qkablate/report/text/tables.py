"""Tables of a study's results."""

import dataclasses
import re

from qkablate.analysis.comparison.audit import MARKS, NOTE, group_checks, worst_state
from qkablate.analysis.comparison.curves import CurveSummary
from qkablate.analysis.comparison.function_distance import FunctionDistance
from qkablate.analysis.comparison.gaps import NoiseFloor
from qkablate.analysis.comparison.lr_curves import LrCurveSummary
from qkablate.analysis.comparison.ranking import Front, Ranking
from qkablate.analysis.comparison.summary import GapSummary, StudySummary
from qkablate.analysis.scaling.series import SeriesSummary
from qkablate.analysis.stats import Estimate
from qkablate.report.text.scaling import make_scaling_tables
from qkablate.report.text.table import Table, format_interval, format_known
from qkablate.table import format_count, format_duration, format_list, format_nats, format_short


def make_tables(summary: StudySummary) -> list[Table]:
    """Return all tables of a study."""
    by_baseline = {floor.baseline: (floor, list[GapSummary]()) for floor in summary.noise_floor}
    for gap in summary.gaps:
        by_baseline[gap.baseline][1].append(gap)
    curves = [curve for curve in summary.curves if len(curve.readings) > 1]
    return [
        _arm_table(summary),
        *(_gap_table(gaps, floor, summary) for floor, gaps in by_baseline.values()),
        *(_rank_table(ranking) for ranking in summary.rankings if len(ranking.ranks) > 1),
        *([make_rate_table(summary.learning_rates)] if summary.learning_rates else []),
        *([_curve_table(curves)] if curves else []),
        *map(make_distance_table, summary.function_distance),
        *(
            _series_table(along, series)
            for along in ("tokens", "parameters")
            if (series := [series for series in summary.series if series.along == along])
        ),
        *make_scaling_tables(summary.scaling, summary.gaps),
        *_make_front_tables(summary.fronts),
    ]


def _arm_table(summary: StudySummary) -> Table:
    show_accuracy = any(arm.accuracy is not None for arm in summary.arms)
    rows = []
    for arm in summary.arms:
        runs = [
            f"{run.test_loss:.4f}" if run.test_loss is not None else f"({run.status})"
            for run in arm.runs
        ]
        cells = [arm.arm, f"{arm.params:,}", format_known(arm.lr, ".3g"), f"{arm.n}/{len(runs)}"]
        cells += [format_known(arm.mean), format_known(arm.sd)]
        cells.append(format_interval(arm.interval, ".4f"))
        if show_accuracy:
            cells += [format_accuracy(arm.accuracy), format_accuracy(arm.chance)]
        rows.append([*cells, " ".join(runs) or "none yet"])
    head = ["arm", "params", "lr", "done", "mean", "sd", "95 % interval"]
    notes = ["params: without embeddings; interval: of the mean over seeds"]
    if show_accuracy:
        head += ["accuracy", "chance"]
        notes.append("chance: accuracy of the best guess that does not depend on the sequence")
    notes += [f"without attention: {references}" for references in summary.text_references]
    for arm in summary.arms:
        if failed := [run.outlier for run in arm.runs if run.outlier is not None]:
            by = ", ".join(f"{excess:.2g}" for excess in sorted(failed, reverse=True))
            notes.append(f"outliers: {arm.arm}, {len(failed)} of {arm.n} runs (by {by} nats)")
    return Table(f"test loss, {summary.loss_unit}", [*head, "every run"], rows, notes)


def _gap_table(gaps: list[GapSummary], floor: NoiseFloor, summary: StudySummary) -> Table:
    head = ["arm", "gap", "95 % interval", "decision", "p (Holm)", "n", "params", "perplexity"]
    has_documents = any(gap.document_error for gap in gaps)
    head += [*["SE over documents"] * has_documents, "detectable"]
    if gaps[0].margin is not None:
        size = f"{gaps[0].margin.nats:g}"
        head += [f"p (gap ≥ {size})", f"p (beyond ± {size})", f"seeds for ± {size} if the gap is 0"]
    head += ["BCa", "sign flip", "audit"]
    rows = []
    for gap in gaps:
        cells = [gap.arm, format_known(gap.mean, format_nats), format_gap_interval(gap)]
        cells += [gap.short_verdict, format_p(gap.p_holm), str(gap.n)]
        cells += [format_percent_more(gap.params_percent)]
        cells += [format_known(gap.perplexity_percent, "{:+z.2f} %".format)]
        if has_documents:
            cells.append(format_known(gap.document_error and gap.document_error.se))
        cells += [format_known(gap.detectable)]
        if gap.margin is not None:
            cells += [format_p(gap.margin.p_noninferior), format_p(gap.margin.p_equivalent)]
            needed = str(gap.margin.seeds_if_zero or "too many")
            cells.append("–" if gap.margin.p_noninferior is None else needed)
        state = worst_state(gap.audit)
        cells += [format_interval(gap.bca), format_p(gap.sign_flip)]
        rows.append([*cells, f"{MARKS[state]} {state}".strip()])
    notes, tuning = [*describe_verdicts(gaps), *_gap_notes(gaps, floor)], summary.tuning
    if summary.one_at_a_time:
        notes.append("one factor at a time: interactions between the axes are not estimated")
    if tuning is not None and any(gap.rates for gap in gaps):
        seconds = tuning.seconds
        time = "" if seconds is None else f", about {format_duration(seconds)} of computing"
        notes.append(
            "not tuned: at its best learning rate an arm may have another gap;"
            f" sweep.tune=true tunes it ({tuning.runs:,} runs{time})"
        )
    return Table(f"gaps to {floor.baseline}, paired by seed", head, rows, notes)


def describe_verdicts(gaps: list[GapSummary]) -> list[str]:
    """Return what each decision is limited to, or why there is none, with its arms."""
    arms: dict[str, list[str]] = {}
    for gap in gaps:
        if not gap.verdict.startswith(short := gap.short_verdict):
            arms.setdefault(f"{short}: {gap.verdict}", []).append(gap.arm)
        elif gap.is_decided and gap.verdict != short:  # the audit warns of too few pairs
            arms.setdefault(gap.verdict, []).append(gap.arm)
    return [f"{text}: {format_list(own)}" if len(gaps) > 1 else text for text, own in arms.items()]


def _gap_notes(gaps: list[GapSummary], floor: NoiseFloor) -> list[str]:
    notes = []
    if floor.seeds_sd is not None:
        notes.append(f"spread of {floor.baseline} between seeds: ± {floor.seeds_sd:.4f}")
    if floor.rounding and floor.rounding.interval:
        notes.append(
            f"rounding alone (standard_reassociated): {' '.join(_estimate_cells(floor.rounding))},"
            f" ± {floor.rounding.sd:.4f} a pair"
        )
    least, comparisons = gaps[0].sign_flip_min_n, format_count(gaps[0].comparisons, "comparison")
    if any(gap.n < least for gap in gaps):
        notes.append(f"the sign-flip test can reject from n = {least} on ({comparisons})")
    if known := [gap.correlation for gap in gaps if gap.correlation is not None]:
        to = f" to {max(known):+z.2f}" if len(known) > 1 else ""
        notes.append(f"correlation of the pairs: {min(known):+z.2f}{to}")
    if any(gap.document_error for gap in gaps):
        notes.append(
            "the interval takes the test split as given; SE over documents: what another choice of"
            " its documents (of pairs and tags: files, or pairs) adds to the uncertainty"
        )
    return notes + _audit_notes(gaps)


def replace_name(text: str, name: str, by: str) -> str:
    """Replace an arm's name in a text, but no longer name that begins with it."""
    return re.sub(rf"(?<![\w=-]){re.escape(name)}(?![\w=-]|\.\w)", by, text)


_INITIALIZATION = ("initialization", NOTE)  # the only note that no column shows


def _audit_notes(gaps: list[GapSummary]) -> list[str]:
    """Return each warning of the audits once, with its arms."""
    groups = group_checks(
        (
            gap.arm,
            dataclasses.replace(check, message=replace_name(check.message, gap.arm, "the arm")),
        )
        for gap in gaps
        for check in gap.audit
        if check.is_warning or (check.name, check.state) == _INITIALIZATION
    )
    return [
        f"{MARKS[check.state]} {check.name}: {check.message}"
        + (f" ({format_list(arms)})" if len(gaps) > 1 else "")
        for check, arms in groups.items()
    ]


def _rank_table(ranking: Ranking) -> Table:
    rows = []
    for rank in ranking.ranks:
        ranks = " to ".join(map(str, dict.fromkeys((rank.best_rank, rank.worst_rank))))
        rows.append([rank.arm, ranks, f"{rank.mean:.4f}", str(rank.n)])
    names = {"params": "parameters", "flops": "training FLOPs"}
    equal = names.get(ranking.equal, ranking.equal)
    notes = ["ranks that no pair's test excludes, adjusted by Holm over all pairs"]
    notes += [f"not ranked: {line}" for line in ranking.unranked]
    equal += f" ({ranking.adjusted} adjusted)" if ranking.adjusted != "mlp" else ""
    title = f"ranks at equal {equal}, with {ranking.size}"
    return Table(title, ["arm", "rank", "mean", "n"], rows, notes)


def make_rate_table(curves: list[LrCurveSummary]) -> Table:
    """Return the table of learning rates, by validation loss."""
    head = ["arm", "runs", "best lr", "optimum", "95 % interval", "cost within 4 ×"]
    head += ["gap at default", "95 % interval", "gap at best", "95 % interval", ""]
    rows = []
    for curve in curves:
        cells = [curve.arm, f"{curve.runs:,}", str(curve.best or "–")]
        is_near = _has_near_optimum(curve)
        cells.append(str(curve.optimum) if is_near else "–")
        cells.append(format_interval(curve.optimum_interval if is_near else None, ".3g"))
        cells.append(format_known(curve.sensitivity))
        cells += [*_estimate_cells(curve.gap_at_default), *_estimate_cells(curve.gap_at_best)]
        rows.append([*cells, "! on the edge" if curve.on_the_edge else ""])
    notes = [
        f"default: {', '.join(dict.fromkeys(str(curve.default) for curve in curves))}",
        "optimum: minimum of a quadratic surface in ln lr and ln of the circuit's multiplier;"
        " none beyond 4 times the rates tried; interval: of lr; cost within 4 ×: mean cost"
        " of a rate up to 4 times above or below the best",
        "the gaps are paired by tuning seed, on validation",
    ]
    return Table("learning rates, by validation loss", head, rows, notes)


def _has_near_optimum(curve: LrCurveSummary) -> bool:
    """Return whether there is an optimum that is at most 4 times beyond the rates tried."""
    if curve.optimum is None:
        return False
    tried = zip(*((entry.lr, entry.circuit) for entry in curve.val_loss), strict=True)
    pairs = zip(curve.optimum, tried, strict=True)
    return all(min(values) / 4 <= rate <= 4 * max(values) for rate, values in pairs)


def _curve_table(curves: list[CurveSummary]) -> Table:
    rows = []
    for curve in curves:
        readings, growth = curve.readings, curve.growth_per_doubling
        picked = [
            f"{format_short(r.tokens)}: {format_nats(r.mean)} {format_interval(r.band)}"
            for r in (readings[0], readings[len(readings) // 2], readings[-1])
        ]
        rows.append([curve.arm, *picked, *_estimate_cells(growth)])
    head = ["arm", "first evaluation", "middle", "last", "growth", "95 % interval"]
    notes = [
        "bands cover all evaluations simultaneously; growth: change of the gap over the last"
        " doubling of tokens",
        "evaluations before the end of a schedule describe, and decide nothing",
    ]
    return Table("validation gap while training", head, rows, notes)


def make_distance_table(family: FunctionDistance) -> Table:
    """Return the distances of one size at the end of training."""
    rows = []
    for one in family.distances:
        cells = [one.arm, str(one.n), format_known(one.end, ".3g")]
        cells.append(format_interval(one.interval, ".3g"))
        times = one.times_another_seed, one.times_rounding
        rows.append([*cells, *(format_known(x, lambda x: f"× {format_ratio(x)}") for x in times)])
    head = ["arm", "n", "nats", "95 % interval", "times another seed", "times rounding"]
    notes = [
        f"½ (KL(p‖q) + KL(q‖p)) at {family.positions:,} positions of the validation split;"
        " geometric mean over pairs. It has no direction: smaller is not better",
        *(f"not read: {line}" for line in family.faults),
    ]
    return Table(f"function distance from {family.baseline} at the end", head, rows, notes)


def format_ratio(value: float) -> str:
    """Format a ratio: 0.37, 1,234 or 1.2e+11."""
    return f"{value:,.0f}" if 99.5 <= value < 1e5 else f"{value:.2g}"


def _series_table(along: str, series_of_arms: list[SeriesSummary]) -> Table:
    rows = []
    for series in series_of_arms:
        points = " ".join(
            f"{format_short(point.at)}: {format_known(point.mean, format_nats)}"
            for point in series.points
        )
        times = ["not measured", ""]
        if (worth := series.equivalent) is not None:
            times = [f"× {worth.times:.3f}", format_interval(worth.interval, ".3f")]
        cells = [series.arm, points, *_estimate_cells(series.growth_per_doubling), *times]
        rows.append([*cells, *_estimate_cells(series.asymptote)])
    head = ["arm", f"gap at {along}", "per doubling", "95 % interval", f"worth, in {along}"]
    head += ["interval", "at ∞", "95 % interval"]
    notes = [
        f"worth: how many times its {along} the baseline needs for the same loss; measured from"
        " three points on",
        "at ∞: the gap after infinitely many tokens, an extrapolation by L∞ + B·D^−β with one β",
    ]
    title = f"gap by {along}, each run with a whole schedule"
    return Table(title, head, rows, notes)


def _make_front_tables(fronts: list[Front]) -> list[Table]:
    """Return a table per data set, of its longest runs."""
    by_data: dict[str, list[Front]] = {}
    for front in fronts:
        by_data.setdefault(front.data_fingerprint, []).append(front)
    tables = []
    for own in by_data.values():
        tokens = max(front.tokens for front in own)
        source = f" of {own[0].data}" if len(by_data) > 1 else ""
        title = f"Pareto fronts of loss and cost, at {format_short(tokens)} tokens{source}"
        tables.append(_front_table(title, [front for front in own if front.tokens == tokens]))
    return tables


def _front_table(title: str, fronts: list[Front]) -> Table:
    rows, dominated = [], []
    for front in fronts:
        for arm in front.arms:
            if arm.is_significant and not arm.is_optimal:
                dominated.append(f"{arm.arm} ({front.cost})")
                continue
            mark = "Pareto-optimal" if arm.is_optimal else "not significantly dominated"
            cost = f"{format_short(arm.cost)} {front.cost}"
            rows.append([arm.arm, cost, f"{arm.mean:.4f}", mark])
    notes = [
        *[f"dominated: {format_list(dominated, 6)}"] * bool(dominated),
        "significance is adjusted by Holm over all pairs of arms, at any rate and cost; an arm with"
        " several rates is shown at the one with the lowest validation loss",
        "for time, give --times FILE, from `qkablate cost --measure --json`",
    ]
    return Table(title, ["arm", "cost", "mean test loss", ""], rows, notes)


def format_accuracy(value: float | None) -> str:
    """Format an accuracy: 12.5 %."""
    return format_known(value, lambda share: f"{100 * share:.1f} %")


def format_percent_more(value: float | None) -> str:
    """Format a relative difference: +1.2 %."""
    return format_known(value, "{:+z.1f} %".format)


def _estimate_cells(estimate: Estimate | None) -> list[str]:
    if estimate is None:
        return ["–", "–"]
    return [format_known(estimate.mean, format_nats), format_interval(estimate.interval)]


def format_gap_interval(gap: GapSummary) -> str:
    """Format the interval of a gap, open on a side where runs diverged."""
    if gap.bounds is None:
        return "–"
    low, high = gap.bounds
    left = "(−∞" if low is None else f"[{format_nats(low)}"
    return f"{left}, {'∞)' if high is None else f'{format_nats(high)}]'}"


def format_p(value: float | None, form: str = ".4f") -> str:
    """Format a p-value; its exact size does not matter where it is tiny."""
    return "< 0.0001" if value is not None and value < 1e-4 else format_known(value, form)
