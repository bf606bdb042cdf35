"""How far apart runs are as functions, while they train."""

from typing import Any

from qkablate.analysis.comparison.function_distance import ARM, ROUNDING, SEEDS
from qkablate.report.charts.base import (
    Chart,
    Panel,
    Spec,
    colour,
    dash,
    tip,
    variants,
    where_known,
)
from qkablate.report.section import Chapter, place_of, span
from qkablate.report.text.distance import told_times
from qkablate.table import some

_POINTS = 6_000  # of all curves
_FAR = 1_000  # times below the others, what is drawn apart of them too


def function_distance(chapter: Chapter) -> Chart | None:
    """By tokens, beside what is no difference: another seed, and rounding."""
    panels, counts, ends = [], [], []
    found = chapter.found["function_distance"]
    curves = sum(len(one["apart"]) for one in found)
    for one in found:
        rows: dict[str, list[Spec]] = {ARM: [], ROUNDING: [], SEEDS: []}
        for own in one["apart"]:
            rows[own["kind"]] += _readings(own, _POINTS // max(1, curves))
            counts += [own["n"]] * (own["kind"] != SEEDS and own["n"] > 0)
        drawn = [*rows[ARM], *rows[ROUNDING]]
        if not drawn:
            continue
        title = place_of(one["baseline"], chapter.entries[one["baseline"]].arm.variant)
        panels.append(_panel(chapter, title, drawn, rows[SEEDS]))
        others = [row["apart"] for row in (*rows[ARM], *rows[SEEDS])]
        rounding = [row["apart"] for row in rows[ROUNDING]]
        if rows[ARM] and rounding and _FAR * max(rounding) < min(others):
            panels.append(_panel(chapter, f"{title}, without rounding", rows[ARM], rows[SEEDS]))
        ends += _ends(one)
    if not panels:
        return None
    positions = {one["positions"] for one in found}
    caption = (
        "How far what an arm predicts is from what its baseline with the same seed predicts:"
        " ½ (KL(p‖q) + KL(q‖p)) in nats, at"
        f" {' or '.join(f'{n:,}' for n in sorted(positions))} positions of the validation split;"
        f" geometric mean over pairs ({span(counts)}), with bands that hold at all readings at once"
        " in 95 of 100 studies. Dashed grey: the baseline with another seed. It has no direction:"
        " less is not better."
    )
    told = f" At the end: {some(ends, 4)}." if ends else ""
    return Chart("function-distance", "Function distance", caption + told, panels)


def _ends(found: dict[str, Any]) -> list[str]:
    """merged_w-d64-h4 is 0.37 times as far as another seed and 1.2e+11 times as far as rounding."""
    said = []
    for own in found["apart"]:
        beside = {"another seed": own["times_another_seed"], "rounding": own["times_rounding"]}
        known = [f"{told_times(n)} times as far as {what}" for what, n in beside.items() if n]
        if known and own["kind"] == ARM:
            said.append(f"{own['arm']} is {' and '.join(known)}")
    return said


def _readings(own: dict[str, Any], most: int) -> list[Spec]:
    """What has a place on logarithmic axes."""
    shown = [one for one in own["readings"] if one["tokens"] and one["mean"]]
    rows = []
    for one in shown[-most:]:
        low, high = one["band"] or (None, None)
        told = f"{one['mean']:.3g}" + (f" [{low:.2g}, {high:.2g}]" if low and high else "")
        rows.append(
            {"arm": own["arm"], "variant": own["variant"], "tokens": one["tokens"], "n": one["n"]}
            | {"apart": _fine(one["mean"]), "told": told}
            | {"low": low and _fine(low), "high": high and _fine(high)}
        )
    return rows


def _fine(value: float) -> float:
    return float(f"{value:.4g}")


def _panel(chapter: Chapter, title: str, rows: list[Spec], seeds: list[Spec]) -> Panel:
    x: Spec = {"field": "tokens", "type": "quantitative", "title": "tokens"}
    x |= {"scale": {"type": "log", "nice": False}, "axis": {"format": "~s", "tickCount": 5}}
    y: Spec = {"field": "apart", "type": "quantitative", "title": "distance, nats per position"}
    y |= {"axis": {"format": ".0e", "tickCount": 6}}
    # A band of few pairs may be wider than all there is to see: the lines tell the axis how far
    # to go.
    means = [row["apart"] for row in (*rows, *seeds)]
    y |= {"scale": {"type": "log", "nice": False, "domain": [min(means) / 3, max(means) * 3]}}
    tooltip = [tip("arm"), {"field": "tokens", "type": "quantitative", "format": ","}]
    tooltip += [tip("told", "mean and band"), tip("n")]
    lines = {"x": x, "y": y, "detail": {"field": "arm"}} | colour(chapter)
    area = lines | {"y": {**y, "field": "low"}, "y2": {"field": "high"}}
    layers = where_known(
        rows, {"mark": {"type": "area", "opacity": 0.13, "clip": True}, "encoding": area}
    )
    seen = int(len({row["tokens"] for row in rows}) == 1)
    layers += [
        {"mark": {"type": "line", "strokeWidth": 2}, "encoding": lines | dash(chapter)},
        {
            # To be pointed at; to be seen where there is one reading, which makes no line.
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
    return Panel(title, {"height": 260, "data": {"values": rows}, "layer": layers}, variants(rows))
