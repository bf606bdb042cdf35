"""Attention maps of one text, layers by heads.

Shape suffixes: L layers, H heads, T tokens, S tokens of the keys.
"""

from collections import Counter

import numpy as np

from qkablate.analysis.study.attention_maps import TARGETS, ArmAttention
from qkablate.report.charts import base
from qkablate.report.charts.base import Chart, ChartPanel, Spec
from qkablate.report.charts.heads import describe_time
from qkablate.report.section import Section
from qkablate.report.text.table import Table
from qkablate.runs.attention_map import FULL_WEIGHT
from qkablate.table import format_count, format_list

_MAX_ARMS, _MAX_HEADS = 6, 16  # arms that are drawn, and heads of each
_MAX_HEADS_OF_LAYER, _MAX_LAYERS = 8, 6
_MAX_CELLS = 16_000  # of all maps
_MAX_WIDTH, _MAX_HEIGHT, _GAP = 480, 400, 10  # pixels of a row and a column of maps, and between
_MIN_PIXELS, _MAX_PIXELS = 3, 9  # of a token
_LABEL_PIXELS, _MAX_LABEL_PIXELS = 12, 24  # of a token with its text, in the map of one head
_THRESHOLDS = (0.5, 2.0, 4.0, 8.0)  # times an equal share: where a shade begins
Head = tuple[int, int]  # layer and head


def attention_chart(section: Section) -> Chart | None:
    """Chart the attention maps of each arm that has any."""
    source = "At the end of training, on the beginning of the validation split"
    if section.is_imported:
        source = describe_time(section)
    return make_attention_chart(section.examples, source) if section.examples else None


def make_attention_chart(arms: list[ArmAttention], source: str, only: Head | None = None) -> Chart:
    """Chart the attention maps of arms, or of a single layer and head."""
    drawn = arms[:_MAX_ARMS]
    labels = _make_labels(arms)
    heads = [_choose_heads(arm) if only is None else [only] for arm in drawn]
    length = max(len(tokens) for arm in drawn for tokens in (arm.tokens, arm.key_tokens))
    while (
        length > 2
        and sum(
            len(heads_of_arm) * _count_cells(arm, length)
            for arm, heads_of_arm in zip(drawn, heads, strict=True)
        )
        > _MAX_CELLS
    ):
        length -= 1
    panels = [
        ChartPanel(
            f"{label}, {arm.which}",
            _map_spec(
                *(arm, heads_of_arm, length),
                has_legend=arm is drawn[0],
                has_labels=only is not None,
            ),
        )
        for label, arm, heads_of_arm in zip(labels, drawn, heads, strict=False)
    ]
    first = [arm for arm in drawn if arm.arm == drawn[0].arm]
    read = [text for arm in first for text in (arm.key_tokens, arm.tokens)]
    texts = dict.fromkeys(text[:length] for text in read)
    quoted = " and ".join(f"“{drawn[0].separator.join(text)}”" for text in texts)
    is_other = any(arm.tokens[:length] not in texts for arm in drawn)
    others = " Other arms have another text, or a shorter part of it." if is_other else ""
    tokens = "tokens" if len(texts) > 1 else format_count(length, "token")
    sides = "; cross: of the target to the source" if len(texts) > 1 else ""
    caption = (
        f"{source}: attention weights of {tokens} as queries (rows) to keys (columns){sides}, in"
        f" {quoted}.{others}"
        " Shades: weight relative to an equal share of the tokens that a query sees, so that"
        f" uniform attention has one shade; gray: below {_THRESHOLDS[0]:g} ×."
    )
    if hidden := labels[_MAX_ARMS:]:
        caption += f" Not drawn: {format_list(hidden, 6)}."
    all_heads = max(arm.a_LHTS.shape[0] * arm.a_LHTS.shape[1] for arm in drawn)
    if (shown := max(map(len, heads))) < all_heads:
        caption += f" Of {format_count(all_heads, 'head')} of an arm, {shown} drawn."
    table = _make_target_table(dict(zip(labels, drawn, strict=False)))
    return Chart("attention", "Attention of one text", caption, panels, table)


def _make_labels(arms: list[ArmAttention]) -> list[str]:
    """Return a name of each map: the variant or the arm, and the site where some are encoders."""
    variants = Counter(variant for variant, _ in {(arm.variant, arm.arm) for arm in arms})
    has_sites = any(arm.site != "decoder" for arm in arms)
    return [
        (arm.variant if variants[arm.variant] == 1 else arm.arm) + f", {arm.site}" * has_sites
        for arm in arms
    ]


def _count_cells(arm: ArmAttention, length: int) -> int:
    """Return how many weights a map of the first tokens has."""
    queries, keys = min(length, len(arm.tokens)), min(length, len(arm.key_tokens))
    return queries * (queries + 1) // 2 if arm.causal else queries * keys


