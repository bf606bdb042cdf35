"""Text by the library `datasets`: folders, the Hub, what HF_HOME keeps of it, no network at all.

The Hub here is a server on this machine. Nothing reaches the real one.
"""

import hashlib
import io
import json
import shutil
import time
import zipfile
from pathlib import Path

import pytest

from qkablate.compose.configs import make_config, open_hydra
from qkablate.config import DataConfig
from qkablate.data import open_data
from qkablate.data.corpus import open_corpus
from qkablate.data.hub import FILE_FORMATS, OTHER_READERS, find_local_files
from qkablate.errors import UserError
from tests.data import fake_hub
from tests.data.fake_hub import commit, serving

CARD = b"""---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/first-*
  - split: validation
    path: data/second-*
  - split: test
    path: data/third-*
---
"""
PUBLISHED = {
    "train": [f"to learn from, {i}" for i in range(40)],
    "val": ["to stop by", "ähnlich ∑"],
    "test": ["to be judged by", "once"],
}


@pytest.fixture
def missing_server():
    """Return the address of a missing server."""
    with fake_hub.missing_server() as address:
        yield address


@pytest.fixture
def silent():
    """Return the address of a server that accepts connections and never answers."""
    with fake_hub.silent_server() as address:
        yield address


@pytest.fixture(autouse=True)
def point(tmp_path, monkeypatch, missing_server):
    """Give both libraries an empty HF_HOME and no Hub, or the one the test chooses."""
    import datasets.config as datasets_config
    from huggingface_hub import HfFileSystem

    hf_home = tmp_path / "hf"
    fake_hub.isolate_client(monkeypatch, hf_home)
    monkeypatch.setenv("HF_UPDATE_DOWNLOAD_COUNTS", "0")
    for name, value in {
        "HF_CACHE_HOME": str(hf_home),
        "HF_DATASETS_CACHE": hf_home / "datasets",
        "DOWNLOADED_DATASETS_PATH": hf_home / "datasets" / "downloads",
        "EXTRACTED_DATASETS_PATH": hf_home / "datasets" / "downloads" / "extracted",
        "HF_UPDATE_DOWNLOAD_COUNTS": False,  # another server, and so is the next
        "USE_PARQUET_EXPORT": False,
        "HF_HUB_OFFLINE": False,
    }.items():
        monkeypatch.setattr(datasets_config, name, value)

    def to(address):
        fake_hub.point_client(monkeypatch, address)
        monkeypatch.setattr(datasets_config, "HF_ENDPOINT", address)
        urls = f"{address}/datasets/{{repo_id}}/resolve/{{revision}}/{{path}}"
        monkeypatch.setattr(datasets_config, "HUB_DATASETS_URL", urls)
        HfFileSystem.clear_instance_cache()

    to(missing_server)
    return to


@pytest.fixture
def hub(point):
    with serving() as hub:
        point(hub.address)
        yield hub


@pytest.fixture
def hf_home(tmp_path):
    """Return HF_HOME."""
    return tmp_path / "hf"


def prepared(name, **words):
    return open_corpus(
        DataConfig(
            name=str(name), **{"source": "hub", "tokenizer": "bytes", "cache": "cache"} | words
        )
    )


def refused(name, **words):
    """Return the one-line error, and assert that no file is left."""
    before = {path for path in Path("cache").glob("*") if path.suffix != ".lock"}
    with pytest.raises(UserError) as error:
        prepared(name, **words)
    assert {path for path in Path("cache").glob("*") if path.suffix != ".lock"} == before
    (line,) = str(error.value).splitlines()
    return line


def split(corpus, name):
    return corpus.split(name).tobytes().decode()


def closed(documents):
    """Return documents as a split holds them: with their ends, in the order of their hashes."""
    ordered = sorted(documents, key=lambda text: hashlib.sha256(text.encode()).digest())
    return "".join(f"{text}\0" for text in ordered)


def place(text):
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64


def assert_published(corpus, **other):
    for name, documents in (PUBLISHED | other).items():
        assert split(corpus, name) == closed(documents)
    assert corpus.manifest.split == "as published"


def jsonl(texts, **columns):
    columns = {"text": texts, **columns}
    lines = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return rows_of_json(lines)


def rows_of_json(rows):
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def parquet(texts, **columns):
    return rows_of_parquet(text=texts, **columns)


def rows_of_parquet(**columns):
    import pyarrow
    import pyarrow.parquet

    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()


