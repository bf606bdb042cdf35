"""False verdicts of the measures of claims, in studies with hidden truths."""

import math

import pytest

from qkablate.analysis.claims.measures import MEASURES
from tests.analysis.measure_truths import ROWS, measure

LIMIT = 0.065
STUDIES = 400


def test_every_measure_has_a_row():
    assert {row.measure for row in ROWS} == {*MEASURES, "than"} - {"gap", "spread"}  # of their own


@pytest.mark.slow
@pytest.mark.parametrize("n", [6, 16])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.measure} {row.world}")
def test_false_verdicts_are_rare(row, n):
    found = measure(row, n, STUDIES)
    chance = 3.5 * math.sqrt(LIMIT * (1 - LIMIT) / STUDIES)  # the largest of many rates
    rates = [found.guarded] if row.guarded else found.false.values()
    assert max(rates) <= LIMIT + chance
