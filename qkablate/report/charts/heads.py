"""Curves and maps of head metrics.

Shape suffixes: L layers, H heads.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np

from qkablate.analysis.comparison import head_metrics
from qkablate.analysis.comparison.curves import Curve
from qkablate.analysis.comparison.head_metrics import HeadMetrics
from qkablate.analysis.stats import Interval
from qkablate.analysis.study.study import Entry
from qkablate.config.variant import layer_names
from qkablate.report.charts import base
from qkablate.report.charts.base import Chart, ChartPanel, Spec, round_digits
from qkablate.report.charts.curves import mean_layers, mean_rows, points_per_curve
from qkablate.report.section import Section, format_n, size_label
from qkablate.report.text.table import Table, format_known

_MAX_CELLS = 6_000  # of all maps
_MAX_HEADS_WITH_NUMBERS = 8  # heads of an arm whose cells have room for a number
_PANEL_WIDTH, _GAP = 530, 14  # pixels of a panel, and between two arms


def head_groups(section: Section) -> list[tuple[str, list[HeadMetrics]]]:
    """Return the arms with diagnostics, by size."""
    return [
        (size_label(name, entries[0].arm.variant), group)
        for name, entries in section.groups.items()
        if (group := [section.heads[e.name] for e in entries if e.name in section.heads])
    ]


def panel_title(metric: str, size: str, several: bool) -> str:
    """Return a panel's title, with the size if there are several."""
    return f"{metric}, {size}" if several and size else metric


def _find_curves(
    section: Section, metrics: Mapping[str, str]
) -> Iterator[tuple[str, str, list[tuple[Curve, Entry, Interval]]]]:
    """Yield for each size and metric the panel's title, the metric, and the curves of the arms."""
    groups = head_groups(section)
    most = points_per_curve(len(metrics) * len(section.heads), most=24)
    for size, group in groups:
        for name, metric in metrics.items():
            curves = [
                (curve, arm.entry, arm.bounds(name))
                for arm in group
                if arm.entry.name not in section.inspections  # which were not trained here
                if (curve := arm.curve(name, most)) is not None
            ]
            yield panel_title(metric, size, len(groups) > 1), metric, curves


def head_curve_chart(section: Section) -> Chart:
    """Chart head metrics by tokens, as means over all heads."""
    panels, counts = [], []
    for title, metric, curves in _find_curves(section, head_metrics.BY_TOKENS):
        counts += [curve.samples[0].n for curve, *_ in curves]
        if rows := [row for curve in curves for row in mean_rows(section, *curve)]:
            y = base.number_axis("loss", metric, zero=False)
            panels.append(base.make_panel(title, rows, mean_layers(section, rows, y)))
    caption = (
        "Mean over all heads and layers and over completed runs of an arm"
        f" ({format_n(counts)}); band: 95 % interval of the mean, pointwise. B is the bilinear"
        " form of a head's scores; its distance from initialization is relative to the norm of the"
        " initial B."
    )
    return Chart("heads", "Heads during training", caption, panels)


def rounding_chart(section: Section) -> Chart:
    """Chart the difference of the two orders of multiplication by tokens, beside the gap."""
    y = base.log_axis("loss", "relative difference", ".2~e")
    panels, counts = [], []
    for title, _, curves in _find_curves(section, head_metrics.ROUNDING):
        counts += [curve.samples[0].n for curve, *_ in curves]
        if rows := [
            row | {"estimate": f"{row['loss']:.2g}", "low": None, "high": None}
            for curve in curves
            for row in mean_rows(section, *curve)
            if row["loss"] > 0
        ]:
            panels.append(base.make_panel(title, rows, mean_layers(section, rows, y)))
    caption = (
        "‖X (W_q W_kᵀ) Xᵀ − (X W_q)(X W_k)ᵀ‖ / ‖(X W_q)(X W_k)ᵀ‖ of the scores: what a merged"
        " matrix can change by rounding alone. Mean over heads, layers and completed runs"
        f" ({format_n(counts)}); arms without two factors have none."
    )
    return Chart("rounding", "Two orders of multiplication", caption, panels)


def head_map_chart(section: Section) -> Chart:
    """Chart head metrics by layer and head at the end of training, side by side."""
    groups = head_groups(section)
    panels, counts, cells = list[ChartPanel](), list[int](), 0
    metrics = head_metrics.BY_IMPORTED_HEAD if section.is_imported else head_metrics.BY_HEAD
    all_cells = [
        (size, *_find_cells(group, metrics, is_sorted=not section.is_imported))
        for size, group in groups
    ]
    heads = {row["head"] for _, by, _ in all_cells for rows in by.values() for row in rows}
    if len(heads) == 1:
        return _single_head_chart(all_cells, [*metrics.values()], describe_time(section))
    for size, by_metric, numbers in all_cells:
        cells += sum(map(len, by_metric.values()))
        if by_metric and (cells <= _MAX_CELLS or not panels):
            counts += numbers
            panels += [
                ChartPanel(
                    panel_title(metric, size, len(groups) > 1), _map_spec(rows, section.is_imported)
                )
                for metric, rows in by_metric.items()
            ]
    order = (
        f"Heads are sorted by value, largest first, and averaged by rank over runs"
        f" ({format_n(counts)}), since head indices do not correspond between seeds."
    )
    if section.is_imported:
        order = (
            "One column per head, in the model's order. M is what a head writes of the token it"
            " attends to; the directionality is 1 where single columns dominate and −1 where single"
            " rows do; the balance is 0 where both factors are as large."
        )
    caption = (
        f"{describe_time(section)}, one row per layer. {order} Symmetry is 1 for a symmetric B and"
        " −1 for an antisymmetric one; induction is the attention to the token that followed the"
        " previous occurrence of the same token."
    )
    if cells > _MAX_CELLS:
        caption += " Only the first sizes are shown."
    return Chart("head-maps", "Head by head", caption, panels)


