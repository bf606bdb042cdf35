"""Shared pieces of charts, as Vega-Lite specs; names enter as data, never in an expression."""

from dataclasses import dataclass
from typing import Any

from qkablate.report.section import Section

Spec = dict[str, Any]
ROW_HEIGHT = 24  # pixels


@dataclass(frozen=True)
class ChartPanel:
    """One plot of a chart, with the variants in it."""

    title: str
    spec: Spec
    variants: list[str]


@dataclass(frozen=True)
class Chart:
    """A chart of the report; `name` is also the suffix of its file."""

    name: str
    title: str
    caption: str
    panels: list[ChartPanel]

    @property
    def variants(self) -> list[str]:
        return list(dict.fromkeys(v for panel in self.panels for v in panel.variants))


def arm_axis(names: list[str]) -> Spec:
    """Return a y axis with one row per name, in this order."""
    y: Spec = {"field": "arm", "type": "nominal", "sort": names, "title": None}
    y |= {"axis": {"labelLimit": 340, "ticks": False, "domain": False, "grid": False}}
    return y | {"scale": {"domain": names}}


def zero_line(axis: str) -> Spec:
    """Return a dashed line at zero."""
    return {
        "data": {"values": [{"at": 0}]},
        "mark": {"type": "rule", "color": "var(--faint)", "strokeDash": [3, 3]},
        "encoding": {axis: {"field": "at", "type": "quantitative"}},
    }


def if_intervals(rows: list[Spec], layer: Spec) -> list[Spec]:
    """Return the layer for the rows that have an interval, or nothing if none has."""
    if all(row["low"] is None for row in rows):
        return []
    return [layer | {"transform": [{"filter": {"field": "low", "valid": True}}]}]


OPEN_NOTE = " A pale bar to the edge: runs diverged, so the interval is unbounded on that side."


def open_intervals(rows: list[Spec], y: Spec, own: Spec) -> list[Spec]:
    """Return pale bars from the mean to the edge where runs diverged."""
    layers: list[Spec] = []
    for key, edge in (("open_below", 0), ("open_above", "width")):
        if any(row[key] for row in rows):
            x = {"x": {"field": "gap", "type": "quantitative"}, "x2": {"value": edge}}
            mark = {"type": "rule", "strokeWidth": 3, "opacity": 0.3}
            layer = {"transform": [{"filter": {"field": key, "equal": True}}], "mark": mark}
            layers.append(layer | {"encoding": {**x, "y": y} | own})
    return layers


def tooltip_field(field: str, title: str = "") -> Spec:
    """Return one line of a tooltip."""
    return {"field": field, "type": "nominal", "title": title or field}


def find_variants(*lists: list[Spec]) -> list[str]:
    """Return the variants of all rows, each once."""
    return list(dict.fromkeys(row["variant"] for rows in lists for row in rows))


def _scale(section: Section, which: str) -> Spec:
    looks = section.styles
    return {"domain": [*looks], "range": [getattr(look, which) for look in looks.values()]}


def _by_variant(section: Section, which: str) -> Spec:
    own: Spec = {"field": "variant", "type": "nominal", "legend": None}
    return own | {"scale": _scale(section, which)}


def color_by_variant(section: Section) -> Spec:
    """Return the color encoding."""
    return {"color": _by_variant(section, "color")}


def dash_by_variant(section: Section) -> Spec:
    """Return the dash encoding."""
    return {"strokeDash": _by_variant(section, "dash")}


def shape_by_variant(section: Section) -> Spec:
    """Return the point shape encoding."""
    return {"shape": _by_variant(section, "shape")}
