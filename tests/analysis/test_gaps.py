"""Gaps: pairs by seed, and what is missing of them."""

import math

import pytest

from qkablate.analysis.gaps import families


def test_gaps_are_of_pairs(world):
    loss = {"standard": 2.0, "no_q": 2.3}
    made = world("variant=standard,no_q", "seed=range(6)").finish(
        lambda run: loss[run.arm.split("-")[0]] + run.changes["seed"] / 7
    )
    study = made.study()
    assert study.is_complete
    (family,) = families(study)
    (found,) = family.gaps
    assert family.baseline.name == "standard-d16-h2"
    assert found.sample.n == 6
    assert found.sample.mean == pytest.approx(0.3)
    assert found.correlation == pytest.approx(1.0)
    assert math.isclose(sum(found.pairs.values()), 1.8)
