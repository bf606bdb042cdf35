"""Curves of loss and gap by training tokens."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping

from qkablate.analysis.comparison.curves import Curve, arm_curve, gap_curve, thin
from qkablate.analysis.stats import Interval
from qkablate.analysis.study.loss_curves import START, VAL
from qkablate.analysis.study.study import Entry
from qkablate.report.charts import base
from qkablate.report.charts.base import Chart, Spec, round_digits
from qkablate.report.section import Section, format_n, size_label
from qkablate.report.text.numbers import format_gap

MAX_RUNS = 200  # whose curves are drawn one by one
MAX_POINTS = 6_000  # of all curves of one chart
TOKENS = base.log_axis("tokens", "tokens")
TOOLTIP = base.make_tooltip(arm="", tokens="", estimate="mean, 95 % interval", n="")  # of a reading
TOOLTIP[1] = {"field": "tokens", "type": "quantitative", "format": ","}


def points_per_curve(curves: int, most: int = 48) -> int:
    """Return how many points each of so many curves may have."""
    return max(6, min(most, MAX_POINTS // max(1, curves)))


def loss_chart(section: Section) -> Chart:
    """Chart the loss by tokens."""
    most = points_per_curve(len(section.study.entries))
    with_runs = len(section.study.records) <= MAX_RUNS
    panels, counts, has_chance, has_start = [], [], False, False
    titles = _title_panels({name: entries[0] for name, entries in section.groups.items()})
    for name, entries in section.groups.items():
        means, runs = list[Spec](), list[Spec]()
        for entry in entries:
            if (curve := arm_curve(entry, section.metric, most)) is not None:
                means += mean_rows(section, curve, entry)
                counts.append(curve.samples[0].n)
            if with_runs:
                runs += _run_rows(section, entry, most)
        if rows := [*means, *runs]:
            lowest = min(row["loss"] if row["low"] is None else row["low"] for row in rows)
            # A band that nearly reaches zero would fill a logarithmic axis.
            logarithmic = lowest > 1e-3 * max(row["loss"] for row in rows)
            scale = {"type": "log", "nice": False} if logarithmic else {"zero": False}
            mark = base.LOG_MARK if logarithmic else ""
            y = base.number_axis("loss", f"loss, {section.study.loss_unit}{mark}", **scale)
            layers = _chance_layers(entries, y)
            has_chance = has_chance or bool(layers)
            if (start := _find_start(section, entries)) is not None:
                has_start = True
                layers += _level_layers(start, f"step 0, {start:.3f}", y, "left")
            if runs:
                lines = _line_encoding(section, y, "run")
                layers.append(base.make_layer("line", lines, runs, strokeWidth=0.8, opacity=0.35))
            layers += mean_layers(section, means, y) if means else []
            panels.append(base.make_panel(titles[name], means, layers, 240, runs))
    split = "Validation" if section.metric == VAL else "Training"
    caption = (
        f"{split} loss. Thick lines: mean over completed runs of an arm ({format_n(counts)});"
        " band: 95 % interval of the mean, pointwise."
    )
    if with_runs:
        caption += " Thin lines: individual runs, including incomplete and diverged ones."
    caption += (
        " Dashed: the loss of guessing without looking at the sequence." if has_chance else ""
    )
    caption += " Dashed, step 0: mean loss of all runs before training." * has_start
    return Chart("losses", f"{split} loss", caption, panels)


def gap_curve_chart(section: Section) -> Chart:
    """Chart the gap by tokens, with a simultaneous confidence band."""
    most = points_per_curve(sum(len(family.gaps) for family in section.families))
    y = base.number_axis("loss", f"gap, {section.study.loss_unit}", zero=True)
    panels, counts = [], []
    titles = _title_panels({family.baseline.name: family.baseline for family in section.families})
    for family in section.families:
        rows: list[Spec] = []
        for gap in family.gaps:
            if (curve := gap_curve(gap, section.metric, most)) is not None:
                rows += mean_rows(section, curve, gap.arm, band=True)
                counts.append(curve.samples[0].n)
        if rows:
            layers = [base.zero_line("y"), *mean_layers(section, rows, y)]
            panels.append(base.make_panel(titles[family.baseline.name], rows, layers))
    split = "validation" if section.metric == VAL else "training"
    caption = (
        f"Gap in {split} loss to the baseline, paired by seed ({format_n(counts)}). Bands:"
        " simultaneous 95 % intervals over all points. Gaps before the end of the schedule are"
        " descriptive only."
    )
    caption += " A single pair has no band." if min(counts, default=2) < 2 else ""
    return Chart("gap-curves", "Gap during training", caption, panels)


def _title_panels(baselines: Mapping[str, Entry]) -> dict[str, str]:
    """Return the sizes as titles; the whole names of those that differ in more than that."""
    titles = {name: size_label(name, entry.arm.variant) for name, entry in baselines.items()}
    counts = Counter(titles.values())
    return {name: title if counts[title] == 1 else name for name, title in titles.items()}


def _chance_layers(entries: list[Entry], y: Spec) -> list[Spec]:
    """Return a line at the loss of the best guess that does not depend on the sequence.

    The accuracy of that guess tells its loss where all answers are equally likely, and where there
    are two.
    """
    known = [entry for entry in entries if entry.chance is not None and 0 < entry.chance < 1]
    if not known or known[0].chance is None:
        return []
    chance, rest = known[0].chance, 1 - known[0].chance
    if math.isclose(1 / chance, round(1 / chance), rel_tol=1e-9):
        loss = -math.log(chance)
    elif known[0].arm.config.data.source == "directed":
        loss = -chance * math.log(chance) - rest * math.log(rest)
    else:
        return []
    return _level_layers(loss, f"chance, {loss:.3f}", y, "right")


def _find_start(section: Section, entries: list[Entry]) -> float | None:
    """Return the mean validation loss at step 0, where curves show it and runs have it."""
    records = [record for entry in entries for record in entry.records.values()]
    losses = [loss for record in records for loss in record.loss_curves[START].values()]
    return statistics.fmean(losses) if losses and section.metric == VAL else None


def _level_layers(loss: float, text: str, y: Spec, side: str) -> list[Spec]:
    """Return a dashed line at a loss, with its label at the left or right."""
    x, dx = (0, 4) if side == "left" else ("width", -4)
    rows = [{"loss": round_digits(loss, 5)}]
    label = {"text": text, "align": side, "dx": dx, "dy": -6, "fontSize": 11}
    faint = {"color": "var(--faint)"}
    return [
        base.make_layer("rule", {"y": y}, rows, **faint, strokeDash=[3, 3]),
        base.make_layer("text", {"y": y, "x": {"value": x}}, rows, **label, **faint),
    ]


def _line_encoding(section: Section, y: Spec, detail: str) -> Spec:
    lines = {"x": TOKENS, "y": y, "detail": {"field": detail}}
    return lines | base.by_variant(section, "color")


def mean_layers(section: Section, rows: list[Spec], y: Spec) -> list[Spec]:
    """Return mean lines by tokens with their bands and tooltips."""
    lines = _line_encoding(section, y, "arm")
    # The points are targets of tooltips; visible where a single reading makes no line.
    opacity = int(len({row["tokens"] for row in rows}) == 1)
    points = lines | {"tooltip": TOOLTIP}
    layers = [
        *base.interval_layer("area", "y", rows, lines, opacity=0.13, clip=True),
        base.make_layer("line", lines | base.by_variant(section, "dash"), strokeWidth=2),
        base.make_layer("point", points, size=90, opacity=opacity, filled=True),
    ]
    if labels := _end_labels(rows):
        text = lines | {"text": {"field": "label", "type": "nominal"}}
        layers.append(base.make_layer("text", text, labels, align="right", dy=-7, fontSize=11))
    return layers


def _end_labels(rows: list[Spec]) -> list[Spec]:
    """Return the last readings of arms whose variant has several, with what few others have."""
    last = {row["arm"]: row for row in rows}  # readings come in order
    parts = {arm: size_label(arm, row["variant"]).split("-") for arm, row in last.items()}
    uses = Counter(part for own in parts.values() for part in own)
    of_variant = Counter(row["variant"] for row in last.values())
    labels = []
    for arm, row in last.items():
        rare = [part for part in parts[arm] if 2 * uses[part] <= len(last)]
        if of_variant[row["variant"]] > 1 and rare:
            labels.append(row | {"label": " ".join(rare)})
    return labels


def mean_rows(
    section: Section,
    curve: Curve,
    entry: Entry,
    bounds: Interval = (0.0, math.inf),
    *,
    band: bool = False,
) -> list[Spec]:
    """Return a row per reading: the mean with its interval within bounds, or simultaneous band."""
    intervals = curve.band() if band else [sample.interval() for sample in curve.samples]
    least, most = (-math.inf, math.inf) if band else bounds
    rows = []
    for tokens, sample, interval in zip(curve.tokens, curve.samples, intervals, strict=True):
        if not math.isfinite(sample.mean):
            continue
        interval = interval and (max(interval[0], least), min(interval[1], most))
        low, high = (round_digits(end, 5) for end in interval) if interval else (None, None)
        row: Spec = {"arm": entry.name, "variant": section.style_names[entry.name]}
        row |= {"tokens": tokens, "n": sample.n}
        row |= {"estimate": format_gap(sample.mean, interval, signed=band)}
        rows.append(row | {"loss": round_digits(sample.mean, 5), "low": low, "high": high})
    return rows


def _run_rows(section: Section, entry: Entry, most: int) -> list[Spec]:
    rows, variant = [], section.style_names[entry.name]
    for number, record in enumerate(entry.records.values()):
        losses = record.loss_curves[section.metric]
        run = {"run": f"{entry.name} {number}", "variant": variant, "low": None}
        rows += [
            run | {"tokens": tokens, "loss": round_digits(losses[tokens], 5)}
            for tokens in thin([*losses], most)
        ]
    return rows
