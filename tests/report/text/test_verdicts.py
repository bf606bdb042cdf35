"""The table of verdicts: a short decision in the first block, its conditions below."""

import dataclasses

import pytest

from qkablate.report.text.tables import make_tables
from qkablate.report.text.verdicts import make_verdict_tables
from qkablate.screen import Screen
from qkablate.table import format_table

THREE = ("variant=standard,no_q,shared_qk", "seed=range(6)")


@pytest.fixture
def summary(cached_world, loss_of, section_of):
    world = cached_world(*THREE).finish(lambda run: loss_of(run, {"no_q": 0.05}))
    return section_of(world).summary


def test_decision_is_short_and_its_conditions_are_notes(summary):
    (table,) = make_verdict_tables(summary)
    column = table.columns.index("decision")
    cells = {row[0].partition("-")[0]: row[column] for row in table.rows}
    expected = {"standard": "baseline", "no_q": "worse", "shared_qk": "no difference found"}
    assert cells == expected
    assert table.notes[:2] == [
        "worse at this rate (not tuned): no_q-d16-h2",
        "no difference found at this rate (not tuned): shared_qk-d16-h2",
    ]


def test_arms_without_a_baseline_have_a_table_of_their_own(summary):
    """Runs of a data set without a baseline are shown, too."""
    gaps = [gap for gap in summary.gaps if not gap.arm.startswith("no_q")]
    compared, alone = make_verdict_tables(dataclasses.replace(summary, gaps=gaps))
    assert {row[0].partition("-")[0] for row in compared.rows} == {"standard", "shared_qk"}
    assert [row[0].partition("-")[0] for row in alone.rows] == ["no_q"]
    assert alone.title.startswith("test loss of arms that are compared with none")


def test_no_perplexity_of_zero_has_a_minus_sign(cached_world, section_of):
    def loss(run):
        return 2.0 + run.changes["seed"] / 70 - 3e-6 * run.arm.startswith("no_q")

    table = make_tables(section_of(cached_world(*THREE).finish(loss)).summary)[1]
    column = table.columns.index("perplexity")
    assert {row[column] for row in table.rows} == {"+0.00 %"}


def test_decision_is_on_a_line_of_the_first_block(summary):
    (short,), gaps = make_verdict_tables(summary), make_tables(summary)[1]
    for table in (short, gaps):
        lines = format_table(table.columns, table.rows, screen=Screen(80))
        first = lines[: lines.index("") if "" in lines else None]
        assert any(line.startswith("shared_qk") and "no difference found" in line for line in first)


@pytest.mark.parametrize(("steps", "has_table"), [((12,), False), ((6, 12), True)])
def test_gap_while_training_needs_two_readings(
    cached_world, loss_of, section_of, with_curves, steps, has_table
):
    world = with_curves(cached_world(*THREE).finish(loss_of), steps)
    titles = [table.title for table in make_tables(section_of(world).summary)]
    assert ("validation gap while training" in titles) == has_table
