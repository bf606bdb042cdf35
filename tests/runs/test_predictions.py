"""Schedule, number and names of the files with predictions."""

import dataclasses
import itertools
import math

import pytest

from qkablate.config import Config, TrainConfig
from qkablate.config.schema import DiagnosticsConfig
from qkablate.runs.predictions import (
    MAX_BYTES,
    MAX_FILES,
    bytes_needed,
    find_predictions,
    is_recorded,
    position_count,
    recorded_steps,
)


def config(steps, every, eval_every=250):
    train = TrainConfig(steps=steps, eval_every=eval_every)
    return dataclasses.replace(Config(), train=train, diagnostics=DiagnosticsConfig(every))


@pytest.mark.parametrize("vocabulary", [2, 60, 257, 8192, 50257, 200_000, 2**19])
def test_file_is_small_for_any_vocabulary(vocabulary):
    count = position_count(vocabulary)
    assert 1 <= count <= 1024
    assert 4 * count * vocabulary <= MAX_BYTES
    assert position_count(2**24) == 0


@pytest.mark.parametrize("every", ["auto", 1, 3, 7, 250, 10**6])
@pytest.mark.parametrize("steps", [1, 12, 250, 1000, 4999, 10**6])
def test_files_are_few_and_include_the_first_and_last_step(steps, every):
    run = config(steps, every)
    before_last = recorded_steps(run)
    recorded = [*before_last] + [steps] * is_recorded(run, steps)
    assert len(recorded) <= MAX_FILES
    assert recorded[0] == 0
    assert recorded[-1] == steps
    interval = 250 if every == "auto" else every
    assert all(step % interval == 0 and is_recorded(run, step) for step in before_last)
    if math.ceil(steps / interval) < MAX_FILES:
        assert [*before_last] == [*range(0, steps, interval)]
    assert bytes_needed(run) == len(recorded) * MAX_BYTES


@pytest.mark.parametrize("every", [1, 3, 250])
def test_steps_of_a_longer_run_are_among_those_of_a_shorter_one(every):
    lengths = [12, 250, 1000, 4999, 10_000, 15_000, 10**6]
    for shorter, longer in itertools.pairwise(recorded_steps(config(n, every)) for n in lengths):
        assert {step for step in longer if step < shorter.stop} <= {*shorter}


def test_nothing_is_recorded_without_diagnostics():
    assert not recorded_steps(config(100, 0))
    assert not is_recorded(config(100, 0), 100)
    assert bytes_needed(config(100, 0)) == 0


def test_other_file_names_are_ignored(tmp_path):
    (tmp_path / "predictions").mkdir()
    names = ("step-1.safetensors", "step-xxxxxxxx.safetensors", "step-00000001.pt")
    for name in (*names, "step-00000250.safetensors"):
        (tmp_path / "predictions" / name).touch()
    assert [*find_predictions(tmp_path)] == [250]
    assert find_predictions(tmp_path / "nowhere") == {}