def _choose_heads(arm: ArmAttention) -> list[Head]:
    """Return evenly spaced layers, and the first heads of each."""
    layers, heads = arm.a_LHTS.shape[:2]
    wide = min(heads, _MAX_HEADS_OF_LAYER)
    tall = min(layers, _MAX_HEADS // wide, _MAX_LAYERS)
    rows = {round(at) for at in np.linspace(layers - 1, 0, tall)}
    return [(layer, head) for layer in sorted(rows) for head in range(wide)]


def _make_target_table(arms: dict[str, ArmAttention]) -> Table | None:
    """Return the mean attention by target, with the head that has most of it."""
    rows = []
    for label, arm in arms.items():
        cells = []
        for values_LH in arm.mean_weights.values():
            layer, head = np.unravel_index(int(values_LH.argmax()), values_LH.shape)
            best = f"{values_LH.max():.0%} (layer {layer} head {head})"
            cells += [f"{values_LH.mean():.0%}", best]
        if cells:
            rows.append([label, f"{arm.uniform_share:.0%}", *cells])
    columns = [column for target in TARGETS.values() for column in (target, "largest head")]
    title = "Mean attention of all heads, and of the head that has most of it"
    return Table(title, ["arm", "equal share", *columns], rows) if rows else None


def _map_spec(
    arm: ArmAttention, places: list[Head], length: int, *, has_legend: bool, has_labels: bool
) -> Spec:
    queries, keys = min(length, len(arm.tokens)), min(length, len(arm.key_tokens))
    layers, heads = len({layer for layer, _ in places}), len({head for _, head in places})
    across, down = (_MAX_WIDTH - _GAP * heads) // (heads * keys), _MAX_HEIGHT // (layers * queries)
    cell = max(1, min(_MAX_PIXELS, across, max(_MIN_PIXELS, down)))
    if has_labels:  # as large as they take, however long the text is
        cell = max(_LABEL_PIXELS, min(_MAX_LABEL_PIXELS, across, down))
    rows = [row for layer, head in places for row in _map_cells(arm, layer, head, length)]
    start, end, bottom = -0.5, keys - 0.5, queries - 0.5
    axis = {"type": "quantitative", "axis": None}
    scale = {"nice": False, "zero": False}
    x: Spec = axis | {"field": "k", "scale": scale | {"domain": [start, end]}}
    y: Spec = axis | {"field": "q", "scale": scale | {"domain": [start, bottom], "reverse": True}}
    color = base.color_by("times", [*_THRESHOLDS[1:]], ("low1", "low2", "low3", "link"))
    if has_legend:
        color["legend"] = base.shade_legend("weight ÷ equal share")
    titles = {"from": "token", "to": "attends to", "share": "%", "times": "× equal share"}
    tooltip = base.make_tooltip(layer="", head="", **titles)
    visible = {"x": x, "y": y, "y2": {"datum": bottom}}  # what a query may attend to
    corners = [{"k": start, "q": start}, {"k": end, "q": bottom if arm.causal else start}]
    square = {"size": cell * cell, "opacity": 1, "strokeWidth": 0, "aria": False}
    drawn = [
        base.make_layer("area", visible, corners, color="var(--line)", opacity=0.45),
        base.make_layer("square", {"x": x, "y": y, "color": color, "tooltip": tooltip}, **square),
    ]
    if has_labels:
        drawn += _token_labels(arm, length, x, y)
    spec: Spec = {"width": cell * keys, "height": cell * queries, "layer": drawn}
    facet = {"row": base.make_facet("layer", rows, 11), "column": base.make_facet("head", rows, 11)}
    facet["row"]["header"]["labelAngle"] = 0
    return {"data": {"values": rows}, "facet": facet, "spacing": _GAP, "spec": spec}


def _token_labels(arm: ArmAttention, length: int, x: Spec, y: Spec) -> list[Spec]:
    """Return the tokens as labels beside and below the map."""
    queries, keys = (
        [{"at": i, "token": token.replace(" ", "␣")} for i, token in enumerate(tokens[:length])]
        for tokens in (arm.tokens, arm.key_tokens)
    )
    text = {"text": {"field": "token", "type": "nominal"}}
    beside = {"x": {"value": -4}, "y": y | {"field": "at"}} | text
    below = {"x": x | {"field": "at"}, "y": {"value": "height"}} | text
    style = {"fontSize": 9, "color": "var(--faint)", "align": "right", "baseline": "middle"}
    return [
        base.make_layer("text", beside, queries, **style),
        base.make_layer("text", below, keys, **style, angle=270, dx=-4),
    ]


def _map_cells(arm: ArmAttention, layer: int, head: int, length: int) -> list[Spec]:
    a_TS = arm.a_LHTS[layer, head, :length, :length]
    # A query sees 1, 2, … tokens, or all.
    seen_T = np.arange(1, len(a_TS) + 1) if arm.causal else np.full(len(a_TS), len(arm.key_tokens))
    times_TS = a_TS / FULL_WEIGHT * seen_T[:, None]
    is_drawn_TS = times_TS >= _THRESHOLDS[0]
    positions = np.argwhere(np.tril(is_drawn_TS) if arm.causal else is_drawn_TS).tolist()
    return [
        {
            "layer": f"layer {layer}",
            "head": f"head {head}",
            "q": query,
            "k": key,
            "from": f"{query} “{arm.tokens[query]}”",
            "to": f"{key} “{arm.key_tokens[key]}”",
            "share": round(100 * int(a_TS[query, key]) / FULL_WEIGHT),
            "times": base.round_digits(float(times_TS[query, key]), 2),
        }
        for query, key in positions
    ]
