"""What heads do with one text: maps of their attention, layers by heads.

Shape suffixes: L layers, H heads, T tokens.
"""

import numpy as np

from qkablate.analysis.study.attention_maps import ASKED, Example
from qkablate.report.charts.base import Chart, Panel, Spec, tip
from qkablate.report.section import Chapter
from qkablate.runs.attention_map import WHOLE
from qkablate.table import counted, some

_ARMS, _HEADS = 6, 16  # that are drawn, and heads of each
_ROW, _COLUMN = 8, 6  # heads of a layer, and layers
_CELLS = 16_000  # of all maps
_WIDE, _TALL, _GAP = 480, 400, 10  # pixels of a row of maps, of a column, and between two
_LEAST, _MOST = 3, 9  # of a token, where there is room
_ROOMY = 8  # pixels of a token that has room for its name
_STEPS = (0.06, 0.15, 0.4)  # where a shade begins
Place = tuple[int, int]  # a layer, and a head of it
_COLOURS = ("low1", "low2", "low3")


def attention(chapter: Chapter) -> Chart | None:
    """A panel for each arm, where runs keep an example."""
    said = "At the end of training, on the beginning of the validation split"
    return attention_of(chapter.examples, said) if chapter.examples else None


def attention_of(found: list[Example], said: str, only: Place | None = None) -> Chart:
    """Maps of all of them; or of one layer and head alone."""
    drawn = found[:_ARMS]
    places = [_places(own) if only is None else [only] for own in drawn]
    length = _length(drawn, places)
    panels = [
        Panel(f"{_name(own, found)}, {own.which}", _maps(own, own_places, length), [])
        for own, own_places in zip(drawn, places, strict=True)
    ]
    texts = list(dict.fromkeys(own.tokens[:length] for own in drawn))
    caption = (
        f"{said}: how much each of {counted(length, 'token')} (down) looks at each before it"
        f" (across), of {_text(texts[0])}."
    )
    if len(texts) > 1:
        caption += " Other arms read another text, or less of it."
    caption += (
        f" Palest: below {_STEPS[0]:.0%} of a token's attention; darker from"
        f" {some([f'{step:.0%}' for step in _STEPS], 3)} on."
    )
    caption += _looks(drawn, found)
    left = [_name(own, found) for own in found[_ARMS:]]
    caption += f" Not drawn: {some(left, 6)}." if left else ""
    return Chart("attention", "Attention of one text", caption + _hidden(drawn, places), panels)


def _name(own: Example, found: list[Example]) -> str:
    """Its variant, where that tells it from the others."""
    alike = [other for other in found if other.variant == own.variant]
    return own.variant if len(alike) == 1 else own.arm


def _places(own: Example) -> list[Place]:
    """What is drawn: layers from the first to the last, and of each the first heads."""
    layers, heads = own.a_LHTT.shape[:2]
    wide = min(heads, _ROW)
    tall = min(layers, _HEADS // wide, _COLUMN)
    rows = {round(at) for at in np.linspace(layers - 1, 0, tall)}
    return [(layer, head) for layer in sorted(rows) for head in range(wide)]


def _hidden(drawn: list[Example], places: list[list[Place]]) -> str:
    most = max(own.a_LHTT.shape[0] * own.a_LHTT.shape[1] for own in drawn)
    shown = max(map(len, places))
    return f" Of {counted(most, 'head')} of an arm, {shown} drawn." if shown < most else ""


def _length(drawn: list[Example], places: list[list[Place]]) -> int:
    """So many tokens at most that the page stays small."""
    most = max(len(own.tokens) for own in drawn)
    maps = sum(map(len, places))
    while most > 2 and maps * most * (most + 1) // 2 > _CELLS:
        most -= 1
    return most


def _text(tokens: tuple[str, ...]) -> str:
    """“the cat”; ids, of a task, with a space between them."""
    between = " " if all(token.isdecimal() for token in tokens) else ""
    return f"“{between.join(tokens)}”"


def _looks(drawn: list[Example], found: list[Example]) -> str:
    """Which heads look where most, in numbers of the maps."""
    told = [own for own in drawn if own.asked]
    if not told:
        return ""
    said = []
    for own in told:
        most = []
        for name, what in ASKED.items():
            values_LH = own.asked[name]
            layer, head = np.unravel_index(int(values_LH.argmax()), values_LH.shape)
            best = f"layer {layer} head {head}: {values_LH.max():.0%}"
            most.append(f"{what} {values_LH.mean():.0%} ({best})")
        said.append(f"{_name(own, found)}: {', '.join(most)}")
    shares = dict.fromkeys(f"{own.equal_share:.0%}" for own in told)
    return (
        " Mean over all heads, and the head that has most of it, where an equal share would be"
        f" {' or '.join(shares)}: {'; '.join(said)}."
    )


def _maps(own: Example, places: list[Place], length: int) -> Spec:
    length = min(length, len(own.tokens))
    layers, heads = len({layer for layer, _ in places}), len({head for _, head in places})
    across, down = (_WIDE - _GAP * heads) // (heads * length), _TALL // (layers * length)
    cell = max(1, min(_MOST, across, max(_LEAST, down)))
    rows = [row for layer, head in places for row in _cells(own, layer, head, length)]
    edge = [-0.5, length - 0.5]
    axis: Spec = {"type": "quantitative", "axis": None}
    x: Spec = axis | {"scale": {"domain": edge, "nice": False, "zero": False}}
    y: Spec = axis | {"scale": {"domain": edge, "nice": False, "zero": False, "reverse": True}}
    scale = {"type": "threshold", "domain": [step * 100 for step in _STEPS[1:]]}
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
                *(tip("layer"), tip("head"), tip("from", "token"), tip("to", "looks at")),
                tip("share", "%"),
            ],
        },
    }
    drawn = [below, cells]
    if cell >= _ROOMY and len(places) == 1:
        drawn += _labels(own, length, x, y)
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


def _labels(own: Example, length: int, x: Spec, y: Spec) -> list[Spec]:
    """The tokens, beside the map and below it."""
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


def _cells(own: Example, layer: int, head: int, length: int) -> list[Spec]:
    a_TT = own.a_LHTT[layer, head, :length, :length]
    seen = np.argwhere(a_TT >= _STEPS[0] * WHOLE).tolist()
    return [
        {
            "layer": f"layer {layer}",
            "head": f"head {head}",
            "q": query,
            "k": key,
            "from": f"{query} “{own.tokens[query]}”",
            "to": f"{key} “{own.tokens[key]}”",
            "share": round(100 * int(a_TT[query, key]) / WHOLE),
        }
        for query, key in seen
    ]
