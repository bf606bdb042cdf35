"""The charts of a report, as Vega-Lite specs."""

from qkablate.report.charts import (
    attention,
    conversions,
    curves,
    distance,
    forest,
    forms,
    heads,
    scaling,
    sizes,
    spectra,
)
from qkablate.report.charts.base import Chart
from qkablate.report.section import Section

_MAKERS = (
    *(forest.claim_chart, conversions.conversion_chart),
    *(forest.gap_chart, curves.loss_chart, curves.gap_curve_chart),
    *(forms.form_chart, heads.rounding_chart),
    *(distance.distance_chart, sizes.heat_map_chart, sizes.cost_chart, scaling.scaling_chart),
    sizes.lr_chart,
    *(heads.head_curve_chart, spectra.spectrum_chart, spectra.output_spectrum_chart),
    spectra.spectra_by_tokens_chart,
    *(heads.head_map_chart, attention.attention_chart),
)


def make_charts(section: Section) -> list[Chart]:
    """Return all charts that have data; some are only a table."""
    charts = filter(None, (make(section) for make in _MAKERS))
    return [chart for chart in charts if chart.panels or chart.table]
