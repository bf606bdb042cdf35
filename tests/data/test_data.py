"""Text → tokens → batches."""

import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch

from qkablate.config import DataConfig
from qkablate.data import Batches, open_dataset, store, tokenizers, windows
from qkablate.data.sources import files
from qkablate.errors import UserError


@pytest.fixture
def cache(tmp_path):
    return str(tmp_path / "cache")


def test_stdlib(cache):
    dataset = open_dataset(DataConfig(cache=cache))
    assert dataset.tokens["val"] == dataset.tokens["test"] == 65536
    assert dataset.tokens["train"] > 5_000_000
    train = dataset.split("train")[:200_000].tobytes().decode("utf-8", "replace")
    assert "def " in train
    names = [str(file) for file in files(DataConfig())]
    assert not any("site-packages" in name or "/test/" in name for name in names)


def test_one_file_is_split_by_position(tmp_path, cache):
    path = tmp_path / "a.txt"
    content = bytes(np.random.default_rng(0).integers(97, 123, 4000, dtype=np.uint8))
    path.write_bytes(content)
    dataset = open_dataset(DataConfig(source="text", path=str(path), cache=cache))
    parts = [dataset.split(name).tobytes() for name in ("train", "val", "test")]
    assert [len(part) for part in parts] == [3600, 200, 200]
    assert b"".join(parts) == content


def test_a_folder_is_split_by_file(tmp_path, cache):
    folder = tmp_path / "texts"
    for i in range(60):
        path = folder / f"{i % 3}" / f"{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"<{i:02}>" * 50)
    (folder / "copy.txt").write_text("<00>" * 50)
    (folder / ".hidden").write_text("<99>" * 50)
    config = DataConfig(source="text", path=str(folder), cache=cache)
    dataset = open_dataset(config)
    found = {
        split: [bytes(d[:4]) for d in dataset.split(split).tobytes().split(b"\0") if d]
        for split in ("train", "val", "test")
    }
    everything = sorted(name for names in found.values() for name in names)
    assert everything == [f"<{i:02}>".encode() for i in range(60)]  # each once, in one split
    assert found["val"]
    assert found["test"]
    # The same files elsewhere, listed in another order, are the same data.
    other = tmp_path / "elsewhere"
    for file in sorted(folder.rglob("*.txt"), reverse=True):
        (other / file.name).parent.mkdir(exist_ok=True)
        (other / file.name).write_bytes(file.read_bytes())
    moved = open_dataset(DataConfig(source="text", path=str(other), cache=cache))
    assert moved.fingerprint == dataset.fingerprint


def test_bounds(tmp_path, cache):
    path = tmp_path / "a.txt"
    path.write_text("ab" * 5000)
    config = DataConfig(source="text", path=str(path), cache=cache, val_tokens=100, test_tokens=50)
    assert open_dataset(config).tokens == {"train": 9000, "val": 100, "test": 50}


def test_chars_and_bits_per_byte(tmp_path, cache):
    path = tmp_path / "a.txt"
    path.write_text("héllo wörld ∑ " * 300, encoding="utf-8")
    base = {"source": "text", "path": str(path), "cache": cache}
    chars = open_dataset(DataConfig(**base, tokenizer="chars"))
    assert chars.vocabulary == len(set("héllo wörld ∑ "))
    characters = json.loads((chars.folder / "manifest.json").read_text())["tokenizer"]["characters"]
    decoded = "".join(characters[i] for i in chars.split("val"))
    assert decoded in path.read_text(encoding="utf-8")
    assert chars.bytes["val"] == len(decoded.encode())
    # A loss of ln 2 per character is one bit per character.
    expected = chars.tokens["val"] / chars.bytes["val"]
    assert chars.bits_per_byte("val", float(np.log(2))) == pytest.approx(expected)
    plain = open_dataset(DataConfig(**base))
    assert plain.fingerprint != chars.fingerprint
    assert plain.bits_per_byte("val", float(np.log(2))) == pytest.approx(1)


@pytest.mark.parametrize("name", tokenizers.TOKENIZERS)
def test_decoding(tmp_path, cache, name):
    """What a dataset says of its tokenizer is enough to have it back, without the corpus."""
    path = tmp_path / "a.txt"
    text = "héllo wörld ∑𝄞\r\n\0\u2028\x85" * 300
    path.write_bytes(text.encode())
    config = DataConfig(source="text", path=str(path), cache=cache, tokenizer=name)
    dataset = open_dataset(config)
    parts = [dataset.split(split) for split in ("train", "val", "test")]
    tokenizer = tokenizers.load(json.loads(json.dumps(dataset.tokenizer)))
    assert tokenizer.vocabulary == dataset.vocabulary
    assert b"".join(tokenizer.decode(tokens) for tokens in parts) == text.encode()
    assert tokenizer.encode(text.encode()).tolist() == np.concatenate(parts).tolist()
    assert tokenizer.decode([]) == b""


