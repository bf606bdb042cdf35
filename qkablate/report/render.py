"""The same charts as files: SVG and PNG, in the light colours, with their captions."""

import json
from typing import Any, Protocol

from qkablate.errors import UserError
from qkablate.report.charts import Chart, Spec
from qkablate.report.palette import plain
from qkablate.report.text.numbers import cleaned

MOST = 24  # panels that one picture holds
_AXIS = {"gridColor": "var(--line)", "gridOpacity": 0.6, "domainColor": "var(--line)"}
_AXIS |= {"tickColor": "var(--line)", "labelColor": "var(--ink)", "titleColor": "var(--faint)"}
CONFIG: Spec = {
    "background": None,
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": _AXIS | {"titleFontWeight": "normal", "labelFontSize": 11, "titleFontSize": 11},
    "title": {"color": "var(--ink)", "subtitleColor": "var(--faint)"},
    "legend": {"labelColor": "var(--ink)", "labelFontSize": 12, "symbolSize": 90},
    "mark": {"invalid": "break-paths-show-path-domains"},
}
SHAPE_PATHS = {
    "circle": "M4 0A4 4 0 1 1 -4 0A4 4 0 1 1 4 0Z",
    "square": "M-3.6 -3.6H3.6V3.6H-3.6Z",
    "triangle-up": "M0 -4.2L4.4 3.4H-4.4Z",
    "diamond": "M0 -5L5 0L0 5L-5 0Z",
}


class Titled(Protocol):
    """What a chart is of: a chapter, or a run."""

    @property
    def title(self) -> str: ...


def picture(chart: Chart, of: Titled, form: str) -> bytes:
    """A chart as `svg` or `png`."""
    import vl_convert

    text = plain(json.dumps(cleaned(_whole(chart, of))))
    try:
        if form == "svg":
            return str(vl_convert.vegalite_to_svg(text)).encode()
        return bytes(vl_convert.vegalite_to_png(text, scale=2))
    except ValueError:  # a name that means something to what draws, as `constructor` does
        raise UserError(f"the picture of {chart.title.lower()} cannot be drawn") from None


def _whole(chart: Chart, of: Titled) -> Spec:
    """All panels in one, with a legend and the caption."""
    shown = chart.panels[:MOST]
    caption = chart.caption
    if len(shown) < len(chart.panels):
        caption += f" The first {MOST} of {len(chart.panels)} sizes."
    columns = 1 if len(shown) == 1 else 2
    width = 620 if columns == 1 else 360
    panels = []
    for place, panel in enumerate(shown):
        wide = {"width", "facet"} & {*panel.spec}
        spec = panel.spec if wide else {"width": width} | panel.spec
        if panel.title:
            spec = {"title": {"text": panel.title, "anchor": "start", "fontSize": 12}} | spec
        if place == 0:
            spec = _with_legend(spec, chart.variants)
        panels.append(spec)
    title = {"text": [f"{chart.title} · {of.title}"], "anchor": "start", "fontSize": 15}
    title |= {"subtitle": _lines(caption, 112 if columns == 2 else 96), "subtitleFontSize": 11}
    config = CONFIG | {"background": "var(--ground)", "font": "sans-serif"}
    whole = {"concat": panels, "columns": columns, "title": title, "config": config, "padding": 14}
    # Shades are of one panel; variants are of all.
    own = {} if chart.variants else {"resolve": {"scale": {"color": "independent"}}}
    return whole | own


def _with_legend(value: Any, variants: list[str]) -> Any:
    """The variants of the chart are told once, above the first panel."""
    if isinstance(value, list):
        return [_with_legend(inner, variants) for inner in value]
    if not isinstance(value, dict):
        return value
    found = {key: _with_legend(inner, variants) for key, inner in value.items()}
    if found.get("field") == "variant" and "legend" in found and "scale" in found:
        found["legend"] = {"title": None, "orient": "top", "values": variants, "columns": 6}
        found["legend"] |= {"symbolOpacity": 1}
    return found


def _lines(text: str, width: int) -> list[str]:
    import textwrap

    return textwrap.wrap(text, width)
