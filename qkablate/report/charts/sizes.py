"""Gap and loss by what an arm is: its size, its cost, its learning rate."""

from qkablate.analysis.sample import Sample
from qkablate.analysis.tables import says
from qkablate.report.chapter import Chapter, place_of, span
from qkablate.report.charts.parts import (
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
from qkablate.report.told import half_of, told_loss, told_open
from qkablate.table import digits


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
        sure = says(one) in ("better", "worse")
        half = half_of(interval)
        text = digits(one["mean"], half, signed=True)
        cells.setdefault(rest, []).append(
            {"variant": arm.variant, "size": size, "order": model.d_model * 1000 + model.heads}
            | {"gap": one["mean"], "n": one["n"], "text": text if sure else f"({text})"}
            | {"told": told_open(one), "arm": one["arm"]}
            | {
                "half": ""
                if interval is None
                else f"± {digits(half_of(interval) or 0, half_of(interval))}"
            }
        )
    panels = [_heat_panel(rest, rows) for rest, rows in cells.items() if len(rows) > 1]
    if not panels:
        return None
    ns = [row["n"] for rows in cells.values() for row in rows]
    caption = (
        f"Gap in test loss, nats per token, ± half of its 95 % t interval ({span(ns)}). Blue is"
        " better. In brackets: no difference was found (by Holm over the arms of one size)."
    )
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
            panels.append(Panel(what, _cost_panel(chapter, rows, what), variants(rows)))
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
