"""Charts of several claims: what was claimed and measured, and what variants cost on text."""

import math
import statistics
from collections import Counter
from typing import NamedTuple

from qkablate.analysis.claims.judgement import PartJudgement
from qkablate.analysis.comparison.audit import LIMITS
from qkablate.analysis.comparison.decision import Verdict
from qkablate.analysis.comparison.gaps import Gap
from qkablate.analysis.stats import Sample
from qkablate.analysis.study.study import Entry
from qkablate.report.charts import base
from qkablate.report.charts.base import Chart, ChartPanel, Spec
from qkablate.report.charts.forest import margin_band
from qkablate.report.section import format_n
from qkablate.report.study.claims import StudiedClaim
from qkablate.report.study.costs import LEVEL, format_compared, is_about_standard, name_part
from qkablate.report.study.questions import find_question
from qkablate.report.text.numbers import format_gap
from qkablate.table import format_count, format_list

_FARTHEST, _EDGE = 6.0, 7.0  # margins from zero: longer intervals are cut, and pale to the edge
_DECIDED = (Verdict.SUPPORTED, Verdict.REFUTED, Verdict.EQUIVALENT)
_FAR = 4  # times the median of the costs: one beyond it is written, and not drawn
# Marks of costs beyond the axis, by sign: text, place, alignment and distance.
_ARROWS = {1: ("→", "width", "right", -4), -1: ("←", 0, "left", 4)}


def answers_chart(claims: list[StudiedClaim]) -> Chart | None:
    """Chart what the variants of all claims that have ended cost, in units of their margins."""
    rows: dict[str, list[Spec]] = {}
    for studied in claims:
        rows.setdefault(find_question(studied.claim.name), []).extend(_make_rows(studied))
    if not any(rows.values()):
        return None
    panel = _answers_panel({asks: own for asks, own in rows.items() if own})
    caption = (
        "Each part of each claim: what the variant costs, with its interval, in units of the"
        " claim's margin (of the interval, where that is 0). Shaded: what was claimed. A bar within"
        " it supports the part; gray: not decided."
    )
    if any(row["open_below"] or row["open_above"] for own in rows.values() for row in own):
        caption += (
            f" Pale: beyond {_FARTHEST:g} margins, where an estimate has no point, or without a"
            " bound, as runs diverged."
        )
    return Chart("answers", "What was claimed, and what was measured", caption, [panel])


def _answers_panel(groups: dict[str, list[Spec]]) -> ChartPanel:
    """Return one panel with the rows of each question below it."""
    rows = [row for own in groups.values() for row in own]
    names = list[str]()
    for question, own in groups.items():
        if names:
            names.append(" " * len(names))  # an empty row: names are distinct
        names += [question, *(row["arm"] for row in own)]
    y = base.arm_axis(names)
    is_question = {"test": {"field": "value", "oneOf": [*groups]}, "value": "bold"}
    y["axis"] |= {"labelLimit": 520, "labelFontSize": 10}
    y["axis"]["labelFontWeight"] = {"condition": is_question, "value": 400}
    domain = {"domain": [-_EDGE, _EDGE], "nice": False}
    x = base.number_axis("gap", "cost of the variant / margin (right: worse)", **domain)
    shades = ["var(--ink)", "var(--faint)"]
    decided = {"type": "nominal", "scale": {"domain": [True, False], "range": shades}}
    color = {"color": {"field": "is_decided", "legend": None} | decided}
    encoding = {"x": x, "y": y} | color
    claimed = {"x": x | {"field": "from"}, "x2": {"field": "to"}, "y": y}
    text = {"text": {"field": "verdict", "type": "nominal"}, "x": {"value": "width"}, "y": y}
    layers = [
        base.make_layer("rect", claimed, color="var(--warn)", opacity=0.15),
        base.zero_line("x"),
        *base.open_intervals(rows, y, color),
        *base.interval_layer("rule", "x", rows, encoding, strokeWidth=3),
        base.make_layer("point", encoding | {"x": x | {"field": "estimate"}}, filled=True, size=70),
        base.make_layer("text", text | color, align="left", dx=8, fontSize=11),
    ]
    panel = base.make_panel("", rows, layers, base.ROW_HEIGHT * len(names))
    return ChartPanel("", {"width": 360} | panel.spec)


