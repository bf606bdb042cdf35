"""Charts show the numbers of the analysis, and a variant looks the same in all of them."""

import dataclasses
import json
import math
import re
from collections import defaultdict
from xml.etree import ElementTree

import pytest
import vl_convert

from qkablate.analysis.comparison.curves import READINGS, Curve, describe_curve
from qkablate.analysis.stats import Sample
from qkablate.report.charts import make_charts
from qkablate.report.charts.curves import MAX_RUNS, mean_layers, mean_rows
from qkablate.report.palette import use_light_colors
from qkablate.report.render import combine_panels, render_chart
from qkablate.report.text.numbers import format_gap

THREE = ("variant=standard,no_q,shared_qk", "seed=range(6)")
SIZES = ("variant=standard,no_q", "model.d_model=16,32", "seed=range(3)")
TUNED = ("variant=standard,no_q", "seed=range(2)", "sweep.tune=true")
RATES = ("variant=standard,no_q", "seed=range(2)", "optim.lr=5e-4,1e-3,2e-3")
TWO_STARTS = ("variant=standard", "variant.init=matched,symmetric", "seed=range(3)")
TWO_STARTS += ("sweep.baseline={variant.init: matched}",)
ALONE = ("variant=no_q", "seed=0", "sweep.baseline=null")


def number_of(run):
    return run.changes["seed"] + len(run.arm)


# How the runs of a sweep end; ... is the loss of `loss_of`.
WORLDS = {
    "running": (THREE, lambda run: ... if number_of(run) % 2 else None),
    "not begun": (THREE, lambda run: None),
    "diverged": (THREE, lambda run: "diverged" if run.changes["seed"] == 1 else ...),
    "all of an arm diverged": (THREE, lambda run: "diverged" if "no_q" in run.arm else ...),
    "all diverged": (THREE, lambda run: "diverged"),
    "failed": (THREE, lambda run: "failed" if number_of(run) % 3 == 0 else ...),
    "alike": (THREE, lambda run: 2.0),
    "nothing lost": (THREE, lambda run: 0.0 if "no_q" in run.arm else ...),
    "tiny": (THREE, lambda run: 1e-12 * number_of(run)),
    "huge": (THREE, lambda run: 1e16 * number_of(run)),
    "one seed": (("variant=standard,no_q,shared_qk", "seed=3"), lambda run: ...),
    "one run": (ALONE, lambda run: ...),
    "no baseline": (("variant=no_q,no_k", "seed=0,1", "sweep.baseline=null"), lambda run: ...),
    "tuned": (TUNED, lambda run: ...),
    "tuning": (TUNED, lambda run: ... if run.tuning else None),
    "tuned, diverged": (TUNED, lambda run: "diverged" if run.changes["optim.lr"] > 3e-3 else ...),
    "rates": (RATES, lambda run: ...),
    "two of a variant": (TWO_STARTS, lambda run: ...),
    "lengths": (("variant=standard,no_q", "seed=0,1", "train.steps=12,24"), lambda run: ...),
}


@pytest.fixture(scope="module")
def section_named(make_world, loss_of, with_curves, section_of, section):
    """Return the section of one of WORLDS, each made once."""
    known = {"finished": section}

    def make(name):
        if name not in known:
            words, end = WORLDS[name]
            world = make_world(*words).finish(
                lambda run: loss_of(run) if (own := end(run)) is ... else own
            )
            known[name] = section_of(with_curves(world))
        return known[name]

    return make


def charts_by_name(section):
    return {chart.name: chart for chart in make_charts(section)}


def within(value):
    """Every map of a spec."""
    if isinstance(value, dict):
        yield value
        for own in value.values():
            yield from within(own)
    elif isinstance(value, list):
        for own in value:
            yield from within(own)


def numbers(value):
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list):
        return [number for own in value for number in numbers(own)]
    return [value] if isinstance(value, float | int) and not isinstance(value, bool) else []


# Whatever the runs came to


@pytest.mark.parametrize("name", ["finished", *WORLDS])
def test_charts_are_valid_for_any_losses(section_named, name):
    section = section_named(name)
    for chart in make_charts(section):
        assert_text_matches(chart, section)
        assert {*chart.variants} <= {*section.styles}
        for panel in chart.panels:
            assert vl_convert.vegalite_to_vega(panel.spec)["marks"]
            json.dumps(panel.spec, allow_nan=False)
            assert all(map(math.isfinite, numbers(panel.spec)))
            assert_drawable(panel.spec)
            assert_looks(panel.spec, section.styles)
            assert_plain_data(panel.spec)


