"""What the W&B run of a sweep shows beside its table of runs: the answer, gaps, charts, the page.

Gaps belong here: each takes two runs. Nothing of this may make a sweep fail that has ended well.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from qkablate.cli.results import need_analysis
from qkablate.errors import UserError
from qkablate.tracking.wandb.run import Shown

GAPS = [
    *("arm", "baseline", "n", "gap", "low", "high", "sd", "p", "p_holm", "detectable", "verdict"),
    *("perplexity_percent", "params_percent", "flops_percent", "arm_diverged"),
    *("baseline_diverged", "audit"),
]
DISTANCES = [
    *("arm", "baseline", "n", "nats", "low", "high", "times_another_seed", "times_rounding"),
    "positions",
]
MOST = 100  # gaps in the summary: it is one line of a table
_HTML = (
    '<!doctype html><meta charset="utf-8"><title>chart</title>'
    '<body style="margin:0;background:#fff">'
)


def shown(folder: Path, note: Callable[[str], None]) -> Shown:
    """All that can be made of the sweep in this folder; what is missing is told in a line."""
    try:
        need_analysis("jinja2", "vl_convert")
    except UserError as missing:
        note(f"W&B: the table of runs, without gaps, charts and the page: {missing}")
        return Shown()
    try:
        return _shown(folder, note)
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        note(f"W&B: the table of runs, without gaps, charts and the page: {first}")
        return Shown()


def _shown(folder: Path, note: Callable[[str], None]) -> Shown:
    from qkablate.analysis.study.study import read_study
    from qkablate.report import rows
    from qkablate.report.charts import charts
    from qkablate.report.page import page
    from qkablate.report.render import picture
    from qkablate.report.section import Chapter
    from qkablate.report.text.summary import answer

    study = read_study(folder)
    chapter = Chapter.of(study.name, f"read from {folder}", study)
    verdicts = [[cell.text for cell in row] for row in rows.verdicts(chapter)]
    gaps = [_gap(one) for one in chapter.found["gaps"]]
    pages = {"report": page([chapter], chapter.title)}
    for chart in charts(chapter):
        try:
            drawn = picture(chart, chapter, "svg").decode()
        except UserError as error:
            note(f"W&B: {error}")
        else:
            pages[f"charts/{chart.name}"] = f"{_HTML}{drawn}"
    return Shown(
        tables={
            "verdicts": ([*rows.COLUMNS], [[*row] for row in verdicts]),
            "gaps": (GAPS, [list(one.values()) for one in gaps]),
            "distances": (DISTANCES, _distances(chapter.found["function_distance"])),
        },
        pages=pages,
        summary={"answer": " ".join(answer(chapter))}
        | {f"gap/{one['arm']}": _in_summary(one) for one in gaps[:MOST]},
    )


def _gap(one: dict[str, Any]) -> dict[str, Any]:
    """A row of the table of gaps."""
    from qkablate.analysis.comparison.audit import OK
    from qkablate.report.text.tables import says

    low, high = one["interval"] or (None, None)
    doubts = [f"{check['name']}: {check['says']}" for check in one["audit"] if check["state"] != OK]
    own = {"gap": one["mean"], "low": low, "high": high, "verdict": says(one)}
    own["audit"] = "; ".join(doubts)
    return {name: _plain(own.get(name, one.get(name))) for name in GAPS}


def _distances(found: list[dict[str, Any]]) -> list[list[Any]]:
    """How far apart what arm and baseline predict is at the end, by every baseline."""
    rows = []
    for one in found:
        for apart in one["apart"]:
            low, high = apart["interval"] or (None, None)
            own = apart | {"nats": apart["end"], "low": low, "high": high}
            own |= {"baseline": one["baseline"], "positions": one["positions"]}
            rows.append([_plain(own[name]) for name in DISTANCES])
    return rows


def _in_summary(one: Mapping[str, Any]) -> dict[str, Any]:
    names = ("gap", "low", "high", "n", "p_holm", "detectable", "verdict")
    return {name: one[name] for name in names}


def _plain(value: Any) -> Any:
    """Of an interval without an end no number is told."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
