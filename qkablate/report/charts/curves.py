"""Curves of loss and gap by training tokens."""

import math

from qkablate.analysis.comparison.curves import Curve, arm_curve, gap_curve, thin
from qkablate.analysis.comparison.gaps import Family
from qkablate.analysis.study.study import VAL, Entry
from qkablate.report.charts.base import (
    Chart,
    ChartPanel,
    Spec,
    color_by_variant,
    dash_by_variant,
    find_variants,
    if_intervals,
    tooltip_field,
    zero_line,
)
from qkablate.report.section import Section, format_n, size_label
from qkablate.report.text.numbers import format_gap, format_loss

MAX_RUNS = 200  # whose curves are drawn one by one
_MAX_POINTS = 6_000  # of all curves of one chart


def loss_chart(section: Section) -> Chart | None:
    """Chart the loss by tokens."""
    entries = section.study.entries
    most = max(6, min(48, _MAX_POINTS // max(1, len(entries))))
    each = len(section.study.records) <= MAX_RUNS
    panels, counts = [], []
    for name, group in section.groups.items():
        means: list[Spec] = []
        single: list[Spec] = []
        for entry in group:
            own = arm_curve(entry, section.metric, most)
            if own is not None:
                means += mean_rows(own, entry)
                counts.append(own.samples[0].n)
            if each:
                single += _run_rows(entry, section.metric, most)
        if means or single:
            y: Spec = {"field": "loss", "type": "quantitative", "title": "loss, nats per token"}
            rows = [*means, *single]
            lowest = min(row["loss"] if row["low"] is None else row["low"] for row in rows)
            # A band that nearly reaches zero would fill a logarithmic axis.
            logarithmic = lowest > 1e-3 * max(row["loss"] for row in rows)
            y |= {"scale": {"type": "log", "nice": False} if logarithmic else {"zero": False}}
            title = size_label(name, group[0].arm.variant)
            spec = make_line_spec(section, means, single, y)
            panels.append(ChartPanel(title, spec, find_variants(means, single)))
    if not panels:
        return None
    what = "Validation" if section.metric == VAL else "Training"
    caption = (
        f"{what} loss. Thick lines: mean over completed runs of an arm ({format_n(counts)});"
        " band: 95 %"
    )
    caption += " t interval of the mean, pointwise."
    caption += (
        " Thin lines: individual runs, including incomplete and diverged ones." if each else ""
    )
    return Chart("losses", f"{what} loss", caption, panels)


def gap_curve_chart(section: Section) -> Chart | None:
    """Chart the gap by tokens, with a simultaneous confidence band."""
    found = [(family, one) for family in section.families for one in family.gaps]
    most = max(6, min(48, _MAX_POINTS // max(1, len(found))))
    by_family: dict[str, tuple[Family, list[Spec]]] = {}
    counts = []
    for family, one in found:
        own = gap_curve(one, section.metric, most)
        if own is not None:
            _, rows = by_family.setdefault(family.baseline.name, (family, []))
            rows += mean_rows(own, one.arm, band=True)
            counts.append(own.samples[0].n)
    y: Spec = {"field": "loss", "type": "quantitative", "title": "gap, nats per token"}
    y |= {"scale": {"zero": True}}
    panels = [
        ChartPanel(
            size_label(name, family.baseline.arm.variant),
            make_line_spec(section, rows, [], y, gap=True),
            find_variants(rows),
        )
        for name, (family, rows) in by_family.items()
    ]
    if not panels:
        return None
    what = "validation" if section.metric == VAL else "training"
    caption = (
        f"Gap in {what} loss to the baseline, paired by seed ({format_n(counts)}). Bands:"
        " simultaneous 95 % intervals over all readings. Gaps before the end of the schedule are descriptive"
        " only."
    )
    caption += " A single pair has no band." if min(counts) < 2 else ""
    return Chart("gap-curves", "Gap during training", caption, panels)


def make_line_spec(
    section: Section, rows: list[Spec], single: list[Spec], y: Spec, *, gap: bool = False
) -> Spec:
    """Return mean lines by tokens with their bands, above the thin lines of single runs."""
    x: Spec = {"field": "tokens", "type": "quantitative", "title": "tokens"}
    x |= {"scale": {"type": "log", "nice": False}, "axis": {"format": "~s", "tickCount": 5}}
    tooltip = [tooltip_field("arm"), {"field": "tokens", "type": "quantitative", "format": ","}]
    tooltip += [tooltip_field("told", "mean and interval"), tooltip_field("n")]
    lines = {"x": x, "y": y, "detail": {"field": "arm"}} | color_by_variant(section)
    layers: list[Spec] = []
    if gap:
        layers.append(zero_line("y"))
    if single:
        layers.append(
            {
                "data": {"values": single},
                "mark": {"type": "line", "strokeWidth": 0.8, "opacity": 0.35},
                "encoding": lines | {"detail": {"field": "run"}},
            }
        )
    if rows:
        seen = int(len({row["tokens"] for row in rows}) == 1)
        band = {**y, "field": "low"}
        layers += [
            *if_intervals(
                rows,
                {
                    "mark": {"type": "area", "opacity": 0.13},
                    "encoding": lines | {"y": band, "y2": {"field": "high"}},
                },
            ),
            {
                "mark": {"type": "line", "strokeWidth": 2},
                "encoding": lines | dash_by_variant(section),
            },
            {
                # Target of tooltips; visible where a single reading makes no line.
                "mark": {"type": "point", "size": 90, "opacity": seen, "filled": True},
                "encoding": lines | {"tooltip": tooltip},
            },
        ]
    return {"height": 240, "data": {"values": rows}, "layer": layers}


def mean_rows(own: Curve, entry: Entry, *, band: bool = False) -> list[Spec]:
    """Return a row per reading: the mean with its interval or simultaneous band."""
    intervals = own.band() if band else [sample.interval() for sample in own.samples]
    rows = []
    for tokens, sample, interval in zip(own.tokens, own.samples, intervals, strict=True):
        if not math.isfinite(sample.mean):
            continue
        low, high = map(_round, interval) if interval else (None, None)
        row = {"arm": entry.name, "variant": entry.arm.variant, "tokens": tokens, "n": sample.n}
        row |= {"told": format_gap(sample.mean, interval) if band else format_loss(sample)}
        rows.append(row | {"loss": _round(sample.mean), "low": low, "high": high})
    return rows


def _run_rows(entry: Entry, metric: str, most: int) -> list[Spec]:
    rows = []
    for place, record in enumerate(entry.records.values()):
        course = record.loss_curves[metric]
        shown = thin([*course], most) if course else []
        own = {"run": f"{entry.name} {place}", "variant": entry.arm.variant, "low": None}
        rows += [own | {"tokens": tokens, "loss": _round(course[tokens])} for tokens in shown]
    return rows


def _round(value: float) -> float:
    """Round to the resolution of a chart."""
    return float(f"{value:.5g}")