def _make_rows(studied: StudiedClaim) -> list[Spec]:
    judgement = studied.judgement
    if not judgement.has_ended:
        return []
    labels = [name_part(studied, judged) for judged in judgement.parts]
    counts, rows = Counter(labels), list[Spec]()
    for judged, label in zip(judgement.parts, labels, strict=True):
        part = judged.part
        interval = part.sample.interval(1 - 2 * judgement.alpha)
        if interval is None or not math.isfinite(part.sample.mean):
            continue
        unit = part.margin or max(map(abs, interval)) or 1.0
        mean, low, high = (end / unit for end in (part.sample.mean, *interval))
        below, above = part.open_below, part.open_above
        edge = part.margin / unit
        left, right = {
            "noninferior": (-_EDGE, edge),
            "worse": (edge, _EDGE),
            "better": (-_EDGE, -edge),
            "equivalent": (-edge, edge),
        }[part.kind]
        if is_about_standard(judged.comparison.spec):
            mean, low, high, below, above = -mean, -high, -low, above, below
            left, right = -right, -left
        estimate = base.round_digits(mean, 4) if abs(mean) <= _FARTHEST else None
        below, above = below or low < -_FARTHEST, above or high > _FARTHEST
        low, high, mean = (max(-_FARTHEST, min(_FARTHEST, end)) for end in (low, high, mean))
        own = f": {judged.comparison.part}" if counts[label] > 1 else ""
        rows.append(
            {"arm": f"{label} ({studied.claim.name}{own})", "estimate": estimate}
            | {"gap": base.round_digits(mean, 4), "from": left, "to": right}
            | {"verdict": judged.word, "is_decided": judged.word in _DECIDED}
            | {"low": base.round_digits(low, 4), "high": base.round_digits(high, 4)}
            | {"open_below": below, "open_above": above}
        )
    return rows


class _Cost(NamedTuple):
    """Cost of a variant on text, in a claim."""

    studied: StudiedClaim
    judged: PartJudgement

    @property
    def gap(self) -> Gap:
        return self.judged.gaps[0]

    @property
    def standard(self) -> Entry:
        is_turned = is_about_standard(self.judged.comparison.spec)
        return self.gap.arm if is_turned else self.gap.baseline

    @property
    def setting(self) -> tuple[str, ...]:
        """Everything but the heads in which the runs of two claims may differ."""
        config = self.standard.arm.config
        model = config.model
        words = [f"{config.data.source} in {config.data.tokenizer}"]
        words += [format_count(model.layers, "layer")]
        words += [f"d_model {model.d_model}", f"{config.train.steps:,} steps"]
        words += [f"{model.norm_kind} norm"] if model.norm_kind != "layer" else []
        words += [model.mlp] if model.mlp != "gelu" else []
        words += [f"{model.position} positions"] if model.position != "learned" else []
        words += [] if model.attention_skip else ["without the attention's skip"]
        words += [config.optim.optimizer] if config.optim.optimizer != "adamw" else []
        if config.data.max_tokens is not None:
            words.append(f"{config.data.max_tokens:,} tokens")
        return tuple(words)

    def make_row(self) -> Spec:
        spec, sample = self.judged.comparison.spec, self.judged.part.sample
        variant = self.gap.baseline if is_about_standard(spec) else self.gap.arm
        heads = format_count(variant.arm.config.model.heads, "head")
        name = f"{format_compared(self.judged)}, {heads}"
        if spec.axis == "tokens":
            name += f", {variant.arm.params / self.standard.arm.params - 1:+.0%} parameters"
        name += f" ({self.studied.claim.name})"
        ends = (sample.mean, *(sample.interval(LEVEL) or (math.nan, math.nan)))
        is_open = (self.judged.part.open_below, self.judged.part.open_above)
        if is_about_standard(spec):
            ends, is_open = (-ends[0], -ends[2], -ends[1]), is_open[::-1]
        return _make_cost_row(name, *ends, *is_open)


