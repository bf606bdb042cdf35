"""Pictures of the study."""

from qkablate.report.charts.base import Chart, ChartPanel
from qkablate.report.study.pictures import Picture


def test_checksum_does_not_depend_on_the_last_digits():
    """They differ between types of CPU."""
    charts = [
        Chart("gaps", "Gaps", "", [ChartPanel("", {"data": {"values": [{"gap": gap}]}})])
        for gap in (0.1 + 0.2, 0.3, 0.301)
    ]
    first, second, other = (Picture("gaps", chart, "", "").hash for chart in charts)
    assert first == second != other
