"""Spectra of the QK circuit: first and last by layer, and during training by arm.

Shape suffixes: L layers, H heads, K singular values.
"""

import math

import numpy as np

from qkablate.analysis.comparison.curves import thin
from qkablate.analysis.comparison.head_metrics import (
    SPECTRUM,
    HeadMetrics,
    nan_mean,
    relative_spectra,
)
from qkablate.report.charts.base import (
    Chart,
    ChartPanel,
    Spec,
    color_by_variant,
    dash_by_variant,
    find_variants,
    tooltip_field,
)
from qkablate.report.charts.heads import head_groups, panel_title
from qkablate.report.section import Section, format_n
from qkablate.table import format_short

_MAX_VALUES = 32  # singular values that a spectrum is drawn with
_MAX_PANELS = 12
_MIN_VALUE = 1e-4  # relative to the largest singular value; smaller ones are dropped
_MAX_TIMES = 6  # of training, that are drawn of an arm


def spectrum_chart(section: Section) -> Chart | None:
    """Chart the singular values of B at initialization and at the end, by layer."""
    found = head_groups(section)
    layers_shown = max(1, _MAX_PANELS // max(1, len(found)))
    panels, counts = [], []
    for place, group in found:
        rows: dict[int, list[Spec]] = {}
        for own in group:
            for when, tokens in _start_and_end(own):
                arrays = own.at(SPECTRUM, tokens)
                if not arrays:
                    continue
                counts.append(len(arrays))
                for layer, values_K in enumerate(relative_spectra(arrays)):
                    rows.setdefault(layer, []).extend(_spectrum_rows(own, when, values_K))
        known = sorted(layer for layer in rows if rows[layer])
        for layer in _pick_evenly(known, layers_shown):
            title = panel_title(f"layer {layer}", place, len(found) > 1)
            spec = _spectrum_panel(section, rows[layer])
            panels.append(ChartPanel(title, spec, find_variants(rows[layer])))
    if not panels:
        return None
    caption = (
        "Singular values of B relative to a head's largest, from the first to the d_head-th; mean"
        f" over the heads of a layer and over runs ({format_n(counts)}). Thick: end of training;"
        " thin: initialization. A line that falls early means a low effective rank."
    )
    return Chart("spectra", "Spectra of the QK circuit", caption, panels)


def _start_and_end(own: HeadMetrics) -> list[tuple[str, int]]:
    tokens = own.tokens
    last = [("end", own.entry.tokens)] if own.entry.tokens in tokens else []
    return ([("start", 0)] if 0 in tokens else []) + last


def _spectrum_rows(own: HeadMetrics, when: str, values_K: np.ndarray) -> list[Spec]:
    arm = {"arm": own.entry.name, "variant": own.entry.arm.variant, "when": when}
    shown = thin([*range(1, len(values_K) + 1)], _MAX_VALUES)
    known = [(i, float(values_K[i - 1])) for i in shown]
    return [
        arm | {"line": f"{own.entry.name} {when}", "i": i, "value": float(f"{value:.3g}")}
        for i, value in known
        if math.isfinite(value) and value >= _MIN_VALUE
    ]


def _spectrum_panel(section: Section, rows: list[Spec]) -> Spec:
    lines = _axes() | {"detail": {"field": "line"}} | color_by_variant(section)
    tooltip = [
        tooltip_field("arm"),
        tooltip_field("when"),
        tooltip_field("i", "singular value"),
        tooltip_field("value", "by the largest"),
    ]
    ends = {when: [row for row in rows if row["when"] == when] for when in ("start", "end")}
    thin: Spec = {"type": "line", "strokeWidth": 1, "opacity": 0.55}
    thick: Spec = {"type": "line", "strokeWidth": 2.5}
    layers = [
        {"data": {"values": ends[when]}, "mark": mark, "encoding": lines | dash_by_variant(section)}
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


def spectra_by_tokens_chart(section: Section) -> Chart | None:
    """Chart the singular values of B during training, one panel per arm, averaged over layers."""
    found, counts = dict[str, list[Spec]](), list[int]()
    for place, group in head_groups(section):
        for own in group:
            rows: list[Spec] = []
            moments = _pick_evenly(own.tokens, _MAX_TIMES)
            for number, tokens in enumerate(moments):
                if arrays := own.at(SPECTRUM, tokens):
                    counts.append(len(arrays))
                    values_K = nan_mean(relative_spectra(arrays), axis=0)
                    age = {"tokens": tokens, "age": (number + 1) / len(moments)}
                    rows += [
                        row | age for row in _spectrum_rows(own, format_short(tokens), values_K)
                    ]
            if len({row["when"] for row in rows}) > 2:  # start and end are drawn by layer
                found[panel_title(own.entry.arm.variant, place, several=True)] = rows
    if not found:
        return None
    shown = dict([*found.items()][:_MAX_PANELS])
    least = min(row["value"] for rows in shown.values() for row in rows)
    panels = [
        ChartPanel(title, _training_panel(section, rows, least), find_variants(rows))
        for title, rows in shown.items()
    ]
    caption = (
        "Singular values of B as above, mean over layers, heads and runs"
        f" ({format_n(counts)}), at up to {_MAX_TIMES} times during training: pale early,"
        " dark late."
    )
    if len(shown) < len(found):
        caption += f" Only the first {_MAX_PANELS} of {len(found)} arms are shown."
    return Chart("spectra-training", "Spectra during training", caption, panels)


def _training_panel(section: Section, rows: list[Spec], least: float) -> Spec:
    axes = _axes()
    axes["y"]["scale"]["domain"] = [least, 1]  # the same for all arms
    lines = axes | {"detail": {"field": "line"}} | color_by_variant(section)
    shade: Spec = {"field": "age", "type": "quantitative", "legend": None}
    shade |= {"scale": {"domain": [0, 1], "range": [0.1, 1]}}
    tooltip = [
        *(tooltip_field("arm"), tooltip_field("when", "tokens")),
        *(tooltip_field("i", "singular value"), tooltip_field("value", "by the largest")),
    ]
    point = {"type": "point", "size": 70, "opacity": 0, "filled": True}
    layers = [
        {"mark": {"type": "line", "strokeWidth": 2}, "encoding": lines | {"opacity": shade}},
        {"mark": point, "encoding": lines | {"tooltip": tooltip}},
    ]
    return {"height": 200, "data": {"values": rows}, "layer": layers}


def _pick_evenly(items: list[int], count: int) -> list[int]:
    """Return at most `count` evenly spaced items, first and last included; of one, the last."""
    if len(items) <= count:
        return items
    if count == 1:
        return items[-1:]
    return [items[round(i)] for i in np.linspace(0, len(items) - 1, count)]