def assert_text_matches(chart, section):
    """Check that the chart states its number of runs and the kind of its intervals."""
    assert re.search(r"n = \d+( to \d+)?\b", chart.caption), chart.name
    assert "n = 0" not in chart.caption or not any(e.losses for e in section.study.entries)
    assert re.search("95 %", chart.caption), chart.name
    assert "interval" in chart.caption, chart.name


def assert_drawable(spec):
    """Check that everything on a logarithmic axis is above zero."""
    for layer in spec["layer"]:
        rows = layer.get("data", spec["data"])["values"]
        for channel in layer["encoding"].values():
            if not isinstance(channel, dict) or channel.get("scale", {}).get("type") != "log":
                continue
            values = [row.get(channel["field"]) for row in rows]
            assert all(value > 0 for value in values if value is not None), channel["field"]


def assert_looks(spec, looks):
    """Check that a variant has the same color, dash and shape in every chart."""
    parts = {"color": "color", "strokeDash": "dash", "shape": "shape"}
    for found in within(spec):
        for channel, part in parts.items():
            own = found.get(channel)
            if isinstance(own, dict) and own.get("field") == "variant":
                scale = dict(zip(own["scale"]["domain"], own["scale"]["range"], strict=True))
                assert scale == {name: getattr(look, part) for name, look in looks.items()}


def assert_plain_data(spec):
    """No name is part of an expression, and nothing is looked up."""
    for found in within(spec):
        assert not {"expr", "calculate", "signal", "href", "url", "params"} & {*found}
        if isinstance(test := found.get("test"), str):
            assert test == "datum.best"


def test_band_near_zero_uses_a_linear_axis(cached_world, section_of):
    world = cached_world("variant=standard", "seed=0,1")
    losses = {0: 0.46065, 1: 0.53935}  # 0.5 ± 0.5
    world.finish(lambda run: losses[run.changes["seed"]])
    for run in world.runs():
        world.curve(run, dict.fromkeys(range(1, 7), losses[run.changes["seed"]]))
    (panel,) = charts_by_name(section_of(world))["losses"].panels
    assert {row["low"] for row in panel.spec["data"]["values"]} == {1.0844e-05}
    logarithmic = {"scale": {"type": "log", "nice": False}}
    assert not [
        own
        for own in within(panel.spec)
        if own.get("field") == "loss" and {"scale": own.get("scale")} == logarithmic
    ]
    assert_drawable(panel.spec)


def test_charts_with_data_are_made(section_named):
    expected = {
        "finished": ["gaps", "losses", "gap-curves", "heat", "costs"],
        "not begun": [],
        "one run": ["losses"],
        "one seed": ["gaps", "losses", "gap-curves", "heat"],
        "tuned": ["gaps", "losses", "gap-curves", "rates"],
    }
    for name, found in expected.items():
        own = [*charts_by_name(section_named(name))]
        assert [one for one in own if one != "heat" or name != "one seed"] == [
            one for one in found if one != "heat" or name != "one seed"
        ], name


# The forest


def gap_rows(section):
    (panel,) = charts_by_name(section)["gaps"].panels
    return panel.spec["data"]["values"]


@pytest.mark.parametrize("name", ["finished", "running", "diverged", "one seed", "rates"])
def test_forest_plot_shows_the_gaps_of_the_analysis(section_named, name):
    section = section_named(name)
    found = [one for one in section.summary.gaps if one.n]
    rows = gap_rows(section)
    assert len(rows) == len(found) > 0
    for row, one in zip(rows, found, strict=True):
        assert row["arm"].startswith(f"{section.labels[one.arm]}  (n = {one.n}")
        assert row["gap"] == one.mean
        assert (row["low"], row["high"]) == (one.interval or (None, None))
        assert row["n"] == one.n
        assert row["baseline"] == one.baseline
    (panel,) = charts_by_name(section)["gaps"].panels
    ticks = [
        layer["data"]["values"] for layer in panel.spec["layer"] if layer["mark"]["type"] == "tick"
    ]
    assert sorted(tick["gap"] for tick in ticks[0]) == sorted(
        pair.gap for one in found for pair in one.pairs
    )


def test_forest_tooltip_shows_mean_and_interval(section):
    for row, one in zip(gap_rows(section), section.summary.gaps, strict=True):
        assert row["estimate"] == format_gap(one.mean, one.interval)


