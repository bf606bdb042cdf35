"""References across claims: one trains weights by position, another is read by them."""

import dataclasses

import pytest

from qkablate.analysis.claims.judgement import judge_claim
from qkablate.analysis.claims.references import share_position_references
from qkablate.analysis.comparison.audit import NOTE, OK, WARNING
from tests.analysis.claims.test_judgement import GRID, claim, frozen

BOTH = {"variant": "standard,static_scores"}


def judge(world, own, lead):
    """Judge a claim whose arms are alike, but for a lead over weights by position."""
    made = frozen(world, own)

    def loss(run):
        near = lead * run.arm.startswith("static") + 0.001 * (run.changes["seed"] % 3)
        return 2.0 + near * (1 + 1e-3 * (run.changes["seed"] % 5))

    return judge_claim(own, made.finish(loss).study(), [])


def position_of(judgement):
    (check,) = (c for c in judgement.parts[0].checks if c.name == "position")
    return check


@pytest.mark.parametrize(("lead", "state"), [(0.5, OK), (0.02, WARNING), (-0.1, WARNING)])
def test_claim_in_the_same_setting_is_read_by_the_other(world, lead, state):
    keys = judge(world, claim(4), lead)
    assert position_of(keys).state == NOTE
    table = dataclasses.replace(claim(4, BOTH, within={"arm": "static_scores"}), name="table")
    shared, itself = share_position_references([keys, judge(world, table, lead)])
    check = position_of(shared)
    assert check.state == state
    assert "in the claim table" in check.message
    assert ("where position is enough" in shared.scope) == (state == WARNING)
    assert position_of(itself).state == OK
    assert dataclasses.replace(shared, parts=keys.parts) == keys


@pytest.mark.parametrize(
    "other", [{"model.heads": "1"}, {"train.steps": "24"}, {"data.test_tokens": "4096"}]
)
def test_another_setting_says_nothing(world, other):
    keys = judge(world, claim(4), 0.0)
    table = judge(world, claim(4, BOTH | other, within={"arm": "static_scores"}), 0.0)
    shared, _ = share_position_references([keys, table])
    assert position_of(shared) == position_of(keys)


def test_rates_and_seeds_are_no_setting(world):
    keys = judge(world, claim(4, GRID | {"optim.lr": "1e-3"}), 0.0)
    table = judge(world, claim(5, BOTH | {"optim.lr": "2e-3"}, within={"arm": "static_scores"}), 0)
    shared, _ = share_position_references([keys, table])
    assert position_of(shared).state == WARNING
