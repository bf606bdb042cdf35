"""Tagged sentences as batches, and the accuracies that take no context."""

import re

import numpy as np
import pytest

from qkablate.config import DataConfig, ModelConfig
from qkablate.config.data import SPLITS
from qkablate.data import IGNORE, TaggedSentences, find_data, open_data, sources
from qkablate.data.batches import DOCUMENT, PAD
from qkablate.data.tokenizers import load_tokenizer
from qkablate.errors import UserError

MODEL = ModelConfig(form="encoder", context=16)
# The word `x` is an argument twice as often as a value, in every file. Its signs tell files apart.
LINES = ["f(x, {signs}name_{i})", "g(x, {signs}name_{i})", "{signs}name_{i} + x + 1"]


@pytest.fixture
def config(tmp_path, monkeypatch):
    for i in range(60):
        signs = f"{i:06b}".replace("0", "+").replace("1", "-")
        lines = (f"{line.format(signs=signs, i=i)}\n" for line in LINES)
        (tmp_path / f"{i}.py").write_text("".join(lines))
    monkeypatch.setattr(sources, "find_files", lambda _: sorted(tmp_path.glob("*.py")))
    return DataConfig(
        source="stdlib_tags", tokenizer="words", vocab_size=257, cache=str(tmp_path / "cache")
    )


@pytest.fixture
def data(config):
    return open_data(config, MODEL)


def read_sentences(data, split):
    """Return the sentences of a split as text."""
    tokenizer, sentences = load_tokenizer(data.tokenizer), data.splits[split]
    return [tokenizer.decode(sentences.sentence(i, 0)).decode() for i in range(len(sentences))]


def test_modules_are_held_out(data):
    signs = [
        {re.sub("[^+-]", "", text)[:6] for text in read_sentences(data, split)} for split in SPLITS
    ]
    assert all(signs)
    assert len(set.union(*signs)) == sum(map(len, signs)) == 60
    assert "repeats" not in data.corpus.manifest.split


def test_no_sentence_occurs_twice_as_tokens(config, tmp_path):
    """Too many names for the vocabulary: sentences that differ in rare ones alone are one."""
    for i in range(60):
        with (tmp_path / f"{i}.py").open("a") as file:
            file.writelines(f"k(rare_{i}_{n})\n" for n in range(6))
    data = open_data(config, MODEL)
    sentences = {split: read_sentences(data, split) for split in SPLITS}
    together = [text for split in SPLITS for text in sentences[split]]
    assert len({*together}) == len(together)
    assert "k ( <unknown> )" in sentences["train"]
    assert len(sentences["val"]) % 3 == len(sentences["test"]) % 3 == 0  # LINES are all there
    counts = re.findall(r"(\d+) of (train|val|test)", data.corpus.manifest.split)
    assert [split for _, split in counts] == [*SPLITS]
    assert len(together) + sum(int(count) for count, _ in counts) == 60 * (len(LINES) + 6)


def test_tags_are_asked_for_at_their_words(data):
    tokenizer = load_tokenizer(data.tokenizer)
    batch = data.batch("train", np.arange(len(data.splits["train"])))
    assert [*data.tags.values()].count("argument") == 1
    for tokens, targets in zip(batch.tokens_NT.tolist(), batch.targets_NA.tolist(), strict=True):
        words = [tokenizer.decode([token]).decode() for token in tokens if token != PAD]
        tags = ["" if tag == IGNORE else data.tags[tag] for tag in targets[: len(words)]]
        if words[1] == "(":
            assert words[0] in ("f", "g")
            assert tags == ["call", "", "argument", *[""] * 7, "value", ""]
        else:
            assert tags == [*[""] * 6, "value", "", "value", "", ""]
        assert {*targets[len(words) :]} == {IGNORE}


def test_baselines_are_the_best_guesses_of_the_training_split(data):
    """Four of eight names are values; that of a held-out module is not known, and is one."""
    baselines = data.measure_baselines()
    assert baselines.chance == pytest.approx(4 / 8)
    assert baselines.word == pytest.approx(7 / 8)
    assert data.description.endswith("; each word's most common tag is right at 87.5%")


def test_baselines_are_of_what_a_limit_reads(data):
    value = next(tag for tag, name in data.tags.items() if name == "value")
    chances = []
    for limit in (1, 2 * MODEL.context, 5 * MODEL.context + 1, 10**6):
        batches = data.split_batches("test", batch_size=4, context=16, limit=limit)
        targets = np.concatenate([batch.targets_NA.numpy().ravel() for batch in batches])
        chances.append((targets[targets != IGNORE] == value).mean())
        assert data.measure_baselines(limit).chance == pytest.approx(chances[-1])
    assert len({*chances}) > 1
    assert data.measure_baselines() == data.measure_baselines(10**6)


def test_file_of_a_sentence_is_its_document(data):
    """Every file has three sentences."""
    batches = [*data.split_batches("test", batch_size=4, context=16)]
    signs = [re.sub("[^+-]", "", text)[:6] for text in read_sentences(data, "test")]
    documents = np.concatenate([batch.slices[DOCUMENT][:, 0] for batch in batches])[: len(signs)]
    assert len({*zip(signs, documents.tolist(), strict=True)}) == len({*signs}) == len(signs) // 3
    assert [*np.bincount(documents)] == [3] * len({*signs})
    assert {*batches[0].slices} == {"tag", DOCUMENT}


def test_metrics_are_also_given_by_tag(data):
    from qkablate.data import EvalMetrics

    totals = EvalMetrics()
    for batch in data.split_batches("test", batch_size=4, context=16):
        hits = batch.targets_NA.numpy() == next(
            tag for tag, name in data.tags.items() if name == "value"
        )
        totals.add_answers(batch, np.ones(hits.shape), hits)
    metrics = data.metrics("test", totals)
    assert metrics["accuracy"] == pytest.approx(4 / 8)
    assert metrics["exact"] == pytest.approx(1 / 3)
    assert metrics["accuracy/tag/value"] == 1
    assert metrics["accuracy/tag/argument"] == metrics["accuracy/tag/call"] == 0


def test_data_is_found_by_its_fingerprint(config, data):
    assert isinstance(find_data(config, MODEL, data.fingerprint), TaggedSentences)


def test_short_contexts_and_other_forms_are_rejected(config):
    with pytest.raises(UserError, match=r"use model.context=12 or more"):
        open_data(config, ModelConfig(form="encoder", context=5)).check_context(5)
    for form in ("decoder", "encoder_decoder"):
        with pytest.raises(UserError, match=f"has tags of words for model.form=encoder.*{form}"):
            open_data(config, ModelConfig(form=form))
