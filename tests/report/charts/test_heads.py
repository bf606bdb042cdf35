"""Pictures of what heads are like: the numbers of the rows, where runs have them, and no others."""

import json
import math
import random
import re
import statistics
from xml.etree import ElementTree

import numpy as np
import pytest
import vl_convert

from qkablate.report.charts import make_charts
from qkablate.report.page import render_page
from qkablate.report.render import render_chart
from qkablate.report.rows import find_problems

NAMES = ("heads", "spectra", "spectra-training", "head-maps")
WORDS = ("variant=standard,no_q", "seed=range(3)")
STEPS = (0, 6, 12)
CONTEXT = 16


def mechanism(run, step, layers=2, heads=3, values=4):
    """Give no_q half of standard's stable rank, and no circuit in layer 1."""
    rng = random.Random(f"{run.arm} {run.changes} {step}")
    half = 0.5 if run.arm.startswith("no_q") else 1.0

    def each(value):
        order = rng.sample(range(heads), heads)
        return [[value + 0.01 * i for i in order] for _ in range(layers)]

    ranks = each(half * (10 - step / 2))
    if half < 1:
        ranks[1] = None
    spectrum = [[[8.0 * 2.0**-k for k in range(values)] for _ in range(heads)]] * layers
    return {
        "qk": {
            "stable_rank": ranks,
            "symmetry": each(-0.5 if half < 1 else 0.5),
            "moved": each(step / 12),
            "singular": spectrum,
        },
        "attention": {"entropy": each(3.0), "previous": each(0.05), "induction": each(0.3)},
    }