def published(parts=1):
    """Return the files of a data set with three splits, the first in several parts."""
    train = PUBLISHED["train"]
    size = len(train) // parts
    files = {
        f"data/first-{i:05}-of-{parts:05}.parquet": parquet(train[i * size : (i + 1) * size])
        for i in range(parts)
    }
    for name, split in (("second", "val"), ("third", "test")):
        files[f"data/{name}-00000-of-00001.parquet"] = parquet(PUBLISHED[split])
    return {"README.md": CARD, **files}


def subsets():
    """Return the files of a data set with two subsets."""
    path = "- config_name: {0}\n  data_files:\n  - split: train\n    path: {0}/*\n"
    card = f"---\nconfigs:\n{path.format('small')}{path.format('large')}---\n".encode()
    texts = {name: [f"{name} {i}" for i in range(40)] for name in ("small", "large")}
    files = {f"{name}/rows.jsonl": jsonl(text) for name, text in texts.items()}
    return {"README.md": card, **files}


def write(folder, files):
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder


def keep(hf_home, name, files, revision="main"):
    """Store files like the Hub's client in HF_HOME; return the snapshot."""
    place = hf_home / "hub" / f"datasets--{name.replace('/', '--')}"
    write(place, {f"refs/{revision}": commit(files).encode()})
    return write(place / "snapshots" / commit(files), files)


# A folder, or files


@pytest.mark.parametrize(("made", "suffix"), [(parquet, "parquet"), (jsonl, "jsonl")])
def test_published_split_is_kept(tmp_path, made, suffix):
    names = {"train": "first", "val": "second", "test": "third"}
    files = {f"data/{names[s]}-0.{suffix}": made(texts) for s, texts in PUBLISHED.items()}
    corpus = prepared(write(tmp_path / "set", {"README.md": CARD, **files}))
    assert_published(corpus)
    assert corpus.tokenizer == {"name": "bytes"}


def test_documents_without_split_are_split_by_hash(tmp_path):
    texts = [f"document {i:03} of all" for i in range(500)]
    corpus = prepared(write(tmp_path / "set", {"train.jsonl": jsonl(texts)}))
    found = [split(corpus, name) for name in ("test", "val", "train")]
    assert "".join(found) == closed(texts)  # in this order: the lowest hashes are held out
    assert [len(part) for part in found[:2]] == [
        len(closed([t for t in texts if low <= place(t) < low + 0.03])) for low in (0, 0.03)
    ]
    # Other files, in another order, some rows twice: the same data.
    files = {"b.parquet": parquet(texts[50:]), "a.parquet": parquet([*texts[49::-1], texts[0]])}
    other = prepared(write(tmp_path / "other", files))
    assert other.fingerprint == corpus.fingerprint


def test_test_documents_are_in_no_other_split(tmp_path):
    folder = write(tmp_path / "set", published())
    again = ["once", *PUBLISHED["train"], PUBLISHED["val"][0]]
    write(folder, {"data/first-00000-of-00001.parquet": parquet(again)})
    both = [*PUBLISHED["val"], "once"]
    write(folder, {"data/second-00000-of-00001.parquet": parquet(both)})
    assert_published(prepared(folder))


def test_published_validation_split_alone_is_kept(tmp_path):
    folder = write(tmp_path / "set", published())
    card = CARD.replace(b"  - split: test\n    path: data/third-*\n", b"")
    corpus = prepared(write(folder, {"README.md": card}))
    assert split(corpus, "val") == closed(PUBLISHED["val"])
    # So few are split by position.
    assert split(corpus, "train") + split(corpus, "test") == closed(PUBLISHED["train"])
    assert 0 < len(split(corpus, "test")) < 0.1 * len(closed(PUBLISHED["train"]))


@pytest.mark.parametrize(("made", "suffix"), [(parquet, "parquet"), (jsonl, "jsonl")])
def test_text_column_can_be_chosen(tmp_path, made, suffix):
    texts = [f"title {i}" for i in range(40)]
    bodies, numbers = [f"body {i}" for i in range(40)], list(range(40))
    train = made(texts, body=bodies, number=numbers)
    test = made(["a title"], body=["a body"], number=[1])
    folder = write(tmp_path / "set", {f"train.{suffix}": train, f"test.{suffix}": test})
    corpus = prepared(folder, field="body")
    assert split(corpus, "test") == "a body\0"
    assert "title" not in split(corpus, "train")
    line = refused(folder, field="bodies")
    assert line.startswith("data.field: ")
    assert "'bodies'; it has text, body, number" in line
    assert refused(folder, field="number").startswith("data.field: 'number' of ")


