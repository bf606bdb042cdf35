"""Spectra of the QK circuit: at initialization and at the end, and during training.

Shape suffixes: K singular values.
"""

import math

import numpy as np

from qkablate.analysis.comparison import head_metrics
from qkablate.analysis.comparison.curves import thin
from qkablate.analysis.comparison.head_metrics import OV_SPECTRUM, SPECTRUM, HeadMetrics, nan_mean
from qkablate.report.charts import base
from qkablate.report.charts.base import Chart, ChartPanel, Spec, round_digits
from qkablate.report.charts.heads import head_groups, layer_labels, panel_title
from qkablate.report.section import Section, format_n
from qkablate.table import format_short

_MAX_VALUES = 32  # singular values that a spectrum is drawn with
_MAX_PANELS = 12
_MIN_VALUE = 1e-4  # relative to the largest singular value; smaller ones are dropped
_MAX_TIMES = 6  # of training, that are drawn of an arm


def spectrum_chart(section: Section) -> Chart:
    """Chart the singular values of B at initialization and at the end, by layer."""
    return Chart("spectra", "Spectra of the QK circuit", *_draw_spectra(section, SPECTRUM, "B"))


def output_spectrum_chart(section: Section) -> Chart | None:
    """Chart those of M of an imported model."""
    if not section.is_imported:
        return None
    drawn = _draw_spectra(section, OV_SPECTRUM, "M")
    return Chart("output-spectra", "Spectra of the OV circuit", *drawn)


def _draw_spectra(section: Section, measure: str, matrix: str) -> tuple[str, list[ChartPanel]]:
    """Return the caption and a panel for each layer."""
    groups = head_groups(section)
    layers_shown = max(1, _MAX_PANELS // max(1, len(groups)))
    panels, counts = [], []
    for size, group in groups:
        rows: dict[int, list[Spec]] = {}
        labels: dict[int, int | str] = {}
        for arm in group:
            for when, tokens in (("start", 0), ("end", arm.entry.tokens)):
                if tokens in arm.tokens and (arrays := arm.at(measure, tokens)):
                    counts.append(len(arrays))
                    spectra = head_metrics.relative_spectra(arrays)
                    labels |= enumerate(layer_labels(arm, len(spectra)))
                    for layer, values_K in enumerate(spectra):
                        rows.setdefault(layer, []).extend(
                            _spectrum_rows(section, arm, when, values_K)
                        )
        drawn = sorted(layer for layer in rows if rows[layer])
        for layer in head_metrics.pick_evenly(drawn, layers_shown):
            title = panel_title(f"layer {labels[layer]}", size, len(groups) > 1)
            panels.append(_layer_panel(section, title, rows[layer]))
    times = "" if section.is_imported else " Thick: end of training; thin: initialization."
    caption = (
        f"Singular values of {matrix} relative to a head's largest, from the first to the"
        f" d_head-th; mean over the heads of a layer and over runs ({format_n(counts)}).{times} A"
        " line that falls early means a low effective rank."
    )
    return caption, panels


def _spectrum_rows(
    section: Section, arm: HeadMetrics, when: str, values_K: np.ndarray
) -> list[Spec]:
    name = arm.entry.name
    row = {"arm": name, "variant": section.style_names[name]}
    row |= {"when": when, "line": f"{name} {when}"}
    shown = thin([*range(1, len(values_K) + 1)], _MAX_VALUES)
    return [
        row | {"i": i, "value": round_digits(float(values_K[i - 1]), 3)}
        for i in shown
        if _MIN_VALUE <= values_K[i - 1] < math.inf
    ]


def _lines(section: Section, least: float | None = None) -> Spec:
    """Return the encoding of spectra, on axes down to the least value."""
    domain = {} if least is None else {"domain": [least, 1]}
    x = base.log_axis("i", "singular value, the largest first")
    y = base.log_axis("value", "relative to the largest", "~g", **domain)
    return {"x": x, "y": y, "detail": {"field": "line"}} | base.by_variant(section, "color")


def _make_panel(title: str, rows: list[Spec], lines: Spec, layers: list[Spec]) -> ChartPanel:
    """Return a panel of lines, with invisible points as targets of tooltips."""
    when = "tokens" if "tokens" in rows[0] else ""
    tooltip = base.make_tooltip(
        arm="", when=when, i="singular value", value="relative to the largest"
    )
    points = base.make_layer("point", lines | {"tooltip": tooltip}, size=70, opacity=0, filled=True)
    return base.make_panel(title, rows, [*layers, points], 200)


def _layer_panel(section: Section, title: str, rows: list[Spec]) -> ChartPanel:
    lines = _lines(section) | base.by_variant(section, "dash")
    layers = [
        base.make_layer("line", lines, shown, strokeWidth=width, opacity=opacity)
        for when, width, opacity in (("start", 1, 0.55), ("end", 2.5, 1))
        if (shown := [row for row in rows if row["when"] == when])
    ]
    return _make_panel(title, rows, lines, layers)


def spectra_by_tokens_chart(section: Section) -> Chart:
    """Chart the singular values of B during training, one panel per arm, averaged over layers."""
    by_title, counts = dict[str, list[Spec]](), list[int]()
    for size, group in head_groups(section):
        for arm in group:
            rows: list[Spec] = []
            times = head_metrics.pick_evenly(arm.tokens, _MAX_TIMES)
            for number, tokens in enumerate(times, 1):
                if arrays := arm.at(SPECTRUM, tokens):
                    counts.append(len(arrays))
                    values_K = nan_mean(head_metrics.relative_spectra(arrays), axis=0)
                    age = {"tokens": tokens, "age": number / len(times)}
                    spectrum = _spectrum_rows(section, arm, format_short(tokens), values_K)
                    rows += [row | age for row in spectrum]
            if len({row["when"] for row in rows}) > 2:  # start and end are drawn by layer
                name = section.style_names[arm.entry.name]
                by_title[panel_title(name, size, several=True)] = rows
    shown = dict([*by_title.items()][:_MAX_PANELS])
    least = min((row["value"] for rows in shown.values() for row in rows), default=1.0)
    shade: Spec = {"field": "age", "type": "quantitative", "legend": None}
    shade |= {"scale": {"domain": [0, 1], "range": [0.1, 1]}}
    lines = _lines(section, least)
    layers = [base.make_layer("line", lines | {"opacity": shade}, strokeWidth=2)]
    panels = [_make_panel(title, rows, lines, layers) for title, rows in shown.items()]
    caption = (
        f"Singular values of B as above, mean over layers, heads and runs ({format_n(counts)}), at"
        f" up to {_MAX_TIMES} times during training: faint early, strong late."
    )
    if len(shown) < len(by_title):
        caption += f" Only the first {_MAX_PANELS} of {len(by_title)} arms are shown."
    return Chart("spectra-training", "Spectra during training", caption, panels)
