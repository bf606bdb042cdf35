"""Checkpoints beside training: what a thread writes, when it is waited for, what a lost lease does.

The thread is that of a GPU; here it works on tensors of a CPU.
"""

import os
import signal
import subprocess
import sys
import threading
from functools import partial

import pytest
import torch

from qkablate.runs.lease import LeaseLost
from qkablate.training import checkpoint, session
from qkablate.training.checkpoint import Checkpoint, TrainProgress
from qkablate.training.recorders.checkpoint_writer import CheckpointWriter
from tests.training.helpers import assert_identical, interrupt_after, run_folder


def state_of(step: int) -> Checkpoint:
    moments = {"state": {0: {"exp_avg": torch.full((3,), float(step))}}}
    weights = {"w": torch.full((2,), float(step))}
    return Checkpoint(TrainProgress(step, speeds=[1.0]), weights, {"optimizer": moments})


class SlowDisk:
    """A disk that writes nothing until it may."""

    def __init__(self, folder):
        self.folder, self.may_write, self.threads = folder, threading.Event(), []

    def write(self, state):
        self.threads.append(threading.current_thread())
        assert self.may_write.wait(60)
        checkpoint.save(self.folder, state)


@pytest.fixture
def disk(tmp_path):
    return SlowDisk(tmp_path / "checkpoints")


def test_on_a_cpu_checkpoints_are_written_at_their_step(disk):
    disk.may_write.set()
    with CheckpointWriter("cpu", disk.write) as writer:
        writer.save(state_of(1))
        assert disk.threads == [threading.current_thread()]
        assert len(checkpoint.find_checkpoints(disk.folder)) == 1


def test_training_goes_on_and_changes_nothing_that_is_written(disk):
    state = state_of(4)
    with CheckpointWriter("cuda:0", disk.write) as writer:
        writer.save(state)
        state.weights["w"] += 1
        state.state["optimizer"]["state"][0]["exp_avg"].zero_()
        state.progress.step = 5
        state.progress.speeds.append(2.0)
        assert not checkpoint.find_checkpoints(disk.folder)
        disk.may_write.set()
    (path,) = checkpoint.find_checkpoints(disk.folder)
    written, expected = checkpoint.load(path, "cpu"), state_of(4)
    assert written.progress == expected.progress
    assert torch.equal(written.weights["w"], expected.weights["w"])
    moment = written.state["optimizer"]["state"][0]["exp_avg"]
    assert torch.equal(moment, torch.full((3,), 4.0))
    assert disk.threads != [threading.current_thread()]


def test_a_checkpoint_waits_for_the_one_before(disk):
    order = []

    def write(state):
        order.append(("begin", state.progress.step))
        disk.write(state)
        order.append(("end", state.progress.step))

    with CheckpointWriter("cuda", write) as writer:
        writer.save(state_of(1))
        threading.Timer(0.05, disk.may_write.set).start()
        writer.save(state_of(2))
    assert order == [("begin", 1), ("end", 1), ("begin", 2), ("end", 2)]


def fail(error, state):
    raise error


@pytest.mark.parametrize("error", [OSError("disk full"), LeaseLost("taken over")], ids=str)
def test_error_of_the_thread_is_raised(error):
    writer = CheckpointWriter("cuda", partial(fail, error))
    writer.save(state_of(1))
    with pytest.raises(type(error), match=str(error)):
        writer.save(state_of(2))
    with pytest.raises(type(error), match=str(error)), writer:  # at the end
        writer.save(state_of(2))
    with pytest.raises(type(error), match=str(error)), writer:  # noqa: PT012
        writer.save(state_of(2))
        raise RuntimeError("training")
    writer.wait()  # each is raised once


def test_a_second_ctrl_c_waits_for_the_checkpoint(disk):
    def write(state):
        disk.write(state)
        raise OSError("disk full")

    with pytest.raises(KeyboardInterrupt), CheckpointWriter("cuda", write) as writer:  # noqa: PT012
        writer.save(state_of(3))
        threading.Timer(0.05, disk.may_write.set).start()
        raise KeyboardInterrupt
    assert [path.name for path in checkpoint.find_checkpoints(disk.folder)] == ["step-00000003"]


