"""The pictures of the study, light and dark, each with a checksum of the data that it shows.

The checksum is of the chart before it is drawn: fonts, which differ from machine to machine, change
the picture and not the checksum.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from qkablate.analysis.claims.judgement import PartJudgement
from qkablate.analysis.comparison.decision import Verdict
from qkablate.analysis.stats import Sample
from qkablate.analysis.study.study import Entry
from qkablate.report.charts import base
from qkablate.report.charts.base import Chart, ChartPanel, Spec
from qkablate.report.charts.curves import gap_curve_chart, loss_chart
from qkablate.report.charts.forest import claim_chart, margin_band
from qkablate.report.palette import darken
from qkablate.report.render import render_chart
from qkablate.report.study.claims import StudiedClaim
from qkablate.report.study.costs import format_compared, is_about_standard
from qkablate.report.study.questions import find_question
from qkablate.report.text.numbers import format_gap
from qkablate.report.text.setting import format_setting
from qkablate.strict_json import hash_json
from qkablate.table import format_count

ANSWERS = "answers"  # name of the picture of all claims
COSTS = "costs"  # that of the variants' costs on text
_WIDTH = 360  # pixels
_LEVEL = 0.95  # of the costs on text
_FAR = 4  # times the largest cost: a floor beyond it is written, and not drawn
_FARTHEST, _EDGE = 6.0, 7.0  # margins from zero: longer intervals are cut, and pale to the edge
_CLAIMED = {  # by the kind of a part, in margins
    "noninferior": (-_EDGE, 1.0),
    "worse": (1.0, _EDGE),
    "better": (-_EDGE, -1.0),
    "equivalent": (-1.0, 1.0),
}
_DECIDED = (Verdict.SUPPORTED, Verdict.REFUTED, Verdict.EQUIVALENT)
_CLIP = re.compile(r"\bclip\d+\b")
_MARK = "<!-- data sha256 {} -->\n"


def draw_pictures(claims: list[StudiedClaim]) -> Iterator[tuple[str, Chart, str, str]]:
    """Yield the pictures: name, chart, subject and setting."""
    if (chart := answers_chart(claims)) is not None:
        yield ANSWERS, chart, "the claims of the study", ""
    if (costs := costs_chart(claims)) is not None:
        yield COSTS, costs[0], "the claims of the study", costs[1]
    for studied in claims:
        section = studied.section
        for make in (claim_chart, loss_chart, gap_curve_chart):
            chart = make(section)
            if chart is not None and chart.panels:
                name = f"{studied.slug}-{chart.name}"
                yield name, chart, section.title, format_setting(section)


def render_picture(chart: Chart, subject: str, setting: str) -> dict[str, bytes]:
    """Return a picture in both themes, by the end of its file's name."""
    light = _renumber(render_chart(chart, subject, "svg", setting).decode())
    mark = _MARK.format(hash_chart(chart, subject, setting))
    return {".svg": f"{light}\n{mark}".encode(), "-dark.svg": f"{darken(light)}\n{mark}".encode()}


def _renumber(svg: str) -> str:
    """Return a picture with clip paths from 0: the renderer counts on from picture to picture."""
    numbers = {name: f"clip{i}" for i, name in enumerate(dict.fromkeys(_CLIP.findall(svg)))}
    return _CLIP.sub(lambda match: numbers[match[0]], svg)


def hash_chart(chart: Chart, subject: str, setting: str) -> str:
    """Return a checksum of everything that a picture shows."""
    shown = [chart.title, chart.caption, [[p.title, p.spec] for p in chart.panels]]
    return hash_json(_round([*shown, subject, setting]))


