"""The pictures of a report, as Vega-Lite: one colour scheme for paper and screens, see palette."""

from qkablate.report.charts.attention import attention
from qkablate.report.charts.base import Chart, Panel, Spec
from qkablate.report.charts.curves import MOST_RUNS, gap_curves, losses
from qkablate.report.charts.distance import function_distance
from qkablate.report.charts.forest import claim, gaps
from qkablate.report.charts.heads import head_curves, head_maps
from qkablate.report.charts.sizes import bowls, costs, heat
from qkablate.report.charts.spectra import head_spectra, spectra_by_tokens
from qkablate.report.section import Chapter

__all__ = ["MOST_RUNS", "Chart", "Panel", "Spec", "charts"]


def charts(chapter: Chapter) -> list[Chart]:
    """All that there is something to draw for."""
    every = (
        *(claim, gaps, losses, gap_curves, function_distance, heat, costs, bowls),
        *(head_curves, head_spectra, spectra_by_tokens, head_maps, attention),
    )
    return [chart for make in every if (chart := make(chapter)) is not None]
