"""References across claims: one trains weights by position, another is read by them."""

import dataclasses

import pytest

from qkablate.analysis.claims.judgement import judge_claim
from qkablate.analysis.claims.references import find_references
from qkablate.analysis.claims.registry import register_claim
from qkablate.analysis.comparison.audit import NOTE, OK, WARNING
from tests.analysis.claims.test_judgement import GRID, claim, frozen

BOTH = {"variant": "standard,static_scores"}
TRANSLATOR = {"model": "nano_translator", "data": "reverse", "model.context": "8"}


def train(world, own, lead, status="done"):
    """Register a claim and train it, with a lead over weights by position."""
    made = frozen(world, own)

    def loss(run):
        by_position = lead + 1e-3 * (run.changes["seed"] % 5)
        if run.arm.startswith("static"):
            return 2.0 + by_position if status == "done" else None
        return 2.0 + 1e-3 * (run.changes["seed"] % 3)

    register_claim(own, made.manifest.out).add(own.seeds[-1], made.finish(loss).folder)
    return made


def table(seeds=4, grid=None):
    arm = {"variant": "static_scores"}
    arm |= {key: value for key, value in (grid or {}).items() if key == "variant.sites"}
    own = claim(seeds, BOTH | (grid or {}), within={"arm": arm})
    return dataclasses.replace(own, name="table")


def content_of(made, own):
    """Return the audit's answer on a claim, judged beside the others of its folder."""
    judged = judge_claim(own, made.study(), [])
    (check,) = (c for c in judged.parts[0].checks if c.name == "content")
    assert ("where content is not shown to matter" in judged.scope) == check.is_warning
    return check


@pytest.mark.parametrize(("lead", "state"), [(0.5, OK), (0.02, NOTE), (-0.1, WARNING)])
def test_claim_is_read_by_another_of_its_setting(world, lead, state):
    keys = claim(4)
    made = train(world, keys, lead)
    assert "unknown" in content_of(made, keys).message
    itself = train(world, table(), lead)
    check = content_of(made, keys)
    assert check.state == state
    assert "relative to standard-d16-h2 in the same setting (claim table)" in check.message
    assert "not needed" in content_of(itself, table()).message


@pytest.mark.parametrize(
    "other", [{"model.heads": "1"}, {"train.steps": "24"}, {"optim.weight_decay": "0.2"}]
)
def test_another_setting_says_nothing(world, other):
    keys = claim(4)
    made = train(world, keys, 0.0)
    train(world, table(grid=other), 0.0)
    assert "unknown" in content_of(made, keys).message


def test_unfinished_claim_says_nothing(world):
    keys = claim(4)
    made = train(world, keys, 0.0)
    train(world, table(), 0.0, status="waiting")
    assert "unknown" in content_of(made, keys).message


def test_unfinished_seeds_hide_no_reference(world):
    """The declared seeds have ended; more are being added."""
    keys = claim(4)
    made = train(world, keys, 0.0)
    other = table()
    train(world, other, 0.5)
    more = frozen(world, other, 6).finish(lambda run: None)
    register_claim(other, made.manifest.out).add(6, more.folder)
    assert content_of(made, keys).state == OK


def test_rates_and_seeds_are_no_setting_and_most_pairs_count(world):
    keys = claim(4, GRID | {"optim.lr": "1e-3"})
    made = train(world, keys, 0.0)
    for seeds, lead in ((5, 0.5), (6, -0.5), (4, 0.5)):
        train(world, table(seeds, {"optim.lr": "2e-3"}), lead)
    assert "is -0.498" in content_of(made, keys).message


def test_sites_have_references_of_their_own(world):
    cross = TRANSLATOR | {"variant.sites": "cross"}
    keys = claim(4, GRID | cross)
    made = train(world, keys, 0.0)
    train(world, table(grid=TRANSLATOR), 0.0)
    assert "unknown" in content_of(made, keys).message
    train(world, table(grid=cross), -0.5)
    assert content_of(made, keys).state == WARNING


def test_each_gap_of_an_interaction_is_answered(world):
    """Only the gap that is subtracted has a reference."""
    heads = {"model.heads": "1,2"}
    part = {"arm": {"variant": "no_q", "model.heads": 2}, "than": {"model.heads": 1}}
    keys = claim(4, GRID | heads, less=part)
    made = train(world, keys, 0.0)
    train(world, table(grid={"model.heads": "1"}), -0.1)
    check = content_of(made, keys)
    assert (check.state, "standard-d16-h1 in" in check.message) == (WARNING, True)


def test_controls_have_the_reference_of_the_size_before(world):
    keys = claim(4, within={"arm": "standard", "against": "no_q", "axis": "params"})
    made = train(world, keys, 0.0)
    train(world, table(), -0.1)
    assert content_of(made, keys).state == WARNING


def test_damaged_claim_beside_it_changes_nothing(world):
    keys = claim(4)
    made = train(world, keys, 0.0)
    other = train(world, table(), 0.0)
    claims = made.folder.parent.parent / "claims"
    next(claims.glob("table-*/claim.json")).write_text("{")
    assert "unknown" in content_of(made, keys).message
    assert find_references(other.manifest.out) == {}