def test_rows_without_text_are_skipped(tmp_path):
    texts, other = ["a", None, "", "b"], ["some more to learn from", None] * 3
    folder = write(tmp_path / "set", {"train.jsonl": jsonl(other * 9), "test.jsonl": jsonl(texts)})
    corpus = prepared(folder)
    assert split(corpus, "test") == closed(["a", "b"])


def test_lines_are_grouped_into_documents(tmp_path):
    lines = ["before", " = A = \n", "one\n", "", " = = of A = = ", "two", " = B = ", "three", ""]
    files = {"train.jsonl": jsonl(["other"] * 40), "test.jsonl": jsonl(lines)}
    corpus = prepared(write(tmp_path / "set", files), document_start="^ = [^=]")
    assert split(corpus, "test") == closed(
        ["before\n", " = A = \none\n\n = = of A = = \ntwo\n", " = B = \nthree\n\n"]
    )


def test_slice_of_a_split_is_loaded(tmp_path):
    folder = write(tmp_path / "set", published())
    corpus = prepared(folder, split="train[:50%]")
    assert_published(corpus, train=PUBLISHED["train"][:20])
    assert_published(prepared(folder, split="train[30:]"), train=PUBLISHED["train"][30:])


def test_training_split_can_be_chosen(tmp_path):
    folder = write(tmp_path / "set", published())
    corpus = prepared(folder, split="validation")
    assert split(corpus, "test") == closed(PUBLISHED["test"])
    for name in ("train", "val"):
        assert "learn" not in split(corpus, name)
    line = refused(folder, split="unsupervised")
    assert line.startswith("data.split: ")
    assert "it has train, validation, test" in line
    assert "train[:x%]" in refused(folder, split="train[:x%]")


def test_max_tokens_limits_the_training_split(tmp_path):
    folder = write(tmp_path / "set", published())
    corpus = prepared(folder, max_tokens=100)
    assert corpus.tokens["train"] == 100
    assert split(corpus, "val") == closed(PUBLISHED["val"])
    assert split(corpus, "test") == closed(PUBLISHED["test"])
    assert prepared(folder, max_tokens=10**6).tokens == prepared(folder).tokens


def test_each_text_file_is_one_document(tmp_path):
    texts = {f"{i}.txt": f"file {i}\n\nstill file {i}\n" for i in range(10, 50)}
    write(tmp_path / "texts", {path: text.encode() for path, text in texts.items()})
    write(tmp_path / "texts", {"other.md": b"no"})
    corpus = prepared("text", files="texts/*.txt")
    whole = "".join(split(corpus, name) for name in ("train", "val", "test"))
    assert whole == closed(texts.values())
    # One alone is split by position, and nothing is put into it.
    write(tmp_path, {"one.txt": ("line\n\n" * 200).encode()})
    corpus = prepared("text", files=str(tmp_path / "one.txt"))
    assert "".join(split(corpus, name) for name in ("train", "val", "test")) == "line\n\n" * 200
    assert refused("text", files="texts/*.nothing").startswith("data.")


def test_rows_of_local_files_are_documents(tmp_path):
    texts = [f"row {i:02}" for i in range(60)]
    write(tmp_path, {"a.jsonl": jsonl(texts[:30]), "b.jsonl": jsonl(texts[30:])})
    write(tmp_path, {"a.parquet": parquet(texts)})
    corpus = prepared("json", files="*.jsonl")
    assert split(corpus, "train") in closed(texts)
    assert prepared("parquet", files="*.parquet").fingerprint == corpus.fingerprint


def test_code_in_a_folder_is_not_run(tmp_path):
    code = {"set.py": b"from pathlib import Path\nPath('ran').touch()\n"}
    assert "code of data sets is never run" in refused(write(tmp_path / "set", code))
    assert list(tmp_path.rglob("ran")) == []


def test_missing_name_is_rejected(tmp_path):
    line = refused(write(tmp_path / "set", {"train.jsonl": b""}))
    assert line.startswith("data.name: ")
    assert line.endswith("it is empty")


@pytest.mark.slow
def test_unreadable_data_is_reported_in_one_line(tmp_path, spawn):
    folder = write(tmp_path / "set", {"train.jsonl": b'{"text": "a"}\n{nothing\n'})
    process = spawn("data", "prepare", "data=hub", f"data.name={folder}", "data.tokenizer=bytes")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    (line,) = err.splitlines()
    assert "data.name" in line
    assert "JSON" in line