def _round(value: Any) -> Any:
    """Return nested containers with numbers of six digits: the last ones depend on the CPU."""
    if isinstance(value, Mapping):
        return {key: _round(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_round(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def read_hash(svg: bytes) -> str | None:
    """Return the checksum at the end of a picture."""
    found = re.search(_MARK.strip().format("([0-9a-f]{64})").encode(), svg[-120:])
    return found[1].decode() if found else None


def answers_chart(claims: list[StudiedClaim]) -> Chart | None:
    """Chart what the variants of all claims that have ended cost, in units of their margins."""
    rows: dict[str, list[Spec]] = {}
    for studied in claims:
        rows.setdefault(find_question(studied.claim.name), []).extend(_rows(studied))
    if not any(rows.values()):
        return None
    panel = _answers_panel({asks: own for asks, own in rows.items() if own})
    caption = (
        "Each part of each claim: what the variant costs, with its interval, in units of the"
        " claim's margin. Shaded: what was claimed. A bar within it supports the part; gray: not"
        " decided."
    )
    if any(row["open_below"] or row["open_above"] for own in rows.values() for row in own):
        caption += (
            f" Pale: beyond {_FARTHEST:g} margins, where an estimate has no point, or without a"
            " bound, as runs diverged."
        )
    return Chart(ANSWERS, "What was claimed, and what was measured", caption, [panel])


def costs_chart(claims: list[StudiedClaim]) -> tuple[Chart, str] | None:
    """Chart what variants cost on text beside standard; return it with its setting.

    It has the parts of all claims in the setting that most of them share.
    """
    parts: dict[str, list[PartJudgement]] = {}
    for studied in claims:
        own = [judged for judged in studied.deciding if _is_plain_cost(judged)]
        if own:
            parts.setdefault(_format_scale(own[0].gaps[0].baseline), []).extend(own)
    if not parts:
        return None
    setting, shown = max(parts.items(), key=lambda item: len(item[1]))
    by_name = {_name_cost(judged): judged.part.sample for judged in shown}
    floor = next((judged.gaps[0].floor for judged in shown if judged.gaps[0].floor), None)
    if floor is not None:
        costs = shown[0].comparison.spec.measure.costs(floor)
        by_name["uniform, the floor"] = Sample(tuple(costs.values()))
    rows = [_cost_row(name, sample) for name, sample in by_name.items()]
    limit = _FAR * max(abs(end) for row in rows[: len(shown)] for end in (row["low"], row["high"]))
    near = [row for row in rows if row["high"] <= limit]
    far = [row for row in rows if row["high"] > limit]
    y = base.arm_axis([row["arm"] for row in rows])
    x = base.number_axis("gap", "test loss minus that of standard, nats per token (right: worse)")
    x |= {"axis": {"tickCount": 6, "labelFlush": False}}
    encoding = {"x": x, "y": y, "color": {"value": "var(--ink)"}}
    text = {"text": {"field": "estimate", "type": "nominal"}, "x": {"value": "width"}, "y": y}
    font = {"fontSize": 11, "color": "var(--ink)"}
    layers = [
        *margin_band(sorted({judged.comparison.spec.margin for judged in shown})),
        base.zero_line("x"),
        *base.interval_layer("rule", "x", near, encoding, strokeWidth=3),
        base.make_layer("point", encoding, filled=True, size=70),
        base.make_layer("text", text, rows, align="left", dx=8, **font),
    ]
    if far:
        arrow = text | {"text": {"value": "→"}}
        layers.append(base.make_layer("text", arrow, far, align="right", dx=-4, **font))
    panel = base.make_panel("", near, layers, base.ROW_HEIGHT * len(rows))
    caption = (
        f"Registered claims, each at its own tuned learning rates, {100 * _LEVEL:.0f} % intervals"
        " over paired seeds. Shaded: the margin. The floor weights all visible tokens equally."
    )
    panels = [ChartPanel("", {"width": 420} | panel.spec)]
    return Chart(COSTS, "What variants cost on text", caption, panels), setting


def _is_plain_cost(judged: PartJudgement) -> bool:
    """Return whether a part compares a variant with standard in the loss on text."""
    spec, gap = judged.comparison.spec, judged.gaps[0]
    is_plain = (spec.of, spec.axis, spec.horizon) == ("gap", "tokens", "longest")
    is_plain &= spec.against.get("variant") == "standard" and len(judged.gaps) == 1
    is_text = all(run.accuracy is None for run, _ in gap.runs)
    return is_plain and is_text and judged.part.sample.interval(_LEVEL) is not None


def _format_scale(entry: Entry) -> str:
    config = entry.arm.config
    model, train = config.model, config.train
    return (
        f"{config.data.source} · {format_count(model.layers, 'layer')} · d_model"
        f" {model.d_model} · {train.steps:,} steps"
    )


def _name_cost(judged: PartJudgement) -> str:
    gap = judged.gaps[0]
    heads = format_count(gap.arm.arm.config.model.heads, "head")
    params = gap.arm.arm.params / gap.baseline.arm.params - 1
    n = judged.part.sample.n
    return f"{format_compared(judged)}, {heads}, {params:+.0%} parameters  (n = {n})"


def _cost_row(name: str, sample: Sample) -> Spec:
    low, high = sample.interval(_LEVEL) or (sample.mean, sample.mean)
    row: Spec = {"arm": name, "gap": sample.mean, "low": low, "high": high}
    return row | {"estimate": format_gap(sample.mean, sample.interval(_LEVEL))}


def _answers_panel(groups: dict[str, list[Spec]]) -> ChartPanel:
    """Return one panel with the rows of each question below it."""
    rows = [row for own in groups.values() for row in own]
    names = list[str]()
    for place, (question, own) in enumerate(groups.items()):
        names += [" " * place, question][not place :] + [row["arm"] for row in own]
    y = base.arm_axis(names)
    is_question = {"test": {"field": "value", "oneOf": [*groups]}, "value": "bold"}
    y["axis"] |= {"labelLimit": 520, "labelFontWeight": {"condition": is_question, "value": 400}}
    domain = {"domain": [-_EDGE, _EDGE], "nice": False}
    x = base.number_axis("gap", "cost of the variant / margin (right: worse)", **domain)
    shades = ["var(--ink)", "var(--faint)"]
    decided = {"type": "nominal", "scale": {"domain": [True, False], "range": shades}}
    color = {"color": {"field": "is_decided", "legend": None} | decided}
    encoding = {"x": x, "y": y} | color
    claimed = {"x": x | {"field": "from"}, "x2": {"field": "to"}, "y": y}
    layers = [
        base.make_layer("rect", claimed, color="var(--warn)", opacity=0.15),
        base.zero_line("x"),
        *base.open_intervals(rows, y, color),
        *base.interval_layer("rule", "x", rows, encoding, strokeWidth=3),
        base.make_layer("point", encoding | {"x": x | {"field": "estimate"}}, filled=True, size=70),
    ]
    text = {"text": {"field": "verdict", "type": "nominal"}, "x": {"value": "width"}, "y": y}
    layers.append(base.make_layer("text", text | color, align="left", dx=8, fontSize=11))
    panel = base.make_panel("", rows, layers, base.ROW_HEIGHT * len(names))
    return ChartPanel("", {"width": _WIDTH} | panel.spec)


def _rows(studied: StudiedClaim) -> list[Spec]:
    judgement = studied.judgement
    counts = Counter(judged.comparison.part for judged in judgement.parts)
    rows: list[Spec] = []
    for judged in judgement.parts if judgement.has_ended else ():
        part = judged.part
        interval = part.sample.interval(1 - 2 * judgement.alpha)
        if interval is None or not math.isfinite(part.sample.mean):
            continue
        mean, low, high = (end / part.margin for end in (part.sample.mean, *interval))
        below, above = part.open_below, part.open_above
        claimed = _CLAIMED[part.kind]
        if is_about_standard(judged.comparison.spec):
            mean, low, high, below, above = -mean, -high, -low, above, below
            claimed = (-claimed[1], -claimed[0])
        estimate = base.round_digits(mean, 4) if abs(mean) <= _FARTHEST else None
        below, above = below or low < -_FARTHEST, above or high > _FARTHEST
        low, high, mean = (max(-_FARTHEST, min(_FARTHEST, end)) for end in (low, high, mean))
        own = judged.comparison.part  # the arms' settings are needed where it has several
        size = part.name.removeprefix(own) if counts[own] > 1 else ""
        label = f"{format_compared(judged)}{size} ({studied.claim.name})"
        rows.append(
            {"arm": label, "gap": base.round_digits(mean, 4), "estimate": estimate}
            | {"from": claimed[0], "to": claimed[1]}
            | {"verdict": judged.word, "is_decided": judged.word in _DECIDED}
            | {"low": base.round_digits(low, 4), "high": base.round_digits(high, 4)}
            | {"open_below": below, "open_above": above}
        )
    return rows