def test_a_write_that_lost_the_lease_renames_and_removes_nothing(tmp_path):
    for step in (1, 2):
        checkpoint.save(tmp_path, state_of(step))
    before = {path: path.stat().st_ino for path in tmp_path.glob("step-*")}
    for step in (2, 3):
        with pytest.raises(LeaseLost):
            checkpoint.save(
                tmp_path, state_of(step), verify=partial(fail, LeaseLost("taken over"), None)
            )
    assert {path: path.stat().st_ino for path in tmp_path.glob("step-*")} == before


@pytest.fixture
def threaded(monkeypatch):
    """Train on a CPU with the thread of a GPU."""
    monkeypatch.setattr(
        session, "CheckpointWriter", lambda _, write: CheckpointWriter("cuda", write)
    )


def test_runs_end_and_resume_bit_identically(qkablate, tiny, tmp_path, monkeypatch, request):
    assert qkablate("train", *tiny, "out=reference").code == 0
    request.getfixturevalue("threaded")
    assert qkablate("train", *tiny, "out=whole").code == 0
    assert_identical(run_folder(tmp_path, "reference"), run_folder(tmp_path, "whole"))
    for calls in (1, 4, 3):
        with monkeypatch.context() as patch:
            interrupt_after(patch, calls)
            assert qkablate("train", *tiny, "out=stopped").code == 143
    assert qkablate("train", *tiny, "out=stopped").code == 0
    assert_identical(run_folder(tmp_path, "reference"), run_folder(tmp_path, "stopped"))


def test_a_failed_write_is_the_result(qkablate, tiny, tmp_path, monkeypatch, threaded):
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", lambda *_, **__: fail(OSError("disk full"), None))
        assert qkablate("train", *tiny).code == 1
    assert "disk full" in (run_folder(tmp_path) / "error.txt").read_text()
    assert qkablate("train", *tiny).code == 0


def test_the_lease_is_verified_before_the_rename(qkablate, tiny, tmp_path, monkeypatch, threaded):
    """Another process takes over while the thread writes."""
    taken = []

    def hash_slowly(path):
        if not taken:
            taken.append(True)
            lease = run_folder(tmp_path) / "lease"
            (number,) = (int(name) for name in os.listdir(lease) if name.isdecimal())
            (lease / f"{number + 1:08d}").write_text("{}\n")
        return real(path)

    real = checkpoint.hash_file
    monkeypatch.setattr(checkpoint, "hash_file", hash_slowly)
    done = qkablate("train", *tiny)
    assert done.code != 0
    assert "was taken over" in done.err
    folder = run_folder(tmp_path)
    assert not list(folder.glob("checkpoints/step-*"))
    assert not (folder / "result.json").exists()


_THREADED = """
import os, signal, sys, threading
from qkablate.cli import main
from qkablate.training import checkpoint, session
from qkablate.training.recorders.checkpoint_writer import CheckpointWriter
from qkablate.training.signals import Signals
session.CheckpointWriter = lambda _, write: CheckpointWriter("cuda", write)
real = checkpoint.sync_folder
"""
_KILLED = """
def sync_folder(folder):
    if "0008" in folder.name:
        os.kill(os.getpid(), signal.SIGKILL)
    real(folder)
checkpoint.sync_folder = sync_folder
main(sys.argv[1:])
"""
_INTERRUPTED_TWICE = """
handled, handle = threading.Semaphore(0), Signals._handle
def count(self, number, frame):
    handled.release()
    handle(self, number, frame)
Signals._handle = count
def sync_folder(folder):
    if "0008" in folder.name and threading.current_thread() is not threading.main_thread():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            handled.acquire(timeout=60)
    real(folder)
checkpoint.sync_folder = sync_folder
main(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "ended", "written"),
    [(_KILLED, -signal.SIGKILL, 4), (_INTERRUPTED_TWICE, 128 + signal.SIGINT, 8)],
    ids=["kill -9", "Ctrl-C twice"],
)
def test_a_process_that_ends_while_it_writes_resumes_bit_identically(
    qkablate, tiny, tmp_path, code, ended, written
):
    assert qkablate("train", *tiny, "out=reference").code == 0
    words = [sys.executable, "-c", _THREADED + code, "train", *tiny, "out=ended"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == ended, done.stderr
    folder = run_folder(tmp_path, "ended") / "checkpoints"
    assert max(path.name for path in folder.glob("step-*")) == f"step-{written:08d}"
    assert qkablate("train", *tiny, "out=ended").code == 0
    assert_identical(run_folder(tmp_path, "reference"), run_folder(tmp_path, "ended"))
