"""Commands in the manner of SCAN."""

import numpy as np
import pytest

from qkablate.config import DataConfig, ModelConfig
from qkablate.data import open_data
from qkablate.data.tasks.commands import actions, held_out_combinations
from qkablate.errors import UserError
from tests.data.tasks.test_padded import make, pairs_of


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("walk", "WALK"),
        ("jump left", "LEFT JUMP"),
        ("run twice", "RUN RUN"),
        ("look opposite right", "RIGHT RIGHT LOOK"),
        ("look around left", "LEFT LOOK LEFT LOOK LEFT LOOK LEFT LOOK"),
        ("jump opposite left thrice", " ".join(["LEFT LEFT JUMP"] * 3)),
        ("walk and jump twice", "WALK JUMP JUMP"),
        ("jump twice after walk left", "LEFT WALK JUMP JUMP"),
        ("walk after look and run", "LOOK WALK RUN"),
    ],
)
def test_actions_of_commands(command, expected):
    assert " ".join(actions(command.split())) == expected


def draw(is_held_out, **keys):
    """Return the pairs, and the combinations of verb and manner in each command."""
    task = make("commands", **keys)
    examples = task.draw(np.random.default_rng(0), np.full(2000, is_held_out))
    pairs, combinations = pairs_of(task, examples), []
    for command, _ in pairs:
        phrases = command.replace(" after ", " and ").split(" and ")
        combinations.append([])
        for phrase in phrases:
            verb, *manner = phrase.removesuffix(" twice").removesuffix(" thrice").split()
            combinations[-1].append((verb, " ".join(manner)))
    assert [len(c) for c in combinations] == examples.slices["phrases"][:, 0].tolist()
    return pairs, combinations


@pytest.mark.parametrize("held_out", [False, True])
def test_targets_are_the_actions(held_out):
    for command, target in draw(held_out)[0]:
        assert [*actions(command.split()), "end"] == target.split()


@pytest.mark.parametrize("count", [1, 4, 12])
def test_combinations_are_held_out_but_not_their_parts(count):
    held = held_out_combinations(count)
    assert len(held) == count
    known = {c for row in draw(False, held_out=count)[1] for c in row}
    assert not known & held
    assert len(known) == 28 - count
    assert {verb for verb, _ in known} >= {verb for verb, _ in held}
    assert {manner for _, manner in known} >= {manner for _, manner in held}
    assert all({*row} & held for row in draw(True, held_out=count)[1])


def test_encoder_alone_is_rejected():
    data = DataConfig(source="commands", tokenizer=None, cache=None, phrases=1, held_out=0)
    with pytest.raises(UserError, match="answers at the positions of its source"):
        open_data(data, ModelConfig(form="encoder", context=64))
