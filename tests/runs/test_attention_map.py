"""The attention of one text on disk: small, the same bytes again, and read as a stranger's."""

import dataclasses
import hashlib
import json
import os

import numpy as np
import pytest
import safetensors.numpy

from qkablate.runs import attention_map
from qkablate.runs.attention_map import MOST_BYTES, MOST_TOKENS, About, length, read, rounded, write

ABOUT = About("0123456789ab", 250, "f" * 64)
TOKENS = np.arange(5)


def weights(layers=2, heads=3, tokens=5, seed=0):
    raw = np.tril(np.random.default_rng(seed).exponential(size=(layers, heads, tokens, tokens)))
    return raw / raw.sum(-1, keepdims=True)


@pytest.fixture
def file(tmp_path):
    write(tmp_path, ABOUT, TOKENS, rounded(weights()))
    return tmp_path / "example.safetensors"


def test_what_was_written_is_read_to_half_of_a_255th(file):
    about, tokens_T, a_LHTT = read(file)
    assert about == ABOUT
    assert tokens_T.tolist() == TOKENS.tolist()
    assert np.abs(a_LHTT / 255 - weights()).max() <= 0.5 / 255 + 1e-12


def test_written_again_it_is_the_same_file_and_nothing_else_is_left(file, tmp_path):
    before = file.read_bytes()
    (tmp_path / ".example.safetensors.dead.tmp").write_bytes(b"half")
    write(tmp_path, ABOUT, TOKENS, rounded(weights()))
    assert file.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"home", file.name}


@pytest.mark.parametrize("layers", [1, 2, 12, 48, 100])
@pytest.mark.parametrize("heads", [1, 12, 64, 2048])
def test_it_stays_small_however_many_heads_there_are(layers, heads):
    tokens = length(layers, heads, 1024)
    assert layers * heads * tokens**2 <= MOST_BYTES
    assert tokens == MOST_TOKENS or layers * heads * (tokens + 1) ** 2 > MOST_BYTES
    assert length(layers, heads, 3) <= 3


def test_the_largest_can_be_read(tmp_path):
    own = rounded(weights(32, 32, 32))
    write(tmp_path, ABOUT, np.arange(32), own)
    assert (read(tmp_path / attention_map.NAME)[2] == own).all()


def packed(a_LHTT=None, tokens_T=TOKENS, **about):
    a_LHTT = rounded(weights()) if a_LHTT is None else a_LHTT
    own = dataclasses.asdict(ABOUT) | about
    known = {key: own[key] for key in dataclasses.asdict(ABOUT)}
    told = json.dumps([known, a_LHTT.shape], sort_keys=True).encode()
    digest = hashlib.sha256(told + a_LHTT.tobytes() + tokens_T.tobytes()).hexdigest()
    tensors = {"attention": a_LHTT, "tokens": tokens_T}
    own.setdefault("sha256", digest)
    return safetensors.numpy.save(tensors, {"about": json.dumps(own)})


AHEAD, LESS = rounded(weights()), rounded(weights())
AHEAD[1, 2, 0] = [100, 155, 0, 0, 0]
LESS[0, 0, 4] //= 2
DAMAGE = {
    "empty": b"",
    "torn": packed()[:-3],
    "text": b"hello" * 50,
    "a huge header": (2**62).to_bytes(8, "little") + b"{" * 100,
    "a deep header": (4000).to_bytes(8, "little") + b"[" * 4000,
    "looks ahead": packed(AHEAD),
    "no whole weights": packed(LESS),
    "another type": packed(weights().astype(np.float32)),
    "another shape": packed(rounded(weights())[0]),
    "no square": packed(rounded(weights())[:, :, :3]),
    "nothing in it": packed(np.zeros((0, 3, 5, 5), np.uint8)),
    "other tokens": packed(tokens_T=np.arange(4)),
    "no tokens": packed(rounded(weights())[:, :, :0, :0], np.arange(0)),
    "too many tokens": packed(rounded(weights(1, 1, 33)), np.arange(33)),
    "tokens in a square": packed(tokens_T=np.zeros((5, 5), np.int64)),
    "tokens below zero": packed(tokens_T=TOKENS - 1),
    "tokens that are no ids": packed(tokens_T=TOKENS.astype(np.float64)),
    "a word for a number": packed(step="250"),
    "true for a number": packed(step=True),
    "another checksum": packed(sha256="0" * 64),
    "more keys": packed(surprise=1),
    "no metadata": safetensors.numpy.save({"attention": rounded(weights())}),
    "another name": safetensors.numpy.save({"x": TOKENS}, {"about": "{}"}),
    "metadata that is no map": safetensors.numpy.save({"x": TOKENS}, {"about": "[1]"}),
}


def test_what_is_packed_here_is_what_is_written(file):
    assert packed() == file.read_bytes()


@pytest.mark.parametrize("name", DAMAGE)
def test_what_no_run_writes_is_refused_in_one_line(file, name):
    file.write_bytes(DAMAGE[name])
    with pytest.raises(ValueError, match=r"\w") as found:
        read(file)
    assert "\n" not in str(found.value)


def test_a_flipped_bit_is_noticed_wherever_it_is(file):
    content = bytearray(file.read_bytes())
    for place in range(len(content)):
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
