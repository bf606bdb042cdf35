"""Gap and loss by size, cost and learning rate."""

from collections.abc import Callable

from qkablate.analysis.stats import Sample
from qkablate.analysis.study.study import Entry
from qkablate.report.charts.base import (
    Chart,
    ChartPanel,
    Spec,
    color_by_variant,
    dash_by_variant,
    find_variants,
    if_intervals,
    shape_by_variant,
    tooltip_field,
)
from qkablate.report.section import Section, format_n, size_label
from qkablate.report.text.numbers import format_gap_summary, format_loss, half_width
from qkablate.table import format_digits


def heat_map_chart(section: Section) -> Chart | None:
    """Chart the gap by variant, d_model and heads."""
    cells: dict[str, list[Spec]] = {}
    for one in section.summary.gaps:
        diverged = one.arm_diverged or one.baseline_diverged
        if one.mean is None and not diverged:
            continue
        arm = section.entries[one.arm].arm
        model = arm.config.model
        size = f"d{model.d_model} h{model.heads}"
        place = size_label(one.arm, arm.variant)
        rest = place.replace(f"d{model.d_model}-h{model.heads}", "", 1).strip("- ")
        interval = one.interval
        sure = one.decision.is_directed
        half = half_width(interval)
        beside = f"± {format_digits(half, half)}" if half is not None else ""
        if one.mean is None:
            text, told = "diverged", "all pairs diverged"
        else:
            text, told = format_digits(one.mean, half, signed=True), format_gap_summary(one)
            text = text if sure else f"({text})"
            beside = told.partition(" ")[2] if diverged else beside
        cells.setdefault(rest, []).append(
            {"variant": arm.variant, "size": size, "order": model.d_model * 1000 + model.heads}
            | {"gap": one.mean or 0.0, "n": one.n, "text": text}
            | {"told": told, "arm": one.arm, "half": beside}
        )
    panels = [_heat_panel(rest, rows) for rest, rows in cells.items() if len(rows) > 1]
    if not panels:
        return None
    ns = [row["n"] for rows in cells.values() for row in rows if row["n"]]
    caption = (
        f"Gap in test loss, nats per token, ± half of its 95 % t interval ({format_n(ns)}). Blue is"
        " better. In parentheses: no difference found (Holm over the arms of one size)."
    )
    if any("∞" in row["half"] for rows in cells.values() for row in rows):
        caption += " ∞: runs diverged, so the interval is unbounded on that side."
    return Chart("heat", "Gap by size", caption, panels)


def _heat_panel(title: str, rows: list[Spec]) -> ChartPanel:
    sizes = [row["size"] for row in sorted(rows, key=lambda row: row["order"])]
    sizes, names = list(dict.fromkeys(sizes)), find_variants(rows)
    most = max(abs(row["gap"]) for row in rows) or 1.0
    steps = [-0.6 * most, -0.25 * most, -0.05 * most, 0.05 * most, 0.25 * most, 0.6 * most]
    shades = ["low3", "low2", "low1", "mid", "high1", "high2", "high3"]
    spec: Spec = {
        "width": {"step": 78},
        "height": {"step": 38},
        "data": {"values": rows},
        "encoding": {
            "x": {"field": "size", "type": "nominal", "sort": sizes, "title": None}
            | {"axis": {"orient": "top", "labelAngle": 0, "ticks": False, "domain": False}},
            "y": {"field": "variant", "type": "nominal", "sort": names, "title": None}
            | {"axis": {"ticks": False, "domain": False, "labelLimit": 160}},
            "tooltip": [
                tooltip_field("arm"),
                tooltip_field("told", "gap, 95 % interval"),
                tooltip_field("n"),
            ],
        },
        "layer": [
            {
                "mark": {"type": "rect", "stroke": "var(--ground)", "strokeWidth": 2},
                "encoding": {
                    "color": {
                        "field": "gap",
                        "type": "quantitative",
                        "scale": {
                            "type": "threshold",
                            "domain": steps,
                            "range": [f"var(--{shade})" for shade in shades],
                        },
                        "legend": None,
                    }
                },
            },
            {
                "mark": {"type": "text", "fontSize": 11, "color": "var(--ink)", "dy": -6},
                "encoding": {"text": {"field": "text"}},
            },
            {
                "mark": {"type": "text", "fontSize": 10, "color": "var(--ink)", "dy": 8},
                "encoding": {"text": {"field": "half"}},
            },
        ],
    }
    return ChartPanel(title, spec, [])


_FLOPS = "training FLOPs"
_COSTS: dict[str, Callable[[Entry], float]] = {
    "parameters without embeddings": lambda entry: float(entry.arm.params),
    _FLOPS: lambda entry: entry.arm.train_flops,
    "KV cache, bytes per token (16 bit)": lambda entry: 2.0 * (entry.arm.kv_cache_numbers or 0),
}


def cost_chart(section: Section) -> Chart | None:
    """Chart the loss against parameters, FLOPs and KV cache."""
    by_data: dict[str, list[Entry]] = {}
    for entry in section.study.entries:
        if entry.losses:
            by_data.setdefault(str(entry.arm.facts.get("data_fingerprint")), []).append(entry)
    panels, shorter, shown = [], 0, []
    for what, cost in _COSTS.items():
        for every in by_data.values():
            longest = max(entry.tokens for entry in every)
            # More tokens lower the loss, but only FLOPs count them as cost.
            own = [entry for entry in every if what == _FLOPS or entry.tokens == longest]
            rows = [_cost_row(entry, cost(entry)) for entry in own if cost(entry) > 0]
            if len({row["cost"] for row in rows}) > 1:
                title = f"{what} ({own[0].arm.config.data.source})" if len(by_data) > 1 else what
                panels.append(
                    ChartPanel(title, _cost_panel(section, rows, what), find_variants(rows))
                )
                shorter += len(every) - len(own)
                shown += [row["n"] for row in rows]
    if not panels:
        return None
    caption = (
        "Mean test loss of each arm; bar: 95 % t interval over seeds"
        f" ({format_n(shown)}). Lower left is better."
    )
    if shorter:
        caption += (
            f" The chart by {_FLOPS} shows all training lengths, the others only the longest."
        )
    return Chart("costs", "Loss against cost", caption, panels)


