"""False verdicts of the measures of claims, in studies with hidden truths."""

import math

import pytest

from qkablate.analysis.claims.measures import MEASURES
from tests.analysis.measure_truths import ROWS, measure

LIMIT = 0.065
STUDIES = 300


def test_every_measure_has_a_row():
    assert {row.measure for row in ROWS} == {*MEASURES, "than"} - {"gap", "spread"}  # of their own


def sizes_of(row):
    """Return small studies and, where some runs fail or verdicts rest on curves, larger ones."""
    return [6, 16] if "fails" in row.world or row.measure == "course" else [6]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("row", "n"),
    [
        pytest.param(row, n, id=f"{row.measure} {row.world}-{n}")
        for row in ROWS
        for n in sizes_of(row)
    ],
)
def test_false_verdicts_are_rare(row, n):
    found = measure(row, n, STUDIES)
    chance = 3.5 * math.sqrt(LIMIT * (1 - LIMIT) / STUDIES)  # the largest of many rates
    rates = [found.guarded] if row.guarded else found.false.values()
    assert max(rates) <= LIMIT + chance
