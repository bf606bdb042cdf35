"""Means with their intervals, a row each."""

from qkablate.report.charts.base import (
    OPEN,
    ROW,
    Chart,
    Panel,
    Spec,
    colour,
    rows_of,
    shape,
    tip,
    variants,
    where_known,
    without_end,
    zero,
)
from qkablate.report.section import Chapter, span
from qkablate.report.text.numbers import told_gap, told_open
from qkablate.table import counted


def claim(chapter: Chapter) -> Chart | None:
    """The parts of a claim, each with the margin it is judged by."""
    found = chapter.judgement
    if found is None or found.verdict is None:
        return None
    rows: list[Spec] = []
    margins: list[Spec] = []
    for one, word in zip(found.judged, found.verdict.parts, strict=True):
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
            | {"told": told_gap(part.sample.mean, interval, **sides)}
            | {"low": low, "high": high, "verdict": word}
            | {f"open_{side}": is_open for side, is_open in sides.items()}
        )
        edges = {"noninferior": [1], "worse": [1], "better": [-1]}.get(part.kind, [-1, 1])
        margins += [{"arm": label, "at": side * spec.margin} for side in edges]
    if not rows:
        return None
    y = rows_of([row["arm"] for row in rows])
    x: Spec = {"type": "quantitative", "title": "nats per token", "scale": {"zero": True}}
    tooltip = [tip("arm", "part"), tip("told", "measured"), tip("verdict")]
    layers = [
        zero("x"),
        {
            "data": {"values": margins},
            "mark": {"type": "tick", "thickness": 3, "size": 20, "color": "var(--warn)"},
            "encoding": {"x": x | {"field": "at"}, "y": y, "tooltip": [tip("at", "margin")]},
        },
        *without_end(rows, y, {"color": {"value": "var(--ink)"}}),
        {
            "mark": {"type": "rule", "strokeWidth": 3, "color": "var(--ink)"},
            "encoding": {"x": x | {"field": "low"}, "x2": {"field": "high"}, "y": y},
        },
        {
            "mark": {"type": "point", "filled": True, "size": 70, "color": "var(--ink)"},
            "encoding": {"x": x | {"field": "gap"}, "y": y, "tooltip": tooltip},
        },
    ]
    drawn: Spec = {"height": ROW * len(rows) + ROW, "data": {"values": rows}, "layer": layers}
    level = f"{100 * (1 - 2 * found.alpha):.3g} %"
    caption = (
        f"What each part of the claim measured: point and {level} interval; thick mark: the margin"
        f" that it is judged by ({span([one.part.sample.n for one in found.judged])})."
    )
    caption += OPEN if any(row["open_below"] or row["open_above"] for row in rows) else ""
    return Chart("parts", "Measured, and claimed", caption, [Panel("", drawn, [])])


def gaps(chapter: Chapter) -> Chart | None:
    """The forest: a row an arm."""
    rows: list[Spec] = []
    pairs: list[Spec] = []
    nothing: list[Spec] = []  # of arms without a pair
    names: list[str] = []
    for one in chapter.found["gaps"]:
        diverged = one["arm_diverged"] + one["baseline_diverged"]
        if one["mean"] is None and not diverged:
            continue
        variant = chapter.entries[one["arm"]].arm.variant
        low, high = one["interval"] or (None, None)
        label = f"{one['arm']}  (n = {one['n']}{f', {diverged} diverged' if diverged else ''})"
        names.append(label)
        if one["mean"] is None:
            nothing.append({"arm": label, "variant": variant})
            continue
        rows.append(
            {"arm": label, "variant": variant, "gap": one["mean"], "low": low, "high": high}
            | {"told": told_open(one), "n": one["n"], "baseline": one["baseline"]}
            | {"open_above": one["arm_diverged"] > 0, "open_below": one["baseline_diverged"] > 0}
        )
        every = [pair["gap"] for pair in one["pairs"]]
        pairs += [{"arm": label, "variant": variant, "gap": gap} for gap in every]
    if not rows:
        return None
    y = rows_of(names)
    x: Spec = {"type": "quantitative", "title": "gap, nats per token"}
    x |= {"scale": {"zero": True, "nice": True}}
    tooltip = [tip("arm"), tip("told", "gap, 95 % interval"), tip("baseline", "against")]
    layers = [zero("x")]
    if len(pairs) <= 2_000:
        layers.append(
            {
                "data": {"values": pairs},
                "mark": {"type": "tick", "thickness": 1, "size": 9, "opacity": 0.45},
                "encoding": {"x": x | {"field": "gap"}, "y": y} | colour(chapter),
            }
        )
    if nothing:
        said = {"type": "text", "align": "left", "dx": 4, "text": "no pair that did not diverge"}
        layers.append(
            {
                "data": {"values": nothing},
                "mark": said | {"color": "var(--warn)", "fontSize": 11},
                "encoding": {"x": {"value": 0}, "y": y},
            }
        )
    layers += [
        *without_end(rows, y, colour(chapter)),
        *where_known(
            rows,
            {
                "mark": {"type": "rule", "strokeWidth": 3, "opacity": 0.75},
                "encoding": {"x": x | {"field": "low"}, "x2": {"field": "high"}, "y": y}
                | colour(chapter),
            },
        ),
        {
            "mark": {"type": "point", "filled": True, "size": 70, "opacity": 1},
            "encoding": {"x": x | {"field": "gap"}, "y": y, "tooltip": tooltip}
            | colour(chapter)
            | shape(chapter),
        },
    ]
    spec: Spec = {
        "height": ROW * len(names) + ROW // 2,
        "data": {"values": rows},
        "layer": layers,
    }
    caption = (
        "Test loss of an arm minus that of its baseline with the same seed: left of zero is better."
        " Point: mean; bar: 95 % t interval, not adjusted for several arms; ticks: the pairs"
        f" ({span([row['n'] for row in rows])})."
    )
    single = sum(row["low"] is None for row in rows)
    caption += f" No bar: one pair alone ({counted(single, 'arm')})." if single else ""
    caption += OPEN if any(row["open_below"] or row["open_above"] for row in rows) else ""
    return Chart("gaps", "Gaps", caption, [Panel("", spec, variants(rows, nothing))])
