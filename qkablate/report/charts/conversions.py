"""Loss of converted models by the parameters they keep."""

from qkablate.analysis.comparison.conversions import Conversion, find_conversions
from qkablate.analysis.stats import Sample
from qkablate.report.charts import base
from qkablate.report.charts.base import Chart, ChartPanel, Spec, round_digits
from qkablate.report.section import Section, format_n
from qkablate.report.text.numbers import format_gap
from qkablate.report.text.projection import conversion_tables

_LABEL_WIDTH, _LABEL_HEIGHT = 0.2, 0.045  # of a panel
_TITLES = {
    "before": "Before fine-tuning",
    "after": "After fine-tuning",
}


def conversion_chart(section: Section) -> Chart | None:
    """Chart the validation loss of each variant by its parameters, before and after fine-tuning."""
    conversions = find_conversions(section.study)
    if not conversions:
        return None
    panels, counts = [], []
    for found in conversions:
        for (when, title), baseline in zip(
            _TITLES.items(), (found.before_finetuning, found.val), strict=True
        ):
            if baseline.n and (rows := _rows(found.variants, when, baseline)):
                name = f": {found.baseline.name}" if len(conversions) > 1 else ""
                panels.append(_panel(section, f"{title}{name}", rows, baseline))
                counts += [row["n"] for row in rows]
    caption = (
        "Mean validation loss by parameters without embeddings, in percent of the trained model's."
        f" Dashed: the trained model itself. Bar: 95 % interval of the paired gap to it"
        f" ({format_n(counts)}). Lower left is better; a variant on"
        " the dashed line loses nothing of the model."
    )
    if any(own.open_above or own.open_below for found in conversions for own in found.variants):
        caption += " Where runs diverged, the interval is unbounded and has no bar."
    table = conversion_tables(section.study)[0] if len(conversions) == 1 else None
    return Chart("conversions", "Conversions to other variants", caption, panels, table)


def _rows(conversions: list[Conversion], when: str, baseline: Sample) -> list[Spec]:
    rows = []
    for own in conversions:
        loss, gap = (
            (own.before_finetuning, own.gap_before_finetuning)
            if when == "before"
            else (own.val, own.val_gap)
        )
        if loss.n and gap.n and own.params_percent is not None:
            interval = gap.interval()
            sides = {"below": own.open_below, "above": own.open_above} if when == "after" else {}
            low, high = (None, None) if interval is None or any(sides.values()) else interval
            rows.append(
                {"arm": own.arm, "variant": own.variant, "n": gap.n}
                | {"percent": round_digits(own.params_percent, 4)}
                | {"loss": round_digits(baseline.mean + gap.mean, 6)}
                | {"low": None if low is None else round_digits(baseline.mean + low, 6)}
                | {"high": None if high is None else round_digits(baseline.mean + high, 6)}
                | {"estimate": format_gap(gap.mean, interval, **sides)}
            )
    return rows


def _with_labels(rows: list[Spec]) -> list[Spec]:
    """Return the rows with a label where none of another point is in its way."""
    ends = [value for row in rows for value in (row["loss"], row["low"], row["high"])]
    heights = [value for value in ends if value is not None]
    height = max(heights) - min(heights) or 1.0
    percents = [row["percent"] for row in rows]
    width = max(percents) - min(percents) or 1.0
    placed: list[Spec] = []
    labeled = []
    for row in sorted(rows, key=lambda row: -row["loss"]):
        is_free = all(
            abs(row["percent"] - other["percent"]) > _LABEL_WIDTH * width
            or abs(row["loss"] - other["loss"]) > _LABEL_HEIGHT * height
            for other in placed
        )
        placed += [row] * is_free
        labeled.append(row | {"label": row["variant"] if is_free else ""})
    return labeled


def _panel(section: Section, title: str, rows: list[Spec], baseline: Sample) -> ChartPanel:
    color = base.by_variant(section, "color")
    x = base.number_axis("percent", "parameters, % of the trained model", zero=False, padding=30)
    y = base.number_axis("loss", f"validation loss, {section.study.loss_unit}", zero=False)
    encoding = {"x": x, "y": y} | color
    tooltip = base.make_tooltip(
        arm="", percent="parameters, %", loss="", estimate="gap, 95 % interval", n=""
    )
    points = encoding | {"tooltip": tooltip} | base.by_variant(section, "shape")
    names = {"x": x, "y": y, "text": {"field": "label", "type": "nominal"}}
    at = {"y": {"field": "at", "type": "quantitative"}}
    own = [{"at": round_digits(baseline.mean, 6)}]
    layers = [
        base.make_layer("rule", at, own, color="var(--faint)", strokeDash=[3, 3]),
        *base.interval_layer("rule", "y", rows, encoding, opacity=0.5),
        base.make_layer("point", points, filled=True, size=60, opacity=0.9),
        base.make_layer("text", names, fontSize=10, color="var(--ink)", dy=-9),
    ]
    return base.make_panel(title, _with_labels(rows), layers, 300)
