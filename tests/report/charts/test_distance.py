"""The picture of the function distance: numbers of the analysis, the twins, and a sentence."""

import json
import re

import numpy as np
import pytest
import vl_convert

from qkablate.report.charts import make_charts
from qkablate.report.charts.distance import drop_wide_bands
from qkablate.report.page import render_page
from qkablate.report.render import render_chart
from qkablate.report.rows import find_problems
from qkablate.report.text import page as markdown
from qkablate.runs import predictions
from qkablate.runs.predictions import PredictionsHeader

WORDS = ("variant=standard,no_q,standard_reassociated", "seed=range(3)")
STEPS = (0, 3, 6, 9, 12)


def predict(world, lift):
    """Every run says 1/2 + lift(run, step) of the first of two tokens."""
    for run in world.runs():
        fingerprint = world.manifest.arms[run.arm].facts["data_fingerprint"]
        for step in STEPS:
            p = 0.5 + lift(run, step)
            logs = np.log(np.array([[p, 1 - p]] * 4)).astype(np.float32)
            about = PredictionsHeader(run.id, step, fingerprint, "a" * 64, 4, 16)
            predictions.write_predictions(world.run_folder(run), about, logs)
    return world


def lifted(run, step, rounding=0.01):
    own = {"no_q": 0.1, "standard_reassociated": rounding}.get(run.arm.partition("-")[0], 0.0)
    return 0.02 * run.changes["seed"] + own * (1 + step) / 13


@pytest.fixture(scope="module")
def apart(make_world, loss_of, section_of):
    def make(lift=lifted, words=WORDS):
        return section_of(predict(make_world(*words).finish(loss_of), lift))

    return make


@pytest.fixture(scope="module")
def section(apart):
    return apart()


def chart_of(section):
    return next((own for own in make_charts(section) if own.name == "function-distance"), None)


def rows_with(panel, mark):
    for layer in panel.spec["layer"]:
        if layer["mark"]["type"] == mark:
            yield layer.get("data", panel.spec["data"])["values"]


@pytest.mark.slow
def test_chart_shows_the_distances_of_the_analysis(section):
    (panel,) = chart_of(section).panels
    (found,) = section.summary.function_distance
    assert panel.variants == ["no_q", "standard_reassociated"]
    arms, seeds = rows_with(panel, "line")
    for rows, own in ((arms, found.distances[:2]), (seeds, found.distances[2:])):
        expected = [
            (one.arm, reading.tokens, pytest.approx(reading.mean, rel=1e-3))
            for one in own
            for reading in one.readings
            if reading.tokens
        ]
        assert [(row["arm"], row["tokens"], row["distance"]) for row in rows] == expected
    assert all(row["low"] < row["distance"] < row["high"] for row in arms)
    assert all(row["low"] is row["high"] is None for row in seeds)
    ((word,),) = rows_with(panel, "text")
    assert word == seeds[-1]


def test_axes_are_logarithmic(section):
    chart = chart_of(section)
    for panel in chart.panels:
        for layer in panel.spec["layer"]:
            for row in layer.get("data", panel.spec["data"])["values"]:
                assert row["tokens"] > 0
                assert row["distance"] > 0
            assert {layer["encoding"][axis]["scale"]["type"] for axis in "xy"} == {"log"}
        assert vl_convert.vegalite_to_vega(panel.spec)["marks"]
        json.dumps(panel.spec, allow_nan=False)
    assert b"another seed" in render_chart(chart, section.title, "svg")


def test_caption_gives_distances_relative_to_another_seed(section):
    (found,) = section.summary.function_distance
    caption = chart_of(section).caption
    told = re.search(
        r"At the end: no_q-d16-h2 is (\S+) times as far as another seed and (\S+) times as far as"
        r" rounding\.$",
        caption,
    )
    assert float(told[1]) == pytest.approx(found.distances[0].times_another_seed, rel=0.06)
    assert float(told[2].replace(",", "")) == pytest.approx(
        found.distances[0].times_rounding, rel=0.06
    )
    assert "n = 3" in caption
    assert "4 positions" in caption


def test_small_rounding_distance_adds_a_panel_without_it(apart):
    section = apart(lambda run, step: lifted(run, step, rounding=1e-5))
    both, others = chart_of(section).panels
    assert both.title == "d16-h2"
    assert others.title == "d16-h2, without rounding"
    assert others.variants == ["no_q"]
    domain = others.spec["layer"][1]["encoding"]["y"]["scale"]["domain"]
    assert domain[0] > 1e-5


def test_each_size_has_a_panel(apart):
    words = ("variant=standard,no_q", "seed=0,1", "model.d_model=16,32")
    chart = chart_of(apart(words=words))
    assert [panel.title for panel in chart.panels] == ["d16-h2", "d32-h2"]
    assert "rounding" not in chart.caption


@pytest.mark.parametrize("lift", [lambda run, step: 0.0, lambda run, step: 0.1 * (step == 12)])
def test_zero_distances_are_dropped_from_logarithmic_axes(apart, lift):
    assert chart_of(apart(lift)) is None


def test_single_distance_to_another_seed_is_a_point(apart):
    chart = chart_of(apart(lambda run, step: lifted(run, step) * (step == 12)))
    (line,) = (
        layer
        for layer in chart.panels[0].spec["layer"]
        if layer["mark"].get("strokeWidth") == 1.5 and "point" in layer["mark"]
    )
    assert len(line["data"]["values"]) == 1
    assert line["mark"]["point"] is True


def test_runs_without_recordings_have_no_chart(make_world, loss_of, section_of):
    section = section_of(make_world(*WORDS).finish(loss_of))
    assert chart_of(section) is None
    assert "unction distance" not in render_page([section], "old")
    assert "unction distance" not in markdown.render_markdown([section])
    assert find_problems(section) == []


def test_page_and_markdown_contain_the_chart(section):
    text = render_page([section], "new")
    assert 'id="c1-function-distance"' in text
    assert "function distance from standard" in markdown.render_markdown([section])


def test_damaged_predictions_are_named_on_the_page(make_world, loss_of, section_of):
    world = predict(make_world(*WORDS).finish(loss_of), lifted)
    run = next(run for run in world.runs() if run.arm.startswith("no_q"))
    (world.run_folder(run) / "predictions/step-00000012.safetensors").write_bytes(b"<script>")
    (line,) = find_problems(section_of(world))
    assert line.startswith(f"function distance: {run.name}/predictions/step-00000012")


def test_band_that_does_not_fit_the_axis_is_left_out():
    bands = {"a": (2.0, 4.0), "b": (1e-9, 1e9), "c": (None, None)}
    rows = [{"arm": arm, "low": low, "high": high} for arm, (low, high) in bands.items()]
    drawn = {row["arm"]: (row["low"], row["high"]) for row in drop_wide_bands(rows, [1, 9])}
    assert drawn == bands | {"b": (None, None)}
