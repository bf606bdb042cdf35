"""Tables of scaling laws: what the audit doubts about a gap, it doubts about the gain."""

from qkablate.report.section import Section
from qkablate.report.text.scaling import make_scaling_tables
from tests.analysis.scaling.test_compute_gain import GRID, SIZES, A, finish


def tables(world):
    summary = Section("sizes", "", world.study()).summary
    return make_scaling_tables(summary.scaling, summary.gaps)


def test_gains_and_doubts_stand_together(cached_world):
    worth, laws = tables(finish(cached_world(*GRID, SIZES), 0.002))
    (row,) = worth.rows
    assert row[:2] == ["no_q-h2", "standard-h2"]
    assert sum(cell.startswith("× ") for cell in row) == 3
    assert {law[0] for law in laws.rows} == {"no_q-h2", "standard-h2"}
    notes = "\n".join(worth.notes)
    assert "above 1 the arm saves" in notes
    assert "! no_q-h2: learning rate: neither was tuned" in notes


def test_refusals_stand_alone(cached_world):
    (worth,) = tables(finish(cached_world(*GRID, "model.d_model=16,32")))
    (note,) = worth.notes
    assert note.startswith("no_q-h2: no answer: 2 sizes × 4 lengths of training")


def test_budget_below_that_of_the_largest_run_is_named(cached_world):
    worth, _ = tables(finish(cached_world(*GRID, SIZES), size_term=A / 4))
    (note,) = [note for note in worth.notes if note.startswith("* no_q-h2: for ")]
    assert "FLOP, the largest budget tried for which the best sizes and lengths of both" in note
    assert "FLOP of its largest run the arm's best size or length for this compute is" in note
    compute = worth.columns.index("compute")
    assert worth.rows[0][compute].endswith("*")