# The Hub


def test_data_set_is_downloaded_once(hub, point, missing_server, hf_home):
    hub.sets["owner/name"] = published(parts=2)
    assert_published(prepared("owner/name"))
    assert len([line for line in hub.requests if line.startswith("GET ") and "first-" in line]) == 2
    assert list(hf_home.rglob("*.parquet"))
    # With another tokenizer it is another corpus, and no network is needed any more.
    point(missing_server)
    again = prepared("owner/name", tokenizer="chars")
    assert again.tokenizer["name"] == "chars"
    assert again.tokens["test"] == len(closed(PUBLISHED["test"]))


def test_data_set_without_card_is_loaded(hub):
    hub.sets["owner/name"] = {
        f"{name}.jsonl": jsonl(PUBLISHED[split])
        for name, split in (("train", "train"), ("validation", "val"), ("test", "test"))
    }
    assert_published(prepared("owner/name"))


def test_truncated_data_is_streamed_and_not_cached(hub, hf_home):
    hub.sets["owner/name"] = published(parts=2)
    corpus = prepared("owner/name", max_tokens=100, val_tokens=10, test_tokens=10)
    assert corpus.tokens == {"train": 100, "val": 10, "test": 10}
    whole = prepared("owner/name")
    assert list(hf_home.rglob("*.parquet"))
    shutil.rmtree(hf_home)
    everything = prepared("owner/name", max_tokens=10**6)
    assert not list(hf_home.rglob("*.parquet"))
    assert not list(hf_home.rglob("*.arrow"))
    assert everything.fingerprint == whole.fingerprint


def test_stream_stops_at_max_tokens(hub):
    hub.sets["owner/name"] = published(parts=4)
    prepared("owner/name", max_tokens=100, val_tokens=10, test_tokens=10)
    parts = {line[-len("00000-of-00004.parquet") :] for line in hub.requests if "GET" in line}
    assert "00000-of-00004.parquet" in parts
    assert "00003-of-00004.parquet" not in parts


def test_revision_is_loaded(hub):
    before = published()
    hub.sets["owner/name"] = {"train.jsonl": jsonl(["changed"])}
    hub.sets["owner/name@v1"] = before
    assert_published(prepared("owner/name", revision="v1"))
    assert_published(prepared("owner/name", revision=commit(before)))
    assert "'v2'" in refused("owner/name", revision="v2")


def test_subset_is_loaded(hub):
    hub.sets["owner/name"] = subsets()
    assert "small" in split(prepared("owner/name", subset="small"), "train")
    assert "large" in split(prepared("owner/name", subset="large"), "train")
    assert "'middle'" in refused("owner/name", subset="middle")
    refused("owner/name")


def test_script_is_refused_and_not_run(hub, tmp_path):
    code = f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n".encode()
    hub.sets["owner/name"] = {"name.py": code, "README.md": b"A set.\n"}
    line = refused("owner/name")
    assert "code of data sets is never run" in line
    assert not (tmp_path / "ran").exists()
    # What it says to do.
    assert "data.revision=refs/convert/parquet" in line
    texts = [f"row {i}" for i in range(40)]
    hub.sets["owner/name@refs/convert/parquet"] = {"default/train/0000.parquet": parquet(texts)}
    corpus = prepared("owner/name", revision="refs/convert/parquet")
    assert split(corpus, "train") in closed(texts)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("status", [401, 403, 404])
def test_unknown_name_is_reported_in_one_line(hub, status):
    hub.refused["owner/name"] = status
    line = refused("owner/name")
    assert line.startswith("data.name: 'owner/name'")
    assert "doesn't exist on the Hub or cannot be accessed" in line


def test_files_are_loaded_from_a_url(hub, point, missing_server):
    """Needs the http support of fsspec."""
    pytest.importorskip("aiohttp")
    point(missing_server)
    text = "from anywhere\n" * 100
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("inner", text)
    hub.files = {"one.txt": text.encode(), "packed.zip": packed.getvalue()}
    for files in (f"{hub.address}/one.txt", f"zip://inner::{hub.address}/packed.zip"):
        corpus = prepared("text", files=files)
        assert "".join(split(corpus, name) for name in ("train", "val", "test")) == text