def test_diverged_runs_are_counted_in_the_label(section_named):
    for row in gap_rows(section_named("diverged")):
        assert "2 diverged" in row["arm"] + row["estimate"]
        assert "∞" in row["estimate"]


def edges(chart):
    """Return where bars without an end are cut off."""
    layers = [layer for panel in chart.panels for layer in panel.spec["layer"]]
    return {
        layer["transform"][0]["filter"]["field"]: layer["encoding"]["x2"]["value"]
        for layer in layers
        if "value" in layer["encoding"].get("x2", {})
    }


def test_unbounded_side_is_drawn_to_the_edge(section_named, claimed):
    forest = charts_by_name(section_named("diverged"))["gaps"]
    assert edges(forest) == {"open_below": 0, "open_above": "width"}
    assert "the interval is unbounded" in forest.caption
    assert edges(charts_by_name(section_named("finished"))["gaps"]) == {}
    claim = claimed(0.0, end=lambda number: "diverged" if number == 1 else None)
    parts = charts_by_name(claim)["parts"]
    assert edges(parts) == {"open_above": "width"}
    assert "the interval is unbounded" in parts.caption
    assert "∞" in charts_by_name(section_named("diverged"))["heat"].caption


def test_fully_diverged_arm_is_shown(section_named):
    found = charts_by_name(section_named("all of an arm diverged"))
    (panel,) = found["gaps"].panels
    (said,) = [layer for layer in panel.spec["layer"] if layer["mark"].get("text")]
    (row,) = said["data"]["values"]
    assert row["variant"] == "no_q"
    assert row["arm"] in panel.spec["layer"][-1]["encoding"]["y"]["scale"]["domain"]
    assert "6 diverged" in row["arm"]
    (cell,) = [
        row
        for row in heat_rows(section_named("all of an arm diverged"))
        if row["variant"] == "no_q"
    ]
    assert cell["text"] == "diverged"


def test_single_pair_has_no_bar_and_a_note(section_named):
    section = section_named("one seed")
    assert all(row["low"] is None for row in gap_rows(section))
    assert "No bar" in charts_by_name(section)["gaps"].caption


def layers_of(section, mark):
    (panel,) = charts_by_name(section)["gaps"].panels
    return [layer for layer in panel.spec["layer"] if layer["mark"]["type"] == mark]


def test_labels_leave_out_what_all_arms_share(section, section_named):
    assert section.labels["no_q-d16-h2"] == "no_q-d16"
    assert section_named("diverged").labels["shared_qk-d16-h2"] == "shared_qk"
    assert {*section_named("rates").labels.values()} == {
        f"{variant} lr {lr}"
        for variant in ("standard", "no_q")
        for lr in ("0.0005", "0.001", "0.002")
    }


def test_margin_is_a_band(make_world, loss_of, section_of):
    section = section_of(make_world(*SIZES).finish(loss_of), 0.02)
    (band,) = layers_of(section, "rect")
    assert band["data"]["values"] == [{"from": -0.02, "to": 0.02}]
    assert "Shaded: the margin, ± 0.02 nats" in charts_by_name(section)["gaps"].caption


def test_rows_are_grouped_by_size(section):
    names = layers_of(section, "point")[-1]["encoding"]["y"]["scale"]["domain"]
    assert [name.partition("  ")[0] for name in names] == [
        *("no_q-d16", "shared_qk-d16", " ", "no_q-d32", "shared_qk-d32")
    ]


@pytest.mark.parametrize(("lead", "is_drawn"), [(-9.9, True), (0.0, False)])
def test_floor_is_drawn_or_written_at_the_edge(make_world, loss_of, section_of, lead, is_drawn):
    """FLOOR_LEAD of the made results is 10 nats, which would compress the axis."""
    world = make_world("variant=standard,no_q", "seed=range(3)", "sweep.floor=true")
    section = section_of(
        world.finish(lambda run: loss_of(run) + lead * run.arm.startswith("uniform"))
    )
    rows = [
        row
        for mark in ("point", "text")
        for layer in layers_of(section, mark)
        for row in layer.get("data", {"values": []})["values"]
    ]
    (floor,) = rows
    assert floor["arm"] == "uniform, floor  (n = 3)"
    assert bool(layers_of(section, "text")) != is_drawn
    assert "Floor: attention that averages all tokens." in charts_by_name(section)["gaps"].caption


