"""Gap and loss by size, cost and learning rate."""

import statistics
from collections.abc import Callable

from qkablate.analysis.stats import Sample
from qkablate.analysis.study.study import Entry
from qkablate.report.charts import base
from qkablate.report.charts.base import Chart, ChartPanel, Spec
from qkablate.report.section import Section, format_n, size_label
from qkablate.report.text.numbers import format_gap_summary, format_loss, half_width
from qkablate.table import format_count, format_digits


def heat_map_chart(section: Section) -> Chart:
    """Chart the gap by variant, d_model and heads."""
    cells: dict[str, list[Spec]] = {}  # by what else the arms' names say
    for gap in section.summary.gaps:
        diverged = gap.arm_diverged or gap.baseline_diverged
        if gap.mean is None and not diverged:
            continue
        arm = section.entries[gap.arm].arm
        model = arm.config.model
        size = size_label(gap.arm, arm.variant)
        rest = size.replace(f"d{model.d_model}-h{model.heads}", "", 1).strip("- ")
        half = half_width(gap.interval)
        beside = f"± {format_digits(half, half)}" if half is not None else ""
        text, estimate = "diverged", "all pairs diverged"
        if gap.mean is not None:
            text = format_digits(gap.mean, half, signed=True)
            text = text if gap.decision.is_directed and not gap.rates else f"({text})"
            estimate = format_gap_summary(gap)
            beside = estimate.partition(" ")[2] if diverged else beside
        cells.setdefault(rest, []).append(
            {"arm": gap.arm, "variant": arm.variant, "size": f"d{model.d_model} h{model.heads}"}
            | {"order": model.d_model * 1000 + model.heads, "gap": gap.mean or 0.0, "n": gap.n}
            | {"text": text, "estimate": estimate, "half": beside}
            | {"decided": not text.startswith("(")}
        )
    all_rows = [row for rows in cells.values() for row in rows]
    steps = _heat_steps(section, [abs(row["gap"]) for row in all_rows])
    shown = {rest: rows for rest, rows in cells.items() if len(rows) > 1}
    panels = [
        _heat_panel(rest, rows, steps, has_legend=number == 0)
        for number, (rest, rows) in enumerate(shown.items())
    ]
    caption = (
        f"Gap in test loss, {section.study.loss_unit}, ± half of its 95 % interval"
        f" ({format_n([row['n'] for row in all_rows if row['n']])}). Blue is better, on"
        " one scale for all panels. In parentheses and gray: neither better nor worse (Holm over"
        " all gaps), or rates not tuned."
    )
    if any("∞" in row["half"] for row in all_rows):
        caption += " ∞: runs diverged, so the interval is unbounded on that side."
    return Chart("heat", "Gap by size", caption, panels)


def _heat_steps(section: Section, sizes: list[float]) -> list[float]:
    """Return where shades begin: up to the largest gap, or to a size that matters if it is less."""
    gaps = section.summary.gaps
    floors = [gap.margin.nats for gap in gaps if gap.margin]
    floors = floors or [gap.detectable for gap in gaps if gap.detectable is not None]
    largest = max([*sizes, statistics.median(floors or [0.0])]) or 1.0
    return [
        base.round_digits(largest * share, 2) for share in (-0.6, -0.25, -0.05, 0.05, 0.25, 0.6)
    ]


