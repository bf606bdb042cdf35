"""Pairs of source and target: of the standard library, of files, of the Hub; their batches."""

import dataclasses
import json
import re

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from qkablate.config import DataConfig, ModelConfig, VariantConfig, resolve_variant
from qkablate.config.data import SPLITS
from qkablate.data import IGNORE, EvalMetrics, Pairs, find_data, open_data, sources
from qkablate.data.batches import DOCUMENT, PAD
from qkablate.data.corpus import open_corpus
from qkablate.data.pairs.sources import open_pairs
from qkablate.data.tokenizers import CHUNK_BYTES, load_tokenizer
from qkablate.errors import UserError
from qkablate.models.build import build_model

MODEL = ModelConfig(form="encoder_decoder", source=8, context=12)
ROWS = [(f"src {i}", f"∑ziel {i}") for i in range(60)]


@pytest.fixture
def config(tmp_path):
    return DataConfig(
        source="pairs", source_field="en", target_field="de", cache=str(tmp_path / "cache")
    )


@pytest.fixture
def write(tmp_path, config):
    """Write a file; the config that reads it."""

    def write(name, content, path=None, **changed):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")
        return dataclasses.replace(config, path=str(path or file), **changed)

    return write


def rows_of(kind, rows=ROWS):
    if kind == "jsonl":
        return "".join(json.dumps({"en": s, "de": t, "n": 1}) + "\n" for s, t in rows)
    mark = {"tsv": "\t", "csv": ","}[kind]
    return "".join(
        mark.join(cells) + "\n" for cells in [("de", "n", "en"), *((t, "1", s) for s, t in rows)]
    )


def texts(pairs, split):
    """Return the sentences of a split."""
    tokenizer, part = load_tokenizer(pairs.tokenizer), pairs.splits[split]
    decoded = [
        [tokenizer.decode(part.sentence(i, side).tolist()).decode() for side in (0, 1)]
        for i in range(len(part))
    ]
    return [tuple(pair) for pair in decoded]


@pytest.mark.parametrize("kind", ["jsonl", "tsv", "csv"])
def test_byte_order_mark_is_no_text(write, kind):
    """Spreadsheets write it."""
    pairs = open_data(write(f"pairs.{kind}", "\ufeff" + rows_of(kind)), MODEL)
    assert sorted([pair for split in SPLITS for pair in texts(pairs, split)]) == sorted(ROWS)


@pytest.mark.parametrize("tokenizer", ["bytes", "chars", "bpe"])
@pytest.mark.parametrize("kind", ["jsonl", "tsv", "csv"])
def test_files_are_read_and_split(write, kind, tokenizer):
    data = write(f"pairs.{kind}", rows_of(kind), tokenizer=tokenizer)
    if tokenizer == "bpe":
        data.vocab_size = 300
    pairs = open_data(data, MODEL)
    found = {split: texts(pairs, split) for split in SPLITS}
    assert sorted([pair for part in found.values() for pair in part]) == sorted(ROWS)
    assert [len(found[split]) for split in SPLITS] == [54, 3, 3]


def test_all_formats_and_places_have_one_fingerprint(write, tmp_path):
    prints = {
        open_data(write(f"{k}/a.{k}", rows_of(k)), MODEL).fingerprint
        for k in ("tsv", "csv", "jsonl")
    }
    write("side.en", "".join(f"{s}\n" for s, _ in ROWS))
    side = write("side.de", "".join(f"{t}\n" for _, t in ROWS), path=tmp_path / "side")
    assert {open_data(side, MODEL).fingerprint} == prints


def test_columns_lead_to_no_file_outside_the_path(write, tmp_path):
    """They may be those of a run that somebody else has trained."""
    for name in ("mine.en", "mine.de"):
        write(name, "a secret\n" * 20)
    data = write("set/pairs.tsv", rows_of("tsv"), path=f"{tmp_path}/set/")
    data.source_field, data.target_field = "/../mine.en", "/../mine.de"
    with pytest.raises(
        UserError, match=r"data.source_field: line 2 of .*has no text '/../mine.en'"
    ):
        open_data(data, MODEL)