def costs_chart(claims: list[StudiedClaim]) -> tuple[Chart, str] | None:
    """Chart what variants cost on text beside standard; return it with its setting.

    It has the parts of all claims in the setting that most of them share.
    """
    settings: dict[tuple[str, ...], list[_Cost]] = {}
    for studied in claims:
        for judged in studied.deciding:
            if _is_plain_cost(judged):
                cost = _Cost(studied, judged)
                settings.setdefault(cost.setting, []).append(cost)
    if not settings:
        return None
    setting, costs = max(settings.items(), key=lambda item: len(item[1]))
    rows = [cost.make_row() for cost in costs]
    margins = sorted({cost.judged.comparison.spec.margin for cost in costs})
    rows += _floor_rows(costs)
    ends = {row["arm"]: max(abs(row["low"]), abs(row["high"])) for row in rows}
    most = _FAR * statistics.median(ends.values())
    near = [row for row in rows if ends[row["arm"]] <= most]
    far = [row for row in rows if row not in near]
    limit = max(1.5 * margins[-1], 1.05 * max(ends[row["arm"]] for row in near))
    y = base.arm_axis([row["arm"] for row in rows])
    y["axis"] |= {"labelLimit": 460, "labelFontSize": 10}
    title = "test loss minus that of standard, in nats (right: worse)"
    x = base.number_axis("gap", title, domain=[-limit, limit], nice=False)
    x |= {"axis": {"tickCount": 6}}
    encoding = {"x": x, "y": y, "color": {"value": "var(--ink)"}}
    text = {"text": {"field": "estimate", "type": "nominal"}, "x": {"value": "width"}, "y": y}
    font = {"fontSize": 11, "color": "var(--ink)"}
    layers = [
        *margin_band(margins),
        base.zero_line("x"),
        *base.open_intervals(near, y, {"color": encoding["color"]}),
        *base.interval_layer("rule", "x", near, encoding, strokeWidth=3),
        base.make_layer("point", encoding, filled=True, size=70),
        base.make_layer("text", text, rows, align="left", dx=8, **font),
    ]
    for sign, (mark, place, align, dx) in _ARROWS.items():
        if beyond := [row for row in far if row["gap"] * sign > 0]:
            arrow = {"text": {"value": mark}, "x": {"value": place}, "y": y}
            layers.append(base.make_layer("text", arrow, beyond, align=align, dx=dx, **font))
    panel = base.make_panel("", near, layers, base.ROW_HEIGHT * len(rows))
    warned = {name for cost in costs for name in LIMITS if cost.judged.is_warned(name)}
    scope = [words for name, words in LIMITS.items() if name in warned]
    caption = (
        f"Registered claims, each variant at learning rates tuned for it. {100 * LEVEL:.0f} %"
        f" intervals ({format_n([cost.judged.part.sample.n for cost in costs])}), with the error of"
        " tuning. Shaded: the margin. Parameters without embeddings."
        " The floor weights all visible tokens equally."
        + (f" This holds {format_list(scope)}." if scope else "")
        + base.format_open_note(near)
    )
    panels = [ChartPanel("", {"width": 360} | panel.spec)]
    return Chart("costs", "What variants cost on text", caption, panels), " · ".join(setting)


def _is_plain_cost(judged: PartJudgement) -> bool:
    """Return whether a part compares a variant with standard in the loss on text."""
    spec, gap = judged.comparison.spec, judged.gaps[0]
    variants = {side.get("variant") for side in (spec.arm, spec.against)}
    is_plain = (spec.of, spec.horizon) == ("gap", "longest") and spec.axis in ("tokens", "params")
    is_plain &= "standard" in variants and len(variants) == 2 and len(judged.gaps) == 1
    is_decoder = gap.arm.arm.config.model.form == "decoder"
    is_text = all(run.accuracy is None for run, _ in gap.runs)
    has_interval = judged.part.sample.interval(LEVEL) is not None
    return is_plain and is_decoder and is_text and has_interval


def _floor_rows(costs: list[_Cost]) -> list[Spec]:
    """Return the row of the floor that is beside standard in one of the claims."""
    for cost in costs:
        floor = cost.gap.floor
        if floor is not None and not is_about_standard(cost.judged.comparison.spec):
            sample = Sample(tuple(cost.judged.comparison.spec.measure.costs(floor).values()))
            low, high = sample.interval(LEVEL) or (sample.mean, sample.mean)
            name = f"uniform, the floor ({cost.studied.claim.name})"
            is_open = (floor.baseline_diverged > 0, floor.arm_diverged > 0)
            return [_make_cost_row(name, sample.mean, low, high, *is_open)]
    return []


def _make_cost_row(
    name: str, mean: float, low: float, high: float, open_below: bool, open_above: bool
) -> Spec:
    row: Spec = {"arm": name, "gap": mean, "low": low, "high": high}
    row |= {"open_below": open_below, "open_above": open_above}
    return row | {"estimate": format_gap(mean, (low, high), below=open_below, above=open_above)}
