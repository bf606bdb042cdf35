"""Evaluation of a trained run: the same sums in any batches, and no trace of it."""

import hashlib
import random

import numpy as np
import pytest
import torch

from qkablate.errors import UserError
from qkablate.training.recorders.run_evaluation import (
    Machine,
    evaluate_run,
    open_run_data,
    read_split,
    training_limit,
)
from qkablate.training.warm_start.restore import restore


@pytest.fixture(scope="module")
def trained(tmp_path_factory, train):
    """Return a run and its data."""
    folder = tmp_path_factory.mktemp("trained")
    restored = restore(train(folder, "train.steps=2", "train.eval_tokens=64"))
    return restored, open_run_data(restored, None, str(folder / "cache"))


def test_sums_do_not_depend_on_the_batches(trained):
    restored, data = trained
    found = [
        read_split(restored.config, restored.model, data, "val", None, size) for size in (1, 3, 64)
    ]
    for totals in found[1:]:
        assert totals.all.count == found[0].all.count == data.tokens["val"] - 1
        assert totals.all.loss == pytest.approx(found[0].all.loss, rel=1e-6)


def test_own_data_is_read_as_far_as_in_training(trained):
    restored, data = trained
    assert training_limit(restored, data, "val") == 64
    short = evaluate_run(restored, data, "text", "val", 64, Machine())
    assert short.answers == 64 < data.tokens["val"]
    whole = evaluate_run(restored, data, "text", "val", None, Machine())
    assert whole.answers == data.tokens["val"] - 1


def test_process_and_run_are_left_as_they_were(trained):
    restored, data = trained

    def state():
        weights = [tensor.numpy().tobytes() for tensor in restored.model.state_dict().values()]
        return (
            hashlib.sha256(b"".join(weights)).hexdigest(),
            *(random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()),
            *(torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()),
            *sorted((str(p), p.stat().st_mtime_ns) for p in restored.folder.rglob("*")),
        )

    before = state()
    evaluate_run(restored, data, "text", "test", None, Machine(threads=2))
    assert state() == before


def test_data_elsewhere_is_refused(trained, tmp_path):
    restored, _ = trained
    with pytest.raises(UserError, match="is not prepared on this machine"):
        open_run_data(restored, None, str(tmp_path / "empty"))