def test_baseline_without_pairs_has_no_floor(make_world, loss_of, section_of):
    """A sweep may be reported while the runs of one size have not begun."""
    words = ("variant=standard,no_q", "model.d_model=16,32", "seed=range(3)", "sweep.floor=true")
    world = make_world(*words).finish(
        lambda run: None if run.arm.startswith("no_q-d32") else loss_of(run)
    )
    names = layers_of(section_of(world), "point")[-1]["encoding"]["y"]["scale"]["domain"]
    assert [name.partition("  ")[0] for name in names] == ["no_q-d16", "uniform-d16, floor"]


def test_interval_of_a_floor_is_unbounded_where_its_baseline_diverged(
    make_world, loss_of, section_of
):
    world = make_world("variant=standard,no_q", "seed=range(4)", "sweep.floor=true")

    def end(run):
        if run.arm.startswith("standard") and run.changes["seed"] == 0:
            return "diverged"
        return loss_of(run) - 9.9 * run.arm.startswith("uniform")

    pale = {
        (row["arm"], layer["transform"][0]["filter"]["field"])
        for layer in layers_of(section_of(world.finish(end)), "rule")
        if layer["mark"].get("opacity") == 0.3
        for row in layer.get("data", {"values": []})["values"]
        if row[layer["transform"][0]["filter"]["field"]]
    }
    assert pale == {("uniform, floor  (n = 3)", "open_below")}


# The heat


def heat_rows(section):
    return [
        row
        for panel in charts_by_name(section)["heat"].panels
        for row in panel.spec["data"]["values"]
    ]


def test_heat_map_has_a_cell_per_variant_and_size(section):
    rows = heat_rows(section)
    cells = [(row["variant"], row["size"]) for row in rows]
    assert len({*cells}) == len(cells)
    assert {*cells} == {
        (variant, size) for variant in ("no_q", "shared_qk") for size in ("d16 h2", "d32 h2")
    }
    gaps = {one.arm: one.mean for one in section.summary.gaps}
    assert {row["arm"]: row["gap"] for row in rows} == gaps


@pytest.mark.parametrize("name", ["finished", "running", "alike", "failed", "huge", "diverged"])
def test_heat_map_puts_undecided_gaps_in_parentheses(section_named, name):
    section = section_named(name)
    intervals = {one.arm: one.interval for one in section.summary.gaps}
    found = {gap.arm for gap in section.summary.gaps if gap.verdict in ("better", "worse")}
    rows = heat_rows(section) if "heat" in charts_by_name(section) else []
    assert rows or name != "finished"
    for row in rows:
        low, high = intervals[row["arm"]]
        assert (row["text"][0] + row["text"][-1] == "()") == (row["arm"] not in found), row["arm"]
        if name == "diverged":
            assert row["half"] == "(−∞, ∞)"
            continue
        half = float(row["half"].removeprefix("± "))
        assert half == pytest.approx((high - low) / 2, rel=0.06, abs=1e-6)


def test_heat_map_sizes_increase(section):
    (panel,) = charts_by_name(section)["heat"].panels
    assert panel.spec["encoding"]["x"]["sort"] == ["d16 h2", "d32 h2"]


def test_heat_map_shades_go_from_better_to_worse(section):
    (panel,) = charts_by_name(section)["heat"].panels
    (scale,) = [
        layer["encoding"]["color"]["scale"]
        for layer in panel.spec["layer"]
        if "color" in layer.get("encoding", {})
    ]
    shades = scale["range"]
    assert [shade[6:9] for shade in shades] == ["low"] * 3 + ["mid"] + ["hig"] * 3
    assert scale["domain"] == sorted(scale["domain"])
    assert len(shades) == len(scale["domain"]) + 1


def test_labels_of_the_shades_stand_apart(section):
    (panel,) = charts_by_name(section)["heat"].panels
    legend = panel.spec["layer"][0]["encoding"]["color"]["legend"]
    assert (legend["labelOverlap"], legend["labelSeparation"]) == ("greedy", 8)


def heat_scales(section):
    return [
        layer["encoding"]["color"]["scale"]["domain"]
        for panel in charts_by_name(section)["heat"].panels
        for layer in panel.spec["layer"]
        if "color" in layer.get("encoding", {})
    ]


def test_heat_map_has_one_scale_for_all_panels(make_world, loss_of, section_of):
    world = make_world(*SIZES, "control=none,params").finish(loss_of)
    scales = heat_scales(section_of(world))
    assert len(scales) > 1
    assert all(scale == scales[0] for scale in scales)
    largest = max(abs(gap.mean) for gap in section_of(world).summary.gaps)
    assert scales[0][-1] == pytest.approx(0.6 * largest, rel=0.01)


