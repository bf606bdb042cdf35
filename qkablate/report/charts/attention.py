"""Attention maps of one text, layers by heads.

Shape suffixes: L layers, H heads, T tokens.
"""

import numpy as np

from qkablate.analysis.study.attention_maps import TARGETS, ArmAttention
from qkablate.report.charts.base import Chart, ChartPanel, Spec, tooltip_field
from qkablate.report.section import Section
from qkablate.runs.attention_map import FULL_WEIGHT
from qkablate.table import format_count, format_list

_MAX_ARMS, _MAX_HEADS = 6, 16  # that are drawn, and heads of each
_MAX_HEADS_OF_LAYER, _MAX_LAYERS = 8, 6  # heads of a layer, and layers
_MAX_CELLS = 16_000  # of all maps
_MAX_WIDTH, _MAX_HEIGHT, _GAP = (
    480,
    400,
    10,
)  # pixels of a row of maps, of a column, and between two
_MIN_PIXELS, _MAX_PIXELS = 3, 9  # of a token, where there is room
_MIN_PIXELS_FOR_LABELS = 8  # pixels of a token that has room for its name
_THRESHOLDS = (0.06, 0.15, 0.4)  # where a shade begins
Place = tuple[int, int]  # a layer, and a head of it
_COLOURS = ("low1", "low2", "low3")


def attention_chart(section: Section) -> Chart | None:
    """Chart the attention maps of each arm that has any."""
    said = "At the end of training, on the beginning of the validation split"
    return make_attention_chart(section.examples, said) if section.examples else None


def make_attention_chart(found: list[ArmAttention], said: str, only: Place | None = None) -> Chart:
    """Chart the attention maps of arms, or of a single layer and head."""
    drawn = found[:_MAX_ARMS]
    places = [_choose_heads(own) if only is None else [only] for own in drawn]
    length = _choose_length(drawn, places)
    panels = [
        ChartPanel(
            f"{_arm_label(own, found)}, {own.which}", _map_panel(own, own_places, length), []
        )
        for own, own_places in zip(drawn, places, strict=True)
    ]
    texts = list(dict.fromkeys(own.tokens[:length] for own in drawn))
    caption = (
        f"{said}: attention weights of {format_count(length, 'token')} as queries (rows) to keys"
        f" (columns), in {_format_text(texts[0])}."
    )
    if len(texts) > 1:
        caption += " Other arms have another text, or a shorter part of it."
    caption += (
        f" Palest: below {_THRESHOLDS[0]:.0%} of a token's attention; darker from"
        f" {format_list([f'{step:.0%}' for step in _THRESHOLDS], 3)} on."
    )
    caption += _format_targets(drawn, found)
    left = [_arm_label(own, found) for own in found[_MAX_ARMS:]]
    caption += f" Not drawn: {format_list(left, 6)}." if left else ""
    return Chart(
        "attention", "Attention of one text", caption + _format_hidden(drawn, places), panels
    )


def _arm_label(own: ArmAttention, found: list[ArmAttention]) -> str:
    """Return the arm's variant if that is unique, else its name."""
    alike = [other for other in found if other.variant == own.variant]
    return own.variant if len(alike) == 1 else own.arm


