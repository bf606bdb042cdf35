"""Commands in the manner of SCAN."""

import numpy as np
import pytest

from qkablate.config import DataConfig, ModelConfig
from qkablate.data import EvalMetrics, open_data
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


LONGER = {"longest": (19, 97), "extra_phrases": 2}


@pytest.mark.parametrize("held_out", [0, 4])
def test_longer_commands_are_held_out(held_out):
    """They take turns with combinations, if those are held out, too."""
    keys = LONGER | {"held_out": held_out}
    assert {len(row) for row in draw(False, **keys)[1]} == {1, 2}
    rows = draw(True, **keys)[1]
    longer = rows[1::2] if held_out else rows
    assert {len(row) for row in longer} == {3, 4}
    assert not {c for row in longer for c in row} & held_out_combinations(held_out)
    assert {len(row) for row in rows[::2]} == ({1, 2} if held_out else {3, 4})


def test_measures_tell_longer_commands_apart():
    task, totals = make("commands", **LONGER), EvalMetrics()
    for batch in task.split_batches("test", batch_size=1, context=task.length):
        phrases, shape = int(batch.slices["phrases"][0, 0]), batch.targets_NA.shape
        totals.add_answers(batch, np.ones(shape), np.full(shape, phrases < 3))
    measures = task.metrics("test", totals)
    assert measures["exact"] == 27 / 30  # every eighth
    kinds = ("pair/known", "pair/held_out", "pair/longer", "phrases/2", "phrases/3")
    assert [measures[f"exact/{kind}"] for kind in kinds] == [1, 1, 0, 1, 0]


@pytest.mark.parametrize("extra", [None, 0])
def test_fingerprint_of_earlier_runs_stays(extra):
    """The key of longer commands came later."""
    assert make("commands", extra_phrases=extra).fingerprint.startswith("fa935c553a862efe")


def test_fingerprint_depends_on_longer_commands():
    tasks = [make("commands", **LONGER | {"extra_phrases": extra}) for extra in (0, 1, 2)]
    assert len({task.fingerprint for task in tasks}) == 3


def test_encoder_alone_is_rejected():
    data = DataConfig(source="commands", tokenizer=None, cache=None, phrases=1, held_out=0)
    with pytest.raises(UserError, match="answers at the positions of its source"):
        open_data(data, ModelConfig(form="encoder", context=64))
