"""The pictures of the study, light and dark, each with a checksum of the data that it shows.

The checksum is of the chart before it is drawn: fonts, which differ from machine to machine, change
the picture and not the checksum. A picture with the same checksum is not drawn again.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from qkablate.disk import read_file
from qkablate.report.charts.base import Chart
from qkablate.report.charts.curves import gap_curve_chart, loss_chart
from qkablate.report.charts.forest import claim_chart
from qkablate.report.palette import DARK, LIGHT, darken
from qkablate.report.render import combine_panels, render_chart
from qkablate.report.study.charts import answers_chart, costs_chart
from qkablate.report.study.claims import StudiedClaim
from qkablate.report.text.setting import format_setting
from qkablate.strict_json import hash_json

ANSWERS, COSTS = "answers", "costs"  # the pictures of several claims
_CLIP = re.compile(r"\bclip\d+\b")
_MARK = "<!-- data sha256 {} -->\n"


@dataclass(frozen=True)
class Picture:
    """A chart of the study, with what it is about."""

    name: str  # of its files, without theme and suffix
    chart: Chart
    subject: str
    setting: str

    @cached_property
    def hash(self) -> str:
        """A checksum of everything that the picture shows."""
        spec = combine_panels(self.chart, self.subject, self.setting)
        return hash_json(_round([LIGHT, DARK, spec]))

    @property
    def files(self) -> list[str]:
        """The names of its files, in both themes."""
        return [f"{self.name}.svg", f"{self.name}-dark.svg"]

    def is_drawn(self, folder: Path) -> bool:
        """Return whether its files in a folder show the same already."""
        paths = [folder / name for name in self.files]
        return all(path.is_file() and read_hash(read_file(path)) == self.hash for path in paths)

    def render(self) -> dict[str, bytes]:
        """Return the picture in both themes, by the names of their files."""
        light = _renumber(render_chart(self.chart, self.subject, "svg", self.setting).decode())
        mark = _MARK.format(self.hash)
        themes = zip(self.files, (light, darken(light)), strict=True)
        return {name: f"{svg}\n{mark}".encode() for name, svg in themes}


def draw_pictures(claims: list[StudiedClaim]) -> Iterator[Picture]:
    """Yield the pictures of several claims, then those of each."""
    if (chart := answers_chart(claims)) is not None:
        yield Picture(ANSWERS, chart, "the claims of the study", "")
    if (costs := costs_chart(claims)) is not None:
        yield Picture(COSTS, costs[0], "the claims of the study", costs[1])
    for studied in claims:
        section = studied.section
        for make in (claim_chart, loss_chart, gap_curve_chart):
            chart = make(section)
            if chart is not None and chart.panels:
                name = f"{studied.slug}-{chart.name}"
                yield Picture(name, chart, section.title, format_setting(section))


def _renumber(svg: str) -> str:
    """Return a picture with clip paths from 0: the renderer counts on from picture to picture."""
    numbers = {name: f"clip{i}" for i, name in enumerate(dict.fromkeys(_CLIP.findall(svg)))}
    return _CLIP.sub(lambda match: numbers[match[0]], svg)


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