def test_unknown_characters():
    assert tokenizers.Bytes().unknown("anything ∑") == ""
    chars = tokenizers.Chars.of([b"hello", "wörld".encode()])
    assert chars.describe() == {"name": "chars", "characters": "dehlorwö"}
    assert chars.unknown("wörld") == ""
    assert chars.unknown("Hey, hey 𝄞") == "Hy, 𝄞"  # each once, in their order


def test_the_order_of_characters_is_the_descriptions():
    tokenizer = tokenizers.load({"name": "chars", "characters": "ba"})
    assert tokenizer.encode(b"ab").tolist() == [1, 0]
    assert tokenizer.decode([1, 0]) == b"ab"


def test_changed_text_is_prepared_anew(tmp_path, cache):
    path = tmp_path / "a.txt"
    config = DataConfig(source="text", path=str(path), cache=cache)
    path.write_text("a" * 1000)
    before = open_dataset(config).fingerprint
    path.write_text("b" * 1000)
    os.utime(path, ns=(1, 1))
    assert open_dataset(config).fingerprint != before


def _open(arguments):
    config, started = arguments
    started.wait()  # all at the same moment
    return open_dataset(config).fingerprint


def test_many_runs_at_once_prepare_once(tmp_path, cache, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("abc " * 50_000)
    config = DataConfig(source="text", path=str(path), cache=cache)
    prepare, journal = store._prepare, tmp_path / "prepared"

    def counted(*arguments):
        with journal.open("a") as file:
            file.write("once\n")
        prepare(*arguments)

    monkeypatch.setattr(store, "_prepare", counted)
    context = multiprocessing.get_context("fork")
    with context.Manager() as manager, ProcessPoolExecutor(6, mp_context=context) as pool:
        barrier = manager.Barrier(6)
        assert len(set(pool.map(_open, [(config, barrier)] * 6))) == 1
    assert journal.read_text() == "once\n"
    assert len([f for f in (tmp_path / "cache").iterdir() if f.is_dir()]) == 1


def test_half_prepared_is_not_taken_for_whole(tmp_path, cache):
    path = tmp_path / "a.txt"
    path.write_text("abc " * 500)
    config = DataConfig(source="text", path=str(path), cache=cache)
    folder = open_dataset(config).folder
    with (folder / "train.bin").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(UserError, match=r"damaged \(train.bin has 100 bytes\)"):
        open_dataset(config)
    (folder / "manifest.json").unlink()
    assert open_dataset(config).tokens["train"] == 1800


@pytest.mark.parametrize("name", ["empty.txt", "binary.txt", "nothing.txt"])
def test_bad_files(tmp_path, cache, name):
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "binary.txt").write_bytes(b"abc\xff\xfe")
    with pytest.raises(UserError, match=r"data\.path"):
        open_dataset(DataConfig(source="text", path=str(tmp_path / name), cache=cache))


def test_batches_depend_on_seed_and_step_alone():
    tokens = np.arange(1000, dtype=np.uint16)

    def batches(**other):
        base = {"seed": 0, "batch_size": 4, "accumulate": 1, "context": 8}
        return Batches(tokens, **(base | other))

    (x, y), *_ = batches().step(7)
    assert x.shape == y.shape == (4, 8)
    assert torch.equal(x + 1, y)  # the target is the next token
    again = batches()
    for step in (3, 9, 1):
        again.step(step)  # other draws shift nothing
    assert torch.equal(again.step(7)[0][0], x)
    assert not torch.equal(batches(seed=1).step(7)[0][0], x)
    assert not torch.equal(batches().step(8)[0][0], x)
    parts = batches(batch_size=2, accumulate=2).step(7)
    assert torch.equal(torch.cat([part for part, _ in parts]), x)


def test_batches_reach_both_ends():
    tokens = np.arange(10, dtype=np.uint8)
    batches = Batches(tokens, seed=0, batch_size=8, accumulate=1, context=8)
    seen = [batches.step(step)[0] for step in range(9)]
    x, y = (torch.cat(part) for part in zip(*seen, strict=True))
    assert x.min() == 0
    assert y.max() == 9


@pytest.mark.parametrize("length", [2, 9, 16, 17, 40, 41])
def test_windows_predict_every_token_once(length):
    tokens = np.arange(length, dtype=np.uint8)
    parts = list(windows(tokens, batch_size=2, context=8))
    x, y = (torch.cat(part).flatten() for part in zip(*parts, strict=True))
    assert all(part[0].shape == (2, 8) for part in parts)
    counted = y[y != -100]
    assert counted.tolist() == list(range(1, length))
    assert torch.equal(x[y != -100] + 1, counted)
