"""The verdicts of a study, short enough for one screen."""

from collections.abc import Sequence

from qkablate.analysis.comparison.audit import MARKS
from qkablate.analysis.comparison.summary import GapSummary, StudySummary
from qkablate.report.text.table import Table, format_known
from qkablate.report.text.tables import (
    describe_verdicts,
    format_accuracy,
    format_gap_interval,
    format_p,
)
from qkablate.table import format_list, format_nats


def make_verdict_tables(summary: StudySummary) -> list[Table]:
    """Return one table per baseline, and one of the arms that are compared with none.

    The columns that decide come first: on a narrow terminal the others follow in a second block.
    """
    baselines = [floor.baseline for floor in summary.noise_floor]
    compared = {*baselines, *(gap.arm for gap in summary.gaps)}
    alone = [arm.arm for arm in summary.arms if arm.arm not in compared]
    tables = [_make_table(summary, baseline) for baseline in baselines]
    return [*tables, _make_table(summary, None, alone)] if alone or not tables else tables


def _make_table(summary: StudySummary, baseline: str | None, alone: Sequence[str] = ()) -> Table:
    gaps = {gap.arm: gap for gap in summary.gaps if gap.baseline == baseline}
    nats = next((gap.margin.nats for gap in gaps.values() if gap.margin), None)
    arms = [arm for arm in summary.arms if arm.arm in {baseline, *gaps, *alone}]
    has_accuracy = any(arm.accuracy is not None for arm in arms)
    head = ["arm"]
    head += ["gap", "95 % interval", "decision", "p (Holm)"] if baseline else []
    head += ["done", "test loss", *["accuracy", "chance"] * has_accuracy]
    head += [f"p (gap ≥ {nats:g})", f"p (beyond ± {nats:g})"] if nats is not None else []
    rows = []
    for arm in arms:
        gap = gaps.get(arm.arm)
        cells = [arm.arm, *(_gap_cells(gap) if baseline else [])]
        cells += [f"{arm.n}/{len(arm.runs)}", format_known(arm.mean)]
        cells += [format_accuracy(arm.accuracy), format_accuracy(arm.chance)] * has_accuracy
        if nats is not None:
            margin = gap.margin if gap else None
            cells += [format_p(margin.p_noninferior if margin else None)]
            cells += [format_p(margin.p_equivalent if margin else None)]
        rows.append(cells)
    title = "test loss of arms that are compared with none" if summary.noise_floor else "test loss"
    title = f"gaps to {baseline}, paired by seed" if baseline else title
    notes = [*describe_verdicts([*gaps.values()]), *_warnings([*gaps.values()])]
    return Table(f"{title}; {summary.loss_unit}", head, rows, notes)


def _gap_cells(gap: GapSummary | None) -> list[str]:
    if gap is None:
        return ["", "", "baseline", ""]
    mean = format_known(gap.mean, format_nats)
    return [mean, format_gap_interval(gap), gap.short_verdict, format_p(gap.p_holm)]


def _warnings(gaps: list[GapSummary]) -> list[str]:
    """Return the first warning of each check of the audit, with all its arms."""
    first: dict[str, str] = {}
    arms: dict[str, list[str]] = {}
    for gap in gaps:
        for check in gap.audit:
            if check.is_warning:
                first.setdefault(check.name, f"{MARKS[check.state]} {check.name}: {check.message}")
                arms.setdefault(check.name, []).append(gap.arm)
    return [
        text + (f" ({format_list(arms[name])})" if len(gaps) > 1 else "")
        for name, text in first.items()
    ]
