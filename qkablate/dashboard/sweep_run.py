"""Content of a sweep's own W&B run: summary, gaps, charts, report page.

Gaps are logged here because each needs two runs. An error here never fails a finished sweep.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from qkablate.errors import UserError
from qkablate.tracking.wandb.run import LoggedTables

if TYPE_CHECKING:
    from qkablate.analysis.comparison.function_distance import FunctionDistance
    from qkablate.analysis.comparison.summary import GapSummary

GAP_COLUMNS = [
    *("arm", "baseline", "n", "gap", "low", "high", "sd", "p", "p_holm", "detectable", "verdict"),
    *("perplexity_percent", "params_percent", "flops_percent", "arm_diverged"),
    *("baseline_diverged", "audit"),
]
DISTANCE_COLUMNS = [
    *("arm", "baseline", "n", "nats", "low", "high", "times_another_seed", "times_rounding"),
    "positions",
]
_SUMMARY_COLUMNS = ("gap", "low", "high", "n", "p_holm", "detectable", "verdict")
MAX_SUMMARY_GAPS = 100  # gaps in the summary: it is one line of a table
_HTML_HEAD = (
    '<!doctype html><meta charset="utf-8"><title>chart</title>'
    '<body style="margin:0;background:#fff">'
)


def make_sweep_tables(folder: Path, note: Callable[[str], None]) -> LoggedTables:
    """Make the tables, charts and page of a sweep; note in a line what is missing."""
    try:
        return _make_tables(folder, note)
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        note(f"W&B: the table of runs, without gaps, charts and the page: {first}")
        return LoggedTables()


def _make_tables(folder: Path, note: Callable[[str], None]) -> LoggedTables:
    from qkablate.analysis.study.study import read_study
    from qkablate.report import rows
    from qkablate.report.charts import make_charts
    from qkablate.report.page import render_page
    from qkablate.report.render import render_chart
    from qkablate.report.section import Section
    from qkablate.report.text.summary import summarize

    study = read_study(folder)
    section = Section(study.name, f"read from {folder}", study)
    verdicts = [[cell.text for cell in row] for row in rows.make_verdict_rows(section)]
    gaps = [*map(make_gap_row, section.summary.gaps)]
    summary: dict[str, object] = {"answer": " ".join(summarize(section))}
    for gap in gaps[:MAX_SUMMARY_GAPS]:
        summary[f"gap/{gap['arm']}"] = {name: gap[name] for name in _SUMMARY_COLUMNS}
    pages = {"report": render_page([section], section.title)}
    for chart in [chart for chart in make_charts(section) if chart.panels]:
        try:
            drawn = render_chart(chart, section.title, "svg").decode()
        except UserError as error:
            note(f"W&B: {error}")
        else:
            pages[f"charts/{chart.name}"] = f"{_HTML_HEAD}{drawn}"
    return LoggedTables(
        tables={
            "verdicts": (rows.verdict_columns(section), verdicts),
            "gaps": (GAP_COLUMNS, [list(row.values()) for row in gaps]),
            "distances": (DISTANCE_COLUMNS, _distance_rows(section.summary.function_distance)),
        },
        pages=pages,
        summary=summary,
    )


def make_gap_row(gap: "GapSummary") -> dict[str, object]:
    """Return one row of the table of gaps."""
    low, high = gap.bounds or (None, None)
    doubts = [f"{check.name}: {check.message}" for check in gap.audit if check.state != "ok"]
    row = {**vars(gap), "gap": gap.mean, "low": low, "high": high, "verdict": gap.verdict}
    row["audit"] = "; ".join(doubts)
    return {name: _finite_or_none(row[name]) for name in GAP_COLUMNS}


def _distance_rows(families: "list[FunctionDistance]") -> list[list[object]]:
    """Return the function distances at the end of training, by baseline."""
    rows = []
    for family in families:
        for distance in family.distances:
            low, high = distance.interval or (None, None)
            row = {**vars(distance), "nats": distance.end, "low": low, "high": high}
            row |= {"baseline": family.baseline, "positions": family.positions}
            rows.append([_finite_or_none(row[name]) for name in DISTANCE_COLUMNS])
    return rows


def _finite_or_none(value: object) -> object:
    """Return None for infinite bounds and NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
