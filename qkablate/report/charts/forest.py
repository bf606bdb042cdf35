"""Forest plots: means with their intervals, one row each."""

from qkablate.report.charts.base import (
    OPEN_NOTE,
    ROW_HEIGHT,
    Chart,
    ChartPanel,
    Spec,
    arm_axis,
    color_by_variant,
    find_variants,
    if_intervals,
    open_intervals,
    shape_by_variant,
    tooltip_field,
    zero_line,
)
from qkablate.report.section import Section, format_n
from qkablate.report.text.numbers import format_gap, format_gap_summary
from qkablate.table import format_count


def claim_chart(section: Section) -> Chart | None:
    """Chart the parts of a claim with their margins."""
    found = section.judgement
    if found is None or found.verdict is None:
        return None
    rows: list[Spec] = []
    margins: list[Spec] = []
    for one, word in zip(found.parts, found.verdict.parts, strict=True):
        part, spec = one.part, one.comparison.spec
        interval = part.sample.interval(1 - 2 * found.alpha)
        if interval is None:
            continue
        each = ", per doubling" if spec.horizon == "growth" else ""
        label = f"{part.name}{each}  (n = {part.sample.n})"
        low, high = interval
        sides = {"below": part.open_below, "above": part.open_above}
        rows.append(
            {"arm": label, "gap": part.sample.mean}
            | {"told": format_gap(part.sample.mean, interval, **sides)}
            | {"low": low, "high": high, "verdict": word}
            | {f"open_{side}": is_open for side, is_open in sides.items()}
        )
        edges = {"noninferior": [1], "worse": [1], "better": [-1]}.get(part.kind, [-1, 1])
        margins += [{"arm": label, "at": side * spec.margin} for side in edges]
    if not rows:
        return None
    y = arm_axis([row["arm"] for row in rows])
    x: Spec = {"type": "quantitative", "title": "nats per token", "scale": {"zero": True}}
    tooltip = [
        tooltip_field("arm", "part"),
        tooltip_field("told", "measured"),
        tooltip_field("verdict"),
    ]
    layers = [
        zero_line("x"),
        {
            "data": {"values": margins},
            "mark": {"type": "tick", "thickness": 3, "size": 20, "color": "var(--warn)"},
            "encoding": {
                "x": x | {"field": "at"},
                "y": y,
                "tooltip": [tooltip_field("at", "margin")],
            },
        },
        *open_intervals(rows, y, {"color": {"value": "var(--ink)"}}),
        {
            "mark": {"type": "rule", "strokeWidth": 3, "color": "var(--ink)"},
            "encoding": {"x": x | {"field": "low"}, "x2": {"field": "high"}, "y": y},
        },
        {
            "mark": {"type": "point", "filled": True, "size": 70, "color": "var(--ink)"},
            "encoding": {"x": x | {"field": "gap"}, "y": y, "tooltip": tooltip},
        },
    ]
    drawn: Spec = {
        "height": ROW_HEIGHT * len(rows) + ROW_HEIGHT,
        "data": {"values": rows},
        "layer": layers,
    }
    level = f"{100 * (1 - 2 * found.alpha):.3g} %"
    caption = (
        f"Estimate and {level} interval of each part of the claim; thick mark: the claimed margin"
        f" ({format_n([one.part.sample.n for one in found.parts])})."
    )
    caption += OPEN_NOTE if any(row["open_below"] or row["open_above"] for row in rows) else ""
    return Chart("parts", "Claimed and measured", caption, [ChartPanel("", drawn, [])])


def gap_chart(section: Section) -> Chart | None:
    """Chart the gaps, one row per arm."""
    rows: list[Spec] = []
    pairs: list[Spec] = []
    nothing: list[Spec] = []  # of arms without a pair
    names: list[str] = []
    for one in section.summary.gaps:
        diverged = one.arm_diverged + one.baseline_diverged
        if one.mean is None and not diverged:
            continue
        variant = section.entries[one.arm].arm.variant
        low, high = one.interval or (None, None)
        label = f"{one.arm}  (n = {one.n}{f', {diverged} diverged' if diverged else ''})"
        names.append(label)
        if one.mean is None:
            nothing.append({"arm": label, "variant": variant})
            continue
        rows.append(
            {"arm": label, "variant": variant, "gap": one.mean, "low": low, "high": high}
            | {"told": format_gap_summary(one), "n": one.n, "baseline": one.baseline}
            | {"open_above": one.arm_diverged > 0, "open_below": one.baseline_diverged > 0}
        )
        every = [pair.gap for pair in one.pairs]
        pairs += [{"arm": label, "variant": variant, "gap": gap} for gap in every]
    if not rows:
        return None
    y = arm_axis(names)
    x: Spec = {"type": "quantitative", "title": "gap, nats per token"}
    x |= {"scale": {"zero": True, "nice": True}}
    tooltip = [
        tooltip_field("arm"),
        tooltip_field("told", "gap, 95 % interval"),
        tooltip_field("baseline", "against"),
    ]
    layers = [zero_line("x")]
    if len(pairs) <= 2_000:
        layers.append(
            {
                "data": {"values": pairs},
                "mark": {"type": "tick", "thickness": 1, "size": 9, "opacity": 0.45},
                "encoding": {"x": x | {"field": "gap"}, "y": y} | color_by_variant(section),
            }
        )
    if nothing:
        said = {"type": "text", "align": "left", "dx": 4, "text": "all pairs diverged"}
        layers.append(
            {
                "data": {"values": nothing},
                "mark": said | {"color": "var(--warn)", "fontSize": 11},
                "encoding": {"x": {"value": 0}, "y": y},
            }
        )
    layers += [
        *open_intervals(rows, y, color_by_variant(section)),
        *if_intervals(
            rows,
            {
                "mark": {"type": "rule", "strokeWidth": 3, "opacity": 0.75},
                "encoding": {"x": x | {"field": "low"}, "x2": {"field": "high"}, "y": y}
                | color_by_variant(section),
            },
        ),
        {
            "mark": {"type": "point", "filled": True, "size": 70, "opacity": 1},
            "encoding": {"x": x | {"field": "gap"}, "y": y, "tooltip": tooltip}
            | color_by_variant(section)
            | shape_by_variant(section),
        },
    ]
    spec: Spec = {
        "height": ROW_HEIGHT * len(names) + ROW_HEIGHT // 2,
        "data": {"values": rows},
        "layer": layers,
    }
    caption = (
        "Test loss of an arm minus test loss of its baseline with the same seed; negative"
        " is better. Point: mean; bar: 95 % t interval, unadjusted; ticks: single pairs"
        f" ({format_n([row['n'] for row in rows])})."
    )
    single = sum(row["low"] is None for row in rows)
    caption += f" No bar: a single pair ({format_count(single, 'arm')})." if single else ""
    caption += OPEN_NOTE if any(row["open_below"] or row["open_above"] for row in rows) else ""
    return Chart("gaps", "Gaps", caption, [ChartPanel("", spec, find_variants(rows, nothing))])
