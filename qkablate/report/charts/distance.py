"""Function distance between arms and baselines during training."""

from qkablate.analysis.comparison.function_distance import (
    ARM,
    ROUNDING,
    SEEDS,
    DistanceSummary,
    FunctionDistance,
)
from qkablate.report.charts.base import (
    Chart,
    ChartPanel,
    Spec,
    color_by_variant,
    dash_by_variant,
    find_variants,
    if_intervals,
    tooltip_field,
)
from qkablate.report.section import Section, format_n, size_label
from qkablate.report.text.distance import format_ratio
from qkablate.table import format_list

_MAX_POINTS = 6_000  # of all curves
_ROUNDING_RATIO = 1_000  # times below the others, what is drawn apart of them too


def distance_chart(section: Section) -> Chart | None:
    """Chart the distance by tokens, with another seed and rounding for scale."""
    panels, counts, ends = [], [], []
    found = section.summary.function_distance
    curves = sum(len(one.distances) for one in found)
    for one in found:
        rows: dict[str, list[Spec]] = {ARM: [], ROUNDING: [], SEEDS: []}
        for own in one.distances:
            rows[own.kind] += _make_rows(own, _MAX_POINTS // max(1, curves))
            counts += [own.n] * (own.kind != SEEDS and own.n > 0)
        drawn = [*rows[ARM], *rows[ROUNDING]]
        if not drawn:
            continue
        title = size_label(one.baseline, section.entries[one.baseline].arm.variant)
        panels.append(_make_panel(section, title, drawn, rows[SEEDS]))
        others = [row["apart"] for row in (*rows[ARM], *rows[SEEDS])]
        rounding = [row["apart"] for row in rows[ROUNDING]]
        if rows[ARM] and rounding and _ROUNDING_RATIO * max(rounding) < min(others):
            panels.append(
                _make_panel(section, f"{title}, without rounding", rows[ARM], rows[SEEDS])
            )
        ends += _format_ends(one)
    if not panels:
        return None
    positions = {one.positions for one in found}
    caption = (
        "Distance between the predictions of an arm and of its baseline with the same seed:"
        " ½ (KL(p‖q) + KL(q‖p)) in nats, at"
        f" {' or '.join(f'{n:,}' for n in sorted(positions))} positions of the validation split;"
        f" geometric mean over pairs ({format_n(counts)}), with simultaneous 95 % bands. Dashed"
        " gray: the baseline with another seed. The distance has no direction."
    )
    told = f" At the end: {format_list(ends, 4)}." if ends else ""
    return Chart("function-distance", "Function distance", caption + told, panels)


def _format_ends(found: FunctionDistance) -> list[str]:
    """Format the final distances relative to another seed and to rounding."""
    said = []
    for own in found.distances:
        beside = {"another seed": own.times_another_seed, "rounding": own.times_rounding}
        known = [f"{format_ratio(n)} times as far as {what}" for what, n in beside.items() if n]
        if known and own.kind == ARM:
            said.append(f"{own.arm} is {' and '.join(known)}")
    return said


def _make_rows(own: DistanceSummary, most: int) -> list[Spec]:
    """Return the readings that logarithmic axes can show."""
    shown = [one for one in own.readings if one.tokens and one.mean]
    rows = []
    for one in shown[-most:]:
        low, high = one.band or (None, None)
        told = f"{one.mean:.3g}" + (f" [{low:.2g}, {high:.2g}]" if low and high else "")
        rows.append(
            {"arm": own.arm, "variant": own.variant, "tokens": one.tokens, "n": one.n}
            | {"apart": _round(one.mean), "told": told}
            | {"low": low and _round(low), "high": high and _round(high)}
        )
    return rows


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def _make_panel(section: Section, title: str, rows: list[Spec], seeds: list[Spec]) -> ChartPanel:
    x: Spec = {"field": "tokens", "type": "quantitative", "title": "tokens"}
    x |= {"scale": {"type": "log", "nice": False}, "axis": {"format": "~s", "tickCount": 5}}
    y: Spec = {"field": "apart", "type": "quantitative", "title": "distance, nats per position"}
    y |= {"axis": {"format": ".0e", "tickCount": 6}}
    # A band of few pairs may be very wide, so the axis follows the lines.
    means = [row["apart"] for row in (*rows, *seeds)]
    y |= {"scale": {"type": "log", "nice": False, "domain": [min(means) / 3, max(means) * 3]}}
    tooltip = [tooltip_field("arm"), {"field": "tokens", "type": "quantitative", "format": ","}]
    tooltip += [tooltip_field("told", "mean and band"), tooltip_field("n")]
    lines = {"x": x, "y": y, "detail": {"field": "arm"}} | color_by_variant(section)
    area = lines | {"y": {**y, "field": "low"}, "y2": {"field": "high"}}
    layers = if_intervals(
        rows, {"mark": {"type": "area", "opacity": 0.13, "clip": True}, "encoding": area}
    )
    seen = int(len({row["tokens"] for row in rows}) == 1)
    layers += [
        {"mark": {"type": "line", "strokeWidth": 2}, "encoding": lines | dash_by_variant(section)},
        {
            # Target of tooltips; visible where a single reading makes no line.
            "mark": {"type": "point", "size": 90, "opacity": seen, "filled": True},
            "encoding": lines | {"tooltip": tooltip},
        },
    ]
    if seeds:
        faint = {"color": "var(--faint)", "strokeDash": [3, 3], "strokeWidth": 1.5}
        own = {"x": x, "y": y, "tooltip": tooltip}
        layers.append(
            {"data": {"values": seeds}, "mark": {"type": "line"} | faint, "encoding": own}
        )
        word = {"type": "text", "align": "right", "baseline": "bottom", "dy": -4, "fontSize": 11}
        word |= {"text": "another seed", "color": "var(--faint)"}
        layers.append({"data": {"values": seeds[-1:]}, "mark": word, "encoding": {"x": x, "y": y}})
    return ChartPanel(
        title, {"height": 260, "data": {"values": rows}, "layer": layers}, find_variants(rows)
    )
