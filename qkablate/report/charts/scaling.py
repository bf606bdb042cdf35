"""Charts of scaling laws: the compute frontier, lines of equal loss, and the gap at its end."""

from collections.abc import Iterable

import numpy as np

from qkablate.analysis.scaling.compute_gain import GridFit
from qkablate.analysis.scaling.law import REACH, ScalingLaw
from qkablate.report.charts import base
from qkablate.report.charts.base import Chart, ChartPanel, Spec, round_digits
from qkablate.report.section import Section
from qkablate.report.text.numbers import format_gap

_POINTS = 60  # of a line
_LEVELS = 5  # lines of equal loss


def scaling_chart(section: Section) -> Chart | None:
    """Chart the scaling laws of each arm beside its baseline's."""
    fits = [fit for fit in section.grid_fits if fit.laws]
    # By kind, so that arms stand side by side.
    kinds = _frontier_panel, _iso_loss_panel, _horizon_panel
    panels = [make_panel(section, fit) for make_panel in kinds for fit in fits]
    caption = (
        "Loss by compute: the mean test loss of every size and length (points) and the lowest loss"
        " that each law gives for a compute budget (lines); left and lower is better. Equal loss:"
        f" sizes and lengths that have it, within {REACH:g} times those that were trained. Gap by"
        " length: at the largest size, measured (points) and fitted (line); dashed: after"
        " infinitely many tokens, an extrapolation, with its 95 % interval."
    )
    return Chart("scaling", "Scaling laws", caption, panels) if panels else None


def _sides(section: Section, fit: GridFit) -> Iterable[tuple[str, ScalingLaw]]:
    """Yield the style's name and the law of the arm, and of its baseline."""
    gap, names = fit.gaps[-1], section.style_names
    return zip((names[gap.arm.name], names[gap.baseline.name]), fit.laws, strict=True)


def _frontier_panel(section: Section, fit: GridFit) -> ChartPanel:
    points, lines = list[Spec](), list[Spec]()
    for variant, law in _sides(section, fit):
        data = law.data
        flops_P = data.flops_P * data.tokens_P
        for flops, loss, params in zip(flops_P, data.losses_P, data.params_P, strict=True):
            point = _point(variant, flops=flops, loss=loss)
            points.append(point | {"params": f"{params:,.0f}"})
        for flops in np.geomspace(flops_P.min(), flops_P.max(), _POINTS):
            if (loss := law.lowest_loss(float(flops))) is not None:
                lines.append(_point(variant, flops=flops, loss=loss))
    x = base.log_axis("flops", "training FLOPs")
    y = base.number_axis("loss", f"test loss, {section.study.loss_unit}", zero=False)
    encoding = {"x": x, "y": y} | base.by_variant(section, "color")
    tooltip = base.make_tooltip(variant="", params="parameters", loss="test loss")
    layers = [
        base.make_layer(
            "line", encoding | base.by_variant(section, "dash"), lines, strokeWidth=2, clip=True
        ),
        base.make_layer(
            *("point", encoding | base.by_variant(section, "shape") | {"tooltip": tooltip}),
            **{"filled": True, "size": 45, "opacity": 0.8},
        ),
    ]
    return base.make_panel(f"{fit.summary.arm}: loss by compute", points, layers, 260)


def _iso_loss_panel(section: Section, fit: GridFit) -> ChartPanel:
    baseline = fit.laws[-1]
    losses = np.sort(baseline.data.losses_P)
    rows = list[Spec]()
    for loss in np.linspace(losses[0], losses[-1], _LEVELS + 2)[1:-1]:
        for variant, law in _sides(section, fit):
            sizes = law.data.params_P
            for params in np.geomspace(sizes.min() / REACH, sizes.max() * REACH, _POINTS):
                if (tokens := law.tokens_for(float(loss), float(params))) is not None:
                    row = _point(variant, params=params, tokens=tokens)
                    rows.append(row | {"level": f"{variant} {loss:.4f}", "loss": f"{loss:.3f}"})
    x, y = base.log_axis("params", "parameters"), base.log_axis("tokens", "tokens")
    color = base.by_variant(section, "color", "dash")
    tooltip = base.make_tooltip(variant="", loss="loss")
    lines = {"x": x, "y": y, "detail": {"field": "level"}, "tooltip": tooltip} | color
    layers = [base.make_layer("line", lines, strokeWidth=1.5)]
    ends = {row["level"]: row for row in rows}  # the last point of each line
    text = {"x": x, "y": y, "text": {"field": "loss"}} | base.by_variant(section, "color")
    name = section.style_names[fit.gaps[-1].baseline.name]
    own = [row for row in ends.values() if row["variant"] == name]
    if own:
        layers.append(base.make_layer("text", text, own, align="left", dx=4, fontSize=11))
    return base.make_panel(f"{fit.summary.arm}: equal loss", rows, layers, 260)


def _horizon_panel(section: Section, fit: GridFit) -> ChartPanel:
    largest = fit.gaps[-1]
    variant = section.style_names[largest.arm.name]
    gaps = [gap for gap in fit.gaps if gap.arm.arm.params == largest.arm.arm.params]
    rows = list[Spec]()
    for gap in gaps:
        interval = gap.sample.interval()
        low, high = interval or (None, None)
        row = _point(variant, tokens=gap.baseline.tokens, gap=gap.sample.mean)
        row |= {"low": low, "high": high, "estimate": format_gap(gap.sample.mean, interval)}
        rows.append(row)
    lines = list[Spec]()
    if fit.asymptote is not None:
        tokens = np.geomspace(rows[0]["tokens"], REACH * rows[-1]["tokens"], _POINTS)
        curve = fit.asymptote.gap(tokens)
        lines = [_point(variant, tokens=t, gap=g) for t, g in zip(tokens, curve, strict=True)]
    x = base.log_axis("tokens", "tokens")
    y = base.number_axis("gap", f"gap, {section.study.loss_unit}")
    encoding = {"x": x, "y": y} | base.by_variant(section, "color")
    tooltip = base.make_tooltip(estimate="gap, 95 % interval")
    layers = [
        base.zero_line("y"),
        base.make_layer("line", encoding, lines, strokeWidth=2),
        *base.interval_layer("rule", "y", rows, encoding, opacity=0.6),
        base.make_layer("point", encoding | {"tooltip": tooltip}, filled=True, size=60),
    ]
    if (end := fit.summary.asymptote) is not None and end.mean is not None:
        level = [{"gap": end.mean, "variant": variant}]
        flat = {"y": y} | base.by_variant(section, "color")
        layers.append(base.make_layer("rule", flat, level, strokeDash=[5, 4]))
        if end.interval is not None:
            band = [{"low": end.interval[0], "high": end.interval[1], "variant": variant}]
            ends = {"y": y | {"field": "low"}, "y2": {"field": "high"}}
            color = base.by_variant(section, "color")
            layers.append(base.make_layer("rect", ends | color, band, opacity=0.1))
    return base.make_panel(f"{fit.summary.arm}: gap by length", rows, layers, 260)


def _point(variant: str, **values: float) -> Spec:
    return {"variant": variant} | {name: round_digits(x, 5) for name, x in values.items()}