def describe_time(section: Section) -> str:
    """Return when the heads were measured, and of imported runs on what."""
    sources = dict.fromkeys(arm.source for arm in section.inspections.values())
    return f"As imported, on {' and '.join(sources)}" if section.is_imported else "End of training"


def _single_head_chart(
    all_cells: list[tuple[str, dict[str, list[Spec]], list[int]]], metrics: list[str], when: str
) -> Chart:
    """Return a table: a map of single cells would say less."""
    values: dict[tuple[str, ...], dict[str, float]] = {}
    for size, by_metric, _ in all_cells:
        for metric, rows in by_metric.items():
            for row in rows:
                key = (row["arm"], size, str(row["layer"]))
                values.setdefault(key, {})[metric] = row["value"]
    cells = [
        [*key, *(format_known(own.get(m), ".3g") for m in metrics)] for key, own in values.items()
    ]
    counts = [n for _, _, numbers in all_cells for n in numbers]
    caption = (
        f"{when}, mean over runs ({format_n(counts)}). Symmetry is 1 for a symmetric B and"
        " −1 for an antisymmetric one; induction is the attention to the token that followed the"
        " previous occurrence of the same token."
    )
    table = Table("The head of each layer", ["arm", "size", "layer", *metrics], cells)
    return Chart("head-maps", "Head by head", caption, [], table)


def _find_cells(
    group: list[HeadMetrics], metrics: Mapping[str, str], is_sorted: bool
) -> tuple[dict[str, list[Spec]], list[int]]:
    """Return the cells of one size by metric, and the numbers of runs."""
    variants = [arm.entry.arm.variant for arm in group]
    unique = len({*variants}) == len(variants)
    labels = variants if unique else [arm.entry.name for arm in group]
    by_metric: dict[str, list[Spec]] = {}
    counts: list[int] = []
    for name, metric in metrics.items():
        rows: list[Spec] = []
        for label, arm in zip(labels, group, strict=True):
            if arrays := arm.at(name, arm.entry.tokens):
                counts.append(len(arrays))
                values_LH = head_metrics.sort_heads(arrays) if is_sorted else arrays[0]
                layers = layer_labels(arm, len(values_LH))
                rows += _map_cells(label, layers, values_LH, first=1 if is_sorted else 0)
        if rows:
            by_metric[metric] = rows
    return by_metric, counts


def layer_labels(arm: HeadMetrics, count: int) -> list[int] | list[str]:
    """Return the layers of an arm as people read them: 0, or encoder 0."""
    names = layer_names(arm.entry.arm.config.model)
    if arm.entry.arm.config.model.form != "encoder_decoder" or len(names) != count:
        return [*range(count)]
    return [name.replace("_L", " ") for name in names]


def _map_cells(
    label: str, layers: Sequence[int | str], values_LH: np.ndarray, first: int
) -> list[Spec]:
    return [
        {"arm": label, "layer": layer, "head": head, "value": round_digits(value, 3)}
        for layer, values_H in zip(layers, values_LH, strict=True)
        for head, value in enumerate(map(float, values_H), first)
        if math.isfinite(value)
    ]


def _map_spec(rows: list[Spec], has_order: bool = False) -> Spec:
    heads = len({row["head"] for row in rows})
    roomy = heads <= _MAX_HEADS_WITH_NUMBERS
    step = 46 if roomy else 16
    color = {"color": _color([row["value"] for row in rows])}
    layers = [base.make_layer("rect", color, stroke="var(--ground)", strokeWidth=1)]
    if roomy:
        most = max(abs(row["value"]) for row in rows)
        form = ".1%" if most < 0.1 else ".2f" if most < 10 else ".0f" if most < 1e4 else ".0e"
        text = {"text": {"field": "value", "type": "quantitative", "format": form}}
        layers.append(base.make_layer("text", text, fontSize=12, color="var(--ink)"))
    axis = {"ticks": False, "domain": False, "labelAngle": 0}
    # Sites in the order of computation, numbers in their own.
    order = {"sort": None} if any(isinstance(row["layer"], str) for row in rows) else {}
    encoding = {
        "x": {
            "field": "head",
            "type": "ordinal",
            "title": None,
            "axis": axis if has_order else None,
        },
        "y": {"field": "layer", "type": "ordinal", "title": None, "axis": axis} | order,
        "tooltip": base.make_tooltip(arm="", layer="", head="" if has_order else "rank", value=""),
    }
    height = {"step": 28 if roomy else step}
    return {
        "data": {"values": rows},
        "facet": base.make_facet("arm", rows, 12),
        "columns": max(1, _PANEL_WIDTH // (step * heads + _GAP)),
        "spacing": _GAP,
        "spec": {"width": {"step": step}, "height": height, "encoding": encoding, "layer": layers},
    }


def _color(values: list[float]) -> Spec:
    """Return a sequential blue scale, or a diverging one if there are negative values."""
    low, high = min(values), max(values)
    if low < 0:
        parts = (-0.6, -0.3, -0.1, 0.1, 0.3, 0.6)
        return base.color_by("value", [max(-low, high) * part for part in parts])
    width = max(high - low, high / 4) or 1.0  # nearly equal values share a shade
    steps = [low + width * part / 4 for part in (1, 2, 3)]
    assert all(step < following for step, following in pairwise(steps))
    return base.color_by("value", steps, ("mid", "low1", "low2", "low3"))
