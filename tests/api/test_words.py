"""Python values and the words that they become."""

from pathlib import Path

import numpy as np
import pytest

from qkablate.api.words import format_words, reject_unnamed
from qkablate.compose.configs import compose_jobs, open_hydra
from qkablate.compose.grid import read_request
from qkablate.errors import UserError

VALUES = {
    "seed": 3,
    "optim.lr": 1e-5,
    "train.evaluate_test": False,
    "train.tokens": None,
    "optim.betas": [0.8, 0.9],
    "tracking.tags": ["a b", "1,2", 'say "no"'],
    "tracking.group": "true",
    "data.path": Path("a folder/my,text.txt"),
}


def read(config, key):
    for part in key.split("."):
        config = getattr(config, part)
    return config


@pytest.mark.parametrize("key", VALUES)
def test_values_reach_the_config_as_they_are(key):
    (job,) = compose_jobs(["data=text", *format_words({"data.path": "x", key: VALUES[key]})])
    expected = str(VALUES[key]) if isinstance(VALUES[key], Path) else VALUES[key]
    assert read(job.config, key) == expected


@pytest.mark.parametrize(
    ("value", "example"),
    [
        ("quick", "sweep='quick'"),
        ("merged_w", "variant='merged_w'"),
        ("merged_x", "variant='merged_x'"),
        (np.array([1, 2]), "variant='no_q'"),
        (None, "variant='no_q'"),
        (["a"], "variant='no_q'"),
    ],
    ids=repr,
)
def test_value_without_its_key_leads_to_an_example(value, example):
    with pytest.raises(UserError) as error:
        reject_unnamed("train", [value])
    assert str(error.value) == f"train: {value!r} needs its key, as in train({example})"


def test_numbers_of_numpy_are_numbers():
    words = format_words({"seed": np.int64(3), "optim.lr": np.float32(0.5)})
    assert words == ["seed=3", "optim.lr=0.5"]


AXES = [
    ({"seed": range(3)}, {"seed": ["0", "1", "2"]}),
    ({"seed": np.arange(2)}, {"seed": ["0", "1"]}),
    ({"variant": ("standard", "no_q")}, {"variant": ["standard", "no_q"]}),
    ({"seed": 1}, {"seed": ["1"]}),
    ({"seed": 1, "optim.betas": [0.8, 0.9]}, {"seed": ["1"], "optim.betas": ["[0.8,0.9]"]}),
    ({"optim.betas": [[0.8, 0.9], [0.9, 0.99]]}, {"optim.betas": ["[0.8,0.9]", "[0.9,0.99]"]}),
    ({"seed": 1, "tracking.tags": ["a", "b"]}, {"seed": ["1"], "tracking.tags": ["[a,b]"]}),
]


@pytest.mark.parametrize(("keys", "choices"), AXES)
def test_sequences_are_axes_of_a_sweep(keys, choices):
    with open_hydra():
        assert read_request(format_words(keys, axes=True)).choices == choices


def test_settings_of_a_sweep_keep_their_lists_and_maps():
    keys = {
        "seed": range(2),
        "sweep.filter": ["model.d_model // model.heads >= 8"],
        "sweep.also": [{"data": "recall", "model.context": 32}],
        "sweep.tune": True,
        "sweep.tuning_seeds": [7, 8],
        "control": ["none", "params"],
    }
    with open_hydra():
        request = read_request(format_words(keys, axes=True))
    assert request.settings.sweep.filter == ["model.d_model // model.heads >= 8"]
    assert request.settings.sweep.also == [{"data": "recall", "model.context": 32}]
    assert request.settings.sweep.tuning_seeds == [7, 8]
    assert [*request.controls] == ["none", "params"]


@pytest.mark.parametrize(
    ("keys", "axes", "message"),
    [
        ({"seed": [0, 1]}, False, r"seed: \[0, 1\] are several values; qkablate.sweep trains"),
        ({"seed": object()}, False, "seed: a object is not text, a number"),
        ({"seed": []}, True, "seed: there is no value in it"),
    ],
)
def test_other_values_are_rejected(keys, axes, message):
    with pytest.raises(UserError, match=message):
        format_words(keys, axes=axes)