def test_no_source_is_in_two_splits(write):
    """Many pairs are split by the hash of the source; a source may have two targets."""
    rows = [(f"s {i % 500}", f"t {i}") for i in range(1000)]
    pairs = open_data(write("pairs.tsv", rows_of("tsv", rows)), MODEL)
    split_of = {s: split for split in SPLITS for s, _ in texts(pairs, split)}
    assert len(split_of) == 500
    assert sum(len(pairs.splits[split]) for split in SPLITS) == 1000
    for split in SPLITS:
        assert {s for s, _ in texts(pairs, split)} == {s for s in split_of if split_of[s] == split}
        assert len(pairs.splits[split]) > 15


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_long_pairs_are_left_out(write, tokenizer):
    rows = [(f"{i:0{2 + i % 8}}", "t" * (1 + i // 9 % 9)) for i in range(405)]
    rows += [("s\n" * CHUNK_BYTES + "s", "t")]  # read in pieces
    data = write("pairs.jsonl", rows_of("jsonl", rows), tokenizer=tokenizer)
    data.vocab_size, data.max_length = (257 if tokenizer == "bpe" else None), 5
    corpus = open_corpus(data)
    pairs = Pairs(corpus, MODEL)
    left = [text for split in SPLITS for text in texts(pairs, split)]
    fits = {(s, t) for s, t in rows if len(s) <= 5 and len(t) + 1 <= 5}
    assert {*left} == fits
    assert pairs.longest() == (5, 5)
    left_out = len(rows) - len(fits)
    assert corpus.manifest.split.endswith(f"{left_out} pairs of more than 5 tokens are left out")
    assert len(left) == len(fits) > 50
    data.max_length = 2
    with pytest.raises(UserError, match=r"nothing is left for \w+; raise data.max_length=2"):
        open_corpus(
            dataclasses.replace(
                data, path=str(write("b.tsv", rows_of("tsv", [("ss", "tt")] * 9)).path)
            )
        )


def test_files_named_by_splits_are_published(write, tmp_path):
    for name, part in (("train", ROWS[:20]), ("valid", ROWS[30:33]), ("test", ROWS[20:30])):
        data = write(f"set/{name}.tsv", rows_of("tsv", part), path=tmp_path / "set")
    pairs = open_data(data, MODEL)
    assert sorted(texts(pairs, "train")) == sorted(ROWS[:20])
    assert sorted(texts(pairs, "test")) == sorted(ROWS[20:30])
    (tmp_path / "set" / "valid.tsv").unlink()
    with pytest.raises(UserError, match=r"'.*set' has no file for val"):
        open_corpus(data)


def test_numbered_files_are_of_the_split_that_their_names_begin_with(write, tmp_path):
    parts = (("train-00000", ROWS[:20]), ("validation-00000", ROWS[30:33]), ("test_0", ROWS[20:30]))
    for name, part in parts:
        data = write(f"set/{name}.tsv", rows_of("tsv", part), path=tmp_path / "set")
    pairs = open_data(data, MODEL)
    assert sorted(texts(pairs, "train")) == sorted(ROWS[:20])
    assert sorted(texts(pairs, "val")) == sorted(ROWS[30:33])
    assert sorted(texts(pairs, "test")) == sorted(ROWS[20:30])
    write("set/more.tsv", rows_of("tsv", ROWS[33:]))
    with pytest.raises(
        UserError, match=r"more.tsv' is of no split: .* neither train, val nor test"
    ):
        open_corpus(data)


MISTAKES = {
    "csv cell": (
        "a.csv",
        "de,en," + "x" * 200_000 + "\n",
        "line 1 of '.*a.csv' is not a row: field larger than field limit",
    ),
    "jsonl column": (
        "a.jsonl",
        '{"de": "x", "fr": "y"}\n',
        "data.source_field: line 1 of '.*a.jsonl' has no text 'en'; it has de, fr",
    ),
    "jsonl number": (
        "a.jsonl",
        '{"de": 3, "en": "y"}\n',
        "data.target_field: 'de' is not text in line 1",
    ),
    "jsonl json": ("a.jsonl", '{"de": "x", "en": "y"}\n{\n', "line 2 of '.*a.jsonl' is not JSON"),
    "tsv column": (
        "a.tsv",
        "de\teng\nx\ty\n",
        r"data.source_field: .*'en'; it has de, eng \(nearest: eng\)",
    ),
    "tsv cells": (
        "a.tsv",
        "de\ten\nx\ty\nx\n",
        "line 3 of '.*' has 1 cells, and the first line names 2 columns: de, en",
    ),
    "empty": (
        "a.tsv",
        "de\ten\nx\t\n \tx\nx\ty\n",
        r"2 pairs of '.*' with an empty sentence \(line 2, 3\); remove them",
    ),
    "zero": (
        "a.jsonl",
        '{"de": "x\\u0000", "en": "y"}\n',
        "line 1 of '.*' is not text: it has the byte 0",
    ),
    "half a pair": (
        "a.jsonl",
        '{"de": "x", "en": "y\\ud800"}\n',
        "line 1 of '.*' is not text: it has half of a surrogate pair",
    ),
    "suffix": ("a.txt", "x\n", "'.*a.txt' is not a .jsonl, .tsv or .csv file"),
    "few": (
        "a.tsv",
        "de\ten\nx\ty\nv\tw\n",
        "'.*' is too little text: nothing is left for train",
    ),
    "no file": ("b.tsv", "", "there is no file, folder or pattern '.*a.tsv'"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_bad_files_are_one_line(write, tmp_path, case):
    name, content, line = MISTAKES[case]
    path = tmp_path / "a.tsv" if case == "no file" else None
    with pytest.raises(UserError, match=line) as caught:
        open_corpus(write(name, content, path))
    assert "\n" not in str(caught.value)


def test_unequal_numbers_of_lines_are_rejected(write, tmp_path):
    write("side.en", "a\nb\nc\n")
    data = write("side.de", "a\nb\n", path=tmp_path / "side")
    with pytest.raises(UserError, match=r"'.*side.en' has 3 lines, and '.*side.de' has 2"):
        open_corpus(data)
    (tmp_path / "side.en").unlink()
    with pytest.raises(UserError, match=r"'.*side.de' is there, but not '.*side.en'"):
        open_corpus(data)


def test_sentences_longer_than_the_model_are_counted(write):
    data = write("pairs.tsv", rows_of("tsv", [*ROWS, ("s" * 30, "t"), ("s", "t" * 40)]))
    open_data(data, dataclasses.replace(MODEL, source=30, context=41)).check_context(41)
    for source, context, line in [
        (8, 41, "model.source: of 62 pairs 1 sources are longer than 8 tokens; the longest"),
        (30, 40, "model.context: of 62 pairs 1 targets, with an end, than 40; the longest"),
        (8, 40, "1 sources are longer than 8 tokens and 1 targets, with an end, than 40"),
    ]:
        pairs = open_data(data, dataclasses.replace(MODEL, source=source, context=context))
        with pytest.raises(UserError, match=f"{line}.*need model.source=30 model.context=41"):
            pairs.check_context(context)


def test_a_limit_reads_the_first_pairs_of_the_test_split(write):
    pairs = open_data(write("pairs.tsv", rows_of("tsv", ROWS * 5)), MODEL)

    def read(limit):
        batches = pairs.split_batches("test", batch_size=1, context=12, limit=limit)
        return [batch.inputs[0].tolist() for batch in batches]

    whole = read(None)
    assert len(whole) == len(pairs.splits["test"]) > 2
    assert read(2 * 12 + 5) == whole[:2]
    assert read(1) == whole[:1]
    assert pairs.test_tokens(2 * 12 + 5) == sum(
        len(t.encode()) for _, t in texts(pairs, "test")[:2]
    )
    wide = Pairs(pairs.corpus, dataclasses.replace(MODEL, context=24))
    assert wide.test_tokens(2 * 12 + 5) == len(texts(pairs, "test")[0][1].encode())
    assert wide.test_tokens(None) == wide.tokens["test"]
    assert read(10**9) == whole


def read_documents(pairs, size=4, **keys):
    """Return the document of each pair that a reading of the test split counts, in order."""
    documents = []
    for batch in pairs.split_batches("test", batch_size=size, context=12, **keys):
        counts_NA = batch.targets_NA.numpy() != IGNORE
        for document_A, counts_A in zip(batch.slices[DOCUMENT], counts_NA, strict=True):
            if counts_A.any():
                (document,) = {*document_A[counts_A].tolist()}
                documents.append(document)
    return documents


def test_a_pair_of_unknown_file_is_its_own_document(write, monkeypatch):
    pairs = open_data(write("pairs.tsv", rows_of("tsv", ROWS * 5)), MODEL)
    count = len(pairs.splits["test"])
    assert read_documents(pairs) == [*range(count)]
    assert read_documents(pairs, limit=2 * 12) == [0, 1]
    assert next(pairs.split_batches("val", batch_size=4, context=12)).slices == {}
    monkeypatch.setattr("qkablate.data.batches.MAX_DOCUMENT_GROUPS", 2)
    assert read_documents(pairs) == [2 * i // count for i in range(count)]
    pairs = open_data(write("few.tsv", rows_of("tsv", ROWS[:20])), MODEL)
    assert len(pairs.splits["test"]) == 1
    assert next(pairs.split_batches("test", batch_size=4, context=12)).slices == {}


def test_losses_by_document_of_several_processes_are_those_of_one(write):
    """Batches are dealt out, and the sums are merged."""
    pairs = open_data(write("pairs.tsv", rows_of("tsv", [(s, t * 2) for s, t in ROWS * 5])), MODEL)
    rng = np.random.default_rng(0)
    parts = EvalMetrics(), EvalMetrics(), EvalMetrics()
    for i, batch in enumerate(pairs.split_batches("test", batch_size=1, context=12)):
        losses, hits = rng.random(batch.targets_NA.shape), np.zeros(batch.targets_NA.shape, bool)
        for totals in (parts[0], parts[1 + i % 2]):
            totals.add_answers(batch, losses, hits)
    whole, merged, other = parts
    assert len(other.slices[DOCUMENT]) < len(pairs.splits["test"])
    merged.merge(other)
    assert merged.slices[DOCUMENT] == whole.slices[DOCUMENT]
    assert sum(sums.loss for sums in whole.slices[DOCUMENT].values()) == pytest.approx(
        whole.all.loss
    )
    assert whole.sequence_slices == {}


def test_batches_hold_padded_pairs(write):
    pairs = open_data(write("pairs.tsv", rows_of("tsv")), MODEL)
    assert pairs.vocabulary == 256
    seen = []
    for batch in pairs.split_batches("test", batch_size=2, context=12):
        source_NS, tokens_NT = batch.inputs
        assert source_NS.shape == (2, 8)
        assert tokens_NT.shape == batch.targets_NA.shape == (2, 12)
        for source, known, target in zip(
            source_NS.tolist(), tokens_NT.tolist(), batch.targets_NA.tolist(), strict=True
        ):
            answer = [token for token in target if token != IGNORE]
            if answer:
                assert answer[-1] == known[0] == pairs.end == 0
                length = len(answer)
                assert known == [0, *answer[:-1], *[pairs.end] * (12 - length)]
                assert target == answer + [IGNORE] * (12 - length)
                text = bytes(token for token in source if token != PAD)
                assert source == [*text, *[PAD] * (8 - len(text))]
                seen.append((text.decode(), bytes(answer[:-1]).decode()))
    assert seen == texts(pairs, "test")


def naive_totals(pairs, split, model):
    """Return loss, hits and right pairs of the pairs of a split, one by one and without padding."""
    part, counts = pairs.splits[split], np.zeros(4)  # loss, hits, right pairs, answers
    for i in range(len(part)):
        source, target = (part.sentence(i, side).astype(np.int64).tolist() for side in (0, 1))
        answers = torch.tensor([*target, pairs.end])
        known = torch.tensor([[pairs.end, *target]])
        logits = model(torch.tensor([source]), known)[0]
        loss = float(F.cross_entropy(logits, answers, reduction="sum"))
        is_hit = logits.argmax(-1) == answers
        counts += [loss, int(is_hit.sum()), bool(is_hit.all()), len(answers)]
    loss, hits, right, answers = counts.tolist()
    return {"loss": loss / answers, "accuracy": hits / answers, "exact": right / len(part)}


@pytest.mark.parametrize("split", ["val", "test"])
def test_evaluation_counts_every_target_once(write, split):
    """Lengths and batches are unequal, and the last batch is partial."""
    digits = [(str(i), "7" * (i % 11)) for i in range(1, 300) if i % 11]
    pairs = open_data(write("pairs.tsv", rows_of("tsv", digits), tokenizer="chars"), MODEL)
    config = dataclasses.replace(MODEL, layers=1, d_model=8, heads=2)
    variant = resolve_variant(VariantConfig(), config)
    generator = torch.Generator().manual_seed(0)
    model, plain = (
        build_model(config, variant, pairs.vocabulary, padding=padding).double()
        for padding in (True, False)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        plain.load_state_dict(model.state_dict())
        expected = naive_totals(pairs, split, plain)
        for size in (1, 3, 4, len(pairs.splits[split]), 50):
            totals = EvalMetrics()
            for batch in pairs.split_batches(split, batch_size=size, context=MODEL.context):
                losses, hits = model.loss_and_hits(*batch.inputs, batch.targets_NA)
                totals.add_answers(batch, losses.numpy(), hits.numpy())
            assert pairs.metrics(split, totals) == pytest.approx(expected, rel=1e-6)
            assert totals.sequences.count == len(pairs.splits[split])


def test_training_batches_depend_on_seed_and_step_alone(write):
    pairs = open_data(write("pairs.tsv", rows_of("tsv")), MODEL)

    def tokens(step, **changed):
        settings = {"seed": 0, "batch_size": 4, "grad_accum": 1, "context": 12} | changed
        parts = pairs.batches(**settings).step(step)
        return np.concatenate([batch.tokens_NT.numpy() for batch in parts]).tolist()

    assert tokens(3) == tokens(3) == tokens(3, batch_size=2, grad_accum=2)
    assert len({str(tokens(3)), str(tokens(4)), str(tokens(3, seed=1))}) == 3


def test_pairs_are_found_by_fingerprint(write):
    data = write("pairs.tsv", rows_of("tsv"))
    pairs = open_data(data, MODEL)
    found = find_data(data, MODEL, pairs.fingerprint)
    assert isinstance(found, Pairs)
    assert found.fingerprint == pairs.fingerprint
    assert find_data(data, MODEL, "0") is None


@pytest.mark.parametrize("form", ["decoder", "encoder"])
def test_other_forms_are_rejected(config, form):
    with pytest.raises(UserError, match=r"model.form=encoder_decoder, as in model=nano_translator"):
        open_data(dataclasses.replace(config, source="stdlib_pairs"), ModelConfig(form=form))


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Write a standard library of 40 files, whose names change nothing."""

    def make(prefix="a"):
        folder = tmp_path / prefix
        folder.mkdir()
        for i in range(40):
            lines = [f"x{i} = name_{i} + value({j})\n" for j in range(i % 7 + 1)]
            (folder / f"{prefix}{i}.py").write_text("".join([*lines, "y = shared_name + 1\n"]))
        monkeypatch.setattr(sources, "_stdlib_files", lambda: sorted(folder.iterdir()))

    return make


def test_stdlib_pairs_are_split_by_file(library, config):
    library()
    data = DataConfig(source="stdlib_pairs", cache=config.cache)
    pairs = open_data(data, dataclasses.replace(MODEL, source=96, context=97))
    found = {split: texts(pairs, split) for split in SPLITS}
    whole = [pair for part in found.values() for pair in part]
    assert ("name_3 + value(1)", "name_3 value 1 1() +") in whole
    assert len(whole) == len({*whole})
    assert [
        split for split in SPLITS if ("shared_name + 1", "shared_name 1 +") in found[split]
    ] == ["test"]
    files = {
        split: {
            re.search(r"name_\d+", s)[0]
            for s, _ in found[split]
            if "name_" in s and "shared" not in s
        }
        for split in SPLITS
    }
    assert all(files.values())
    assert len(set.union(*files.values())) == sum(map(len, files.values())) == 40


def test_file_of_a_stdlib_pair_is_its_document(library, config):
    library()
    data = DataConfig(source="stdlib_pairs", cache=config.cache)
    pairs = open_data(data, dataclasses.replace(MODEL, source=96, context=97))
    names = [re.search(r"(?<!shared_)name_\d+", source) for source, _ in texts(pairs, "test")]
    documents = read_documents(pairs)
    known = {(name[0], i) for name, i in zip(names, documents, strict=True) if name}
    files = {name for name, _ in known}
    assert 2 < len(files) < len(documents)
    assert len(known) == len(files) == len({i for _, i in known}) == len({*documents})
    count = len(documents) // 2
    assert read_documents(pairs, limit=97 * count) == documents[:count]


def test_damaged_files_of_pairs_are_named(library, config):
    library()
    data = DataConfig(source="stdlib_pairs", cache=config.cache)
    path = open_corpus(data).folder / "test.files.bin"
    path.write_bytes(path.read_bytes()[8:])
    with pytest.raises(UserError, match=r"the checksum of test.files.bin is wrong"):
        open_corpus(data)


def test_fingerprint_of_stdlib_pairs_does_not_depend_on_paths(library, config, tmp_path):
    prints = []
    for prefix in ("a", "z"):
        library(prefix)
        data = DataConfig(source="stdlib_pairs", cache=str(tmp_path / f"cache-{prefix}"))
        prints.append(open_corpus(data).fingerprint)
    assert prints[0] == prints[1]


def test_installed_standard_library_has_pairs(monkeypatch):
    """Read every twentieth file, which takes a second."""
    config = DataConfig(source="stdlib_pairs")
    files = sources.find_files(config)[::20]
    monkeypatch.setattr(sources, "_stdlib_files", lambda: files)
    pairs = [pair[0] for _, documents in open_pairs(config) for pair in documents]
    assert len({*pairs}) > 1000
    assert all(pair.count(b"\0") == 1 for pair in pairs)