def _cost_row(entry: Entry, cost: float) -> Spec:
    sample = entry.sample
    low, high = sample.interval() or (None, None)
    row = {
        "arm": entry.name,
        "variant": entry.arm.variant,
        "cost": cost,
        "told": format_loss(sample),
    }
    return row | {"loss": sample.mean, "low": low, "high": high, "n": sample.n}


def _cost_panel(section: Section, rows: list[Spec], what: str) -> Spec:
    x: Spec = {
        "field": "cost",
        "type": "quantitative",
        "title": what,
        "scale": {"type": "log", "nice": False, "padding": 24},
    }
    x |= {"axis": {"format": "~s", "tickCount": 5}}
    y: Spec = {
        "type": "quantitative",
        "title": "test loss, nats per token",
        "scale": {"zero": False},
    }
    tooltip = [
        tooltip_field("arm"),
        tooltip_field("told", "test loss, 95 % interval"),
        tooltip_field("n"),
    ]
    tooltip.append({"field": "cost", "type": "quantitative", "title": what, "format": ".3s"})
    own = color_by_variant(section)
    return {
        "height": 260,
        "data": {"values": rows},
        "layer": [
            *if_intervals(
                rows,
                {
                    "mark": {"type": "rule", "opacity": 0.6},
                    "encoding": {"x": x, "y": y | {"field": "low"}, "y2": {"field": "high"}} | own,
                },
            ),
            {
                "mark": {"type": "point", "filled": True, "size": 60, "opacity": 0.9},
                "encoding": {"x": x, "y": y | {"field": "loss"}, "tooltip": tooltip}
                | own
                | shape_by_variant(section),
            },
        ],
    }


def lr_chart(section: Section) -> Chart | None:
    """Chart the validation loss by learning rate."""
    by_baseline: dict[str, list[Spec]] = {}
    lost: dict[str, list[Spec]] = {}
    counts, diverged = [], 0
    for one in section.summary.learning_rates:
        arm = section.study.arms[one.arm]
        key = one.baseline or one.arm
        for point in one.val_loss:
            known = [loss for loss in point.by_seed if loss is not None]
            row = {"arm": one.arm, "variant": arm.variant, "lr": point.lr}
            if len(known) < len(point.by_seed):
                diverged += 1
                lost.setdefault(key, []).append(row)
                continue
            sample = Sample(tuple(known))
            low, high = sample.interval() or (None, None)
            counts.append(sample.n)
            row |= {"loss": sample.mean, "low": low, "high": high, "n": sample.n}
            row |= {"best": point.lr == one.best, "told": format_loss(sample)}
            by_baseline.setdefault(key, []).append(row)
    panels = [
        ChartPanel(
            size_label(key, section.study.arms[key].variant),
            _lr_panel(section, rows, lost.get(key, [])),
            find_variants(rows),
        )
        for key, rows in by_baseline.items()
    ]
    if not panels:
        return None
    caption = (
        "Validation loss by learning rate, mean over tuning seeds"
        f" ({format_n(counts)}); bar: 95 % t interval; large point: the best rate."
    )
    caption += f" Crosses: {diverged} rates at which a run diverged." if diverged else ""
    return Chart("rates", "Learning rates", caption, panels)


def _lr_panel(section: Section, rows: list[Spec], lost: list[Spec]) -> Spec:
    x: Spec = {"field": "lr", "type": "quantitative", "title": "learning rate"}
    x |= {"scale": {"type": "log", "nice": False, "padding": 16}}
    x |= {"axis": {"format": "~g", "tickCount": 5}}
    y: Spec = {"type": "quantitative", "title": "validation loss", "scale": {"zero": False}}
    tooltip = [
        tooltip_field("arm"),
        tooltip_field("lr", "learning rate"),
        tooltip_field("told", "loss, 95 % interval"),
    ]
    tooltip.append(tooltip_field("n"))
    own = color_by_variant(section)
    best = {"condition": {"test": "datum.best", "value": 150}, "value": 35}
    layers = [
        {
            "mark": {"type": "line", "strokeWidth": 2},
            "encoding": {"x": x, "y": y | {"field": "loss"}, "detail": {"field": "arm"}}
            | own
            | dash_by_variant(section),
        },
        *if_intervals(
            rows,
            {
                "mark": {"type": "rule", "opacity": 0.5},
                "encoding": {"x": x, "y": y | {"field": "low"}, "y2": {"field": "high"}} | own,
            },
        ),
        {
            "mark": {"type": "point", "filled": True, "opacity": 1},
            "encoding": {"x": x, "y": y | {"field": "loss"}, "tooltip": tooltip, "size": best}
            | own
            | shape_by_variant(section),
        },
    ]
    if lost:
        top = max(row["loss"] for row in rows)
        layers.append(
            {
                "data": {"values": [row | {"loss": top, "told": "diverged"} for row in lost]},
                "mark": {"type": "point", "shape": "cross", "angle": 45, "filled": True},
                "encoding": {"x": x, "y": y | {"field": "loss"}, "tooltip": tooltip[:3]} | own,
            }
        )
    return {"height": 240, "data": {"values": rows}, "layer": layers}