def test_gaps_below_the_margin_are_pale(make_world, section_of):
    world = make_world(*SIZES).finish(lambda run: 2 - 5e-6 * run.arm.startswith("no_q"))
    (scale,) = heat_scales(section_of(world, 0.01))
    assert scale[-1] == pytest.approx(0.006)


def test_gaps_without_a_difference_are_gray(section):
    (panel,) = charts_by_name(section)["heat"].panels
    color = panel.spec["layer"][0]["encoding"]["color"]
    assert color["condition"] == {
        "test": {"field": "decided", "equal": False},
        "value": "var(--none)",
    }
    assert color["legend"]["title"] == "gap, nats"
    for row in heat_rows(section):
        assert row["decided"] != row["text"].startswith("(")


# Curves


@pytest.fixture(scope="module")
def long(make_world, loss_of, with_curves, section_of):
    """Two arms with three hundred readings a run."""
    world = make_world("variant=standard,no_q", "seed=range(3)").finish(loss_of)
    return section_of(with_curves(world, tuple(range(1, 301))))


def by(rows, key):
    found = defaultdict(list)
    for row in rows:
        found[row[key]].append(row)
    return found


@pytest.mark.parametrize("name", ["losses", "gap-curves"])
def test_thinned_curve_keeps_its_ends(long, name):
    (panel,) = charts_by_name(long)[name].panels
    arms = by(panel.spec["data"]["values"], "arm")
    assert {*arms} == {"no_q-d16-h2"} | ({"standard-d16-h2"} if name == "losses" else set())
    for rows in arms.values():
        tokens = [row["tokens"] for row in rows]
        assert tokens == sorted({*tokens})
        assert READINGS / 2 < len(tokens) <= READINGS
        assert (tokens[0], tokens[-1]) == (32, 300 * 32)
        for row in rows:
            assert row["low"] <= row["loss"] <= row["high"]
            assert row["n"] == 3


def thin(chart):
    """Return the marks of single runs."""
    return [
        row
        for panel in chart.panels
        for layer in panel.spec["layer"]
        if layer["encoding"].get("detail") == {"field": "run"}
        for row in layer["data"]["values"]
    ]


def test_each_run_is_a_thin_line(long, section_named):
    lines = by(thin(charts_by_name(long)["losses"]), "run")
    assert len(lines) == 6
    for rows in lines.values():
        assert len(rows) <= READINGS
        assert (rows[0]["tokens"], rows[-1]["tokens"]) == (32, 300 * 32)
    assert len(by(thin(charts_by_name(section_named("diverged"))["losses"]), "run")) == 18


def test_mean_curve_uses_completed_runs(section_named):
    section = section_named("diverged")
    (panel,) = charts_by_name(section)["losses"].panels
    for name, rows in by(panel.spec["data"]["values"], "arm").items():
        done = section.entries[name].with_status("done")
        for row in rows:
            losses = [record.loss_curves["val/loss"][row["tokens"]] for record in done]
            assert row["n"] == len(losses) == 5
            assert row["loss"] == pytest.approx(math.fsum(losses) / 5, rel=0.05)


def test_arms_of_one_variant_are_told_apart_by_labels(section):
    """Settings that only a few arms of a panel have are written at the end of their lines."""
    rows = [
        {"arm": f"{variant}-d16-h2{own}", "variant": variant, "tokens": tokens, "loss": 2.0}
        for variant, own in (("standard", ""), ("no_q", ""), ("no_q", "-params"))
        for tokens in (10, 20)
    ]
    *_, texts = mean_layers(section, [row | {"low": None} for row in rows], {"field": "loss"})
    assert texts["mark"]["type"] == "text"
    (label,) = texts["data"]["values"]
    assert (label["arm"], label["tokens"]) == ("no_q-d16-h2-params", 20)
    assert label["label"] == "params"


@pytest.mark.parametrize(
    ("data", "chance", "loss"),
    [
        ("recall", 1 / 32, math.log(32)),
        ("induction", 1 / 99, math.log(99)),  # which is not 1 / (1 / 99) to the last bit
        ("directed", 2 / 3, 0.63651),
    ],
)
def test_loss_chart_of_a_task_has_a_line_at_chance(
    make_world, section_of, loss_of, data, chance, loss
):
    world = make_world("variant=standard,no_q", "seed=0,1", f"data={data}", "model.context=64")
    world.finish(
        lambda run: {"loss": dict.fromkeys(("train", "val", "test"), 2.0), "chance": chance}
    )
    for run in world.runs():
        world.curve(run, dict.fromkeys(range(1, 7), 2.0))
    chart = charts_by_name(section_of(world))["losses"]
    rule, text = chart.panels[0].spec["layer"][:2]
    assert rule["mark"]["type"] == "rule"
    assert rule["data"]["values"] == [{"loss": pytest.approx(loss, abs=1e-4)}]
    assert text["mark"]["text"].startswith("chance, ")
    assert "guessing" in chart.caption


