"""Charts of scaling laws show the points, the frontier and the extrapolated gap."""

import random

import pytest

from qkablate.report.charts.scaling import scaling_chart
from qkablate.report.render import render_chart

GRID = ("variant=standard,no_q", "seed=range(3)", "train.steps=12,24,48", "model.d_model=16,32,64")


@pytest.fixture(scope="module")
def grid_section(make_world, section_of):
    world = make_world(*GRID)

    def loss(run):
        arm = world.manifest.arms[run.arm]
        noise = random.Random(f"{run.arm} {run.changes}").gauss(0, 0.002)
        worse = 0.02 if arm.variant == "no_q" else 0.0
        return 1.2 + worse + 100 * arm.params**-0.4 + 30 * arm.tokens**-0.35 + noise

    return section_of(world.finish(loss))


def rows_of(panel, mark):
    layers = [layer for layer in panel.spec["layer"] if layer["mark"]["type"] == mark]
    return [row for layer in layers for row in layer.get("data", panel.spec["data"])["values"]]


def test_frontier_lies_below_all_points_of_its_compute(grid_section):
    frontier, equal, horizons = scaling_chart(grid_section).panels
    points, lines = rows_of(frontier, "point"), rows_of(frontier, "line")
    assert len(points) == 2 * 3 * 3
    for point in points:
        own = [row for row in lines if row["variant"] == point["variant"]]
        cheaper = [row["loss"] for row in own if row["flops"] <= point["flops"]]
        assert not cheaper or min(cheaper) < point["loss"] + 0.05
    assert len(lines) > 20
    assert {row["variant"] for row in rows_of(equal, "line")} == {"standard", "no_q"}
    assert len(rows_of(horizons, "point")) == 3


def test_extrapolated_gap_is_that_of_the_summary(grid_section):
    *_, horizons = scaling_chart(grid_section).panels
    (summary,) = grid_section.summary.scaling
    (level,) = [row for row in rows_of(horizons, "rule") if "variant" in row and "low" not in row]
    assert level["gap"] == summary.asymptote.mean
    assert summary.asymptote.mean == pytest.approx(0.02 + 0.1, abs=0.15)


def test_chart_renders(grid_section):
    svg = render_chart(scaling_chart(grid_section), "grid", "svg").decode()
    for title in ("loss by compute", "equal loss", "gap by length"):
        assert f"no_q-h2: {title}" in svg


def test_studies_without_a_grid_have_no_chart(section):
    assert scaling_chart(section) is None
