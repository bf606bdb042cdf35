"""The pictures of the study, light and dark, each with a checksum of the data that it shows.

The checksum is of the chart before it is drawn: fonts, which differ from machine to machine, change
the picture and not the checksum.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from qkablate.report.charts import base
from qkablate.report.charts.base import Chart, Spec
from qkablate.report.charts.curves import gap_curve_chart, loss_chart
from qkablate.report.charts.forest import claim_chart
from qkablate.report.palette import darken
from qkablate.report.render import render_chart
from qkablate.report.study.claims import StudiedClaim
from qkablate.report.text.setting import format_setting
from qkablate.strict_json import hash_json

ANSWERS = "answers"  # name of the picture of all claims
_FARTHEST, _EDGE = 6.0, 7.0  # margins from zero: longer intervals are cut, and pale to the edge
_CLIP = re.compile(r"\bclip\d+\b")
_MARK = "<!-- data sha256 {} -->\n"


def draw_pictures(claims: list[StudiedClaim]) -> Iterator[tuple[str, Chart, str, str]]:
    """Yield the pictures: name, chart, subject and setting."""
    if (chart := answers_chart(claims)) is not None:
        yield ANSWERS, chart, "the claims of the study", ""
    for studied in claims:
        section = studied.section
        for make in (claim_chart, loss_chart, gap_curve_chart):
            chart = make(section)
            if chart is not None and chart.panels:
                name = f"{studied.slug}-{chart.name}"
                yield name, chart, section.title, format_setting(section)


def render_picture(chart: Chart, subject: str, setting: str) -> dict[str, bytes]:
    """Return a picture in both themes, by the end of its file's name."""
    light = _renumber(render_chart(chart, subject, "svg", setting).decode())
    mark = _MARK.format(hash_chart(chart, subject, setting))
    return {".svg": f"{light}\n{mark}".encode(), "-dark.svg": f"{darken(light)}\n{mark}".encode()}


def _renumber(svg: str) -> str:
    """Return a picture with clip paths from 0: the renderer counts on from picture to picture."""
    numbers = {name: f"clip{i}" for i, name in enumerate(dict.fromkeys(_CLIP.findall(svg)))}
    return _CLIP.sub(lambda match: numbers[match[0]], svg)


def hash_chart(chart: Chart, subject: str, setting: str) -> str:
    """Return a checksum of everything that a picture shows."""
    shown = [chart.title, chart.caption, [[p.title, p.spec] for p in chart.panels]]
    return hash_json(_round([*shown, subject, setting]))


def _round(value: Any) -> Any:
    """Return nested containers with numbers of six digits: the last ones depend on the CPU."""
    if isinstance(value, Mapping):
        return {key: _round(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_round(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def read_hash(svg: bytes) -> str | None:
    """Return the checksum at the end of a picture."""
    found = re.search(_MARK.strip().format("([0-9a-f]{64})").encode(), svg[-120:])
    return found[1].decode() if found else None


def answers_chart(claims: list[StudiedClaim]) -> Chart | None:
    """Chart the parts of all claims that have ended, in units of their margins."""
    rows = [row for studied in claims for row in _rows(studied)]
    if not rows:
        return None
    names = [row["arm"] for row in rows]
    y = base.arm_axis(names)
    title = "measured / claimed margin (left: better than the baseline, right: worse)"
    has_open = any(row["open_below"] or row["open_above"] for row in rows)
    ends = {"domain": [-_EDGE, _EDGE], "nice": False} if has_open else {"zero": True, "nice": True}
    x = base.number_axis("gap", title, **ends)
    ink = {"color": {"value": "var(--ink)"}}
    encoding = {"x": x, "y": y}
    margins = [{"arm": row["arm"], "at": at} for row in rows for at in row["edges"]]
    margin = {"x": x | {"field": "at"}, "y": y}
    layers = [
        base.zero_line("x"),
        base.make_layer("tick", margin, margins, thickness=3, size=20, color="var(--warn)"),
        *base.open_intervals(rows, y, ink),
        *base.interval_layer("rule", "x", rows, encoding, strokeWidth=3, color="var(--ink)"),
        base.make_layer(
            *("point", {"x": x | {"field": "estimate"}, "y": y}),
            **{"filled": True, "size": 70, "color": "var(--ink)"},
        ),
    ]
    panel = base.make_panel("", rows, layers, base.ROW_HEIGHT * (len(rows) + 1))
    caption = (
        "Each part of each claim: estimate and interval at its level, divided by the claimed margin"
        " (thick mark). An interval on the claimed side of its mark supports the part."
    )
    if has_open:
        caption += (
            f" Pale: beyond {_FARTHEST:g} margins, where an estimate has no point, or without a"
            " bound, as runs diverged."
        )
    return Chart(ANSWERS, "What the claims claimed, and what was measured", caption, [panel])


def _rows(studied: StudiedClaim) -> list[Spec]:
    judgement = studied.judgement
    counts = Counter(judged.comparison.part for judged in judgement.parts)
    rows: list[Spec] = []
    for judged in judgement.parts if judgement.has_ended else ():
        part = judged.part
        interval = part.sample.interval(1 - 2 * judgement.alpha)
        if interval is None or not math.isfinite(part.sample.mean):
            continue
        mean, low, high = (end / part.margin for end in (part.sample.mean, *interval))
        below = part.open_below or low < -_FARTHEST
        above = part.open_above or high > _FARTHEST
        estimate = base.round_digits(mean, 4) if abs(mean) <= _FARTHEST else None
        low, high, mean = (max(-_FARTHEST, min(_FARTHEST, end)) for end in (low, high, mean))
        edges = {"noninferior": [1], "worse": [1], "better": [-1]}.get(part.kind, [-1, 1])
        own = judged.comparison.part  # the arms' settings are needed where it has several
        name = own if counts[own] == 1 else part.name
        label = f"{studied.claim.name}: {name}: {judged.word}"
        rows.append(
            {"arm": label, "gap": base.round_digits(mean, 4), "edges": edges}
            | {"low": base.round_digits(low, 4), "high": base.round_digits(high, 4)}
            | {
                "open_below": below,
                "open_above": above,
                "estimate": estimate,
                "verdict": judged.word,
            }
        )
    return rows