@pytest.mark.parametrize("chance", [None, 0.3407, 0.25001, 1.0])
def test_loss_chart_has_no_line_where_the_loss_of_guessing_is_unknown(
    make_world, section_of, loss_of, chance
):
    """The share of the most common of several tags does not tell the entropy of all."""
    world = make_world("variant=standard,no_q", "seed=0,1")
    world.finish(
        lambda run: {"loss": dict.fromkeys(("train", "val", "test"), 2.0), "chance": chance}
    )
    for run in world.runs():
        world.curve(run, dict.fromkeys(range(1, 7), 2.0))
    chart = charts_by_name(section_of(world))["losses"]
    assert "chance" not in json.dumps(chart.panels[0].spec)
    assert "guessing" not in chart.caption


def test_loss_chart_has_a_line_at_step_0(make_world, section_of, loss_of):
    world = make_world("variant=standard,no_q", "seed=0,1").finish(loss_of)
    for run in world.runs():
        start = {0: 4.0 + run.changes["seed"]}
        world.curve(run, start | dict.fromkeys(range(1, 7), 2.0))
    chart = charts_by_name(section_of(world))["losses"]
    rule, text = chart.panels[0].spec["layer"][:2]
    assert rule["data"]["values"] == [{"loss": 4.5}]
    assert text["mark"]["text"] == "step 0, 4.500"
    assert "before training" in chart.caption
    assert all(row["tokens"] > 0 for row in thin(chart))


def test_training_loss_has_no_line_at_step_0(make_world, section_of, loss_of):
    world = make_world("variant=standard,no_q", "seed=0,1").finish(loss_of)
    for run in world.runs():
        world.curve(run, {0: 4.0, 1: 2.0})
        path = world.run_folder(run) / "metrics.jsonl"
        rows = [{"step": s, "tokens": 32 * s, "train/loss": 2.0} for s in range(1, 7)]
        path.write_text(path.read_text() + "".join(json.dumps(row) + "\n" for row in rows))
    chart = charts_by_name(section_of(world))["losses"]
    assert chart.title == "Training loss"
    assert "before training" not in chart.caption


def test_logarithmic_axes_are_marked(section):
    for chart in make_charts(section):
        for found in within([panel.spec for panel in chart.panels]):
            if isinstance(found.get("scale"), dict) and isinstance(found.get("title"), str):
                assert found["title"].endswith(" (log)") == (found["scale"].get("type") == "log")


def test_curves_of_different_variants_have_no_labels(section):
    for panel in charts_by_name(section)["losses"].panels:
        assert "text" not in {layer["mark"]["type"] for layer in panel.spec["layer"]}


def test_floor_is_in_the_panel_of_its_baseline(make_world, section_of, loss_of):
    world = make_world("variant=standard,no_q", "sweep.floor=true").finish(loss_of)
    (group,) = section_of(world).groups.values()
    assert [entry.arm.variant for entry in group] == ["standard", "no_q", "uniform"]


def test_each_site_has_its_floor(make_world, section_of, loss_of):
    translator = ("model=nano_translator", "data=reverse", "model.context=8", "sweep.floor=true")
    sites = ("variant=standard,no_q", "variant.sites=encoder,cross", "seed=range(3)")
    section = section_of(make_world(*translator, *sites).finish(loss_of))
    (group,) = section.groups.values()
    assert [entry.arm.variant for entry in group[-2:]] == ["uniform_encoder", "uniform_cross"]
    names = layers_of(section, "point")[-1]["encoding"]["y"]["scale"]["domain"]
    assert [name.partition("  ")[0] for name in names] == [
        *("no_q_encoder", "no_q_cross", "uniform_encoder, floor", "uniform_cross, floor")
    ]


