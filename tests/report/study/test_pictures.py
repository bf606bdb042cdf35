"""Pictures of the study."""

from types import SimpleNamespace

import pytest

from qkablate.analysis.stats import Sample
from qkablate.report.charts.base import Chart, ChartPanel
from qkablate.report.study.pictures import answers_chart, hash_chart


def test_checksum_does_not_depend_on_the_last_digits():
    """They differ between types of CPU."""
    charts = [
        Chart("gaps", "Gaps", "", [ChartPanel("", {"data": {"values": [{"gap": gap}]}})])
        for gap in (0.1 + 0.2, 0.3, 0.301)
    ]
    first, second, other = (hash_chart(chart, "", "") for chart in charts)
    assert first == second != other


def answer(*values):
    """Return a claim that has ended, of one part with a margin of 0.01."""
    part = SimpleNamespace(sample=Sample(values), margin=0.01, open_below=False, open_above=False)
    part.kind, part.name = "worse", "part"
    comparison = SimpleNamespace(part="part")
    judged = SimpleNamespace(part=part, word="SUPPORTED", comparison=comparison)
    judgement = SimpleNamespace(has_ended=True, parts=[judged], alpha=0.05)
    return SimpleNamespace(claim=SimpleNamespace(name="claim"), judgement=judgement)


@pytest.mark.parametrize(
    ("values", "ends", "estimate"),
    [
        ((0.019, 0.02, 0.021), (False, False), 2.0),
        ((-0.05, 0.02, 0.15), (True, True), 4.0),
        ((0.19, 0.2, 0.21), (False, True), None),  # a point would stand at another number
    ],
)
def test_intervals_beyond_the_edge_of_the_answers_are_pale(values, ends, estimate):
    chart = answers_chart([answer(*values)])
    (row,) = chart.panels[0].spec["data"]["values"]
    assert (row["open_below"], row["open_above"]) == ends
    assert row["estimate"] == (None if estimate is None else pytest.approx(estimate))
    assert -6 <= row["low"] <= row["high"] <= 6
    points = next(x for x in chart.panels[0].spec["layer"] if x["mark"]["type"] == "point")
    assert points["encoding"]["x"]["field"] == "estimate"
    assert ("Pale: beyond 6 margins" in chart.caption) is any(ends)
