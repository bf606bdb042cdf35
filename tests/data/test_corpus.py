"""Documents → splits → tokens on disk."""

import errno
import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkablate.config import DataConfig, ModelConfig
from qkablate.data import (
    IGNORE,
    EvalMetrics,
    corpus,
    document_store,
    open_data,
    prepare,
    sources,
    tokenizers,
)
from qkablate.data.corpus import open_corpus
from qkablate.errors import UserError
from qkablate.strict_json import hash_json

SPLITS = ("train", "val", "test")


@pytest.fixture
def cache(tmp_path):
    return str(tmp_path / "cache")


@pytest.fixture
def folder(tmp_path):
    """Return a folder with sixty documents, one of them twice."""
    folder = tmp_path / "texts"
    for i in range(60):
        path = folder / f"{i % 3}" / f"{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"<{i:02}>" * 50)
    (folder / "copy.txt").write_text("<00>" * 50)
    return folder


def text(prepared, split):
    tokenizer = tokenizers.load_tokenizer(prepared.tokenizer)
    return tokenizer.decode(prepared.split(split).tolist())


def parts(prepared):
    return {split: [d for d in text(prepared, split).split(b"\0") if d] for split in SPLITS}


def hash_of(text):
    return hashlib.sha256(text).digest()


def test_standard_library_is_a_corpus(cache):
    prepared = open_corpus(DataConfig(cache=cache))
    assert prepared.tokens["val"] == prepared.tokens["test"] == 65536
    assert prepared.tokens["train"] > 5_000_000
    assert "def " in prepared.split("train")[:200_000].tobytes().decode("utf-8", "replace")


@pytest.mark.parametrize("tokens", [131_072, 1_000_000])
def test_held_out_text_of_the_standard_library_is_many_documents(cache, tokens):
    prepared = open_corpus(DataConfig(cache=cache, val_tokens=tokens, test_tokens=tokens))
    train = prepared.split("train").tobytes()
    trained = {hash_of(document) for document in train.split(b"\0")}
    documents = {hash_of(f.read_bytes()): f.read_bytes() for f in sources.find_files(DataConfig())}
    rest = b"\0".join(text for digest, text in documents.items() if digest not in trained)
    for split in ("val", "test"):
        assert prepared.tokens[split] > 0.95 * tokens
        held_out = parts(prepared)[split]
        assert len(held_out) == prepared.manifest.documents[split] >= 50
        assert max(map(len, held_out)) < tokens / 25
        # Each is an excerpt of a document of which nothing is trained on.
        assert all(excerpt in rest for excerpt in held_out)
    groups = prepared.document_groups("test")
    assert len(groups) == prepared.tokens["test"]
    ends = np.flatnonzero(np.diff(groups))
    assert (prepared.split("test")[ends] == 0).all()  # a document ends there
    assert len(ends) == prepared.manifest.documents["test"] - 1


@given(st.lists(st.integers(1, 50), max_size=8), st.integers(1, 300))
def test_filling_limit_is_the_smallest_that_fills(sizes, total):
    limit = prepare._filling_limit(np.array(sizes, dtype=np.int64), total)

    def filled(limit):
        return sum(min(size, limit) for size in sizes)

    if sum(sizes) < total:
        assert limit == max(sizes, default=0)
    else:
        assert filled(limit) >= total > filled(limit - 1)


def test_long_documents_are_cut_to_excerpts_of_whole_characters(tmp_path, cache):
    texts = [f"{i:03}" + "é∑𝄞" * 3000 for i in range(600)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts))
    config = DataConfig(source="text", path=str(tmp_path / "a.jsonl"), cache=cache)
    found = parts(open_corpus(config))
    for split in ("val", "test"):
        held_out = [document.decode() for document in found[split][:-1]]
        assert len(held_out) > 5
        assert len({document[:2] for document in held_out}) > 1  # not all from the start
        assert max(len(d.encode()) for d in held_out) <= 65536 / 5
    assert max(map(len, found["train"])) == 3 + 9 * 3000


