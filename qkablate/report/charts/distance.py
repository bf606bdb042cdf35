"""Function distance between arms and baselines during training."""

from qkablate.analysis.comparison.function_distance import (
    ARM,
    ROUNDING,
    SEEDS,
    DistanceSummary,
    FunctionDistance,
)
from qkablate.report.charts import base
from qkablate.report.charts.base import Chart, ChartPanel, Spec, round_digits
from qkablate.report.charts.curves import MAX_POINTS, TOKENS, TOOLTIP, mean_layers
from qkablate.report.section import Section, format_n, size_label
from qkablate.report.text.tables import format_ratio
from qkablate.table import format_list

_ROUNDING_RATIO = 1_000  # if rounding is this much smaller, a panel without it is added


def distance_chart(section: Section) -> Chart:
    """Chart the distance by tokens, with another seed and rounding for scale."""
    panels, counts, ends = [], [], []
    families = section.summary.function_distance
    curves = sum(len(family.distances) for family in families)
    for family in families:
        rows: dict[str, list[Spec]] = {ARM: [], ROUNDING: [], SEEDS: []}
        for distance in family.distances:
            rows[distance.kind] += _make_rows(section, distance, MAX_POINTS // max(1, curves))
            counts += [distance.n] * (distance.kind != SEEDS and distance.n > 0)
        if not (rows[ARM] or rows[ROUNDING]):
            continue
        title = size_label(family.baseline, section.entries[family.baseline].arm.variant)
        panels.append(_make_panel(section, title, rows[ARM] + rows[ROUNDING], rows[SEEDS]))
        others = [row["distance"] for row in rows[ARM] + rows[SEEDS]]
        rounding = [row["distance"] for row in rows[ROUNDING]]
        if rows[ARM] and rounding and _ROUNDING_RATIO * max(rounding) < min(others):
            title += ", without rounding"
            panels.append(_make_panel(section, title, rows[ARM], rows[SEEDS]))
        ends += _format_ends(family)
    positions = sorted({family.positions for family in families})
    caption = (
        "Distance between the predictions of an arm and of its baseline with the same seed:"
        f" ½ (KL(p‖q) + KL(q‖p)) in nats, at {' or '.join(f'{n:,}' for n in positions)} positions"
        f" of the validation split; geometric mean over pairs ({format_n(counts)}), with"
        " simultaneous 95 % bands where they fit the axis. Dashed gray: the baseline with another"
        " seed. The distance has no direction: smaller is not better."
    )
    caption += f" At the end: {format_list(ends, 4)}." if ends else ""
    return Chart("function-distance", "Function distance", caption, panels)


def _format_ends(family: FunctionDistance) -> list[str]:
    """Format the final distances relative to another seed and to rounding."""
    texts = []
    for distance in family.distances:
        scales = {"another seed": distance.times_another_seed, "rounding": distance.times_rounding}
        known = [f"{format_ratio(n)} times as far as {what}" for what, n in scales.items() if n]
        if known and distance.kind == ARM:
            texts.append(f"{distance.arm} is {' and '.join(known)}")
    return texts


def _make_rows(section: Section, distance: DistanceSummary, most: int) -> list[Spec]:
    """Return the readings that logarithmic axes can show."""
    rows, variant = [], section.style_names.get(distance.arm, distance.variant)
    for reading in [r for r in distance.readings if r.tokens and r.mean][-most:]:
        low, high = reading.band or (None, None)
        band = f" [{low:.2g}, {high:.2g}]" if low and high else ""
        rows.append(
            {"arm": distance.arm, "variant": variant, "tokens": reading.tokens}
            | {"n": reading.n, "distance": round_digits(reading.mean, 4)}
            | {"estimate": f"{reading.mean:.3g}{band}"}
            | {"low": low and round_digits(low, 4), "high": high and round_digits(high, 4)}
        )
    return rows


def drop_wide_bands(rows: list[Spec], domain: list[float]) -> list[Spec]:
    """Return the rows without the bands of arms that do not fit the axis, and would fill it."""
    wide = {
        row["arm"]
        for row in rows
        if row["low"] and not domain[0] <= row["low"] <= row["high"] <= domain[1]
    }
    return [row | {"low": None, "high": None} if row["arm"] in wide else row for row in rows]


def _make_panel(section: Section, title: str, rows: list[Spec], seeds: list[Spec]) -> ChartPanel:
    # The band of few pairs may be wider than all else, so the axis follows the lines.
    means = [row["distance"] for row in (*rows, *seeds)]
    domain = [min(means) / 3, max(means) * 3]
    y = base.log_axis("distance", "distance, nats per position", ".2~e", domain=domain)
    rows = drop_wide_bands(rows, domain)
    layers = mean_layers(section, rows, y)
    if seeds:
        place, faint = {"x": TOKENS, "y": y}, {"color": "var(--faint)"}
        line, last = place | {"tooltip": TOOLTIP}, seeds[-1:]
        style = {"strokeDash": [3, 3], "strokeWidth": 1.5, "point": len(seeds) == 1}
        label = {"text": "another seed", **faint, "fontSize": 11, "align": "right"}
        layers += [
            base.make_layer("line", line, seeds, **faint, **style),
            base.make_layer("text", place, last, **label, baseline="bottom", dy=-4),
        ]
    return base.make_panel(title, rows, layers, 260)
