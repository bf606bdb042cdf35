"""Shared pieces of charts, as Vega-Lite specs; names enter as data, never in an expression."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from qkablate.report.section import Section
from qkablate.report.text.table import Table

Spec = dict[str, Any]
ROW_HEIGHT = 24  # pixels
LOG_MARK = " (log)"  # page.js removes it from linear axes
SHADES = ("low3", "low2", "low1", "mid", "high1", "high2", "high3")  # of negative and positive


@dataclass(frozen=True)
class ChartPanel:
    """One plot of a chart, with the variants in it."""

    title: str
    spec: Spec
    variants: list[str] = field(default_factory=list)

    @property
    def has_own_width(self) -> bool:
        return bool({"width", "facet"} & self.spec.keys())


@dataclass(frozen=True)
class Chart:
    """A chart of the report; `name` is also the suffix of its file."""

    name: str
    title: str
    caption: str
    panels: list[ChartPanel]
    table: Table | None = None  # numbers below the panels, or in place of them
    columns: int = 2  # of panels in a picture

    @property
    def variants(self) -> list[str]:
        return list(dict.fromkeys(v for panel in self.panels for v in panel.variants))


def make_panel(
    title: str, rows: list[Spec], layers: list[Spec], height: int = 240, *more: list[Spec]
) -> ChartPanel:
    """Return layers over some rows; `more` rows are in layers of their own."""
    spec: Spec = {"height": height, "data": {"values": rows}, "layer": layers}
    return ChartPanel(title, spec, find_variants(rows, *more))


def number_axis(field: str, title: str, **scale: object) -> Spec:
    """Return an axis of numbers."""
    return {"field": field, "type": "quantitative", "title": title, "scale": scale}


def log_axis(field: str, title: str, form: str = "~s", **scale: object) -> Spec:
    """Return a logarithmic axis with few labels, marked as one."""
    axis = number_axis(field, f"{title}{LOG_MARK}", type="log", nice=False, **scale)
    return axis | {"axis": {"format": form, "tickCount": 5}}


def arm_axis(names: list[str]) -> Spec:
    """Return a y axis with one row per name, in this order."""
    y: Spec = {"field": "arm", "type": "nominal", "sort": names, "title": None}
    y |= {"axis": {"labelLimit": 340, "ticks": False, "domain": False, "grid": False}}
    return y | {"scale": {"domain": names}}


def make_layer(
    mark: str, encoding: Spec, rows: list[Spec] | None = None, /, **options: Any
) -> Spec:
    """Return a layer of marks, of the rows of the chart or of its own."""
    layer: Spec = {"mark": {"type": mark, **options}, "encoding": encoding}
    return layer if rows is None else {"data": {"values": rows}} | layer


def zero_line(axis: str) -> Spec:
    """Return a dashed line at zero."""
    at = {axis: {"field": "at", "type": "quantitative"}}
    return make_layer("rule", at, [{"at": 0}], color="var(--faint)", strokeDash=[3, 3])


def interval_layer(
    mark: str, axis: str, rows: list[Spec], encoding: Spec, **options: Any
) -> list[Spec]:
    """Return marks from low to high for the rows that have an interval, if any has."""
    if all(row["low"] is None for row in rows):
        return []
    ends = {axis: encoding[axis] | {"field": "low"}, f"{axis}2": {"field": "high"}}
    layer = make_layer(mark, encoding | ends, **options)
    return [layer | {"transform": [{"filter": {"field": "low", "valid": True}}]}]


def format_open_note(rows: list[Spec], cause: str = "runs diverged, so ") -> str:
    """Return the note of a caption about intervals that are unbounded, if any is."""
    if not any(row["open_below"] or row["open_above"] for row in rows):
        return ""
    return f" A pale bar to the edge: {cause}the interval is unbounded on that side."


def open_intervals(
    rows: list[Spec], y: Spec, color: Spec, data: list[Spec] | None = None
) -> list[Spec]:
    """Return pale bars from the mean to the edge where the interval is unbounded.

    The layers draw the rows of their panel, or `data`.
    """
    layers = []
    for key, edge in (("open_below", 0), ("open_above", "width")):
        if any(row[key] for row in rows):
            x = {"x": {"field": "gap", "type": "quantitative"}, "x2": {"value": edge}}
            layer = make_layer("rule", {**x, "y": y} | color, data, strokeWidth=3, opacity=0.3)
            layers.append(layer | {"transform": [{"filter": {"field": key, "equal": True}}]})
    return layers


def make_tooltip(**titles: str) -> list[Spec]:
    """Return a tooltip with a line per field; an empty title is the field's name."""
    return [
        {"field": field, "type": "nominal", "title": title or field}
        for field, title in titles.items()
    ]


def find_variants(*lists: list[Spec]) -> list[str]:
    """Return the variants of all rows, each once."""
    return list(dict.fromkeys(row["variant"] for rows in lists for row in rows if "variant" in row))


def make_facet(field: str, rows: list[Spec], size: int) -> Spec:
    """Return one map per value of a field, in the order of the rows, with labels of this size."""
    header = {"title": None, "labelColor": "var(--ink)", "labelFontSize": size, "labelPadding": 3}
    order = list(dict.fromkeys(row[field] for row in rows))
    return {"field": field, "type": "nominal", "sort": order, "header": header}


def round_digits(value: float, digits: int) -> float:
    """Round to the resolution of a chart: many digits would only make the page larger."""
    return float(f"{value:.{digits}g}")


def color_by(field: str, steps: list[float], shades: Sequence[str] = SHADES) -> Spec:
    """Return the encoding of a number by shades that begin at rising steps."""
    scale = {"type": "threshold", "domain": steps, "range": [f"var(--{name})" for name in shades]}
    return {"field": field, "type": "quantitative", "scale": scale, "legend": None}


def shade_legend(title: str) -> Spec:
    """Return the legend of shades that begin at steps, as a bar below the panel."""
    place = {"orient": "bottom", "direction": "horizontal", "gradientLength": 260}
    labels = {"labelOverlap": "greedy", "labelSeparation": 8}  # those that fit, apart
    return {"title": title, "type": "gradient", "titleColor": "var(--faint)", **place, **labels}


def by_variant(section: Section, *attributes: str) -> Spec:
    """Return the encodings of variants by `color`, `dash` or `shape`."""
    encoding = {}
    for attribute in attributes:
        values = [getattr(style, attribute) for style in section.styles.values()]
        scale = {"domain": [*section.styles], "range": values}
        by = {"field": "variant", "type": "nominal", "legend": None, "scale": scale}
        encoding["strokeDash" if attribute == "dash" else attribute] = by
    return encoding
