"""The sweep that is proposed after a finished one removes its first obstacle."""

import random

import pytest

from qkablate.analysis.comparison.summary import describe_study
from qkablate.analysis.next_sweep import propose_next_sweep


def proposed(world, loss):
    study = world.finish(loss).study()
    return propose_next_sweep(study, describe_study(study))


def losses(lead):
    """Return losses of a sweep whose floor is so far above the baseline."""

    def loss(run):
        shift = lead - 10 if run.arm.startswith("uniform") else 0.0  # 10 is added to the floor
        return 2 + shift + run.changes["seed"] / 7 + random.Random(run.id).gauss(0, 1e-4)

    return loss


@pytest.mark.parametrize(
    ("seeds", "lead", "changes"),
    [
        (3, -0.1, ["train.steps=48", "sweep.name=made-longer"]),
        (2, -0.1, ["train.steps=48", "sweep.name=made-longer"]),
        (2, 1.0, ["seed=range(6)", "sweep.name=made-more-seeds"]),
        (1, 1.0, ["seed=range(6)", "sweep.name=made-more-seeds"]),
        (3, 1.0, ["sweep.name=made-tuned", "sweep.tune=true"]),
    ],
)
def test_more_steps_come_before_seeds_and_seeds_before_tuning(cached_world, seeds, lead, changes):
    words = ("variant=standard,no_q", f"seed=range({seeds})", "sweep.floor=true")
    command = proposed(cached_world(*words, "sweep.name=made"), losses(lead))
    assert command[0] == "sweep"
    assert command[-2:] == changes
    keys = [word.partition("=")[0] for word in command[1:]]
    assert len(keys) == len({*keys})
    assert "variant=standard,no_q" in command
    assert "out" not in keys


def test_runs_without_a_gap_lead_to_no_sweep(cached_world):
    world = cached_world("variant=standard", "seed=range(2)", "sweep.name=made")
    assert proposed(world, losses(1.0)) is None
