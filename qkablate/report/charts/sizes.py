"""Gap and loss by what an arm is: its size, its cost, its learning rate."""

from collections.abc import Callable

from qkablate.analysis.stats import Sample
from qkablate.analysis.study.study import Entry
from qkablate.report.charts.base import (
    Chart,
    Panel,
    Spec,
    colour,
    dash,
    shape,
    tip,
    variants,
    where_known,
)
from qkablate.report.section import Chapter, place_of, span
from qkablate.report.text.numbers import half_of, told_loss, told_open
from qkablate.report.text.tables import says
from qkablate.table import digits


def heat(chapter: Chapter) -> Chart | None:
    """Variant × d_model × heads."""
    cells: dict[str, list[Spec]] = {}
    for one in chapter.found["gaps"]:
        diverged = one["arm_diverged"] or one["baseline_diverged"]
        if one["mean"] is None and not diverged:
            continue
        arm = chapter.entries[one["arm"]].arm
        model = arm.config.model
        size = f"d{model.d_model} h{model.heads}"
        place = place_of(one["arm"], arm.variant)
        rest = place.replace(f"d{model.d_model}-h{model.heads}", "", 1).strip("- ")
        interval = one["interval"]
        sure = says(one) in ("better", "worse")
        half = half_of(interval)
        beside = f"± {digits(half, half)}" if half is not None else ""
        if one["mean"] is None:
            text, told = "diverged", "no pair that did not diverge"
        else:
            text, told = digits(one["mean"], half, signed=True), told_open(one)
            text = text if sure else f"({text})"
            beside = told.partition(" ")[2] if diverged else beside
        cells.setdefault(rest, []).append(
            {"variant": arm.variant, "size": size, "order": model.d_model * 1000 + model.heads}
            | {"gap": one["mean"] or 0.0, "n": one["n"], "text": text}
            | {"told": told, "arm": one["arm"], "half": beside}
        )
    panels = [_heat_panel(rest, rows) for rest, rows in cells.items() if len(rows) > 1]
    if not panels:
        return None
    ns = [row["n"] for rows in cells.values() for row in rows if row["n"]]
    caption = (
        f"Gap in test loss, nats per token, ± half of its 95 % t interval ({span(ns)}). Blue is"
        " better. In brackets: no difference was found (by Holm over the arms of one size)."
    )
    if any("∞" in row["half"] for rows in cells.values() for row in rows):
        caption += " ∞: on that side runs diverged, and the interval has no end."
    return Chart("heat", "Gap by size", caption, panels)


def _heat_panel(title: str, rows: list[Spec]) -> Panel:
    sizes = [row["size"] for row in sorted(rows, key=lambda row: row["order"])]
    sizes, names = list(dict.fromkeys(sizes)), variants(rows)
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
            "tooltip": [tip("arm"), tip("told", "gap, 95 % interval"), tip("n")],
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


_WORK = "training FLOPs"
_COSTS: dict[str, Callable[[Entry], float]] = {
    "parameters, embeddings apart": lambda entry: float(entry.arm.params),
    _WORK: lambda entry: entry.arm.work,
    "KV cache, bytes per token (16 bit)": lambda entry: 2.0 * (entry.arm.cached or 0),
}


def costs(chapter: Chapter) -> Chart | None:
    """Loss against what an arm costs."""
    by_data: dict[str, list[Entry]] = {}
    for entry in chapter.study.entries:
        if entry.losses:
            by_data.setdefault(str(entry.arm.facts.get("data_fingerprint")), []).append(entry)
    panels, shorter, shown = [], 0, []
    for what, cost in _COSTS.items():
        for every in by_data.values():
            longest = max(entry.tokens for entry in every)
            # More tokens lower the loss, and are a cost in FLOPs alone.
            own = [entry for entry in every if what == _WORK or entry.tokens == longest]
            rows = [_priced(entry, cost(entry)) for entry in own if cost(entry) > 0]
            if len({row["cost"] for row in rows}) > 1:
                title = f"{what} ({own[0].arm.config.data.source})" if len(by_data) > 1 else what
                panels.append(Panel(title, _cost_panel(chapter, rows, what), variants(rows)))
                shorter += len(every) - len(own)
                shown += [row["n"] for row in rows]
    if not panels:
        return None
    caption = (
        "Mean test loss of every arm; bar: 95 % t interval of the mean over seeds"
        f" ({span(shown)}). Lower and further left is better."
    )
    if shorter:
        caption += f" By {_WORK} all lengths of training are shown, else the longest alone."
    return Chart("costs", "Loss against cost", caption, panels)


def _priced(entry: Entry, cost: float) -> Spec:
    sample = entry.sample
    low, high = sample.interval() or (None, None)
    row = {"arm": entry.name, "variant": entry.arm.variant, "cost": cost, "told": told_loss(sample)}
    return row | {"loss": sample.mean, "low": low, "high": high, "n": sample.n}


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
    tooltip = [tip("arm"), tip("told", "test loss, 95 % interval"), tip("n")]
    tooltip.append({"field": "cost", "type": "quantitative", "title": what, "format": ".3s"})
    own = colour(chapter)
    return {
        "height": 260,
        "data": {"values": rows},
        "layer": [
            *where_known(
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
                | shape(chapter),
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
            variants(rows),
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
    tooltip = [tip("arm"), tip("lr", "learning rate"), tip("told", "loss, 95 % interval")]
    tooltip.append(tip("n"))
    own = colour(chapter)
    best = {"condition": {"test": "datum.best", "value": 150}, "value": 35}
    layers = [
        {
            "mark": {"type": "line", "strokeWidth": 2},
            "encoding": {"x": x, "y": y | {"field": "loss"}, "detail": {"field": "arm"}}
            | own
            | dash(chapter),
        },
        *where_known(
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
            | shape(chapter),
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
