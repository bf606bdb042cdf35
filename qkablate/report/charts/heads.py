"""What the heads are like: maps and curves of what diagnosing steps measured.

Shape suffixes: L layers, H heads, K singular values.
"""

import math
from itertools import pairwise

import numpy as np

from qkablate.analysis.comparison.head_metrics import (
    BY_HEAD,
    BY_TOKENS,
    Watched,
    sorted_heads,
)
from qkablate.report.charts.base import Chart, Panel, Spec, tip, variants
from qkablate.report.charts.curves import lines_by_tokens, mean_readings
from qkablate.report.section import Chapter, place_of, span

_POINTS = 6_000  # of all curves of a chart
_CELLS = 6_000  # of all maps
_ROOMY = 8  # heads of an arm whose cells have room for a number
_WIDE, _GAP = 530, 14  # pixels of a panel, and between two arms


def groups(chapter: Chapter) -> list[tuple[str, list[Watched]]]:
    """What is drawn in one panel: the arms of one size that were watched."""
    found = [
        (
            place_of(name, group[0].arm.variant),
            [chapter.heads[entry.name] for entry in group if entry.name in chapter.heads],
        )
        for name, group in chapter.groups.items()
    ]
    return [(place, group) for place, group in found if group]


def titled(what: str, place: str, several: bool) -> str:
    return f"{what}, {place}" if several and place else what


def head_curves(chapter: Chapter) -> Chart | None:
    """Means over all heads, by tokens."""
    found = groups(chapter)
    most = max(6, min(24, _POINTS // max(1, len(BY_TOKENS) * len(chapter.heads))))
    panels, counts = [], []
    for place, group in found:
        for name, what in BY_TOKENS.items():
            rows: list[Spec] = []
            for own in group:
                if (curve := own.curve(name, most)) is not None:
                    rows += mean_readings(curve, own.entry)
                    counts.append(curve.samples[0].n)
            if rows:
                y: Spec = {"field": "loss", "type": "quantitative", "title": what}
                y |= {"scale": {"zero": False}}
                title = titled(what, place, len(found) > 1)
                spec = lines_by_tokens(chapter, rows, [], y)
                panels.append(Panel(title, spec, variants(rows)))
    if not panels:
        return None
    caption = (
        "Mean over all heads and layers that have it, and over an arm's runs that are done"
        f" ({span(counts)}); band: 95 % t interval of that mean, at each reading by itself. B is"
        " the matrix of a head's scores. Its distance from its start is told in the size of that"
        " start."
    )
    return Chart("heads", "Heads while training", caption, panels)


def head_maps(chapter: Chapter) -> Chart | None:
    """Layers by heads at the end, an arm beside the other."""
    found = groups(chapter)
    panels: list[Panel] = []
    counts, cells = list[int](), 0
    for place, group in found:
        own, seen, size = _maps(group)
        cells += size
        if own and (cells <= _CELLS or not panels):
            counts += seen
            panels += [
                Panel(titled(what, place, len(found) > 1), spec, []) for what, spec in own.items()
            ]
    if not panels:
        return None
    caption = (
        "At the end of training, a row a layer. A layer's heads stand in the order of their values,"
        f" the largest first, and each place is a mean over runs ({span(counts)}): which number a"
        " head has means nothing from seed to seed. Symmetry is 1 of a symmetric B and −1 of an"
        " antisymmetric one; induction is the attention to what came after the same token before."
    )
    if cells > _CELLS:
        caption += " The first sizes alone."
    return Chart("head-maps", "Head by head", caption, panels)


def _maps(group: list[Watched]) -> tuple[dict[str, Spec], list[int], int]:
    """Of one size: a picture for each measure, of how many runs they are, and their cells."""
    specs: dict[str, Spec] = {}
    counts, cells = list[int](), 0
    for name, what in BY_HEAD.items():
        rows: list[Spec] = []
        for label, own in _labelled(group):
            if arrays := own.last(name):
                counts.append(len(arrays))
                rows += _cells(label, sorted_heads(arrays))
        if rows:
            specs[what] = _map(rows)
            cells += len(rows)
    return specs, counts, cells


def _labelled(group: list[Watched]) -> list[tuple[str, Watched]]:
    """By their variants, where these tell them apart."""
    short = [own.entry.arm.variant for own in group]
    names = short if len({*short}) == len(short) else [own.entry.name for own in group]
    return [*zip(names, group, strict=True)]


def _cells(label: str, values_LH: np.ndarray) -> list[Spec]:
    return [
        {"arm": label, "layer": layer, "head": head + 1, "value": float(f"{value:.3g}")}
        for layer, values_H in enumerate(values_LH)
        for head, value in enumerate(map(float, values_H))
        if math.isfinite(value)
    ]


def _map(rows: list[Spec]) -> Spec:
    names = list(dict.fromkeys(row["arm"] for row in rows))
    heads = max(row["head"] for row in rows)
    roomy = heads <= _ROOMY
    step = 28 if roomy else 12
    layers: list[Spec] = [
        {
            "mark": {"type": "rect", "stroke": "var(--ground)", "strokeWidth": 1},
            "encoding": {"color": {"field": "value", "type": "quantitative"} | _shades(rows)},
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
        "columns": max(1, _WIDE // (step * heads + _GAP)),
        "spacing": _GAP,
        "spec": {
            "width": {"step": step},
            "height": {"step": 20 if roomy else step},
            "encoding": {
                "x": {"field": "head", "type": "ordinal", "title": None, "axis": None},
                "y": {"field": "layer", "type": "ordinal", "title": None, "axis": axis},
                "tooltip": [tip("arm"), tip("layer"), tip("head", "place"), tip("value")],
            },
            "layer": layers,
        },
    }


def _shades(rows: list[Spec]) -> Spec:
    """Steps of blue; where there are negative ones, of orange above zero and of blue below."""
    values = [row["value"] for row in rows]
    low, high = min(values), max(values)
    if low < 0:
        most = max(-low, high)
        steps = [most * part for part in (-0.6, -0.3, -0.1, 0.1, 0.3, 0.6)]
        names = ["low3", "low2", "low1", "mid", "high1", "high2", "high3"]
    else:
        width = max(high - low, high / 4) or 1.0  # what hardly differs looks alike
        steps = [low + width * part / 4 for part in (1, 2, 3)]
        names = ["mid", "low1", "low2", "low3"]
    assert all(one < other for one, other in pairwise(steps))
    scale = {"type": "threshold", "domain": steps, "range": [f"var(--{name})" for name in names]}
    return {"scale": scale, "legend": None}