def _choose_heads(own: ArmAttention) -> list[Place]:
    """Return evenly spaced layers, and the first heads of each."""
    layers, heads = own.a_LHTT.shape[:2]
    wide = min(heads, _MAX_HEADS_OF_LAYER)
    tall = min(layers, _MAX_HEADS // wide, _MAX_LAYERS)
    rows = {round(at) for at in np.linspace(layers - 1, 0, tall)}
    return [(layer, head) for layer in sorted(rows) for head in range(wide)]


def _format_hidden(drawn: list[ArmAttention], places: list[list[Place]]) -> str:
    most = max(own.a_LHTT.shape[0] * own.a_LHTT.shape[1] for own in drawn)
    shown = max(map(len, places))
    return f" Of {format_count(most, 'head')} of an arm, {shown} drawn." if shown < most else ""


def _choose_length(drawn: list[ArmAttention], places: list[list[Place]]) -> int:
    """Return the number of tokens that keeps the page small."""
    most = max(len(own.tokens) for own in drawn)
    maps = sum(map(len, places))
    while most > 2 and maps * most * (most + 1) // 2 > _MAX_CELLS:
        most -= 1
    return most


def _format_text(tokens: tuple[str, ...]) -> str:
    """Format tokens as text; ids are separated by spaces."""
    between = " " if all(token.isdecimal() for token in tokens) else ""
    return f"“{between.join(tokens)}”"


def _format_targets(drawn: list[ArmAttention], found: list[ArmAttention]) -> str:
    """Format the mean attention by target, with the head that has most of it."""
    told = [own for own in drawn if own.mean_weights]
    if not told:
        return ""
    said = []
    for own in told:
        most = []
        for name, what in TARGETS.items():
            values_LH = own.mean_weights[name]
            layer, head = np.unravel_index(int(values_LH.argmax()), values_LH.shape)
            best = f"layer {layer} head {head}: {values_LH.max():.0%}"
            most.append(f"{what} {values_LH.mean():.0%} ({best})")
        said.append(f"{_arm_label(own, found)}: {', '.join(most)}")
    shares = dict.fromkeys(f"{own.uniform_share:.0%}" for own in told)
    return (
        " Mean over all heads, and the largest head; uniform attention would give"
        f" {' or '.join(shares)}: {'; '.join(said)}."
    )


def _map_panel(own: ArmAttention, places: list[Place], length: int) -> Spec:
    length = min(length, len(own.tokens))
    layers, heads = len({layer for layer, _ in places}), len({head for _, head in places})
    across, down = (_MAX_WIDTH - _GAP * heads) // (heads * length), _MAX_HEIGHT // (layers * length)
    cell = max(1, min(_MAX_PIXELS, across, max(_MIN_PIXELS, down)))
    rows = [row for layer, head in places for row in _map_cells(own, layer, head, length)]
    edge = [-0.5, length - 0.5]
    axis: Spec = {"type": "quantitative", "axis": None}
    x: Spec = axis | {"scale": {"domain": edge, "nice": False, "zero": False}}
    y: Spec = axis | {"scale": {"domain": edge, "nice": False, "zero": False, "reverse": True}}
    scale = {"type": "threshold", "domain": [step * 100 for step in _THRESHOLDS[1:]]}
    scale |= {"range": [f"var(--{name})" for name in _COLOURS]}
    colour = {"field": "share", "type": "quantitative", "scale": scale, "legend": None}
    triangle = [{"k": edge[0], "q": edge[0]}, {"k": edge[1], "q": edge[1]}]
    below: Spec = {
        "data": {"values": triangle},
        "mark": {"type": "area", "color": "var(--line)", "opacity": 0.45},
        "encoding": {"x": x | {"field": "k"}, "y": y | {"field": "q"}, "y2": {"datum": edge[1]}},
    }
    mark = {"type": "square", "size": cell * cell, "opacity": 1, "strokeWidth": 0, "aria": False}
    cells: Spec = {
        "mark": mark,
        "encoding": {
            "x": x | {"field": "k"},
            "y": y | {"field": "q"},
            "color": colour,
            "tooltip": [
                *(
                    tooltip_field("layer"),
                    tooltip_field("head"),
                    tooltip_field("from", "token"),
                    tooltip_field("to", "attends to"),
                ),
                tooltip_field("share", "%"),
            ],
        },
    }
    drawn = [below, cells]
    if cell >= _MIN_PIXELS_FOR_LABELS and len(places) == 1:
        drawn += _token_labels(own, length, x, y)
    order = {key: list(dict.fromkeys(row[key] for row in rows)) for key in ("layer", "head")}
    header = {"title": None, "labelColor": "var(--ink)", "labelFontSize": 11, "labelPadding": 3}
    return {
        "data": {"values": rows},
        "facet": {
            "row": {"field": "layer", "type": "nominal", "sort": order["layer"]}
            | {"header": header | {"labelAngle": 0}},
            "column": {"field": "head", "type": "nominal", "sort": order["head"]}
            | {"header": header},
        },
        "spacing": _GAP,
        "spec": {"width": cell * length, "height": cell * length, "layer": drawn},
    }


def _token_labels(own: ArmAttention, length: int, x: Spec, y: Spec) -> list[Spec]:
    """Return the tokens as labels beside and below the map."""
    data = {"values": [{"at": i, "token": own.tokens[i]} for i in range(length)]}
    mark = {"type": "text", "fontSize": 9, "color": "var(--faint)", "align": "right"}
    text = {"text": {"field": "token", "type": "nominal"}}
    beside = {"x": {"value": -4}, "y": y | {"field": "at"}}
    below = {"x": x | {"field": "at"}, "y": {"value": "height"}}
    return [
        {"data": data, "mark": mark | {"baseline": "middle"}, "encoding": beside | text},
        {
            "data": data,
            "mark": mark | {"baseline": "middle", "angle": 270, "dx": -4},
            "encoding": below | text,
        },
    ]


def _map_cells(own: ArmAttention, layer: int, head: int, length: int) -> list[Spec]:
    a_TT = own.a_LHTT[layer, head, :length, :length]
    seen = np.argwhere(a_TT >= _THRESHOLDS[0] * FULL_WEIGHT).tolist()
    return [
        {
            "layer": f"layer {layer}",
            "head": f"head {head}",
            "q": query,
            "k": key,
            "from": f"{query} “{own.tokens[query]}”",
            "to": f"{key} “{own.tokens[key]}”",
            "share": round(100 * int(a_TT[query, key]) / FULL_WEIGHT),
        }
        for query, key in seen
    ]