def test_losses_of_the_test_split_are_counted_by_document(folder, cache):
    config = DataConfig(source="text", path=str(folder), cache=cache)
    prepared = open_corpus(config)
    batches = [*prepared.split_batches("test", batch_size=2, context=16)]
    counted = np.concatenate(
        [b.slices["document"][b.targets_NA.numpy() != IGNORE] for b in batches]
    )
    assert len(counted) == prepared.tokens["test"] - 1
    ends = prepared.document_ends("test")
    assert np.bincount(counted).tolist() == np.diff(ends, prepend=1).tolist()
    assert next(prepared.split_batches("val", batch_size=2, context=16)).slices is None


def test_a_limit_reads_the_beginning_of_the_test_split(folder, cache):
    """So runs of one limit read the same text, and those of a larger one all of it and more."""
    prepared = open_corpus(DataConfig(source="text", path=str(folder), cache=cache))

    def read(limit):
        batches = prepared.split_batches("test", batch_size=3, context=16, limit=limit)
        return [t for b in batches for t in b.targets_NA.flatten().tolist() if t != IGNORE]

    whole = read(None)
    assert whole == prepared.split("test").tolist()[1:]
    for limit in (1, 2, 50, len(whole) // 2):
        assert read(limit) == whole[: max(2, limit) - 1]
        assert prepared.test_tokens(limit) == max(2, limit)
    assert read(10**9) == whole
    assert prepared.test_tokens(10**9) == prepared.test_tokens(None) == prepared.tokens["test"]


def test_very_many_documents_are_grouped(folder, cache, monkeypatch):
    monkeypatch.setattr("qkablate.data.batches.MAX_DOCUMENT_GROUPS", 2)
    prepared = open_corpus(DataConfig(source="text", path=str(folder), cache=cache))
    assert prepared.manifest.documents["test"] > 2
    assert [*np.unique(prepared.document_groups("test"))] == [0, 1]


def test_one_file_is_split_by_position(tmp_path, cache):
    path = tmp_path / "a.txt"
    content = bytes(np.random.default_rng(0).integers(97, 123, 4000, dtype=np.uint8))
    path.write_bytes(content)
    prepared = open_corpus(DataConfig(source="text", path=str(path), cache=cache))
    assert [len(text(prepared, split)) for split in SPLITS] == [3600, 200, 200]
    assert b"".join(text(prepared, split) for split in SPLITS) == content
    assert prepared.manifest.documents == dict.fromkeys(SPLITS, 1)


@pytest.mark.parametrize("tokenizer", ["bytes", "chars", "bpe"])
def test_splits_keep_characters_whole(tmp_path, cache, tokenizer):
    path = tmp_path / "a.txt"
    content = "∑𝄞é\r\n\u2028" * 700
    path.write_bytes(content.encode())
    config = DataConfig(
        source="text", path=str(path), cache=cache, tokenizer=tokenizer, vocab_size=300
    )
    found = [text(open_corpus(config), split).decode() for split in SPLITS]
    assert "".join(found) == content


@pytest.fixture
def rows(tmp_path):
    """Write a file with these documents."""

    def write(numbers, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("\n".join(json.dumps({"text": f"<{i:04}>" * 9}) for i in numbers))
        return path

    return write


def split_of(i):
    """Return the split of a document by its hash."""
    place = int.from_bytes(hash_of(f"<{i:04}>".encode() * 9)[:8]) / 2**64
    return "test" if place < 0.03 else "val" if place < 0.06 else "train"


@pytest.mark.parametrize("tokenizer", ["bytes", "chars", "bpe"])
def test_many_documents_are_split_by_their_hashes(rows, cache, tokenizer):
    base = {"source": "text", "cache": cache, "tokenizer": tokenizer, "vocab_size": 300}
    prepared = open_corpus(DataConfig(**base, path=str(rows([*range(1000), *range(50)]))))
    found = parts(prepared)
    for split in SPLITS:
        own = [f"<{i:04}>".encode() * 9 for i in range(1000) if split_of(i) == split]
        assert found[split] == sorted(own, key=hash_of)  # each once, in the order of their hashes
    # In another file and order it is the same data.
    other = rows(reversed(range(1000)), "other.jsonl")
    assert open_corpus(DataConfig(**base, path=str(other))).fingerprint == prepared.fingerprint


def test_held_out_documents_stay_held_out(rows, cache):
    """With more text or other bounds, held-out documents are never trained on."""
    held_out, trained = set(), set()
    for number, (count, keys) in enumerate(
        [(400, {}), (1000, {}), (1000, {"max_tokens": 30_000}), (1000, {"val_tokens": 100})]
    ):
        path = rows(range(count), f"{number}.jsonl")
        prepared = open_corpus(DataConfig(source="text", path=str(path), cache=cache, **keys))
        found = parts(prepared)
        held_out |= {d[:6] for split in ("val", "test") for d in found[split]}
        trained |= {d[:6] for d in found["train"]}
        if keys.get("max_tokens"):
            assert prepared.tokens["train"] == 30_000
    assert not held_out & trained


@pytest.mark.parametrize("count", [2, 3, 7, 60, 299])
def test_few_documents_are_split_by_position(tmp_path, cache, count):
    texts = [bytes([97 + i % 26]) * (6000 // count + i) for i in range(count)]
    (tmp_path / "texts").mkdir()
    for i, text_ in enumerate(texts):
        (tmp_path / "texts" / f"{i}.txt").write_bytes(text_)
    config = DataConfig(source="text", path=str(tmp_path / "texts"), cache=cache)
    prepared = open_corpus(config)
    found = parts(prepared)
    order = sorted({*texts}, key=hash_of)
    joined = [b"".join(found[split]) for split in SPLITS]
    assert b"".join(joined) == b"".join(order)  # nothing is lost, nothing stands twice
    total = sum(map(len, joined))
    assert 0.85 * total < len(joined[0]) < 0.95 * total
    assert all(0.02 * total < len(part) < 0.08 * total for part in joined[1:])
    if count >= 60:  # short ones are not cut
        assert all(document in order for split in SPLITS for document in found[split])


@pytest.mark.slow
@given(
    st.lists(st.text("é∑\n", min_size=40, max_size=60), min_size=4, max_size=30),
    st.sampled_from(["bytes", "chars", "bpe"]),
    st.integers(2, 50),
)
@settings(max_examples=60, deadline=None)
def test_splits_are_disjoint_and_bounded(tmp_path_factory, texts, tokenizer, room):
    """Each document is in one split, once; val and test are within their bounds."""
    texts = [chr(65 + i) + text for i, text in enumerate(texts)]
    texts += texts[::3]  # some of them twice
    folder = tmp_path_factory.mktemp("any")
    rows = "\n".join(json.dumps({"text": t}) for t in texts)
    (folder / "a.jsonl").write_text(rows)
    config = DataConfig(
        source="text",
        path=str(folder / "a.jsonl"),
        cache=str(folder / "cache"),
        tokenizer=tokenizer,
        vocab_size=260,
        val_tokens=room,
        test_tokens=room,
    )
    prepared = open_corpus(config)
    unique = {*texts}
    for split in ("val", "test"):
        assert 2 <= prepared.tokens[split] <= room
    assert prepared.manifest.documents["train"] <= len(unique)
    assert len(parts(prepared)["train"]) == len({*parts(prepared)["train"]})
    assert all(len(text(prepared, s)) == prepared.manifest.bytes[s] for s in SPLITS)


def test_splits_respect_their_bounds(tmp_path, cache):
    path = tmp_path / "a.txt"
    path.write_text("ab" * 5000)
    base = {"source": "text", "path": str(path), "cache": cache}
    config = DataConfig(**base, val_tokens=100, test_tokens=50)
    assert open_corpus(config).tokens == {"train": 9000, "val": 100, "test": 50}
    config = DataConfig(**base, max_tokens=1234)
    assert open_corpus(config).tokens == {"train": 1234, "val": 500, "test": 500}


def test_max_tokens_does_not_change_held_out_text(rows, cache):
    base = {"source": "text", "path": str(rows(range(1000))), "cache": cache}
    whole, part = open_corpus(DataConfig(**base)), open_corpus(DataConfig(**base, max_tokens=900))
    assert part.tokens["train"] == 900
    for split in ("val", "test"):
        assert text(part, split) == text(whole, split)


@pytest.mark.slow
def test_truncated_stream_is_split_by_hash(rows, cache):
    """However few documents are read, the split of each is that in the whole data set."""
    path = str(rows(range(1000)))
    keys = {"source": "hub", "name": "json", "files": path, "tokenizer": "bytes", "cache": cache}
    prepared = open_corpus(DataConfig(**keys, max_tokens=9000))
    assert prepared.tokens["train"] == 9000
    found = parts(prepared)
    assert sum(map(len, found.values())) < 300
    for split in SPLITS:
        assert all(split_of(int(d[1:5])) == split for d in found[split])
    with pytest.raises(UserError, match=r"nothing is left for \w+; raise data\.max_tokens"):
        open_corpus(DataConfig(**keys, max_tokens=100))


def test_duplicates_are_counted(rows, cache):
    path = str(rows([*range(400), *range(41)]))
    prepared = open_corpus(DataConfig(source="text", path=path, cache=cache))
    assert prepared.manifest.duplicates == 41


def test_bpe_is_learned_from_training_text_only(rows, cache, monkeypatch):
    seen = []

    def learn(texts, size, progress):
        seen.extend(texts)
        return [bytes([i]) for i in range(256)]

    monkeypatch.setattr(tokenizers.bpe, "learn_tokens", learn)
    path = rows(range(1000))
    config = DataConfig(source="text", path=str(path), cache=cache, tokenizer="bpe", vocab_size=257)
    prepared = open_corpus(config)
    assert {t.encode() for t in seen} == {*parts(prepared)["train"]}
    assert len(seen) > 900


def test_bits_per_byte_are_comparable_across_tokenizers(tmp_path, cache):
    path = tmp_path / "a.txt"
    path.write_text("héllo wörld ∑ " * 300, encoding="utf-8")
    base = {"source": "text", "path": str(path), "cache": cache}
    chars = open_corpus(DataConfig(**base, tokenizer="chars"))
    assert chars.vocabulary == len(set("héllo wörld ∑ "))
    # A loss of ln 2 per character is one bit per character.
    expected = chars.tokens["val"] / chars.manifest.bytes["val"]
    assert chars.bits_per_byte("val", float(np.log(2))) == pytest.approx(expected)
    plain = open_corpus(DataConfig(**base))
    assert plain.fingerprint != chars.fingerprint
    assert plain.bits_per_byte("val", float(np.log(2))) == pytest.approx(1)
    # The same text, whatever the tokens.
    bpe = open_corpus(DataConfig(**base, tokenizer="bpe", vocab_size=280))
    assert bpe.manifest.bytes == plain.manifest.bytes == chars.manifest.bytes
    assert bpe.tokens["train"] < chars.tokens["train"] < plain.tokens["train"]
    assert bpe.manifest.dtype == "uint16"


def test_bits_per_byte_of_a_part_are_of_the_bytes_that_were_read(tmp_path, cache):
    path = tmp_path / "a.txt"
    path.write_text("a" * 2000 + "∑" * 60 + "b" * 40, encoding="utf-8")  # 60 × 3 + 40 bytes
    config = DataConfig(source="text", path=str(path), cache=cache, tokenizer="chars")
    chars = open_corpus(config)

    def measure(limit):
        totals = EvalMetrics()
        for batch in chars.split_batches("test", batch_size=2, context=8, limit=limit):
            count = int((batch.targets_NA != IGNORE).sum())
            totals.add_loss(float(np.log(2)) * count, count)
        return chars.metrics("test", totals)["bits_per_byte"]

    text_ = text(chars, "test").decode()
    assert len({*text_}) == 2
    for limit in (10, 50, len(text_) - 1, len(text_), 10**6):
        part = text_[:limit]
        assert measure(limit) == pytest.approx(len(part) / len(part.encode()))
    assert measure(None) == chars.bits_per_byte("test", float(np.log(2)))
    assert measure(10) == pytest.approx(1 / 3)


def test_bits_per_byte_of_a_part_need_the_files_of_the_tokenizer(folder, cache, monkeypatch):
    prepared = open_corpus(DataConfig(source="text", path=str(folder), cache=cache))

    def load(_):
        raise UserError("the files of 'gpt2' are not cached")

    monkeypatch.setattr(corpus, "load_tokenizer", load)
    count = prepared.tokens["test"] - 1
    for answers, known in ((count, {"loss", "bits_per_byte"}), (count - 1, {"loss"})):
        totals = EvalMetrics()
        totals.add_loss(1.0, answers)
        assert {*prepared.metrics("test", totals)} == known


def test_changed_text_is_prepared_again(tmp_path, cache):
    path = tmp_path / "a.txt"
    config = DataConfig(source="text", path=str(path), cache=cache)
    path.write_text("a" * 1000)
    before = open_corpus(config).fingerprint
    path.write_text("b" * 1000)
    os.utime(path, ns=(1, 1))
    assert open_corpus(config).fingerprint != before


def test_manifest_describes_the_corpus(folder, cache):
    config = DataConfig(source="text", path=str(folder), cache=cache)
    prepared = open_corpus(config)
    manifest = json.loads((prepared.folder / "manifest.json").read_text())
    assert manifest["sources"] == {"source": "text", "path": str(folder)}
    assert manifest["split"] == "by position: the last 5 % each for val and test"
    assert sum(manifest["documents"].values()) == 60
    assert {"tokens", "bytes", "sha256", "tokenizer_sha256", "fingerprint"} <= set(manifest)
    for split in SPLITS:
        data = (prepared.folder / f"{split}.bin").read_bytes()
        assert hashlib.sha256(data).hexdigest() == manifest["sha256"][split]
    assert {f.name for f in prepared.folder.iterdir()} == {
        *("manifest.json", "tokenizer.json", "train.bin", "val.bin", "test.bin"),
        *("val.ends.bin", "test.ends.bin"),
    }


def test_text_prepared_before_files_were_recorded_is_read(folder, cache):
    config = DataConfig(source="text", path=str(folder), cache=cache)
    prepared = open_corpus(config)
    path = prepared.folder / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["files_sha256"]
    own = hash_json({key: value for key, value in manifest.items() if key != "checksum"})
    assert manifest["checksum"] == own
    path.write_text(json.dumps(manifest))
    assert open_corpus(config).manifest == prepared.manifest
    assert prepared.document_files("test") is None


@pytest.mark.exhaustive
def test_tokens_do_not_depend_on_threads_or_hash_seed(folder, cache, monkeypatch, tmp_path):
    """Processes differ in string hashes and numbers of threads."""
    words = ["data=text", f"data.path={folder}", "data.tokenizer=bpe", "data.vocab_size=290"]
    found = set()
    for number, threads in enumerate((1, 2, 7)):
        code = (
            "import sys; from qkablate.data import writer; from qkablate.cli import main;"
            f"writer.THREADS = {threads}; main(sys.argv[1:])"
        )
        own = [*words, f"data.cache={tmp_path / str(number)}"]
        run = [sys.executable, "-c", code, "data"]
        environment = {**os.environ, "PYTHONHASHSEED": str(number)}
        subprocess.run([*run, "prepare", *own], check=True, env=environment, capture_output=True)
        told = subprocess.run([*run, "info", *own, "--json"], check=True, capture_output=True)
        found.add(json.loads(told.stdout)["fingerprint"])
    assert len(found) == 1


def _open(arguments):
    config, started = arguments
    started.wait()  # all at the same moment
    return open_corpus(config).fingerprint


def test_concurrent_runs_prepare_once(tmp_path, cache, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("abc " * 50_000)
    config = DataConfig(source="text", path=str(path), cache=cache)
    prepare, journal = corpus._prepare, tmp_path / "prepared"

    def counted(*arguments):
        with journal.open("a") as file:
            file.write("once\n")
        prepare(*arguments)

    monkeypatch.setattr(corpus, "_prepare", counted)
    context = multiprocessing.get_context("fork")
    with context.Manager() as manager, ProcessPoolExecutor(6, mp_context=context) as pool:
        barrier = manager.Barrier(6)
        assert len(set(pool.map(_open, [(config, barrier)] * 6))) == 1
    assert journal.read_text() == "once\n"
    assert len([f for f in (tmp_path / "cache").iterdir() if f.is_dir()]) == 1


def _killed(config, where):
    """Prepare, and die by SIGKILL after a number of pieces of text."""
    stage, count = where
    left = [count]

    def die(*_):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    if stage == "reading":
        budget = document_store.TokenBudget
        estimate = budget.estimate_tokens
        budget.estimate_tokens = lambda self, piece: (die(), estimate(self, piece))[1]
    else:
        encode = tokenizers.ByteTokenizer.encode
        tokenizers.ByteTokenizer.encode = lambda self, piece: (die(), encode(self, piece))[1]
    open_corpus(config)
    os._exit(0)


@pytest.mark.parametrize(
    "where", [("reading", 3), ("reading", 60), ("writing", 0), ("writing", 30)]
)
def test_killed_preparation_starts_clean(folder, cache, where):
    config = DataConfig(source="text", path=str(folder), cache=cache)
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_killed, args=(config, where))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    (left,) = [f for f in folder.parent.joinpath("cache").iterdir() if f.is_dir()]
    assert left.suffix == ".tmp"
    assert (left / "documents").exists()
    prepared = open_corpus(config)
    assert sum(prepared.manifest.documents.values()) == 60
    assert not left.exists()


@pytest.mark.slow
def test_sigterm_leaves_no_temporary_files(tmp_path, cache, spawn):
    """Clusters end jobs by SIGTERM."""
    path = tmp_path / "a.txt"
    path.write_text("".join(f"{i} word\n" for i in range(3_000_000)))
    words = ["data=text", f"data.path={path}", f"data.cache={cache}", "data.tokenizer=bpe"]
    process = spawn("data", "prepare", *words)
    while not list(tmp_path.glob("cache/*.tmp/documents")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert not [f for f in (tmp_path / "cache").iterdir() if f.suffix != ".lock"]


def test_other_files_in_the_cache_are_kept(folder, cache, tmp_path):
    (tmp_path / "cache" / "thesis.tmp").mkdir(parents=True)
    open_corpus(DataConfig(source="text", path=str(folder), cache=cache))
    assert (tmp_path / "cache" / "thesis.tmp").exists()


def test_prepared_files_follow_the_umask(folder, cache):
    """All users of a cluster can share them, depending on the umask."""
    prepared = open_corpus(DataConfig(source="text", path=str(folder), cache=cache))
    mask = os.umask(0)
    os.umask(mask)
    assert prepared.folder.stat().st_mode & 0o777 == 0o777 & ~mask


@pytest.mark.parametrize(
    ("name", "damage", "line"),
    [
        ("train.bin", lambda b: b[:100], "train.bin has 100 bytes"),
        ("val.bin", lambda b: b"x" + b[1:], "the checksum of val.bin is wrong"),
        ("test.bin", lambda b: b + b"x", "test.bin has"),
        ("manifest.json", lambda b: b[:-5], "damaged"),
        ("manifest.json", lambda b: b"[]", "damaged"),
        ("manifest.json", lambda b: b.replace(b'"uint8"', b'"nonsense"'), "dtype is not of type"),
        (
            "manifest.json",
            lambda b: b.replace(b'vocabulary": 256', b'vocabulary": 300'),
            "checksum",
        ),
        ("manifest.json", lambda b: b.replace(b'"bytes": {', b'"bytes": {"x": 1,'), "checksum"),
        ("tokenizer.json", lambda b: b'{"name": "chars", "characters": "ab"}', "checksum"),
        ("tokenizer.json", lambda b: b"", "damaged"),
    ],
)
def test_damaged_file_is_named(tmp_path, cache, name, damage, line):
    path = tmp_path / "a.txt"
    path.write_text("abc " * 500)
    config = DataConfig(source="text", path=str(path), cache=cache)
    folder = open_corpus(config).folder
    (folder / name).write_bytes(damage((folder / name).read_bytes()))
    with pytest.raises(UserError, match="is damaged") as error:
        open_corpus(config)
    assert line in str(error.value)
    assert "remove that folder" in str(error.value)
    (folder / "manifest.json").unlink()
    assert open_corpus(config).tokens["train"] == 1800


def test_token_beyond_the_vocabulary_is_rejected(tmp_path, cache, monkeypatch):
    """Even if all checksums are right."""
    path = tmp_path / "a.txt"
    path.write_text("abc " * 500)
    monkeypatch.setattr(tokenizers.ByteTokenizer, "vocabulary", 98)
    with pytest.raises(UserError, match=r"train\.bin has a token beyond the vocabulary"):
        open_corpus(DataConfig(source="text", path=str(path), cache=cache))


@pytest.mark.parametrize("content", [b"", b"abc\xff\xfe", b"abc", bytes(5000)])
def test_invalid_text_leaves_no_files(tmp_path, cache, content):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(UserError, match=r"data\.path: '.*a\.txt' is (empty|n|too)"):
        open_corpus(DataConfig(source="text", path=str(tmp_path / "a.txt"), cache=cache))
    assert not [f for f in (tmp_path / "cache").iterdir() if f.suffix != ".lock"]


def test_full_disk_leaves_no_files(tmp_path, cache, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("abc " * 500)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tokenizers.ByteTokenizer, "encode", full)
    with pytest.raises(UserError, match=r"data\.cache: cannot write in '.*': No space left"):
        open_corpus(DataConfig(source="text", path=str(path), cache=cache))
    assert not [f for f in (tmp_path / "cache").iterdir() if f.suffix != ".lock"]


@pytest.mark.parametrize("key", ["path", "cache"])
@pytest.mark.parametrize("value", ["x" * 300, "~nosuchuser/x", "/dev/null/x"])
def test_unusual_paths_are_rejected_or_prepared(tmp_path, cache, key, value):
    (tmp_path / "a.txt").write_text("abc " * 500)
    config = DataConfig(source="text", path=str(tmp_path / "a.txt"), cache=cache)
    setattr(config, key, value)
    if (key, value) == ("cache", "~nosuchuser/x"):  # a folder of that name
        assert open_corpus(config).folder.parent.parent.name == "~nosuchuser"
        return
    with pytest.raises(UserError, match=rf"data\.{key}: "):
        open_corpus(config)


def test_corpus_shorter_than_a_window_is_rejected(tmp_path, cache):
    path = tmp_path / "a.txt"
    path.write_text("abc " * 50)
    data = open_data(DataConfig(source="text", path=str(path), cache=cache), ModelConfig())
    with pytest.raises(UserError, match=r"model\.context: 64 is longer than the data: the val"):
        data.check_context(64)