CARD_OF_PAIRS = CARD.replace(b"first-*", b"first.jsonl").replace(b"second-*", b"second.jsonl")
CARD_OF_PAIRS = CARD_OF_PAIRS.replace(b"third-*", b"third.jsonl")


def published_pairs():
    """Return the files of a data set of pairs, one of them with an empty sentence."""
    pairs = {split: [(f"{t} en", f"{t} de") for t in texts] for split, texts in PUBLISHED.items()}
    pairs["train"].insert(3, ("", "empty"))
    files = {"README.md": CARD_OF_PAIRS}
    for name, split in (("first", "train"), ("second", "val"), ("third", "test")):
        rows = [{"translation": {"en": en, "de": de}} for en, de in pairs[split]]
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        files[f"data/{name}.jsonl"] = lines.encode()
    return files


PAIR_FIELDS = {"source_field": "translation.de", "target_field": "translation.en"}


def assert_pairs(corpus):
    for name, documents in PUBLISHED.items():
        assert split(corpus, name) == closed([f"{text} de\0{text} en" for text in documents])


def test_pairs_are_downloaded_once(hub, point, missing_server):
    hub.sets["owner/name"] = published_pairs()
    assert_pairs(prepared("owner/name", source="pairs", **PAIR_FIELDS))
    point(missing_server)
    again = prepared("owner/name", source="pairs", tokenizer="chars", **PAIR_FIELDS)
    assert again.manifest.documents["test"] == len(PUBLISHED["test"])


def test_pairs_of_a_cache_are_read_without_network(hf_home):
    keep(hf_home, "owner/name", published_pairs())
    assert_pairs(prepared("owner/name", source="pairs", **PAIR_FIELDS))


def test_missing_column_of_pairs_is_rejected(hf_home):
    keep(hf_home, "owner/name", published_pairs())
    for target, line in [
        ("translation.fr", "'owner/name' has no 'translation.de' or 'translation.fr'"),
        ("fr", "data.target_field: 'owner/name' has no 'fr'; it has translation"),
        ("translation", "data.target_field: 'translation' of 'owner/name' is not text"),
    ]:
        fields = PAIR_FIELDS | {"target_field": target}
        assert line in refused("owner/name", source="pairs", **fields)


HUB_NAMES = {"train": "train", "val": "validation", "test": "test"}


def translated(split, mark=""):
    """Return the sentences of a split in two languages, each with a mark."""
    texts = [f"{text}{mark}" for text in PUBLISHED[split]]
    return [{"en": f"{text} in English", "de": f"{text} auf Deutsch"} for text in texts]


def multi30k():
    rows = {split: translated(split) for split in PUBLISHED}
    return {f"{split}.jsonl": rows_of_json(rows[split]) for split in rows}


def iwslt14():
    return {
        f"default/{name}/0000.parquet": rows_of_parquet(translation=translated(split))
        for split, name in HUB_NAMES.items()
    }


def wmt14():
    """Return the files of two subsets, of which one is not to be read."""
    card, files = "---\nconfigs:\n", {}
    for subset, mark in (("cs-en", " of another subset"), ("de-en", "")):
        card += f"- config_name: {subset}\n  data_files:\n"
        for split, name in HUB_NAMES.items():
            card += f"  - split: {name}\n    path: {subset}/{name}-*\n"
            rows = rows_of_parquet(translation=translated(split, mark))
            files[f"{subset}/{name}-00000-of-00001.parquet"] = rows
    return {"README.md": f"{card}---\n".encode(), **files}


