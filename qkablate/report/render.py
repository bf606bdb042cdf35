"""Charts as standalone SVG and PNG files, with captions, in the light theme."""

import json
import textwrap
from typing import Any

from qkablate.errors import UserError
from qkablate.report.charts.base import Chart, Spec
from qkablate.report.palette import use_light_colors
from qkablate.report.text.numbers import sanitize_all

MAX_PANELS = 24  # of one file
_AXIS = {"gridColor": "var(--line)", "gridOpacity": 0.6, "domainColor": "var(--line)"}
_AXIS |= {"tickColor": "var(--line)", "labelColor": "var(--ink)", "titleColor": "var(--faint)"}
_AXIS |= {"titlePadding": 9}  # a viewer's font may be wider than the one of the layout
CONFIG: Spec = {
    "background": None,
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": _AXIS
    | {"labelFlush": False, "titleFontWeight": "normal", "labelFontSize": 11, "titleFontSize": 11},
    "title": {"color": "var(--ink)", "subtitleColor": "var(--faint)"},
    "legend": {"labelColor": "var(--ink)", "labelFontSize": 12, "symbolSize": 90},
    "mark": {"invalid": "break-paths-show-path-domains"},
}
SHAPE_PATHS = {
    "circle": "M4 0A4 4 0 1 1 -4 0A4 4 0 1 1 4 0Z",
    "square": "M-3.6 -3.6H3.6V3.6H-3.6Z",
    "triangle-up": "M0 -4.2L4.4 3.4H-4.4Z",
    "diamond": "M0 -5L5 0L0 5L-5 0Z",
    "triangle-down": "M0 4.2L4.4 -3.4H-4.4Z",
}


def render_chart(chart: Chart, subject: str, form: str, setting: str = "") -> bytes:
    """Return a chart of a section or a run, named in its title, as `svg` or `png`."""
    import vl_convert

    text = use_light_colors(json.dumps(sanitize_all(combine_panels(chart, subject, setting))))
    try:
        if form == "svg":
            return str(vl_convert.vegalite_to_svg(text)).encode()
        return bytes(vl_convert.vegalite_to_png(text, scale=2))
    except ValueError:  # a name that Vega reserves, such as `constructor`
        raise UserError(f"chart '{chart.name}' cannot be rendered") from None


def combine_panels(chart: Chart, subject: str, setting: str = "") -> Spec:
    """Return all panels as one spec, with a legend, the setting of the runs and the caption."""
    shown = chart.panels[:MAX_PANELS]
    caption = chart.caption
    if len(shown) < len(chart.panels):
        caption += f" Only the first {MAX_PANELS} of {len(chart.panels)} panels are shown."
    columns = min(len(shown), chart.columns)
    width = 620 if columns == 1 else 360
    panels = []
    for panel in shown:
        spec = panel.spec if panel.has_own_width else {"width": width} | panel.spec
        if panel.title:
            spec = {"title": {"text": panel.title, "anchor": "start", "fontSize": 12}} | spec
        panels.append(spec)
    # The legend shows points with shapes, or lines with dashes.
    panels[0] = _with_legend(panels[0], chart.variants, '"shape":' in json.dumps(panels[0]))
    title = {"text": [f"{chart.title} · {subject}"], "anchor": "start", "fontSize": 15}
    is_narrow = columns == 1 and isinstance(shown[0].spec.get("width"), dict)  # cells of a table
    characters = 112 if columns == 2 else 60 if is_narrow else 96
    lines = [*textwrap.wrap(setting, characters), *textwrap.wrap(caption, characters)]
    title |= {"subtitle": lines, "subtitleFontSize": 11}
    config = CONFIG | {"background": "var(--ground)", "font": "sans-serif"}
    # A viewer's font may be wider than the one that the layout is computed with.
    padding = {"left": 36, "top": 14, "right": 56, "bottom": 14}
    if chart.columns == 1:  # with long labels
        padding |= {"left": 64}
    if any(panel.has_own_width for panel in shown):  # perhaps narrower than the text above it
        padding |= {"left": 72, "right": 150}
    spec = {"concat": panels, "columns": columns, "title": title, "config": config}
    spec |= {"padding": padding}
    # A sequential scale belongs to one panel; the scale of variants to all.
    return spec if chart.variants else spec | {"resolve": {"scale": {"color": "independent"}}}


def _with_legend(value: Any, variants: list[str], has_shapes: bool) -> Any:
    """Return the spec of a panel with the legend of all variants of its chart."""
    if isinstance(value, list):
        return [_with_legend(inner, variants, has_shapes) for inner in value]
    if not isinstance(value, dict):
        return value
    spec = {key: _with_legend(inner, variants, has_shapes) for key, inner in value.items()}
    if spec.get("field") == "variant" and "legend" in spec and "scale" in spec:
        spec["legend"] = {"title": None, "orient": "top", "values": variants, "columns": 6}
        spec["legend"] |= {"symbolOpacity": 1}
        # A viewer's font may be wider than that of the layout, by the more the longer a name is.
        padding = 2 * max(map(len, variants)) - 12
        spec["legend"] |= {"columnPadding": padding} if padding > 10 else {}
        if not has_shapes:
            spec["legend"] |= {"symbolType": "stroke", "symbolSize": 900, "symbolStrokeWidth": 2}
    return spec
