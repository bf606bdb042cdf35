"""The charts of a report, as Vega-Lite specs."""

from qkablate.report.charts.attention import attention_chart
from qkablate.report.charts.base import Chart
from qkablate.report.charts.curves import gap_curve_chart, loss_chart
from qkablate.report.charts.distance import distance_chart
from qkablate.report.charts.forest import claim_chart, gap_chart
from qkablate.report.charts.heads import (
    head_curve_chart,
    head_map_chart,
    spectra_by_tokens_chart,
    spectrum_chart,
)
from qkablate.report.charts.sizes import cost_chart, heat_map_chart, lr_chart
from qkablate.report.section import Section

_MAKERS = (
    *(claim_chart, gap_chart, loss_chart, gap_curve_chart, distance_chart, heat_map_chart),
    *(cost_chart, lr_chart, head_curve_chart, spectrum_chart, spectra_by_tokens_chart),
    *(head_map_chart, attention_chart),
)


def make_charts(section: Section) -> list[Chart]:
    """Return all charts that have data."""
    return [chart for make in _MAKERS if (chart := make(section)) and chart.panels]
