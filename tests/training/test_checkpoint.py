"""Checkpoints on disks that are full, or return errors."""

import errno
import re

import pytest
import torch

from qkablate.training import checkpoint
from qkablate.training.checkpoint import Checkpoint, TrainProgress

STEPS = (2, 4)


@pytest.fixture
def folder(tmp_path):
    """Return a folder with checkpoints of two steps."""
    for step in STEPS:
        weights = {"w": torch.full((2,), float(step))}
        checkpoint.save(tmp_path / "checkpoints", Checkpoint(TrainProgress(step), weights))
    return tmp_path / "checkpoints"


def load(folder):
    notes = []
    return checkpoint.load_newest(folder, "cpu", folder / "metrics.jsonl", notes.append), notes


def test_failed_write_leaves_nothing(folder, monkeypatch):
    before = sorted(path.name for path in folder.iterdir())

    def write(state, path):
        path.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", write)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(folder, Checkpoint(TrainProgress(6), {"w": torch.zeros(2)}))
    assert sorted(path.name for path in folder.iterdir()) == before


@pytest.mark.parametrize("unread", [STEPS, STEPS[-1:]], ids=["both", "the newest"])
def test_unreadable_checkpoints_are_kept_unless_an_older_one_is_read(folder, monkeypatch, unread):
    """An error of a network's disk may pass, and a run must not start anew because of it."""
    hash_file = checkpoint.hash_file

    def read(path):
        if int(path.parent.name.removeprefix("step-")) in unread:
            raise OSError(errno.ESTALE, "Stale file handle")
        return hash_file(path)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "hash_file", read)
        if unread == STEPS:
            with pytest.raises(OSError, match="Stale file handle"):
                load(folder)
        else:
            found, notes = load(folder)
            assert found.progress.step == STEPS[0]
            assert re.search(
                r"step-\d+4 cannot be read \(.*Stale file handle\): not used", notes[0]
            )
    if unread == STEPS:
        found, notes = load(folder)
        assert (found.progress.step, notes) == (STEPS[-1], [])