def test_gap_curve_is_that_of_the_analysis(section):
    rows = [
        row
        for panel in charts_by_name(section)["gap-curves"].panels
        for row in panel.spec["data"]["values"]
    ]
    gaps = [one for family in section.families for one in family.gaps]
    found = {one.arm.name: describe_curve(one).readings for one in gaps}
    shown = by(rows, "arm")
    assert {*shown} == {*found}
    for name, readings in found.items():
        for row, reading in zip(shown[name], readings, strict=True):
            low, high = reading.band
            half = (high - low) / 2
            assert row["tokens"] == reading.tokens
            for key, value in (("loss", reading.mean), ("low", low), ("high", high)):
                assert row[key] == pytest.approx(value, abs=half / 10)


@pytest.mark.parametrize(("most", "each"), [(36, True), (35, False)])
def test_only_means_are_drawn_for_many_runs(section, monkeypatch, most, each):
    assert MAX_RUNS == 200
    monkeypatch.setattr("qkablate.report.charts.curves.MAX_RUNS", most)
    chart = charts_by_name(section)["losses"]
    assert len(by(thin(chart), "run")) == (36 if each else 0)
    assert ("Thin" in chart.caption) == each
    for panel in chart.panels:
        assert len(by(panel.spec["data"]["values"], "arm")) == 3


def test_each_size_has_its_panel(section):
    for name in ("losses", "gap-curves"):
        assert [panel.title for panel in charts_by_name(section)[name].panels] == [
            "d16-h2",
            "d32-h2",
        ]


# Costs and learning rates


def test_cost_chart_shows_the_costs_of_the_arms(section):
    arms = {entry.name: entry.arm for entry in section.study.entries}
    panels = {
        panel.title: panel.spec["data"]["values"]
        for panel in charts_by_name(section)["costs"].panels
    }
    assert len(panels) == 3
    of = {
        "parameters": lambda a: a.params,
        "FLOPs": lambda a: a.train_flops,
        "KV": lambda a: 2 * a.kv_cache_numbers,
    }
    for title, rows in panels.items():
        (cost,) = [own for word, own in of.items() if word in title]
        assert {row["arm"]: row["cost"] for row in rows} == {
            name: cost(arm) for name, arm in arms.items()
        }
        for row in rows:
            assert row["loss"] == section.entries[row["arm"]].sample.mean


def test_bars_of_losses_end_at_zero(make_world, section_of):
    world = make_world("variant=standard,no_q", "model.d_model=16,32", "seed=range(3)")
    section = section_of(world.finish(lambda run: 0.1 * run.changes["seed"]))
    for panel in charts_by_name(section)["costs"].panels:
        assert {row["low"] for row in panel.spec["data"]["values"]} == {0}


def test_arms_of_equal_cost_stand_side_by_side(section):
    for panel in charts_by_name(section)["costs"].panels:
        rows = panel.spec["data"]["values"]
        assert len({row["at"] for row in rows}) == len(rows) > len({row["cost"] for row in rows})
        for row in rows:
            assert row["at"] == pytest.approx(row["cost"], rel=0.05)


def test_cost_chart_needs_several_sizes(section_named):
    assert "costs" not in charts_by_name(section_named("diverged"))


def test_cost_chart_shows_the_longest_training_only(section_named):
    """But for FLOPs, of which more tokens cost more."""
    chart = charts_by_name(section_named("lengths"))["costs"]
    for panel in chart.panels:
        lengths = {row["arm"].rpartition("-")[2] for row in panel.spec["data"]["values"]}
        assert len(lengths) == (2 if "FLOPs" in panel.title else 1), panel.title
    assert "the others only the longest" in chart.caption


def test_best_rate_is_large_and_diverged_rates_are_crosses(section_named):
    section = section_named("tuned, diverged")
    chart = charts_by_name(section)["rates"]
    (panel,) = chart.panels
    for name, rows in by(panel.spec["data"]["values"], "arm").items():
        (best,) = [row for row in rows if row["best"]]
        assert best["loss"] == min(row["loss"] for row in rows)
        assert best["lr"] == 1e-3, name
    (crosses,) = [
        layer["data"]["values"]
        for layer in panel.spec["layer"]
        if layer["mark"].get("shape") == "cross"
    ]
    assert {(row["arm"], row["lr"]) for row in crosses} == {
        ("standard-d16-h2", 4e-3),
        ("no_q-d16-h2", 4e-3),
    }
    assert len(crosses) == 6  # both at three rates of their circuits
    assert "Crosses: 6 rates at which a run diverged" in chart.caption


# Claims


