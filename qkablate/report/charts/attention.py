"""Attention maps of one text, layers by heads.

Shape suffixes: L layers, H heads, T tokens.
"""

import numpy as np

from qkablate.analysis.study.attention_maps import TARGETS, ArmAttention
from qkablate.report.charts import base
from qkablate.report.charts.base import Chart, ChartPanel, Spec
from qkablate.report.section import Section
from qkablate.runs.attention_map import FULL_WEIGHT
from qkablate.table import format_count, format_list

_MAX_ARMS, _MAX_HEADS = 6, 16  # arms that are drawn, and heads of each
_MAX_HEADS_OF_LAYER, _MAX_LAYERS = 8, 6
_MAX_CELLS = 16_000  # of all maps
_MAX_WIDTH, _MAX_HEIGHT, _GAP = 480, 400, 10  # pixels of a row and a column of maps, and between
_MIN_PIXELS, _MAX_PIXELS = 3, 9  # of a token
_MIN_PIXELS_FOR_LABELS = 8  # pixels of a token that has room for its text
_THRESHOLDS = (0.02, 0.06, 0.15, 0.4)  # where a shade begins
Head = tuple[int, int]  # layer and head


def attention_chart(section: Section) -> Chart | None:
    """Chart the attention maps of each arm that has any."""
    source = "At the end of training, on the beginning of the validation split"
    return make_attention_chart(section.examples, source) if section.examples else None


def make_attention_chart(arms: list[ArmAttention], source: str, only: Head | None = None) -> Chart:
    """Chart the attention maps of arms, or of a single layer and head."""
    drawn = arms[:_MAX_ARMS]
    variants = [arm.variant for arm in arms]
    labels = [arm.variant if variants.count(arm.variant) == 1 else arm.arm for arm in arms]
    heads = [_choose_heads(arm) if only is None else [only] for arm in drawn]
    length, maps = max(len(arm.tokens) for arm in drawn), sum(map(len, heads))
    while length > 2 and maps * length * (length + 1) // 2 > _MAX_CELLS:
        length -= 1
    panels = [
        ChartPanel(f"{label}, {arm.which}", _map_spec(arm, heads_of_arm, length))
        for label, arm, heads_of_arm in zip(labels, drawn, heads, strict=False)
    ]
    texts = list(dict.fromkeys(arm.tokens[:length] for arm in drawn))
    separator = " " if all(token.isdecimal() for token in texts[0]) else ""  # between ids
    others = " Other arms have another text, or a shorter part of it." if len(texts) > 1 else ""
    caption = (
        f"{source}: attention weights of {format_count(length, 'token')} as queries (rows) to keys"
        f" (columns), in “{separator.join(texts[0])}”.{others}"
        f" Gray: below {_THRESHOLDS[0]:.0%} of a token's attention; darker from"
        f" {format_list([f'{step:.0%}' for step in _THRESHOLDS])} on."
    )
    caption += _format_targets(dict(zip(labels, drawn, strict=False)))
    if hidden := labels[_MAX_ARMS:]:
        caption += f" Not drawn: {format_list(hidden, 6)}."
    all_heads = max(arm.a_LHTT.shape[0] * arm.a_LHTT.shape[1] for arm in drawn)
    if (shown := max(map(len, heads))) < all_heads:
        caption += f" Of {format_count(all_heads, 'head')} of an arm, {shown} drawn."
    return Chart("attention", "Attention of one text", caption, panels)


