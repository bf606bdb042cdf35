"""`train --extend`: a longer run goes on from the stable phase of a shorter one."""

import json

import pytest

from qkablate.config import flatten
from qkablate.runs.prefix import LENGTH_KEYS
from qkablate.training.warm_start.restore import restore
from tests.sweeps.run_checks import assert_same, final_state
from tests.training.helpers import run_folder


@pytest.fixture
def words(tiny):
    """Return the words of a wsd run without its length and folder."""
    kept = [word for word in tiny if not word.startswith(("train.steps", "out="))]
    return [*kept, "optim.schedule=wsd"]


def folder_of(tmp_path, out, steps):
    """Return the folder of the run that was trained for so many steps."""
    results = {p: json.loads(p.read_text()) for p in tmp_path.glob(f"{out}/runs/*/result.json")}
    (path,) = (path for path, result in results.items() if result["steps"] == steps)
    return path.parent


def test_extended_run_equals_one_trained_alone(qkablate, words, tmp_path):
    """Settings that depend on the length are those of the shorter run: here, its warm-up."""
    assert qkablate("train", *words, "train.steps=12").code == 0
    shorter = run_folder(tmp_path)
    done = qkablate("train", *words, "train.steps=40", "--extend")
    assert done.code == 0
    assert f"extends {shorter.name} from step 10, with its optim.warmup=2" in done.err
    assert "optim.warmup=2" in done.out.partition("Next")[2]  # for a variant to compare it with
    extended = folder_of(tmp_path, "outputs", 40)
    values = flatten(restore(extended, load=False).config)
    explicit = [f"{key}={values[key]}" for key in LENGTH_KEYS]
    assert qkablate("train", *words, *explicit, "train.steps=40", "out=alone").code == 0
    alone = run_folder(tmp_path, "alone")
    assert alone.name == extended.name
    assert_same(final_state(alone), final_state(extended))


def test_the_longest_run_is_extended_again(qkablate, words, tmp_path):
    assert qkablate("train", *words, "train.steps=12").code == 0
    assert qkablate("train", *words, "train.steps=20", "--extend").code == 0
    again = qkablate("train", *words, "train.steps=20", "--extend")
    assert "this run ended before" in again.out
    further = qkablate("train", *words, "train.steps=30", "--extend")
    assert f"extends {folder_of(tmp_path, 'outputs', 20).name} from step 16" in further.err


def test_without_a_shorter_run_there_is_nothing_to_extend(qkablate, words):
    assert qkablate("train", *words, "train.steps=20").code == 0
    for changes, reason in (
        (["train.steps=12"], "'outputs' has no shorter wsd run with the same settings"),
        (["train.steps=20"], "no shorter wsd run"),
        (["train.steps=40", "seed=1"], "no shorter wsd run"),
        (["train.steps=40", "optim.warmup=3"], "no shorter wsd run"),
        (["train.steps=40", "out=empty"], "'empty' has no shorter wsd run"),
        (["train.steps=40", "optim.schedule=cosine"], "has no stable phase to go on from"),
        (["train.steps=40", "-m", "seed=0,1"], "give it without -m"),
    ):
        done = qkablate("train", *words, *changes, "--extend")
        assert (done.code, done.err.count("\n")) == (2, 1)
        assert done.err.startswith("qkablate: --extend: ")
        assert reason in done.err


def test_damaged_stable_phase_is_not_used(qkablate, words, tmp_path):
    assert qkablate("train", *words, "train.steps=12").code == 0
    (state,) = run_folder(tmp_path).glob("branches/*/state.pt")
    state.write_bytes(state.read_bytes()[:-1])
    done = qkablate("train", *words, "train.steps=40", "--extend")
    assert done.code == 2
    assert "is damaged (state.pt does not have its checksum): not used" in done.err
