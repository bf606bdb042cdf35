"""The pictures of a report, as Vega-Lite. A chart has panels; one colour scheme for paper and
screens: see palette. What a picture shows is made of numbers and of names that are data, never part
of an expression."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qkablate.analysis.curves import Curve, arm_curve, curve, thinned
from qkablate.analysis.gaps import Family
from qkablate.analysis.sample import ALPHA, Sample
from qkablate.analysis.study import VAL, Entry
from qkablate.report.chapter import Chapter, place_of, span
from qkablate.table import digits

Spec = dict[str, Any]
MOST_RUNS = 200  # whose curves are drawn one by one
_POINTS = 6_000  # of all curves of one chart
_ROW = 20  # pixels


@dataclass(frozen=True)
class Panel:
    title: str
    spec: Spec
    variants: list[str]


@dataclass(frozen=True)
class Chart:
    """`name` is also how its file ends."""

    name: str
    title: str
    caption: str
    panels: list[Panel]

    @property
    def variants(self) -> list[str]:
        return list(dict.fromkeys(v for panel in self.panels for v in panel.variants))


def charts(chapter: Chapter) -> list[Chart]:
    """All that there is something to draw for."""
    every = (claim, gaps, losses, gap_curves, heat, costs, bowls)
    return [chart for make in every if (chart := make(chapter)) is not None]


def claim(chapter: Chapter) -> Chart | None:
    """The parts of a claim, each with the margin it is judged by."""
    found = chapter.judgement
    if found is None or found.verdict is None:
        return None
    rows, margins = [], []
    for one, word in zip(found.judged, found.verdict.parts, strict=True):
        part, spec = one.part, one.comparison.spec
        interval = part.sample.interval(1 - 2 * found.alpha)
        if interval is None:
            continue
        label = f"{part.name}  (n = {part.sample.n})"
        low, high = interval
        told = told_gap(part.sample.mean, interval) + " open above" * part.open_above
        rows.append(
            {"arm": label, "gap": part.sample.mean, "told": told + " open below" * part.open_below}
            | {"low": low, "high": high, "verdict": word}
        )
        sides = {"noninferior": [1], "worse": [1], "better": [-1]}.get(part.kind, [-1, 1])
        margins += [{"arm": label, "at": side * spec.margin, "what": "margin"} for side in sides]
    if not rows:
        return None
    y = _names([row["arm"] for row in rows])
    x: Spec = {"type": "quantitative", "title": "nats per token", "scale": {"zero": True}}
    tooltip = [_tip("arm", "part"), _tip("told", "measured"), _tip("verdict")]
    layers = [
        _zero("x"),
        {
            "data": {"values": margins},
            "mark": {"type": "tick", "thickness": 3, "size": 20, "color": "var(--warn)"},
            "encoding": {"x": x | {"field": "at"}, "y": y, "tooltip": [_tip("at", "margin")]},
        },
        {
            "mark": {"type": "rule", "strokeWidth": 3, "color": "var(--ink)"},
            "encoding": {"x": x | {"field": "low"}, "x2": {"field": "high"}, "y": y},
        },
        {
            "mark": {"type": "point", "filled": True, "size": 70, "color": "var(--ink)"},
            "encoding": {"x": x | {"field": "gap"}, "y": y, "tooltip": tooltip},
        },
    ]
    drawn: Spec = {"height": _ROW * len(rows) + _ROW, "data": {"values": rows}, "layer": layers}
    level = f"{100 * (1 - 2 * found.alpha):.3g} %"
    caption = (
        f"What each part of the claim measured: point and {level} interval; thick mark: the margin"
        f" that it is judged by ({span([one.part.sample.n for one in found.judged])})."
    )
    return Chart("claim", "Measured, and claimed", caption, [Panel("", drawn, [])])


def gaps(chapter: Chapter) -> Chart | None:
    """The forest: a row an arm."""
    rows, pairs = [], []
    for one in chapter.found["gaps"]:
        if one["mean"] is None:
            continue
        variant = chapter.entries[one["arm"]].arm.variant
        low, high = one["interval"] or (None, None)
        label = f"{one['arm']}  (n = {one['n']})"
        diverged = one["arm_diverged"] + one["baseline_diverged"]
        told = told_gap(one["mean"], one["interval"])
        told += f", {diverged} diverged" if diverged else ""
        rows.append(
            {"arm": label, "variant": variant, "gap": one["mean"], "low": low, "high": high}
            | {"told": told, "n": one["n"], "baseline": one["baseline"]}
        )
        every = [pair["gap"] for pair in one["pairs"]]
        pairs += [{"arm": label, "variant": variant, "gap": gap} for gap in every]
    if not rows:
        return None
    names = [row["arm"] for row in rows]
    y = _names(names)
    x: Spec = {"type": "quantitative", "title": "gap, nats per token"}
    x |= {"scale": {"zero": True, "nice": True}}
    tooltip = [_tip("arm"), _tip("told", "gap, 95 % interval"), _tip("baseline", "against")]
    layers = [_zero("x")]
    if len(pairs) <= 2_000:
        layers.append(
            {
                "data": {"values": pairs},
                "mark": {"type": "tick", "thickness": 1, "size": 9, "opacity": 0.45},
                "encoding": {"x": x | {"field": "gap"}, "y": y} | _colour(chapter),
            }
        )
    layers += [
        {
            "mark": {"type": "rule", "strokeWidth": 3, "opacity": 0.75},
            "encoding": {"x": x | {"field": "low"}, "x2": {"field": "high"}, "y": y}
            | _colour(chapter),
            "transform": [{"filter": {"field": "low", "valid": True}}],
        },
        {
            "mark": {"type": "point", "filled": True, "size": 70, "opacity": 1},
            "encoding": {"x": x | {"field": "gap"}, "y": y, "tooltip": tooltip}
            | _colour(chapter)
            | _shape(chapter),
        },
    ]
    spec: Spec = {
        "height": _ROW * len(names) + _ROW // 2,
        "data": {"values": rows},
        "layer": layers,
    }
    caption = (
        "Test loss of an arm minus that of its baseline with the same seed: left of zero is better."
        " Point: mean; bar: 95 %"
        f" t interval, not adjusted for several arms; ticks: the pairs ({chapter.seeds})."
    )
    single = sum(row["low"] is None for row in rows)
    caption += f" No bar: fewer than two pairs ({single} arms)." if single else ""
    return Chart("gaps", "Gaps", caption, [Panel("", spec, _variants(rows))])


def losses(chapter: Chapter) -> Chart | None:
    """Loss by tokens."""
    entries = chapter.study.entries
    most = max(6, min(48, _POINTS // max(1, len(entries))))
    each = len(chapter.study.records) <= MOST_RUNS
    panels, counts = [], []
    for name, group in chapter.groups.items():
        means: list[Spec] = []
        single: list[Spec] = []
        for entry in group:
            own = arm_curve(entry, chapter.metric, most)
            if own is not None:
                means += _readings(own, entry)
                counts.append(own.samples[0].n)
            if each:
                single += _single(entry, chapter.metric, most)
        if means or single:
            y: Spec = {"field": "loss", "type": "quantitative", "title": "loss, nats per token"}
            y |= {"scale": {"type": "log", "nice": False}}
            title = place_of(name, group[0].arm.variant)
            panels.append(Panel(title, _lines(chapter, means, single, y), _variants(means, single)))
    if not panels:
        return None
    what = "Validation" if chapter.metric == VAL else "Training"
    caption = f"{what} loss. Line: mean of an arm's runs that are done ({span(counts)}); band: 95 %"
    caption += " t interval of that mean at each reading; thin: "
    caption += "every run, one that diverged ends at its last reading." if each else "not drawn."
    return Chart("losses", f"{what} loss", caption, panels)


def gap_curves(chapter: Chapter) -> Chart | None:
    """The gap by tokens, with a band that holds at all readings at once."""
    found = [(family, one) for family in chapter.families for one in family.gaps]
    most = max(6, min(48, _POINTS // max(1, len(found))))
    by_family: dict[str, tuple[Family, list[Spec]]] = {}
    counts = []
    for family, one in found:
        own = curve(one, chapter.metric, most)
        if own is not None:
            _, rows = by_family.setdefault(family.baseline.name, (family, []))
            rows += _readings(own, one.arm, band=True)
            counts.append(own.samples[0].n)
    y: Spec = {"field": "loss", "type": "quantitative", "title": "gap, nats per token"}
    y |= {"scale": {"zero": True}}
    panels = [
        Panel(
            place_of(name, family.baseline.arm.variant),
            _lines(chapter, rows, [], y, zero=True),
            _variants(rows),
        )
        for name, (family, rows) in by_family.items()
    ]
    if not panels:
        return None
    what = "validation" if chapter.metric == VAL else "training"
    caption = (
        f"Gap in {what} loss to the baseline, pair by pair ({span(counts)}). The bands hold at all"
        " readings at once in 95 of 100 studies. In the middle of a schedule this describes, and"
        " decides nothing."
    )
    if min(counts) < 2:
        caption += " One pair alone has no band."
    return Chart("gap-curves", "Gap while training", caption, panels)


def heat(chapter: Chapter) -> Chart | None:
    """Variant × d_model × heads."""
    cells: dict[str, list[Spec]] = {}
    for one in chapter.found["gaps"]:
        if one["mean"] is None:
            continue
        arm = chapter.entries[one["arm"]].arm
        model = arm.config.model
        size = f"d{model.d_model} h{model.heads}"
        place = place_of(one["arm"], arm.variant)
        rest = place.replace(f"d{model.d_model}-h{model.heads}", "", 1).strip("- ")
        interval = one["interval"]
        sure = interval is not None and (interval[0] > 0 or interval[1] < 0)
        half = _half(interval)
        text = digits(one["mean"], half, signed=True)
        cells.setdefault(rest, []).append(
            {"variant": arm.variant, "size": size, "order": model.d_model * 1000 + model.heads}
            | {"gap": one["mean"], "n": one["n"], "text": text if sure else f"({text})"}
            | {"told": told_gap(one["mean"], interval), "arm": one["arm"]}
            | {
                "half": ""
                if interval is None
                else f"± {digits(_half(interval) or 0, _half(interval))}"
            }
        )
    panels = [_heat_panel(rest, rows) for rest, rows in cells.items() if len(rows) > 1]
    if not panels:
        return None
    ns = [row["n"] for rows in cells.values() for row in rows]
    caption = (
        f"Gap in test loss, nats per token, ± half of its 95 % t interval ({span(ns)}). Blue is"
        " better. In brackets: nothing was found, for the interval holds zero or there is none."
    )
    return Chart("heat", "Gap by size", caption, panels)


def _heat_panel(title: str, rows: list[Spec]) -> Panel:
    sizes = [row["size"] for row in sorted(rows, key=lambda row: row["order"])]
    sizes, names = list(dict.fromkeys(sizes)), _variants(rows)
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
            "tooltip": [_tip("arm"), _tip("told", "gap, 95 % interval"), _tip("n")],
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
    return Panel(title, spec, [])


def costs(chapter: Chapter) -> Chart | None:
    """Loss against what an arm costs."""
    done = [entry for entry in chapter.study.entries if entry.losses]
    axes = {
        "parameters, embeddings apart": [float(e.arm.params) for e in done],
        "training FLOPs": [e.arm.work for e in done],
        "KV cache, bytes per token (16 bit)": [2.0 * (e.arm.cached or 0) for e in done],
    }
    panels = []
    for what, costs in axes.items():
        rows = []
        for entry, cost in zip(done, costs, strict=True):
            sample = entry.sample
            low, high = sample.interval() or (None, None)
            if cost > 0:
                rows.append(
                    {"arm": entry.name, "variant": entry.arm.variant, "cost": cost}
                    | {"loss": sample.mean, "low": low, "high": high, "n": sample.n}
                    | {"told": told_loss(sample)}
                )
        if len({row["cost"] for row in rows}) > 1:
            panels.append(Panel(what, _cost_panel(chapter, rows, what), _variants(rows)))
    if not panels:
        return None
    caption = (
        "Mean test loss of every arm; bar: 95 % t interval of the mean over seeds"
        f" ({span([len(entry.losses) for entry in done])}). Lower and further left is better."
    )
    return Chart("costs", "Loss against cost", caption, panels)


def _cost_panel(chapter: Chapter, rows: list[Spec], what: str) -> Spec:
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
    tooltip = [_tip("arm"), _tip("told", "test loss, 95 % interval"), _tip("n")]
    tooltip.append({"field": "cost", "type": "quantitative", "title": what, "format": ".3s"})
    own = _colour(chapter)
    return {
        "height": 260,
        "data": {"values": rows},
        "layer": [
            {
                "mark": {"type": "rule", "opacity": 0.6},
                "encoding": {"x": x, "y": y | {"field": "low"}, "y2": {"field": "high"}} | own,
                "transform": [{"filter": {"field": "low", "valid": True}}],
            },
            {
                "mark": {"type": "point", "filled": True, "size": 60, "opacity": 0.9},
                "encoding": {"x": x, "y": y | {"field": "loss"}, "tooltip": tooltip}
                | own
                | _shape(chapter),
            },
        ],
    }


def bowls(chapter: Chapter) -> Chart | None:
    """Validation loss by learning rate."""
    by_baseline: dict[str, list[Spec]] = {}
    lost: dict[str, list[Spec]] = {}
    counts, diverged = [], 0
    for one in chapter.found["learning_rates"]:
        arm = chapter.study.manifest.arms[one["arm"]]
        key = one["baseline"] or one["arm"]
        for point in one["val_loss"]:
            known = [loss for loss in point["by_seed"] if loss is not None]
            row = {"arm": one["arm"], "variant": arm.variant, "lr": point["lr"]}
            if len(known) < len(point["by_seed"]):
                diverged += 1
                lost.setdefault(key, []).append(row)
                continue
            sample = Sample(tuple(known))
            low, high = sample.interval() or (None, None)
            counts.append(sample.n)
            row |= {"loss": sample.mean, "low": low, "high": high, "n": sample.n}
            row |= {"best": point["lr"] == one["best"], "told": told_loss(sample)}
            by_baseline.setdefault(key, []).append(row)
    panels = [
        Panel(
            place_of(key, chapter.study.manifest.arms[key].variant),
            _bowl_panel(chapter, rows, lost.get(key, [])),
            _variants(rows),
        )
        for key, rows in by_baseline.items()
    ]
    if not panels:
        return None
    caption = (
        "Validation loss by learning rate, mean over the seeds that serve to tune"
        f" ({span(counts)}); bar: 95 % t interval; large: the best."
    )
    caption += f" Cross: {diverged} rates at which a run diverged." if diverged else ""
    return Chart("rates", "Learning rates", caption, panels)


def _bowl_panel(chapter: Chapter, rows: list[Spec], lost: list[Spec]) -> Spec:
    x: Spec = {"field": "lr", "type": "quantitative", "title": "learning rate"}
    x |= {"scale": {"type": "log", "nice": False, "padding": 16}}
    x |= {"axis": {"format": "~g", "tickCount": 5}}
    y: Spec = {"type": "quantitative", "title": "validation loss", "scale": {"zero": False}}
    tooltip = [_tip("arm"), _tip("lr", "learning rate"), _tip("told", "loss, 95 % interval")]
    tooltip.append(_tip("n"))
    own = _colour(chapter)
    best = {"condition": {"test": "datum.best", "value": 150}, "value": 35}
    layers = [
        {
            "mark": {"type": "line", "strokeWidth": 2},
            "encoding": {"x": x, "y": y | {"field": "loss"}, "detail": {"field": "arm"}}
            | own
            | _dash(chapter),
        },
        {
            "mark": {"type": "rule", "opacity": 0.5},
            "encoding": {"x": x, "y": y | {"field": "low"}, "y2": {"field": "high"}} | own,
            "transform": [{"filter": {"field": "low", "valid": True}}],
        },
        {
            "mark": {"type": "point", "filled": True, "opacity": 1},
            "encoding": {"x": x, "y": y | {"field": "loss"}, "tooltip": tooltip, "size": best}
            | own
            | _shape(chapter),
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


def _lines(
    chapter: Chapter, rows: list[Spec], single: list[Spec], y: Spec, *, zero: bool = False
) -> Spec:
    """Lines by tokens, with their bands, and thin ones below."""
    x: Spec = {"field": "tokens", "type": "quantitative", "title": "tokens"}
    x |= {"scale": {"type": "log", "nice": False}, "axis": {"format": "~s", "tickCount": 5}}
    tooltip = [_tip("arm"), {"field": "tokens", "type": "quantitative", "format": ","}]
    tooltip += [_tip("loss", "mean"), _tip("low", "from"), _tip("high", "to"), _tip("n")]
    lines = {"x": x, "y": y, "detail": {"field": "arm"}} | _colour(chapter)
    layers: list[Spec] = []
    if zero:
        layers.append(_zero("y"))
    if single:
        layers.append(
            {
                "data": {"values": single},
                "mark": {"type": "line", "strokeWidth": 0.8, "opacity": 0.35},
                "encoding": lines | {"detail": {"field": "run"}},
            }
        )
    if rows:
        band = {**y, "field": "low"}
        layers += [
            {
                "mark": {"type": "area", "opacity": 0.13},
                "encoding": lines | {"y": band, "y2": {"field": "high"}},
                "transform": [{"filter": {"field": "low", "valid": True}}],
            },
            {
                "mark": {"type": "line", "strokeWidth": 2},
                "encoding": lines | _dash(chapter),
            },
            {
                "mark": {"type": "point", "size": 90, "opacity": 0, "filled": True},
                "encoding": lines | {"tooltip": tooltip},
            },
        ]
    return {"height": 240, "data": {"values": rows}, "layer": layers}


def _readings(own: Curve, entry: Entry, *, band: bool = False) -> list[Spec]:
    intervals = own.band() if band else [sample.interval() for sample in own.samples]
    rows = []
    for tokens, sample, interval in zip(own.tokens, own.samples, intervals, strict=True):
        if not math.isfinite(sample.mean):
            continue
        # As many digits as the interval supports, which is a tenth of what one sees of it.
        half = _half(interval)
        low, high = (float(digits(end, half)) for end in interval) if interval else (None, None)
        row = {"arm": entry.name, "variant": entry.arm.variant, "tokens": tokens, "n": sample.n}
        rows.append(row | {"loss": float(digits(sample.mean, half)), "low": low, "high": high})
    return rows


def _single(entry: Entry, metric: str, most: int) -> list[Spec]:
    rows = []
    for place, record in enumerate(entry.records.values()):
        course = record.courses[metric]
        shown = thinned([*course], most) if course else []
        own = {"run": f"{entry.name} {place}", "variant": entry.arm.variant}
        rows += [
            own | {"tokens": tokens, "loss": float(f"{course[tokens]:.4f}")} for tokens in shown
        ]
    return rows


def told_gap(mean: float, interval: Sequence[float] | None) -> str:
    """+0.012 [+0.008, +0.016], with no more digits than the interval supports."""
    half = _half(interval)
    said = digits(mean, half, signed=True)
    if interval is None:
        return f"{said}, no interval"
    return f"{said} [{', '.join(digits(end, half, signed=True) for end in interval)}]"


def told_loss(sample: Sample, level: float = 1 - ALPHA) -> str:
    interval = sample.interval(level)
    half = _half(interval)
    said = digits(sample.mean, half)
    if interval is None:
        return f"{said}, no interval"
    return f"{said} [{', '.join(digits(end, half) for end in interval)}]"


def _half(interval: Sequence[float] | None) -> float | None:
    return None if interval is None else (interval[1] - interval[0]) / 2


def _names(names: list[str]) -> Spec:
    """A row for each, in this order."""
    y: Spec = {"field": "arm", "type": "nominal", "sort": names, "title": None}
    y |= {"axis": {"labelLimit": 220, "ticks": False, "domain": False, "grid": False}}
    return y | {"scale": {"domain": names}}


def _zero(axis: str) -> Spec:
    """A dashed line where there is no difference."""
    return {
        "data": {"values": [{"at": 0}]},
        "mark": {"type": "rule", "color": "var(--faint)", "strokeDash": [3, 3]},
        "encoding": {axis: {"field": "at", "type": "quantitative"}},
    }


def _tip(field: str, title: str = "") -> Spec:
    return {"field": field, "type": "nominal", "title": title or field}


def _variants(*lists: list[Spec]) -> list[str]:
    return list(dict.fromkeys(row["variant"] for rows in lists for row in rows))


def _scale(chapter: Chapter, which: str) -> Spec:
    looks = chapter.looks
    return {"domain": [*looks], "range": [getattr(look, which) for look in looks.values()]}


def _by_variant(chapter: Chapter, which: str) -> Spec:
    own: Spec = {"field": "variant", "type": "nominal", "legend": None}
    return own | {"scale": _scale(chapter, which)}


def _colour(chapter: Chapter) -> Spec:
    return {"color": _by_variant(chapter, "colour")}


def _dash(chapter: Chapter) -> Spec:
    return {"strokeDash": _by_variant(chapter, "dash")}


def _shape(chapter: Chapter) -> Spec:
    return {"shape": _by_variant(chapter, "shape")}