SHIPPED = {  # the files and their revision, the source and the target
    "multi30k": ("bentrevett/multi30k", multi30k, "main", "en", "de"),
    "iwslt14": ("bbaaaa/iwslt14-de-en", iwslt14, "refs/convert/parquet", "de", "en"),
    "wmt14": ("wmt/wmt14", wmt14, "main", "en", "de"),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_pairs_are_read_from_source_to_target(hf_home, name):
    hub_name, files, revision, source, target = SHIPPED[name]
    keep(hf_home, hub_name, {"script.py": b"raise SystemExit\n"})  # replaced unless elsewhere
    keep(hf_home, hub_name, files(), revision)
    words = {"data": name, "data.tokenizer": "bytes", "data.vocab_size": "null"}
    with open_hydra():
        config = make_config(words | {"data.cache": "cache", "model": "transformer_base"})
    pairs = open_data(config.data, config.model)
    pairs.check_context(config.model.context)
    for part in PUBLISHED:
        expected = [f"{pair[source]}\0{pair[target]}" for pair in translated(part)]
        assert split(pairs.corpus, part) == closed(expected)


# No network


@pytest.mark.slow
def test_cache_of_the_hub_client_is_used(tmp_path, hf_home, spawn):
    keep(hf_home, "owner/name", published(parts=2))
    words = ("data.name=owner/name", "data.tokenizer=bytes", "data.cache=cache")
    process = spawn("data", "prepare", "data=hub", *words)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    # The same corpus is found here, with nothing left to read it from.
    shutil.rmtree(hf_home)
    assert_published(prepared("owner/name"))


def test_cache_with_a_missing_part_is_refused(hf_home):
    snapshot = keep(hf_home, "owner/name", published(parts=2))
    (snapshot / "data" / "first-00001-of-00002.parquet").unlink()
    line = refused("owner/name")
    assert "1 of 2 parts of 'first'" in line
    assert "HF_HOME" in line


def test_slice_of_a_cached_split_is_loaded(hf_home):
    keep(hf_home, "owner/name", published())
    corpus = prepared("owner/name", split="train[:50%]")
    assert_published(corpus, train=PUBLISHED["train"][:20])


def test_max_tokens_limits_cached_data(hf_home):
    keep(hf_home, "owner/name", published())
    assert prepared("owner/name", max_tokens=100).tokens["train"] == 100


def test_cache_of_the_library_is_used(hub, point, missing_server, hf_home):
    hub.sets["owner/TwoWords"] = published()
    online = prepared("owner/TwoWords")
    shutil.rmtree("cache")
    shutil.rmtree(hf_home / "hub")
    point(missing_server)
    assert prepared("owner/TwoWords").fingerprint == online.fingerprint
    assert_published(prepared("owner/TwoWords", max_tokens=10**6))


def test_uncached_subset_is_refused_offline(hub, point, missing_server, hf_home):
    hub.sets["owner/name"] = subsets()
    prepared("owner/name", subset="small")
    point(missing_server)
    refused("owner/name", subset="large")
    keep(hf_home, "owner/name", subsets())
    assert "large" in split(prepared("owner/name", subset="large"), "train")


def test_uncached_revision_is_refused_offline(hub, point, missing_server):
    files = published()
    hub.sets["owner/name"] = files
    prepared("owner/name")
    shutil.rmtree("cache")
    point(missing_server)
    assert "HF_HOME" in refused("owner/name", revision="v1")
    assert_published(prepared("owner/name", revision=commit(files)))


def test_offline_mode_sends_no_request(hub, hf_home, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    keep(hf_home, "owner/name", published())
    assert_published(prepared("owner/name"))
    assert "HF_HOME" in refused("owner/other")
    assert hub.requests == []


def test_unreachable_files_are_refused(missing_server):
    line = refused("text", files=f"{missing_server}/one.txt")
    assert "HF_HOME" in line
    assert "data=stdlib" in line


@pytest.mark.slow
@pytest.mark.parametrize("server", ["missing_server", "silent"])
def test_missing_network_is_noticed_quickly(tmp_path, spawn, monkeypatch, request, server):
    monkeypatch.setenv("HF_ENDPOINT", request.getfixturevalue(server))
    cache = tmp_path / "cache"
    started = time.monotonic()
    words = ("data.tokenizer=bytes", f"data.cache={cache}")  # which asks no other server
    process = spawn("data", "prepare", "data=wikitext2", *words)
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - started < 20
    assert process.returncode == 2
    (line,) = err.splitlines()
    assert all(word in line for word in ("HF_HOME", "data.cache", "data=stdlib"))
    assert [path for path in cache.glob("*") if path.suffix != ".lock"] == []


def test_other_readers_of_the_library_are_refused(tmp_path, monkeypatch):
    """Some versions of some unpickle files. All that the installed version has are known."""
    from datasets import packaged_modules

    assert {*packaged_modules._PACKAGED_DATASETS_MODULES} <= {*FILE_FORMATS, *OTHER_READERS}
    monkeypatch.chdir(tmp_path)
    config = DataConfig(source="hub", name="pandas", files="https://localhost/x.pkl")
    with pytest.raises(
        UserError, match=r"data\.name: 'pandas' is not a supported format \(allowed:"
    ):
        find_local_files(config)
    (tmp_path / "pandas").mkdir()
    with pytest.raises(UserError, match=r"the folder is \./pandas"):
        find_local_files(config)
    assert find_local_files(DataConfig(source="hub", name="./pandas")) == []
