"""Forest plots: means with their intervals, one row each."""

import math

from qkablate.analysis.claims.judgement import Judgement
from qkablate.analysis.claims.measures import Unit
from qkablate.report.charts import base
from qkablate.report.charts.base import Chart, ChartPanel, Spec
from qkablate.report.section import Section, format_n
from qkablate.report.text.numbers import format_gap, format_gap_summary
from qkablate.table import format_count

_MAX_FLOOR = 4  # times the largest gap: a floor beyond it is written at the edge, not drawn
_OTHER_AXES = {
    Unit.SHARE: "difference, as a share of the answers",
    Unit.RATIO: "difference, in percent of the baseline",
}


def claim_chart(section: Section) -> Chart | None:
    """Chart the parts of a claim with their margins, a panel for each unit."""
    judgement = section.judgement
    if judgement is None or not judgement.has_ended:
        return None
    axes = {Unit.NATS: f"gap, {section.study.loss_unit}", **_OTHER_AXES}
    drawn = [(*_part_rows(judgement, unit), title) for unit, title in axes.items()]
    panels = [_part_panel(rows, margins, title) for rows, margins, title in drawn if rows]
    caption = (
        f"Estimate and {100 * (1 - 2 * judgement.alpha):.3g} % interval of each part of the claim;"
        " thick mark: the claimed margin"
        f" ({format_n([judged.part.sample.n for judged in judgement.parts])})."
    )
    # Runs diverged or never reached the loss, or they are too few: the table says which.
    caption += base.format_open_note([row for rows, *_ in drawn for row in rows], cause="")
    return Chart("parts", "Claimed and measured", caption, panels, columns=1)  # long labels


def _part_panel(rows: list[Spec], margins: list[Spec], title: str) -> ChartPanel:
    y = base.arm_axis([row["arm"] for row in rows])
    x, ink = base.number_axis("gap", title, zero=True), "var(--ink)"
    x |= {"axis": {"tickCount": 8, "labelOverlap": True}}
    tooltip = base.make_tooltip(arm="part", estimate="measured", verdict="")
    encoding = {"x": x, "y": y}
    margin = {"x": x | {"field": "at"}, "y": y, "tooltip": base.make_tooltip(at="margin")}
    layers = [
        base.zero_line("x"),
        base.make_layer("tick", margin, margins, thickness=3, size=20, color="var(--warn)"),
        *base.open_intervals(rows, y, {"color": {"value": ink}}),
        *base.interval_layer("rule", "x", rows, encoding, strokeWidth=3, color=ink),
        base.make_layer("point", encoding | {"tooltip": tooltip}, filled=True, size=70, color=ink),
    ]
    return base.make_panel("", rows, layers, base.ROW_HEIGHT * (len(rows) + 1))


def _part_rows(judgement: Judgement, unit: Unit) -> tuple[list[Spec], list[Spec]]:
    """Return a row per part in this unit that has an interval, and one per margin."""
    rows, margins = list[Spec](), list[Spec]()
    for judged in judgement.parts:
        part, spec = judged.part, judged.comparison.spec
        interval = part.sample.interval(1 - 2 * judgement.alpha)
        if judged.unit is not unit or interval is None:
            continue

        def place(cost: float) -> float:
            """Return the place of a value on the axis."""
            value = unit.natural(cost)
            return 100 * (value - 1) if unit is Unit.RATIO else value

        what = {"growth": ", per doubling", "asymptote": ", extrapolated"}.get(spec.horizon, "")
        label = f"{part.name}{what}  (n = {part.sample.n})"
        ends = sorted(place(end) for end in interval)
        mean, (low, high) = place(part.sample.mean), ends
        if not math.isfinite(mean):
            continue  # the table tells it
        below, above = part.open_below or math.isinf(low), part.open_above or math.isinf(high)
        if unit is Unit.SHARE:
            below, above = above, below
        sides = {"below": below, "above": above}
        finite = [low if math.isfinite(low) else mean, high if math.isfinite(high) else mean]
        rows.append(
            {"arm": label, "gap": mean, "low": finite[0], "high": finite[1]}
            | {"estimate": format_gap(mean, finite, **sides), "verdict": judged.word}
            | {f"open_{side}": is_open for side, is_open in sides.items()}
        )
        edges = {"noninferior": [1], "worse": [1], "better": [-1]}.get(part.kind, [-1, 1])
        margins += [{"arm": label, "at": place(side * part.margin)} for side in edges]
    return rows, margins