def measure(world, of=mechanism):
    for run in world.runs():
        arm = world.manifest.arms[run.arm]
        per_step = arm.tokens // int(arm.config.train.steps)
        rows = [
            {"step": step, "tokens": step * per_step, "diagnostics": of(run, step)}
            for step in STEPS
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (world.run_folder(run) / "metrics.jsonl").write_text(text)
    return world


@pytest.fixture(scope="module")
def measured(make_world, loss_of, section_of):
    def make(of=mechanism, words=WORDS):
        return section_of(measure(make_world(*words).finish(loss_of), of))

    return make


@pytest.fixture(scope="module")
def section(measured):
    return measured()


def charts_by_name(section):
    return {chart.name: chart for chart in make_charts(section) if chart.name in NAMES}


def panel_of(section, name, title):
    (found,) = [
        panel for panel in charts_by_name(section)[name].panels if panel.title.startswith(title)
    ]
    return found


def rows_of(panel):
    return panel.spec["data"]["values"]


@pytest.mark.slow
def test_all_head_charts_compile(section):
    found = charts_by_name(section)
    assert [*found] == [*NAMES]
    for chart in found.values():
        assert "n = 3" in chart.caption
        for panel in chart.panels:
            assert vl_convert.vegalite_to_vega(panel.spec)["marks"]
            json.dumps(panel.spec, allow_nan=False)
        text = render_chart(chart, section.title, "svg").decode()
        assert ElementTree.fromstring(text).tag.endswith("svg")
        assert "var(" not in text
        assert render_chart(chart, section.title, "png").startswith(b"\x89PNG")


def test_head_curves_are_means_over_heads_with_intervals_over_seeds(section):
    rows = rows_of(panel_of(section, "heads", "stable rank"))
    found = {(row["variant"], row["tokens"]): row for row in rows}
    assert {tokens for _, tokens in found} == {6 * 32, 12 * 32}
    assert found["standard", 384]["loss"] == pytest.approx(4.01)
    assert found["no_q", 384]["loss"] == pytest.approx(2.01)  # of the layer that has a circuit
    assert all(row["n"] == 3 and row["low"] <= row["loss"] <= row["high"] for row in rows)
    moved = rows_of(panel_of(section, "heads", "distance of B"))
    assert [row["loss"] for row in moved if row["variant"] == "no_q"] == pytest.approx([0.51, 1.01])


def test_bands_end_at_the_bounds_of_a_measure(measured):
    """Attention has the entropy of uniform attention at most, and a stable rank is 1 or more."""
    most = statistics.fmean(math.log(visible) for visible in range(2, CONTEXT + 1))

    def near_the_bounds(run, step):
        below = run.changes["seed"] / 10
        both = mechanism(run, step)
        both["attention"]["entropy"] = [[most - below]]
        both["qk"]["stable_rank"] = [[1 + below]]
        return both

    section = measured(near_the_bounds)
    assert section.study.entries[0].arm.config.model.context == CONTEXT
    for row in rows_of(panel_of(section, "heads", "entropy")):
        assert row["low"] < row["loss"] < row["high"] == pytest.approx(most, rel=1e-4)
        assert row["estimate"].endswith(f", {most:.2f}]")
    for row in rows_of(panel_of(section, "heads", "stable rank")):
        assert 1 == row["low"] < row["loss"] < row["high"]


def test_labels_of_a_narrow_logarithmic_axis_differ(measured):
    def nearly_equal(run, step):
        return {"attention": {"rounding": [[(1.1 + step / 40) * 1e-7]]}}

    (chart,) = (c for c in make_charts(measured(nearly_equal)) if c.name == "rounding")
    text = render_chart(chart, "a sweep", "svg").decode()
    labels = re.findall(r">([\d.]+e.7)<", text)
    assert len(labels) == len({*labels}) > 1


def test_head_maps_show_all_layers_sorted_by_value(section):
    rows = rows_of(panel_of(section, "head-maps", "stable rank"))
    found = {(row["arm"], row["layer"], row["head"]): row["value"] for row in rows}
    expected = {
        (arm, layer, head + 1): pytest.approx(value + 0.02 - 0.01 * head)
        for arm, value, layers in (("standard", 4.0, 2), ("no_q", 2.0, 1))
        for layer in range(layers)
        for head in range(3)
    }
    assert found == expected


def test_single_heads_are_a_table(measured):
    def single(run, step):
        return mechanism(run, step, heads=1)

    section = measured(single)
    chart = charts_by_name(section)["head-maps"]
    assert chart.panels == []
    assert chart.table.columns[:4] == ["arm", "size", "layer", "stable rank of B"]
    assert [row[0] for row in chart.table.rows] == ["standard", "standard", "no_q", "no_q"]
    assert [row[3] for row in chart.table.rows] == ["4", "4", "2", "–"]
    text = render_page([section], "a page")
    assert 'aria-label="The head of each layer"' in text


def test_signed_values_have_a_diverging_scale(section):
    def colors(title):
        panel = panel_of(section, "head-maps", title)
        return panel.spec["spec"]["layer"][0]["encoding"]["color"]["scale"]

    both, one = colors("symmetry"), colors("stable rank")
    assert both["domain"] == [-step for step in reversed(both["domain"])]
    assert {"var(--low3)", "var(--mid)", "var(--high3)"} <= {*both["range"]}
    assert "var(--high3)" not in one["range"]
    for scale in (both, one, colors("entropy")):
        assert len(scale["range"]) == len(scale["domain"]) + 1
        assert scale["domain"] == sorted({*scale["domain"]})


def test_spectra_are_drawn_at_start_and_end_by_layer(section):
    chart = charts_by_name(section)["spectra"]
    assert [panel.title for panel in chart.panels] == ["layer 0", "layer 1"]
    rows = rows_of(chart.panels[0])
    assert {(row["variant"], row["when"]) for row in rows} == {
        (variant, when) for variant in ("standard", "no_q") for when in ("start", "end")
    }
    for row in rows:
        assert row["value"] == pytest.approx(2.0 ** (1 - row["i"]))
    thin, thick = chart.panels[0].spec["layer"][:2]
    assert thin["mark"]["strokeWidth"] < thick["mark"]["strokeWidth"]
    assert {row["when"] for row in thick["data"]["values"]} == {"end"}


def test_arm_has_spectra_during_training(section):
    chart = charts_by_name(section)["spectra-training"]
    assert {panel.variants[0] for panel in chart.panels} == {"standard", "no_q"}
    domains = set()
    for panel in chart.panels:
        rows = rows_of(panel)
        by_tokens = {row["tokens"]: row["age"] for row in rows}
        assert len(by_tokens) > 2
        assert [*sorted(by_tokens)] == sorted(by_tokens, key=by_tokens.get)  # paler is earlier
        assert by_tokens[max(by_tokens)] == 1
        for row in rows:
            assert row["value"] == pytest.approx(2.0 ** (1 - row["i"]))
        domains.add(tuple(panel.spec["layer"][0]["encoding"]["y"]["scale"]["domain"]))
    assert len(domains) == 1  # so that arms compare


def test_each_size_has_its_own_panels(measured):
    found = charts_by_name(measured(words=(*WORDS[:1], "seed=0", "model.d_model=16,32")))
    assert len(found["heads"].panels) == 6
    assert {panel.title for panel in found["spectra"].panels} == {
        f"layer {layer}, d{width}-h2" for layer in (0, 1) for width in (16, 32)
    }
    assert "n = 1" in found["heads"].caption


@pytest.mark.slow
def test_number_of_points_is_bounded(measured):
    def large(run, step):
        return mechanism(run, step, layers=24, heads=16, values=128)

    section = measured(large, ("variant=standard,no_q", "seed=0,1"))
    found = charts_by_name(section)
    titles = [panel.title for panel in found["spectra"].panels]
    assert (titles[0], titles[-1]) == ("layer 0", "layer 23")
    assert len({*titles}) == len(titles) <= 12
    assert all(len(rows_of(panel)) <= 128 for panel in found["spectra"].panels)
    for panel in found["head-maps"].panels:
        assert panel.spec["columns"] >= 1
        assert len(panel.spec["spec"]["layer"]) == 1  # no room for numbers
        assert vl_convert.vegalite_to_vega(panel.spec)["marks"]


@pytest.mark.slow
def test_arms_of_the_same_variant_are_distinguished(measured):
    section = measured(words=("variant=standard,no_q", "seed=0,1", "control=none,params"))
    rows = rows_of(panel_of(section, "head-maps", "entropy"))
    names = [entry.name for entry in section.study.entries]
    assert len({*names}) == 3
    assert list(dict.fromkeys(row["arm"] for row in rows)) == names


@pytest.mark.parametrize("value", [math.nan, 0.0, 1e17, -1.0])
def test_non_finite_values_are_dropped(measured, value):
    def odd(run, step):
        own = mechanism(run, step)
        for part in own.values():
            for name, layers in part.items():
                filled = np.full(
                    np.shape(own["qk"]["singular"]) if name == "singular" else (2, 3), value
                )
                layers[:] = filled.tolist()
        return own

    for chart in charts_by_name(measured(odd)).values():
        for panel in chart.panels:
            json.dumps(panel.spec, allow_nan=False)
            assert vl_convert.vegalite_to_vega(panel.spec)["marks"]


def test_damaged_diagnostics_are_named_on_the_page(make_world, loss_of, section_of):
    world = measure(make_world(*WORDS).finish(loss_of))
    run = next(run for run in world.runs() if run.arm.startswith("no_q"))
    path = world.run_folder(run) / "metrics.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"entropy"', b'"entropy', 1))
    assert find_problems(section_of(world)) == [
        f"{run.name}: metrics.jsonl is damaged: rows of head metrics skipped: 1"
    ]


def test_runs_without_diagnostics_have_no_chart(finished, section):
    from qkablate.report.section import Section

    study = finished.study()
    old = Section(study.name, "here", study)
    assert charts_by_name(old) == {}
    text = render_page([old], "old")
    for name in NAMES:
        assert f'id="c1-{name}"' not in text
    with_them = render_page([section], "new")
    for name in NAMES:
        assert f'id="c1-{name}"' in with_them
