"""Heat maps of the approximation errors of an imported model: variants × layers."""

from collections.abc import Mapping
from typing import Any

from qkablate.report.charts import base
from qkablate.report.charts.base import Chart, ChartPanel, Spec
from qkablate.report.section import Section
from qkablate.report.text.forms import SIDES, format_relative_error, make_form_tables
from qkablate.report.text.table import Table
from qkablate.table import format_list

_STEPS = (0.1, 0.25, 0.5, 0.75)  # errors where a shade begins, beyond those that are exact
_SHADES = ("low3", "low1", "mid", "high1", "high2", "high3")
_MAX_LAYERS_WITH_NUMBERS = 16
_WIDTH = 460  # pixels of a map
_MAX_CELLS = 4_000  # of all maps


def form_chart(section: Section) -> Chart | None:
    """Chart the errors of scores and outputs of each variant and layer."""
    measured = {n: i.forms for n, i in section.inspections.items() if i.forms is not None}
    if not measured:
        return None
    panels, cells = list[ChartPanel](), 0
    for name, forms in measured.items():
        suffix = f", {name}" if len(measured) > 1 else ""
        for side, title in SIDES.items():
            rows = _cells(forms, side)
            cells += len(rows)
            if cells <= _MAX_CELLS or not panels:
                panels.append(ChartPanel(f"{title}{suffix}", _map_spec(rows, forms)))
    sources = format_list(list(dict.fromkeys(forms["tokens"] for forms in measured.values())))
    caption = (
        f"Error of each layer in the variant's closest circuits, on {sources}: root mean square"
        " relative to the layer's own scores or outputs, without training. Dark blue: exact."
        " Variants are sorted by the larger of their two errors; the column of a layer shows where"
        " a variant loses most."
    )
    if cells > _MAX_CELLS:
        caption += " Only the first maps are shown."
    tables = make_form_tables(section)
    columns = tables[0].columns
    rows_of = [row for table in tables for row in table.rows]
    table = Table(tables[0].title, columns, rows_of, tables[0].notes)
    return Chart("forms", "Approximation errors of other variants", caption, panels, table)


def _cells(forms: Mapping[str, Any], side: str) -> list[Spec]:
    limit = forms["exact_below"]
    return [
        {
            "variant": form["variant"],
            "layer": layer,
            "error": base.round_digits(held[side], 3),
            "label": _label(held[side], limit),
        }
        for form in forms["forms"]
        for layer, held in enumerate(form["layers"])
        if held[side] is not None
    ]


def _label(error: float, limit: float) -> str:
    return format_relative_error(error, limit).removeprefix("0").replace("exact", "0")


def _map_spec(rows: list[Spec], forms: Mapping[str, Any]) -> Spec:
    layers = max((row["layer"] for row in rows), default=0) + 1
    color = base.color_by("error", [forms["exact_below"], *_STEPS], _SHADES)
    color["legend"] = base.shade_legend("relative error")
    drawn = [base.make_layer("rect", {"color": color}, stroke="var(--ground)", strokeWidth=1)]
    if layers <= _MAX_LAYERS_WITH_NUMBERS:
        text = {"text": {"field": "label", "type": "nominal"}}
        drawn.append(base.make_layer("text", text, fontSize=10, color="var(--ink)"))
    names = [form["variant"] for form in forms["forms"]]
    axis = {"ticks": False, "domain": False, "labelAngle": 0, "labelLimit": 200}
    encoding = {
        "x": {"field": "layer", "type": "ordinal", "title": "layer", "axis": axis},
        "y": {"field": "variant", "type": "nominal", "sort": names, "title": None, "axis": axis},
        "tooltip": base.make_tooltip(variant="", layer="", error="relative error"),
    }
    return {
        "data": {"values": rows},
        "width": {"step": max(6, min(34, _WIDTH // layers))},
        "height": {"step": 20},
        "encoding": encoding,
        "layer": drawn,
    }
