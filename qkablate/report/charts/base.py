"""What charts are made of. A picture is made of numbers and of names that are data, never part
of an expression.
"""

from dataclasses import dataclass
from typing import Any

from qkablate.report.section import Chapter

Spec = dict[str, Any]
ROW = 24  # pixels


@dataclass(frozen=True)
class Panel:
    title: str
    spec: Spec
    variants: list[str]


@dataclass(frozen=True)
class Chart:
    """`name` is also how its file ends."""

    name: str
    title: str
    caption: str
    panels: list[Panel]

    @property
    def variants(self) -> list[str]:
        return list(dict.fromkeys(v for panel in self.panels for v in panel.variants))


def rows_of(names: list[str]) -> Spec:
    """A row for each, in this order."""
    y: Spec = {"field": "arm", "type": "nominal", "sort": names, "title": None}
    y |= {"axis": {"labelLimit": 340, "ticks": False, "domain": False, "grid": False}}
    return y | {"scale": {"domain": names}}


def zero(axis: str) -> Spec:
    """A dashed line where there is no difference."""
    return {
        "data": {"values": [{"at": 0}]},
        "mark": {"type": "rule", "color": "var(--faint)", "strokeDash": [3, 3]},
        "encoding": {axis: {"field": "at", "type": "quantitative"}},
    }


def where_known(rows: list[Spec], layer: Spec) -> list[Spec]:
    """The layer, of the rows that have an interval; none where no row has."""
    if all(row["low"] is None for row in rows):
        return []
    return [layer | {"transform": [{"filter": {"field": "low", "valid": True}}]}]


OPEN = " A pale bar to the edge: on that side runs diverged, and the interval has no end."


def without_end(rows: list[Spec], y: Spec, own: Spec) -> list[Spec]:
    """Pale bars from the mean to the edge, where runs diverged."""
    layers: list[Spec] = []
    for key, edge in (("open_below", 0), ("open_above", "width")):
        if any(row[key] for row in rows):
            x = {"x": {"field": "gap", "type": "quantitative"}, "x2": {"value": edge}}
            mark = {"type": "rule", "strokeWidth": 3, "opacity": 0.3}
            layer = {"transform": [{"filter": {"field": key, "equal": True}}], "mark": mark}
            layers.append(layer | {"encoding": {**x, "y": y} | own})
    return layers


def tip(field: str, title: str = "") -> Spec:
    return {"field": field, "type": "nominal", "title": title or field}


def variants(*lists: list[Spec]) -> list[str]:
    return list(dict.fromkeys(row["variant"] for rows in lists for row in rows))


def _scale(chapter: Chapter, which: str) -> Spec:
    looks = chapter.looks
    return {"domain": [*looks], "range": [getattr(look, which) for look in looks.values()]}


def _by_variant(chapter: Chapter, which: str) -> Spec:
    own: Spec = {"field": "variant", "type": "nominal", "legend": None}
    return own | {"scale": _scale(chapter, which)}


def colour(chapter: Chapter) -> Spec:
    return {"color": _by_variant(chapter, "colour")}


def dash(chapter: Chapter) -> Spec:
    return {"strokeDash": _by_variant(chapter, "dash")}


def shape(chapter: Chapter) -> Spec:
    return {"shape": _by_variant(chapter, "shape")}