def _heat_panel(title: str, rows: list[Spec], steps: list[float], has_legend: bool) -> ChartPanel:
    by_size = sorted(rows, key=lambda row: row["order"])
    sizes, names = list(dict.fromkeys(row["size"] for row in by_size)), base.find_variants(rows)
    shade = base.color_by("gap", steps)
    shade["condition"] = {"test": {"field": "decided", "equal": False}, "value": "var(--none)"}
    if has_legend:
        shade["legend"] = base.shade_legend("gap, nats")
    bare: Spec = {"ticks": False, "domain": False}
    cell = {
        "x": {"field": "size", "type": "nominal", "sort": sizes, "title": None}
        | {"axis": bare | {"orient": "top", "labelAngle": 0}},
        "y": {"field": "variant", "type": "nominal", "sort": names, "title": None}
        | {"axis": bare | {"labelLimit": 160}},
        "tooltip": base.make_tooltip(arm="", estimate="gap, 95 % interval", n=""),
    }
    ink = "var(--ink)"
    layers = [
        base.make_layer("rect", {"color": shade}, stroke="var(--ground)", strokeWidth=2),
        base.make_layer("text", {"text": {"field": "text"}}, fontSize=11, color=ink, dy=-6),
        base.make_layer("text", {"text": {"field": "half"}}, fontSize=10, color=ink, dy=8),
    ]
    spec: Spec = {"width": {"step": 78}, "height": {"step": 38}, "data": {"values": rows}}
    return ChartPanel(title, spec | {"encoding": cell, "layer": layers})


_DODGE = 0.015  # of the axis, between two arms of equal cost
_FLOPS = "training FLOPs"
_COSTS: dict[str, Callable[[Entry], float]] = {
    "parameters without embeddings": lambda entry: float(entry.arm.params),
    _FLOPS: lambda entry: entry.arm.train_flops,
    "KV cache, bytes per token (16 bit)": lambda entry: 2.0 * (entry.arm.kv_cache_numbers or 0),
}


def _size(entry: Entry) -> tuple[int | str, ...]:
    """Return the size of an arm's model and the length of its training."""
    model = entry.arm.config.model
    return model.layers, model.d_model, model.heads, entry.tokens


def _dodge(rows: list[Spec]) -> list[Spec]:
    """Return the rows with their place on the axis: arms of equal cost stand side by side."""
    by_cost: dict[float, list[Spec]] = {}
    for row in rows:
        by_cost.setdefault(row["cost"], []).append(row)
    span = max(by_cost) / min(by_cost)
    placed = []
    for row in rows:
        same = by_cost[row["cost"]]
        shift = same.index(row) - (len(same) - 1) / 2
        placed.append(row | {"at": base.round_digits(row["cost"] * span ** (_DODGE * shift), 5)})
    return placed


def cost_chart(section: Section) -> Chart | None:
    """Chart the loss against parameters, FLOPs and KV cache, where arms have several sizes."""
    by_data: dict[str, list[Entry]] = {}
    for entry in section.study.entries:
        if entry.losses:
            by_data.setdefault(str(entry.arm.facts.get("data_fingerprint")), []).append(entry)
    sizes = {_size(entry) for entries in by_data.values() for entry in entries}
    if len(sizes) < 2:  # the table of verdicts tells what variants of one size cost
        return None
    panels, hidden, counts = [], 0, []
    for unit, cost in _COSTS.items():
        for entries in by_data.values():
            longest = max(entry.tokens for entry in entries)
            # More tokens lower the loss, but only FLOPs count them as cost.
            shown = [entry for entry in entries if unit == _FLOPS or entry.tokens == longest]
            rows: list[Spec] = [
                {"arm": e.name, "variant": section.style_names[e.name], "cost": cost(e)}
                | _loss_cells(e.sample)
                for e in shown
                if cost(e) > 0
            ]
            if len({row["cost"] for row in rows}) > 1:
                source = f" ({shown[0].arm.config.data.source})" if len(by_data) > 1 else ""
                panels.append(_cost_panel(section, f"{unit}{source}", rows, unit))
                hidden += len(entries) - len(shown)
                counts += [row["n"] for row in rows]
    caption = (
        f"Mean test loss of each arm; bar: 95 % interval over seeds ({format_n(counts)}). Lower"
        " left is better. Arms of equal cost stand side by side."
    )
    if hidden:
        caption += (
            f" The chart by {_FLOPS} shows all training lengths, the others only the longest."
        )
    return Chart("costs", "Loss against cost", caption, panels)


