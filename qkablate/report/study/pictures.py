"""The pictures of the study, light and dark, each with a checksum of the data that it shows.

The checksum is of the chart before it is drawn: fonts, which differ from machine to machine, change
the picture and not the checksum.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from qkablate.report.charts.base import Chart
from qkablate.report.charts.curves import gap_curve_chart, loss_chart
from qkablate.report.charts.forest import claim_chart
from qkablate.report.palette import darken
from qkablate.report.render import render_chart
from qkablate.report.study.charts import answers_chart, costs_chart
from qkablate.report.study.claims import StudiedClaim
from qkablate.report.text.setting import format_setting
from qkablate.strict_json import hash_json

ANSWERS, COSTS = "answers", "costs"  # the pictures of several claims
_CLIP = re.compile(r"\bclip\d+\b")
_MARK = "<!-- data sha256 {} -->\n"


def draw_pictures(claims: list[StudiedClaim]) -> Iterator[tuple[str, Chart, str, str]]:
    """Yield the pictures: name, chart, subject and setting."""
    if (chart := answers_chart(claims)) is not None:
        yield ANSWERS, chart, "the claims of the study", ""
    if (costs := costs_chart(claims)) is not None:
        yield COSTS, costs[0], "the claims of the study", costs[1]
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
