"""Predictions and attention maps on disk: reproducible bytes, hostile files refused."""

import dataclasses
import hashlib
import json
import os

import numpy as np
import pytest
import safetensors.numpy

from qkablate.runs.attention_map import (
    MAX_BYTES,
    AttentionMapHeader,
    quantize,
    read_attention_map,
    write_attention_map,
)
from qkablate.runs.predictions import PredictionsHeader, read_predictions, write_predictions

PREDICTIONS = PredictionsHeader("0123456789ab", 250, "f" * 64, "a" * 64, 5, 16)
ATTENTION_MAP = AttentionMapHeader("0123456789ab", 250, "f" * 64)
TOKENS = np.arange(5)


def log_probabilities(positions=5, vocabulary=7):
    raw = np.random.default_rng(0).normal(size=(positions, vocabulary))
    return (raw - np.log(np.exp(raw).sum(1, keepdims=True))).astype(np.float32)


def weights(layers=2, heads=3, tokens=5):
    raw = np.tril(np.random.default_rng(0).exponential(size=(layers, heads, tokens, tokens)))
    return raw / raw.sum(-1, keepdims=True)


def pack(header, tensors, **changes):
    """Content of a file, with the right checksum and then with these changes to the header."""
    fields = dataclasses.asdict(header) | changes
    fields = {key: value for key, value in fields.items() if key != "sha256"}
    known = {key: fields[key] for key in dataclasses.asdict(header)}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    digest = hashlib.sha256(json.dumps([known, shapes], sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(tensors[name].tobytes())
    fields["sha256"] = changes.get("sha256", digest.hexdigest())
    return safetensors.numpy.save(tensors, {"header": json.dumps(fields)})


def pack_predictions(log_PV=None, **changes):
    log_PV = log_probabilities() if log_PV is None else log_PV
    changes = {"positions": len(log_PV)} | changes
    return pack(PREDICTIONS, {"log_probabilities": log_PV}, **changes)


def pack_map(a_LHTT=None, tokens_T=TOKENS, **changes):
    a_LHTT = quantize(weights()) if a_LHTT is None else a_LHTT
    return pack(ATTENTION_MAP, {"attention": a_LHTT, "tokens": tokens_T}, **changes)


class Predictions:
    name, read, pack = "predictions/step-00000250.safetensors", read_predictions, pack_predictions

    @staticmethod
    def write(folder):
        write_predictions(folder, PREDICTIONS, log_probabilities())


class AttentionMap:
    name, read, pack = "attention_map.safetensors", read_attention_map, pack_map

    @staticmethod
    def write(folder):
        write_attention_map(folder, ATTENTION_MAP, TOKENS, quantize(weights()))


@pytest.fixture(params=[Predictions, AttentionMap], ids=lambda kind: kind.__name__)
def kind(request):
    return request.param


@pytest.fixture
def file(kind, tmp_path):
    kind.write(tmp_path)
    return tmp_path / kind.name


def test_predictions_are_read_as_written(tmp_path):
    Predictions.write(tmp_path)
    header, log_PV = read_predictions(tmp_path / Predictions.name)
    assert header == PREDICTIONS
    assert (log_PV == log_probabilities()).all()
    content = safetensors.numpy.load_file(tmp_path / Predictions.name)
    assert content["log_probabilities"].shape == (5, 7)


def test_attention_is_read_to_half_of_a_255th(tmp_path):
    AttentionMap.write(tmp_path)
    header, tokens_T, a_LHTT = read_attention_map(tmp_path / AttentionMap.name)
    assert header == ATTENTION_MAP
    assert tokens_T.tolist() == TOKENS.tolist()
    assert np.abs(a_LHTT / 255 - weights()).max() <= 0.5 / 255 + 1e-12


def test_largest_attention_map_can_be_read(tmp_path):
    a_LHTT = quantize(weights(32, 32, 32))
    assert a_LHTT.size == MAX_BYTES
    write_attention_map(tmp_path, ATTENTION_MAP, np.arange(32), a_LHTT)
    assert (read_attention_map(tmp_path / AttentionMap.name)[2] == a_LHTT).all()


def test_rewriting_gives_the_same_bytes_and_leaves_no_other_file(kind, file, tmp_path):
    before = file.read_bytes()
    assert before == kind.pack()
    (file.parent / f".{file.name}.dead.tmp").write_bytes(b"half")
    kind.write(tmp_path)
    assert file.read_bytes() == before
    assert {path.name for path in file.parent.iterdir()} - {"home"} == {file.name}


NAN, SHIFTED = log_probabilities(), log_probabilities() + np.float32(0.5)
NAN[2, 3] = np.nan
FUTURE, INCOMPLETE = quantize(weights()), quantize(weights())
FUTURE[1, 2, 0] = [100, 155, 0, 0, 0]
INCOMPLETE[0, 0, 4] //= 2
DAMAGED = {
    "empty": lambda kind: b"",
    "truncated": lambda kind: kind.pack()[:-3],
    "text": lambda kind: b"hello" * 50,
    "huge header": lambda kind: (2**62).to_bytes(8, "little") + b"{" * 100,
    "deep header": lambda kind: (4000).to_bytes(8, "little") + b"[" * 4000,
    "number as text": lambda kind: kind.pack(step="250"),
    "boolean as number": lambda kind: kind.pack(step=True),
    "wrong checksum": lambda kind: kind.pack(sha256="0" * 64),
    "unknown key": lambda kind: kind.pack(surprise=1),
    "no metadata": lambda kind: safetensors.numpy.save({"x": TOKENS}),
    "empty metadata": lambda kind: safetensors.numpy.save({"x": TOKENS}, {"header": "{}"}),
    "metadata not a map": lambda kind: safetensors.numpy.save({"x": TOKENS}, {"header": "[1]"}),
}
INVALID_PREDICTIONS = {
    "NaN": pack_predictions(NAN),
    "infinite": pack_predictions(
        np.where(np.arange(7) == 1, -np.inf, log_probabilities()).astype(np.float32)
    ),
    "not normalized": pack_predictions(SHIFTED),
    "wrong type": pack_predictions(log_probabilities().astype(np.float16)),
    "wrong shape": pack_predictions(log_probabilities().ravel()),
    "no positions": pack_predictions(np.zeros((0, 7), np.float32)),
    "step of another name": pack_predictions(step=251),
    "wrong position count": pack_predictions(positions=6),
    "boolean position count": pack_predictions(log_probabilities(1), positions=True),
    "other tensor": pack(PREDICTIONS, {"x": log_probabilities()}),
}
INVALID_MAPS = {
    "attends to the future": pack_map(FUTURE),
    "weights not normalized": pack_map(INCOMPLETE),
    "wrong type": pack_map(weights().astype(np.float32)),
    "wrong shape": pack_map(quantize(weights())[0]),
    "not square": pack_map(quantize(weights())[:, :, :3]),
    "no layers": pack_map(np.zeros((0, 3, 5, 5), np.uint8)),
    "other number of tokens": pack_map(tokens_T=np.arange(4)),
    "no tokens": pack_map(quantize(weights())[:, :, :0, :0], np.arange(0)),
    "too many tokens": pack_map(quantize(weights(1, 1, 33)), np.arange(33)),
    "two-dimensional tokens": pack_map(tokens_T=np.zeros((5, 5), np.int64)),
    "negative tokens": pack_map(tokens_T=TOKENS - 1),
    "tokens of another type": pack_map(tokens_T=TOKENS.astype(np.float64)),
    "tokens missing": pack(ATTENTION_MAP, {"attention": quantize(weights())}),
}


def assert_refused(read, file):
    with pytest.raises(ValueError, match=r"\w") as refused:
        read(file)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_file_is_refused_in_one_line(kind, file, name):
    file.write_bytes(DAMAGED[name](kind))
    assert_refused(kind.read, file)


@pytest.mark.parametrize("name", INVALID_PREDICTIONS)
def test_invalid_predictions_are_refused(tmp_path, name):
    Predictions.write(tmp_path)
    (tmp_path / Predictions.name).write_bytes(INVALID_PREDICTIONS[name])
    assert_refused(read_predictions, tmp_path / Predictions.name)


@pytest.mark.parametrize("name", INVALID_MAPS)
def test_invalid_attention_map_is_refused(tmp_path, name):
    (tmp_path / AttentionMap.name).write_bytes(INVALID_MAPS[name])
    assert_refused(read_attention_map, tmp_path / AttentionMap.name)


def test_every_flipped_bit_is_noticed(kind, file):
    content = bytearray(file.read_bytes())
    for position in range(len(content)):
        content[position] ^= 4
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"\w"):
            kind.read(file)
        content[position] ^= 4


def test_large_file_is_not_read(kind, file):
    with file.open("r+b") as opened:
        opened.truncate(10**10)
    with pytest.raises(ValueError, match="too large"):
        kind.read(file)


@pytest.mark.parametrize("replacement", ["folder", "pipe", "link", "nothing"])
def test_only_regular_files_are_read(kind, file, replacement, tmp_path):
    content = file.read_bytes()
    file.unlink()
    if replacement == "folder":
        file.mkdir()
    elif replacement == "pipe":
        os.mkfifo(file)
    elif replacement == "link":
        (tmp_path / "elsewhere").write_bytes(content)
        file.symlink_to(tmp_path / "elsewhere")
    assert_refused(kind.read, file)