def _loss_cells(sample: Sample) -> Spec:
    low, high = sample.interval() or (None, None)
    low = None if low is None else max(low, 0.0)  # no loss is negative
    loss = {"loss": sample.mean, "low": low, "high": high, "n": sample.n}
    return loss | {"estimate": format_loss(sample)}


def _cost_panel(section: Section, title: str, rows: list[Spec], unit: str) -> ChartPanel:
    color = base.by_variant(section, "color")
    y = base.number_axis("loss", f"test loss, {section.study.loss_unit}", zero=False)
    tooltip = base.make_tooltip(arm="", estimate="test loss, 95 % interval", n="")
    tooltip.append({"field": "cost", "type": "quantitative", "title": unit, "format": ".3s"})
    rows = _dodge(rows)
    encoding = {"x": base.log_axis("at", unit, padding=24), "y": y} | color
    points = encoding | {"tooltip": tooltip} | base.by_variant(section, "shape")
    layers = [
        *base.interval_layer("rule", "y", rows, encoding, opacity=0.6),
        base.make_layer("point", points, filled=True, size=60, opacity=0.9),
    ]
    return base.make_panel(title, rows, layers, 260)


def lr_chart(section: Section) -> Chart:
    """Chart the validation loss by learning rate."""
    by_baseline: dict[str, list[Spec]] = {}
    diverged: dict[str, list[Spec]] = {}
    for curve in section.summary.learning_rates:
        key = curve.baseline or curve.arm
        variant = section.study.arms[curve.arm].variant
        arm: Spec = {"arm": curve.arm, "variant": section.style_names.get(curve.arm, variant)}
        for point in curve.val_loss:
            losses = [loss for loss in point.by_seed if loss is not None]
            row = arm | {"lr": point.lr, "circuit": point.circuit}
            row |= {"best": (point.lr, point.circuit) == curve.best}
            if len(losses) < len(point.by_seed):
                diverged.setdefault(key, []).append(row)
            else:
                by_baseline.setdefault(key, []).append(row | _loss_cells(Sample(tuple(losses))))
    panels = [
        _lr_panel(section, key, rows, diverged.get(key, [])) for key, rows in by_baseline.items()
    ]
    caption = (
        "Validation loss by learning rate, mean over tuning seeds"
        f" ({format_n([row['n'] for rows in by_baseline.values() for row in rows])}); bar:"
        " 95 % interval; large point: the best rate. An arm has a line for each multiplier of its"
        " circuit's rate."
    )
    if count := sum(map(len, diverged.values())):
        caption += f" Crosses: {format_count(count, 'rate')} at which a run diverged."
    return Chart("rates", "Learning rates", caption, panels)


def _lr_panel(section: Section, key: str, rows: list[Spec], diverged: list[Spec]) -> ChartPanel:
    color = base.by_variant(section, "color")
    x = base.log_axis("lr", "learning rate", "~g", padding=16)
    y = base.number_axis("loss", "validation loss", zero=False)
    encoding = {"x": x, "y": y} | color
    detail = {"detail": [{"field": "arm"}, {"field": "circuit"}]}
    line = encoding | detail | base.by_variant(section, "dash")
    tooltip = base.make_tooltip(
        arm="", lr="learning rate", circuit="circuit ×", estimate="loss, 95 % interval", n=""
    )
    size = {"condition": {"test": "datum.best", "value": 150}, "value": 35}
    points = encoding | {"tooltip": tooltip, "size": size} | base.by_variant(section, "shape")
    layers = [
        base.make_layer("line", line, strokeWidth=2),
        *base.interval_layer("rule", "y", rows, encoding, opacity=0.5),
        base.make_layer("point", points, filled=True, opacity=1),
    ]
    if diverged:
        top = max(row["loss"] for row in rows)
        crosses = [row | {"loss": top, "estimate": "diverged"} for row in diverged]
        cross, style = encoding | {"tooltip": tooltip[:4]}, {"angle": 45, "filled": True}
        layers.append(base.make_layer("point", cross, crosses, shape="cross", **style))
    return base.make_panel(size_label(key, section.study.arms[key].variant), rows, layers)
