"""Spectra of the QK circuit: at the start and the end by layer, and over training by arm.

Shape suffixes: L layers, H heads, K singular values.
"""

import math

import numpy as np

from qkablate.analysis.comparison.curves import thinned
from qkablate.analysis.comparison.head_metrics import SPECTRUM, Watched, mean, spectra
from qkablate.report.charts.base import Chart, Panel, Spec, colour, dash, tip, variants
from qkablate.report.charts.heads import groups, titled
from qkablate.report.section import Chapter, span
from qkablate.table import short

_VALUES = 32  # singular values that a spectrum is drawn with
_PANELS = 12
_LEAST = 1e-4  # of the largest singular value: what is below is not looked at
_MOMENTS = 6  # of training, that are drawn of an arm


def head_spectra(chapter: Chapter) -> Chart | None:
    """Singular values of B at the start and at the end, by layer."""
    found = groups(chapter)
    layers_shown = max(1, _PANELS // max(1, len(found)))
    panels, counts = [], []
    for place, group in found:
        rows: dict[int, list[Spec]] = {}
        for own in group:
            for when, tokens in _ends(own):
                arrays = own.at(SPECTRUM, tokens)
                if not arrays:
                    continue
                counts.append(len(arrays))
                for layer, values_K in enumerate(spectra(arrays)):
                    rows.setdefault(layer, []).extend(_spectrum(own, when, values_K))
        known = sorted(layer for layer in rows if rows[layer])
        for layer in _some(known, layers_shown):
            title = titled(f"layer {layer}", place, len(found) > 1)
            spec = _spectrum_panel(chapter, rows[layer])
            panels.append(Panel(title, spec, variants(rows[layer])))
    if not panels:
        return None
    caption = (
        "Singular values of B, a head's by its largest, from the first to the d_head-th; mean over"
        f" the heads of a layer and over runs ({span(counts)}). Thick: at the end of training;"
        " thin: at its start. A line that falls early is a head that looks in few directions."
    )
    return Chart("spectra", "Spectra of the QK circuit", caption, panels)


def _ends(own: Watched) -> list[tuple[str, int]]:
    tokens = own.tokens
    last = [("end", own.entry.tokens)] if own.entry.tokens in tokens else []
    return ([("start", 0)] if 0 in tokens else []) + last


def _spectrum(own: Watched, when: str, values_K: np.ndarray) -> list[Spec]:
    arm = {"arm": own.entry.name, "variant": own.entry.arm.variant, "when": when}
    shown = thinned([*range(1, len(values_K) + 1)], _VALUES)
    known = [(i, float(values_K[i - 1])) for i in shown]
    return [
        arm | {"line": f"{own.entry.name} {when}", "i": i, "value": float(f"{value:.3g}")}
        for i, value in known
        if math.isfinite(value) and value >= _LEAST
    ]


def _spectrum_panel(chapter: Chapter, rows: list[Spec]) -> Spec:
    lines = _axes() | {"detail": {"field": "line"}} | colour(chapter)
    tooltip = [tip("arm"), tip("when"), tip("i", "singular value"), tip("value", "by the largest")]
    ends = {when: [row for row in rows if row["when"] == when] for when in ("start", "end")}
    thin: Spec = {"type": "line", "strokeWidth": 1, "opacity": 0.55}
    thick: Spec = {"type": "line", "strokeWidth": 2.5}
    layers = [
        {"data": {"values": ends[when]}, "mark": mark, "encoding": lines | dash(chapter)}
        for when, mark in (("start", thin), ("end", thick))
        if ends[when]
    ]
    mark = {"type": "point", "size": 70, "opacity": 0, "filled": True}
    layers.append({"mark": mark, "encoding": lines | {"tooltip": tooltip}})
    return {"height": 200, "data": {"values": rows}, "layer": layers}


def _axes() -> Spec:
    x: Spec = {"field": "i", "type": "quantitative", "title": "singular value, the largest first"}
    x |= {"scale": {"type": "log", "nice": False}, "axis": {"format": "~s", "tickCount": 5}}
    y: Spec = {"field": "value", "type": "quantitative", "title": "by the largest"}
    y |= {"scale": {"type": "log", "nice": False}, "axis": {"format": "~g", "tickCount": 5}}
    return {"x": x, "y": y}


def spectra_by_tokens(chapter: Chapter) -> Chart | None:
    """The same over training: an arm a panel, the mean over its layers."""
    found, counts = dict[str, list[Spec]](), list[int]()
    for place, group in groups(chapter):
        for own in group:
            rows: list[Spec] = []
            moments = _some(own.tokens, _MOMENTS)
            for number, tokens in enumerate(moments):
                if arrays := own.at(SPECTRUM, tokens):
                    counts.append(len(arrays))
                    values_K = mean(spectra(arrays), axis=0)
                    age = {"tokens": tokens, "age": (number + 1) / len(moments)}
                    rows += [row | age for row in _spectrum(own, short(tokens), values_K)]
            if len({row["when"] for row in rows}) > 2:  # start and end are drawn by layer
                found[titled(own.entry.arm.variant, place, several=True)] = rows
    if not found:
        return None
    shown = dict([*found.items()][:_PANELS])
    least = min(row["value"] for rows in shown.values() for row in rows)
    panels = [
        Panel(title, _moments_panel(chapter, rows, least), variants(rows))
        for title, rows in shown.items()
    ]
    caption = (
        "Singular values of B as above, mean over layers, heads and runs"
        f" ({span(counts)}), at up to {_MOMENTS} moments of training: pale early, dark late."
    )
    if len(shown) < len(found):
        caption += f" The first {_PANELS} arms of {len(found)}."
    return Chart("spectra-training", "Spectra over training", caption, panels)


def _moments_panel(chapter: Chapter, rows: list[Spec], least: float) -> Spec:
    axes = _axes()
    axes["y"]["scale"]["domain"] = [least, 1]  # the same for all arms
    lines = axes | {"detail": {"field": "line"}} | colour(chapter)
    shade: Spec = {"field": "age", "type": "quantitative", "legend": None}
    shade |= {"scale": {"domain": [0, 1], "range": [0.1, 1]}}
    tooltip = [
        *(tip("arm"), tip("when", "tokens")),
        *(tip("i", "singular value"), tip("value", "by the largest")),
    ]
    point = {"type": "point", "size": 70, "opacity": 0, "filled": True}
    layers = [
        {"mark": {"type": "line", "strokeWidth": 2}, "encoding": lines | {"opacity": shade}},
        {"mark": point, "encoding": lines | {"tooltip": tooltip}},
    ]
    return {"height": 200, "data": {"values": rows}, "layer": layers}


def _some(items: list[int], count: int) -> list[int]:
    """At most so many, first and last among them; of one, the last."""
    if len(items) <= count:
        return items
    if count == 1:
        return items[-1:]
    return [items[round(i)] for i in np.linspace(0, len(items) - 1, count)]
