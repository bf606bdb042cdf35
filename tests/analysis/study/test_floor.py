"""An experiment in which nothing could have shown says nothing: `uniform` has to be beaten."""

import math
import random

import pytest

from qkablate.analysis.comparison.gaps import find_families
from qkablate.analysis.comparison.summary import describe_study
from tests.analysis.worlds import FLOOR_LEAD

WORDS = ("variant=standard,no_q", "seed=range(5)", "sweep.floor=true")


def losses(gap=0.0, lead=1.0):
    """Return losses of no_q, so far above standard, and of the floor."""

    def loss(run):
        shift = {"no_q": gap, "uniform": lead - FLOOR_LEAD, "standard": 0.0}[
            run.arm.partition("-")[0]
        ]
        noise = random.Random(run.id).gauss(0, 1e-4)
        return 2 + shift + run.changes["seed"] / 7 + noise

    return loss


def only_gap(world, loss, margin=None):
    (gap,) = describe_study(world.finish(loss).study(), margin=margin).gaps
    return gap


def test_floor_is_no_arm_of_the_comparison(cached_world):
    world = cached_world(*WORDS)
    assert [*world.manifest.arms] == ["standard-d16-h2", "no_q-d16-h2", "uniform-d16-h2"]
    (family,) = find_families(world.finish(losses()).study())
    assert [gap.arm.name for gap in family.gaps] == ["no_q-d16-h2"]
    assert family.gaps[0].lead == pytest.approx(1, abs=1e-3)


def test_equivalence_needs_a_baseline_above_the_floor(cached_world):
    """The lead has to be several margins: with all arms at the floor every arm is equivalent."""
    world = cached_world(*WORDS)
    assert only_gap(world, losses(), margin=0.01).decision == "equivalent"
    for lead in (0.0, 0.02):
        gap = only_gap(world, losses(lead=lead), margin=0.01)
        assert gap.verdict == "the experiment could not tell"
        (check,) = [check for check in gap.audit if check.name == "floor"]
        assert check.state == "warning"
        assert ("does not clearly beat" in check.message) == (lead == 0)


def test_without_a_floor_nothing_is_equivalent(cached_world):
    world = cached_world(*WORDS[:2])
    assert len(world.manifest.arms) == 2
    gap = only_gap(world, losses(), margin=0.01)
    assert gap.decision == "the experiment could not tell"
    assert "sweep.floor=true" in next(c.message for c in gap.audit if c.name == "floor")
    assert only_gap(world, losses()).decision == "no difference found"


def test_not_worse_needs_a_baseline_above_the_floor(cached_world):
    """Noise almost as large as the margin, and an arm that may be better by more than it."""

    def loss(lead):
        inner = losses(-0.006, lead)
        return lambda run: inner(run) + random.Random(run.id + "x").gauss(0, 5e-3)

    world = cached_world(*WORDS)
    assert only_gap(world, loss(1.0), margin=0.01).decision == "not worse"
    assert only_gap(world, loss(0.0), margin=0.01).decision == "the experiment could not tell"


def test_difference_that_showed_needs_no_floor(cached_world):
    assert only_gap(cached_world(*WORDS), losses(0.1, 0.0), margin=0.01).decision == "worse"


def test_baseline_below_the_floor_finds_no_difference_either(cached_world):
    gap = only_gap(cached_world(*WORDS), losses(lead=-0.1))
    assert gap.decision == "the experiment could not tell"


def test_listed_uniform_is_the_floor_too(cached_world):
    world = cached_world("variant=standard,no_q,uniform", "seed=range(5)", "sweep.floor=true")
    assert len(world.manifest.arms) == 3
    gaps = describe_study(world.finish(losses(lead=FLOOR_LEAD + 1)).study(), margin=0.01).gaps
    assert {gap.arm.partition("-")[0]: str(gap.decision) for gap in gaps} == {
        "no_q": "equivalent",
        "uniform": "worse",
    }


def test_one_variant_at_several_sizes_has_no_floor(cached_world):
    world = cached_world("model.heads=1,2", "seed=range(5)", "sweep.floor=true")
    assert {arm.variant for arm in world.manifest.arms.values()} == {"standard"}


def test_every_model_has_its_floor(cached_world):
    words = ("variant=standard,no_v", "model.attention_skip=true,false", "control=none,params")
    world = cached_world(*words, "sweep.floor=true")
    floors = [arm for arm in world.manifest.arms.values() if arm.variant == "uniform"]
    assert {arm.config.model.attention_skip for arm in floors} == {True, False}
    assert len(floors) == 2  # not one more for the control
    families = find_families(world.finish(lambda run: 2.0).study())
    for gap in (gap for family in families for gap in family.gaps):
        assert gap.floor.arm.arm.config.model == gap.baseline.arm.config.model


def test_same_parametrization_needs_no_floor(cached_world):
    words = ("model.heads=1,2", "sweep.baseline={model.heads: 2}", "seed=range(3)")
    study = cached_world(*words).finish(lambda run: 2 + run.changes["seed"] / 7).study()
    (family,) = find_families(study)
    assert family.gaps[0].lead == math.inf