def gap_chart(section: Section) -> Chart:
    """Chart the gaps, one row per arm, grouped by baseline, each group with its floor."""
    rows, pairs, all_diverged = list[Spec](), list[Spec](), list[Spec]()
    groups: dict[str, list[str]] = {}  # the labels of each baseline
    for gap in section.summary.gaps:
        diverged = gap.arm_diverged + gap.baseline_diverged
        if gap.mean is None and not diverged:
            continue
        counts = f"n = {gap.n}{f', {diverged} diverged' if diverged else ''}"
        label = f"{section.labels[gap.arm]}  ({counts})"
        groups.setdefault(gap.baseline, []).append(label)
        arm = {"arm": label, "variant": section.style_names[gap.arm]}
        if gap.mean is None:
            all_diverged.append(arm)
            continue
        low, high = gap.interval or (None, None)
        rows.append(
            arm
            | {"gap": gap.mean, "low": low, "high": high, "n": gap.n, "baseline": gap.baseline}
            | {"estimate": format_gap_summary(gap)}
            | {"open_above": gap.arm_diverged > 0, "open_below": gap.baseline_diverged > 0}
        )
        pairs += [arm | {"gap": pair.gap} for pair in gap.pairs]
    floors = [floor for floor in _floor_rows(section) if floor["baseline"] in groups]
    for floor in floors:
        groups[floor["baseline"]].append(floor["arm"])
    names = _space_groups([*groups.values()])
    near, far = _split_floors(floors, rows)
    color, y = base.by_variant(section, "color"), base.arm_axis(names)
    x = base.number_axis("gap", f"gap, {section.study.loss_unit}", zero=True, nice=True)
    x |= {"axis": {"tickCount": 6, "labelOverlap": True}}
    encoding = {"x": x, "y": y} | color
    tooltip = base.make_tooltip(arm="", estimate="gap, 95 % interval", baseline="against")
    margins = sorted({gap.margin.nats for gap in section.summary.gaps if gap.margin})
    layers = [*margin_band(margins), base.zero_line("x")]
    if len(pairs) <= 2_000:
        layers.append(base.make_layer("tick", encoding, pairs, thickness=1, size=9, opacity=0.45))
    if all_diverged:
        text = {"text": "all pairs diverged", "align": "left", "dx": 4, "fontSize": 11}
        left = {"x": {"value": 0}, "y": y}
        layers.append(base.make_layer("text", left, all_diverged, **text, color="var(--warn)"))
    if far:
        text = {"text": {"field": "beyond", "type": "nominal"}, "tooltip": tooltip}
        right = {"x": {"value": "width"}, "y": y} | text | color
        layers.append(base.make_layer("text", right, far, align="right", dx=-4, fontSize=11))
    points = encoding | {"tooltip": tooltip} | base.by_variant(section, "shape")
    if near:
        layers += [
            *base.open_intervals(near, y, color, near),
            base.make_layer(
                "rule",
                encoding | {"x": x | {"field": "low"}, "x2": {"field": "high"}},
                near,
                strokeWidth=3,
                opacity=0.5,
            ),
            base.make_layer("point", points, near, filled=True, size=70, opacity=1),
        ]
    layers += [
        *base.open_intervals(rows, y, color),
        *base.interval_layer("rule", "x", rows, encoding, strokeWidth=3, opacity=0.75),
        base.make_layer("point", points, filled=True, size=70, opacity=1),
    ]
    height = base.ROW_HEIGHT * len(names) + base.ROW_HEIGHT // 2
    panel = base.make_panel("", rows, layers, height, all_diverged, floors)
    caption = (
        "Test loss of an arm minus test loss of its baseline with the same seed; negative"
        " is better. Point: mean; bar: 95 % interval, unadjusted for multiple arms; ticks:"
        f" single pairs ({format_n([row['n'] for row in rows])})."
    )
    single = sum(row["low"] is None for row in rows)
    caption += f" No bar: a single pair ({format_count(single, 'arm')})." if single else ""
    if margins:
        caption += f" Shaded: the margin, ± {' or '.join(f'{nats:g}' for nats in margins)} nats."
    caption += " Floor: attention that averages all tokens." if floors else ""
    caption += base.format_open_note([*rows, *near])
    return Chart("gaps", "Gaps", caption, [panel] if rows else [])


def _floor_rows(section: Section) -> list[Spec]:
    """Return the row of each floor of a baseline that is not itself one of the compared arms."""
    rows = []
    gaps = [gap for family in section.families for gap in family.gaps]
    compared = {gap.arm.name for gap in gaps}
    floors = {(g.baseline.name, g.floor.arm.name): g.floor for g in gaps if g.floor is not None}
    for floor in floors.values():
        if floor.arm.name in compared or not floor.sample.n:
            continue
        sample, interval = floor.sample, floor.sample.interval()
        low, high = interval or (sample.mean, sample.mean)
        above, below = floor.arm_diverged > 0, floor.baseline_diverged > 0
        estimate = format_gap(sample.mean, interval, below=below, above=above)
        row: Spec = {"arm": f"{section.labels[floor.arm.name]}, floor  (n = {sample.n})"}
        row |= {"variant": section.style_names[floor.arm.name], "baseline": floor.baseline.name}
        row |= {"gap": sample.mean, "low": low, "high": high, "estimate": estimate}
        row |= {"open_below": below, "open_above": above}
        rows.append(row | {"beyond": f"{estimate} →"})
    return rows


def _split_floors(floors: list[Spec], rows: list[Spec]) -> tuple[list[Spec], list[Spec]]:
    """Return the floors that fit the axis of the arms, and those that would compress it."""
    ends = [row[key] for row in rows for key in ("gap", "low", "high") if row[key] is not None]
    limit = _MAX_FLOOR * max(map(abs, ends), default=0.0)
    near = [row for row in floors if row["high"] <= limit]
    return near, [row for row in floors if row["high"] > limit]


def _space_groups(groups: list[list[str]]) -> list[str]:
    """Return all labels, with an empty row between groups of several."""
    names: list[str] = []
    for number, group in enumerate(groups):
        if number and max(map(len, groups)) > 1:
            names.append(" " * number)
        names += group
    return names


def margin_band(margins: list[float]) -> list[Spec]:
    """Return the band from minus to plus a margin."""
    ends = [{"from": -nats, "to": nats} for nats in margins]
    x = {"x": {"field": "from", "type": "quantitative"}, "x2": {"field": "to"}}
    return [base.make_layer("rect", x, ends, color="var(--warn)", opacity=0.13)] if ends else []