def _choose_heads(arm: ArmAttention) -> list[Head]:
    """Return evenly spaced layers, and the first heads of each."""
    layers, heads = arm.a_LHTT.shape[:2]
    wide = min(heads, _MAX_HEADS_OF_LAYER)
    tall = min(layers, _MAX_HEADS // wide, _MAX_LAYERS)
    rows = {round(at) for at in np.linspace(layers - 1, 0, tall)}
    return [(layer, head) for layer in sorted(rows) for head in range(wide)]


def _format_targets(arms: dict[str, ArmAttention]) -> str:
    """Format the mean attention by target, with the head that has most of it."""
    texts, shares = [], []
    for label, arm in arms.items():
        if not arm.mean_weights:
            continue
        targets = []
        for name, target in TARGETS.items():
            values_LH = arm.mean_weights[name]
            layer, head = np.unravel_index(int(values_LH.argmax()), values_LH.shape)
            best = f"layer {layer} head {head}: {values_LH.max():.0%}"
            targets.append(f"{target} {values_LH.mean():.0%} ({best})")
        texts.append(f"{label}: {', '.join(targets)}")
        shares.append(f"{arm.uniform_share:.0%}")
    if not texts:
        return ""
    return (
        " Mean over all heads, and the largest head; uniform attention would give"
        f" {' or '.join(dict.fromkeys(shares))}: {'; '.join(texts)}."
    )


def _map_spec(arm: ArmAttention, places: list[Head], length: int) -> Spec:
    length = min(length, len(arm.tokens))
    layers, heads = len({layer for layer, _ in places}), len({head for _, head in places})
    across, down = (_MAX_WIDTH - _GAP * heads) // (heads * length), _MAX_HEIGHT // (layers * length)
    cell = max(1, min(_MAX_PIXELS, across, max(_MIN_PIXELS, down)))
    rows = [row for layer, head in places for row in _map_cells(arm, layer, head, length)]
    start, end = -0.5, length - 0.5
    axis = {"type": "quantitative", "axis": None}
    scale = {"domain": [start, end], "nice": False, "zero": False}
    x: Spec = axis | {"field": "k", "scale": scale}
    y: Spec = axis | {"field": "q", "scale": scale | {"reverse": True}}
    steps = [step * 100 for step in _THRESHOLDS[1:]]
    color = base.color_by("share", steps, ("low1", "low2", "low3", "link"))
    titles = {"from": "token", "to": "attends to", "share": "%"}
    tooltip = base.make_tooltip(layer="", head="", **titles)
    triangle = {"x": x, "y": y, "y2": {"datum": end}}
    corners = [{"k": start, "q": start}, {"k": end, "q": end}]
    square = {"size": cell * cell, "opacity": 1, "strokeWidth": 0, "aria": False}
    drawn = [
        base.make_layer("area", triangle, corners, color="var(--line)", opacity=0.45),
        base.make_layer("square", {"x": x, "y": y, "color": color, "tooltip": tooltip}, **square),
    ]
    if cell >= _MIN_PIXELS_FOR_LABELS and len(places) == 1:
        drawn += _token_labels(arm, length, x, y)
    spec: Spec = {"width": cell * length, "height": cell * length, "layer": drawn}
    facet = {"row": base.make_facet("layer", rows, 11), "column": base.make_facet("head", rows, 11)}
    facet["row"]["header"]["labelAngle"] = 0
    return {"data": {"values": rows}, "facet": facet, "spacing": _GAP, "spec": spec}


def _token_labels(arm: ArmAttention, length: int, x: Spec, y: Spec) -> list[Spec]:
    """Return the tokens as labels beside and below the map."""
    rows = [{"at": i, "token": arm.tokens[i]} for i in range(length)]
    text = {"text": {"field": "token", "type": "nominal"}}
    beside = {"x": {"value": -4}, "y": y | {"field": "at"}} | text
    below = {"x": x | {"field": "at"}, "y": {"value": "height"}} | text
    style = {"fontSize": 9, "color": "var(--faint)", "align": "right", "baseline": "middle"}
    return [
        base.make_layer("text", beside, rows, **style),
        base.make_layer("text", below, rows, **style, angle=270, dx=-4),
    ]


def _map_cells(arm: ArmAttention, layer: int, head: int, length: int) -> list[Spec]:
    a_TT = arm.a_LHTT[layer, head, :length, :length]
    positions = np.argwhere(a_TT >= _THRESHOLDS[0] * FULL_WEIGHT).tolist()
    return [
        {
            "layer": f"layer {layer}",
            "head": f"head {head}",
            "q": query,
            "k": key,
            "from": f"{query} “{arm.tokens[query]}”",
            "to": f"{key} “{arm.tokens[key]}”",
            "share": round(100 * int(a_TT[query, key]) / FULL_WEIGHT),
        }
        for query, key in positions
    ]
