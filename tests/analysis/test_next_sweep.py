"""The sweep that is proposed after a finished one removes its first obstacle."""

import itertools
import random

import pytest

from qkablate.analysis.comparison.summary import describe_study
from qkablate.analysis.next_sweep import propose_next_sweep
from qkablate.compose.configs import make_config, open_hydra
from qkablate.compose.grid import read_request
from qkablate.config import GridConfig


def proposed(world, loss):
    study = world.finish(loss).study()
    return propose_next_sweep(study, describe_study(study))


def compose(command):
    """Return the configs that a proposed command trains."""
    with open_hydra():
        choices = read_request(command[1:]).choices
        return [
            make_config(dict(zip(choices, values, strict=True)))
            for values in itertools.product(*choices.values())
        ]


def losses(lead):
    """Return losses of a sweep whose floor is so far above the baseline."""

    def loss(run):
        shift = lead - 10 if run.arm.startswith("uniform") else 0.0  # 10 is added to the floor
        return 2 + shift + run.changes["seed"] / 7 + random.Random(run.id).gauss(0, 1e-4)

    return loss


AT_FLOOR, CLEAR = -0.1, 1.0
OTHER = "data: copy, data.copy_length: 4"


@pytest.mark.parametrize(
    ("seeds", "lead", "changes"),
    [
        ("range(3)", AT_FLOOR, ["train.steps=48", "sweep.name=made-longer"]),
        ("range(2)", AT_FLOOR, ["train.steps=48", "seed=range(6)", "sweep.name=made-longer"]),
        ("range(2)", CLEAR, ["seed=range(6)", "sweep.name=made-more-seeds"]),
        ("10,11", CLEAR, ["seed=0,1,2,3,10,11", "sweep.name=made-more-seeds"]),
        ("0", CLEAR, ["seed=range(6)", "sweep.name=made-more-seeds"]),
        ("range(3)", CLEAR, ["sweep.name=made-tuned", "sweep.tune=true"]),
    ],
)
def test_more_steps_come_before_seeds_and_seeds_before_tuning(cached_world, seeds, lead, changes):
    words = ("variant=standard,no_q", f"seed={seeds}", "sweep.floor=true")
    command = proposed(cached_world(*words, "sweep.name=made"), losses(lead))
    assert command[0] == "sweep"
    assert command[-len(changes) :] == changes
    keys = [word.partition("=")[0] for word in command[1:]]
    assert len(keys) == len({*keys})
    assert "variant=standard,no_q" in command
    assert "out" not in keys
    assert compose(command)


@pytest.mark.parametrize(
    ("length", "steps"),
    [
        ("train.steps=12,24", {48, 96}),
        ("+train.steps=12", {48}),
        ("train.tokens=384", {48}),  # 32 a step
        ("train.tokens=384,640", {48, 80}),
    ],
)
def test_longer_sweep_multiplies_every_length(world, corpus, length, steps):
    small = [word for word in corpus if not word.startswith("train.steps")]
    words = ("variant=standard,no_q", "seed=range(3)", "sweep.floor=true", "train.steps=auto")
    words = words if "tokens" in length else words[:3]
    command = proposed(world(*words, length), losses(AT_FLOOR))
    assert command[-1] == "sweep.name=grid-longer"
    given = {word.partition("=")[0] for word in command}
    configs = compose([*command, *(w for w in small if w.partition("=")[0] not in given)])
    assert {config.train.steps for config in configs} == steps


@pytest.mark.parametrize(
    "word", ["sweep.filter=['train.steps < 20']", f"sweep.also={{{OTHER}, train.steps: 24}}"]
)
def test_longer_sweep_is_not_proposed_where_another_key_names_the_length(world, word):
    words = ("variant=standard,no_q", "seed=range(3)", "sweep.floor=true")
    assert proposed(world(*words, word), losses(AT_FLOOR)) is None


@pytest.mark.parametrize(
    "setting",
    [
        {"also": {"data": "copy", "data.copy_length": 4, "train.steps": 24}},
        {"filter": ["train.steps < 20"]},
        {"also": {"data": "copy", "data.copy_length": 4}},
        {},
    ],
)
def test_a_length_in_the_file_of_a_sweep_is_noticed(world, setting):
    words = ("variant=standard,no_q", "seed=range(3)")
    made = world(*words, grid=GridConfig(name="mine", floor=True, **setting))
    is_fixed = "train.steps" in str(setting)
    assert (proposed(made, losses(AT_FLOOR)) is None) == is_fixed


def test_more_seeds_are_none_of_tuning(world):
    words = ("variant=standard,no_q", "seed=7", "sweep.tune=true", "sweep.tuning_seeds=[0,1]")
    command = proposed(world(*words), losses(CLEAR))
    assert command[-2:] == ["seed=2,3,4,5,6,7", "sweep.name=grid-more-seeds"]


def test_runs_without_a_gap_lead_to_no_sweep(cached_world):
    world = cached_world("variant=standard", "seed=range(2)", "sweep.name=made")
    assert proposed(world, losses(CLEAR)) is None


def test_longer_runs_are_no_remedy_for_a_baseline_that_diverged(cached_world):
    loss = losses(CLEAR)

    def outcome(run):
        is_out = run.arm.startswith("standard") and run.changes["seed"] == 1
        return "diverged" if is_out else loss(run)

    words = ("variant=standard,no_q", "seed=range(6)", "sweep.floor=true")
    command = proposed(cached_world(*words, "sweep.name=made"), outcome)
    assert not any(word.startswith("train.steps") for word in command or [])


@pytest.mark.parametrize(("lead", "name"), [(-0.1, "made-longer"), (1.0, "made-tuned")])
def test_weights_by_position_have_to_be_beaten_first(cached_world, lead, name):
    words = ("variant=standard,no_q,static_scores", "seed=range(3)", "sweep.name=made")

    def loss(run):
        shift = lead if run.arm.startswith("static") else 0.0
        return 2 + shift + run.changes["seed"] / 7 + random.Random(run.id).gauss(0, 1e-4)

    assert f"sweep.name={name}" in proposed(cached_world(*words), loss)
