"""Curves and maps of head metrics.

Shape suffixes: L layers, H heads, K singular values.
"""

import math
from itertools import pairwise

import numpy as np

from qkablate.analysis.comparison.head_metrics import (
    BY_HEAD,
    BY_TOKENS,
    HeadMetrics,
    sort_heads,
)
from qkablate.report.charts.base import Chart, ChartPanel, Spec, find_variants, tooltip_field
from qkablate.report.charts.curves import make_line_spec, mean_rows
from qkablate.report.section import Section, format_n, size_label

_MAX_POINTS = 6_000  # of all curves of a chart
_MAX_CELLS = 6_000  # of all maps
_MAX_HEADS_WITH_NUMBERS = 8  # heads of an arm whose cells have room for a number
_PANEL_WIDTH, _GAP = 530, 14  # pixels of a panel, and between two arms


def head_groups(section: Section) -> list[tuple[str, list[HeadMetrics]]]:
    """Return the arms with diagnostics, by size."""
    found = [
        (
            size_label(name, group[0].arm.variant),
            [section.heads[entry.name] for entry in group if entry.name in section.heads],
        )
        for name, group in section.groups.items()
    ]
    return [(place, group) for place, group in found if group]


def panel_title(what: str, place: str, several: bool) -> str:
    """Return a panel's title, with the size if there are several."""
    return f"{what}, {place}" if several and place else what


def head_curve_chart(section: Section) -> Chart | None:
    """Chart head metrics by tokens, as means over all heads."""
    found = head_groups(section)
    most = max(6, min(24, _MAX_POINTS // max(1, len(BY_TOKENS) * len(section.heads))))
    panels, counts = [], []
    for place, group in found:
        for name, what in BY_TOKENS.items():
            rows: list[Spec] = []
            for own in group:
                if (curve := own.curve(name, most)) is not None:
                    rows += mean_rows(curve, own.entry)
                    counts.append(curve.samples[0].n)
            if rows:
                y: Spec = {"field": "loss", "type": "quantitative", "title": what}
                y |= {"scale": {"zero": False}}
                title = panel_title(what, place, len(found) > 1)
                spec = make_line_spec(section, rows, [], y)
                panels.append(ChartPanel(title, spec, find_variants(rows)))
    if not panels:
        return None
    caption = (
        "Mean over all heads and layers and over completed runs of an arm"
        f" ({format_n(counts)}); band: 95 % t interval of the mean, pointwise. B is the bilinear"
        " form of a head's scores; its distance from initialization is relative to the norm of the"
        " initial B."
    )
    return Chart("heads", "Heads during training", caption, panels)


def head_map_chart(section: Section) -> Chart | None:
    """Chart head metrics by layer and head at the end of training, side by side."""
    found = head_groups(section)
    panels: list[ChartPanel] = []
    counts, cells = list[int](), 0
    for place, group in found:
        own, seen, size = _make_maps(group)
        cells += size
        if own and (cells <= _MAX_CELLS or not panels):
            counts += seen
            panels += [
                ChartPanel(panel_title(what, place, len(found) > 1), spec, [])
                for what, spec in own.items()
            ]
    if not panels:
        return None
    caption = (
        "End of training, one row per layer. Heads are sorted by value, largest first, and averaged"
        f" by rank over runs ({format_n(counts)}), since head indices do not correspond between"
        " seeds. Symmetry is 1 for a symmetric B and −1 for an antisymmetric one; induction is the"
        " attention to the token that followed the previous occurrence of the same token."
    )
    if cells > _MAX_CELLS:
        caption += " Only the first sizes are shown."
    return Chart("head-maps", "Head by head", caption, panels)


def _make_maps(group: list[HeadMetrics]) -> tuple[dict[str, Spec], list[int], int]:
    """Return the maps of one size by metric, their numbers of runs and of cells."""
    specs: dict[str, Spec] = {}
    counts, cells = list[int](), 0
    for name, what in BY_HEAD.items():
        rows: list[Spec] = []
        for label, own in _label_arms(group):
            if arrays := own.last(name):
                counts.append(len(arrays))
                rows += _map_cells(label, sort_heads(arrays))
        if rows:
            specs[what] = _map_spec(rows)
            cells += len(rows)
    return specs, counts, cells


def _label_arms(group: list[HeadMetrics]) -> list[tuple[str, HeadMetrics]]:
    """Label arms by variant if that is unique, else by name."""
    short = [own.entry.arm.variant for own in group]
    names = short if len({*short}) == len(short) else [own.entry.name for own in group]
    return [*zip(names, group, strict=True)]


def _map_cells(label: str, values_LH: np.ndarray) -> list[Spec]:
    return [
        {"arm": label, "layer": layer, "head": head + 1, "value": float(f"{value:.3g}")}
        for layer, values_H in enumerate(values_LH)
        for head, value in enumerate(map(float, values_H))
        if math.isfinite(value)
    ]


def _map_spec(rows: list[Spec]) -> Spec:
    names = list(dict.fromkeys(row["arm"] for row in rows))
    heads = max(row["head"] for row in rows)
    roomy = heads <= _MAX_HEADS_WITH_NUMBERS
    step = 28 if roomy else 12
    layers: list[Spec] = [
        {
            "mark": {"type": "rect", "stroke": "var(--ground)", "strokeWidth": 1},
            "encoding": {"color": {"field": "value", "type": "quantitative"} | _color_scale(rows)},
        }
    ]
    if roomy:
        mark = {"type": "text", "fontSize": 10, "color": "var(--ink)"}
        most = max(abs(row["value"]) for row in rows)
        form = ".1%" if most < 0.1 else ".2f" if most < 10 else ".0f" if most < 1e4 else ".0e"
        text = {"field": "value", "type": "quantitative", "format": form}
        layers.append({"mark": mark, "encoding": {"text": text}})
    axis = {"ticks": False, "domain": False, "labelAngle": 0}
    header = {"title": None, "labelColor": "var(--ink)", "labelFontSize": 11, "labelPadding": 2}
    return {
        "data": {"values": rows},
        "facet": {"field": "arm", "type": "nominal", "sort": names, "header": header},
        "columns": max(1, _PANEL_WIDTH // (step * heads + _GAP)),
        "spacing": _GAP,
        "spec": {
            "width": {"step": step},
            "height": {"step": 20 if roomy else step},
            "encoding": {
                "x": {"field": "head", "type": "ordinal", "title": None, "axis": None},
                "y": {"field": "layer", "type": "ordinal", "title": None, "axis": axis},
                "tooltip": [
                    tooltip_field("arm"),
                    tooltip_field("layer"),
                    tooltip_field("head", "place"),
                    tooltip_field("value"),
                ],
            },
            "layer": layers,
        },
    }


def _color_scale(rows: list[Spec]) -> Spec:
    """Return a sequential blue scale, or a diverging one if there are negative values."""
    values = [row["value"] for row in rows]
    low, high = min(values), max(values)
    if low < 0:
        most = max(-low, high)
        steps = [most * part for part in (-0.6, -0.3, -0.1, 0.1, 0.3, 0.6)]
        names = ["low3", "low2", "low1", "mid", "high1", "high2", "high3"]
    else:
        width = max(high - low, high / 4) or 1.0  # nearly equal values share a shade
        steps = [low + width * part / 4 for part in (1, 2, 3)]
        names = ["mid", "low1", "low2", "low3"]
    assert all(one < other for one, other in pairwise(steps))
    scale = {"type": "threshold", "domain": steps, "range": [f"var(--{name})" for name in names]}
    return {"scale": scale, "legend": None}