@pytest.mark.parametrize(
    ("kind", "edges"),
    [
        ("noninferior", [0.01]),
        ("worse", [0.01]),
        ("better", [-0.01]),
        ("equivalent", [-0.01, 0.01]),
    ],
)
def test_claim_chart_shows_margins(claimed, kind, edges):
    section = claimed(0.004, kind=kind)
    first = make_charts(section)[0]
    assert first.name == "parts"
    assert "90 % interval" in first.caption
    assert "n = 4" in first.caption
    (panel,) = first.panels
    (row,) = panel.spec["data"]["values"]
    (one,) = section.judgement.parts
    assert row["gap"] == one.part.sample.mean
    assert (row["low"], row["high"]) == one.part.sample.interval(0.9)
    assert row["verdict"] == section.judgement.word
    (margins,) = [
        layer["data"]["values"] for layer in panel.spec["layer"] if layer["mark"]["type"] == "tick"
    ]
    assert [margin["at"] for margin in margins] == edges
    assert vl_convert.vegalite_to_vega(panel.spec)


def test_claim_chart_needs_a_verdict(claimed):
    assert "parts" not in charts_by_name(claimed(0.0, ended=5))


# Files


@pytest.mark.parametrize("name", ["finished", "tuned, diverged"])
def test_chart_is_a_standalone_svg(section_named, name):
    section = section_named(name)
    for chart in make_charts(section):
        text = render_chart(chart, section.title, "svg").decode()
        root = ElementTree.fromstring(text)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert "var(" not in text
        assert "NaN" not in text
        assert not [own for own in root.iter() if own.tag.endswith(("script", "image"))]
        words = " ".join("".join(own.itertext()) for own in root.iter() if "text" in own.tag)
        assert chart.title in words
        assert section.title in words
        assert re.search(r"n = \d", words)
        for variant in chart.variants:
            assert variant in words


def test_hostile_title_is_escaped_in_svg(section):
    title = "</text><script>alert(1)</script> var(--c1) \x1b[31m ${x} \u202e"
    own = dataclasses.replace(section, title=title)
    root = ElementTree.fromstring(
        render_chart(charts_by_name(own)["gaps"], own.title, "svg").decode()
    )
    assert not [found for found in root.iter() if found.tag.endswith("script")]
    words = " ".join("".join(found.itertext()) for found in root.iter() if "text" in found.tag)
    assert "<script>alert(1)</script>" in words
    assert "\x1b" not in words
    assert "\u202e" not in words


def test_chart_is_a_standalone_png(section):
    content = render_chart(charts_by_name(section)["gaps"], section.title, "png")
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert content.rstrip(b"\0").endswith(b"IEND\xaeB`\x82")


def test_chart_has_the_colors_of_its_variants(section):
    text = render_chart(charts_by_name(section)["gaps"], section.title, "svg").decode().lower()
    for variant in ("no_q", "shared_qk"):
        assert use_light_colors(section.styles[variant].color) in text


def test_bands_of_losses_end_at_zero(section):
    entry = section.study.entries[0]
    curve = Curve([8], [Sample((0.1, 2.0))], Sample(()))
    (row,) = mean_rows(section, curve, entry)
    assert curve.samples[0].interval()[0] < 0 == row["low"]
    assert row["high"] > row["loss"]


def test_arm_with_the_variant_of_its_baseline_looks_different(section_named):
    """In every chart, as the baseline keeps the variant's style."""
    section = section_named("two of a variant")
    styles = section.styles
    assert {*styles} >= {"standard", "standard init=symmetric"}
    assert styles["standard"].color != styles["standard init=symmetric"].color
    charts = charts_by_name(section)
    assert {"standard", "standard init=symmetric"} <= {*charts["losses"].variants}
    assert charts["gaps"].variants[0] == "standard init=symmetric"


@pytest.mark.parametrize(("name", "is_line"), [("losses", True), ("gaps", False)])
def test_legend_shows_the_dash_of_a_line_and_the_shape_of_a_point(section, name, is_line):
    (chart,) = (chart for chart in make_charts(section) if chart.name == name)
    assert ('"symbolType": "stroke"' in json.dumps(combine_panels(chart, section.title))) == is_line


def test_panels_of_one_size_have_the_names_of_their_arms(section_named):
    def titles(name):
        return [panel.title for panel in charts_by_name(section_named(name))["losses"].panels]

    assert len({*titles("no baseline")}) == 2
    assert all(title.startswith(("no_q-", "no_k-")) for title in titles("no baseline"))
    assert not any("standard" in title for title in titles("lengths"))  # the size tells them apart
