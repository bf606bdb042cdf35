"""What a run predicted, on disk: the same bytes again, few of them, and read as a stranger's."""

import dataclasses
import hashlib
import json
import math
import os

import numpy as np
import pytest
import safetensors.numpy

from qkablate.config import Config, DiagnoseConfig, TrainConfig
from qkablate.runs import predictions
from qkablate.runs.predictions import MOST_BYTES, MOST_FILES, About, are_kept, kept, read, write

ABOUT = About("0123456789ab", 250, "f" * 64, "a" * 64, 5, 16)


def logs(positions=5, vocabulary=7, seed=0):
    raw = np.random.default_rng(seed).normal(size=(positions, vocabulary))
    return (raw - np.log(np.exp(raw).sum(1, keepdims=True))).astype(np.float32)


def config(steps, every, eval_every=250):
    train = TrainConfig(steps=steps, eval_every=eval_every)
    return dataclasses.replace(Config(), train=train, diagnose=DiagnoseConfig(every))


@pytest.fixture
def file(tmp_path):
    write(tmp_path, ABOUT, logs())
    (path,) = kept(tmp_path).values()
    return path


def test_what_was_written_is_read(file):
    assert file.parts[-2:] == ("predictions", "step-00000250.safetensors")
    about, found = read(file)
    assert about == ABOUT
    assert (found == logs()).all()
    assert safetensors.numpy.load_file(file)["log_probabilities"].shape == (5, 7)


def test_written_again_it_is_the_same_file_and_nothing_else_is_left(file, tmp_path):
    before = file.read_bytes()
    (file.parent / ".step-00000250.safetensors.dead.tmp").write_bytes(b"half")
    write(tmp_path, ABOUT, logs())
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize("vocabulary", [2, 60, 257, 8192, 50257, 200_000, 2**19])
def test_a_file_stays_small_whatever_the_vocabulary(vocabulary):
    count = predictions.positions(vocabulary)
    assert 1 <= count <= 1024
    assert 4 * count * vocabulary <= MOST_BYTES
    assert predictions.positions(2**24) == 0


@pytest.mark.parametrize("every", ["auto", 1, 3, 7, 250, 10**6])
@pytest.mark.parametrize("steps", [1, 12, 250, 1000, 4999, 10**6])
def test_files_are_few_and_begin_and_end_with_the_run(steps, every):
    own = config(steps, every)
    wide = predictions.steps(own)
    found = [*wide] + [steps] * are_kept(own, steps)
    assert len(found) <= MOST_FILES
    assert found[0] == 0
    assert found[-1] == steps
    looks = 250 if every == "auto" else every
    assert all(step % looks == 0 and are_kept(own, step) for step in wide)
    if math.ceil(steps / looks) < MOST_FILES:  # few enough: all of them
        assert [*wide] == [*range(0, steps, looks)]
    assert predictions.bytes_needed(own) == len(found) * MOST_BYTES


def test_where_nobody_looks_nothing_is_kept():
    assert not predictions.steps(config(100, 0))
    assert not are_kept(config(100, 0), 100)
    assert predictions.bytes_needed(config(100, 0)) == 0


# Files of strangers.


def packed(log_PV, **about):
    own = {**dataclasses.asdict(ABOUT), "positions": len(log_PV)} | about
    known = {key: own[key] for key in dataclasses.asdict(ABOUT)}
    told = json.dumps(known, sort_keys=True).encode()
    own.setdefault("sha256", hashlib.sha256(told + log_PV.tobytes()).hexdigest())
    tensors = {"log_probabilities": log_PV}
    return safetensors.numpy.save(tensors, {"about": json.dumps(own)})


NAN, ROWS = logs().copy(), logs() + np.float32(0.5)
NAN[2, 3] = np.nan
DAMAGE = {
    "empty": b"",
    "torn": packed(logs())[:-3],
    "text": b"hello" * 50,
    "a huge header": (2**62).to_bytes(8, "little") + b"{" * 100,
    "a deep header": (4000).to_bytes(8, "little") + b"[" * 4000,
    "NaN": packed(NAN),
    "infinite": packed(np.where(np.arange(7) == 1, -np.inf, logs()).astype(np.float32)),
    "no probabilities": packed(ROWS),
    "another type": packed(logs().astype(np.float16)),
    "another shape": packed(logs().ravel()),
    "nothing in it": packed(np.zeros((0, 7), np.float32)),
    "another step": packed(logs(), step=251),
    "another count": packed(logs(), positions=6),
    "a word for a number": packed(logs(), step="250"),
    "true for a number": packed(logs(1), positions=True),
    "another checksum": packed(logs(), sha256="0" * 64),
    "more keys": packed(logs(), surprise=1),
    "no metadata": safetensors.numpy.save({"log_probabilities": logs()}),
    "another name": safetensors.numpy.save({"x": logs()}, {"about": json.dumps({})}),
    "metadata that is no map": safetensors.numpy.save({"x": logs()}, {"about": "[1]"}),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_no_run_writes_is_refused_in_one_line(file, name):
    file.write_bytes(DAMAGE[name])
    with pytest.raises(ValueError, match=r"\w") as found:
        read(file)
    assert "\n" not in str(found.value)


def test_a_flipped_bit_is_noticed_wherever_it_is(file):
    content = bytearray(file.read_bytes())
    for place in range(0, len(content), 7):
        content[place] ^= 4
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"\w"):
            read(file)
        content[place] ^= 4


def test_what_is_too_large_is_not_read(file):
    with file.open("r+b") as opened:
        opened.truncate(10**10)
    with pytest.raises(ValueError, match="too large"):
        read(file)


@pytest.mark.parametrize("kind", ["folder", "pipe", "link", "gone"])
def test_what_is_no_file_is_not_read(file, kind, tmp_path):
    content = file.read_bytes()
    file.unlink()
    if kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "link":
        (tmp_path / "elsewhere").write_bytes(content)
        file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"\w"):
        read(file)


def test_names_that_are_none_are_passed_over(file, tmp_path):
    for name in ("step-1.safetensors", "step-xxxxxxxx.safetensors", "step-00000001.pt"):
        (file.parent / name).write_bytes(b"")
    assert [*kept(tmp_path)] == [250]
    assert kept(tmp_path / "nowhere") == {}
