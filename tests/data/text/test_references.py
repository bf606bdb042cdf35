"""N-grams and a compressor: against a plain implementation, and from the cache."""

import json
import tracemalloc
from collections import Counter, defaultdict

import numpy as np
import pytest

from qkablate.config import DataConfig
from qkablate.data.corpus import open_corpus
from qkablate.data.text import references
from qkablate.data.text.references import measure_text_references, ngram_losses
from qkablate.errors import UserError


def witten_bell(train, order, vocabulary):
    """Return P(w | h) by the formula, one token at a time."""
    seen = defaultdict(Counter)
    for i in range(len(train)):
        for length in range(min(order, i + 1)):
            seen[tuple(train[i - length : i])][train[i]] += 1

    def probability(token, context):
        below = probability(token, context[1:]) if context else 1 / vocabulary
        counts = seen.get(tuple(context))
        if counts is None:
            return below
        return (counts[token] + len(counts) * below) / (counts.total() + len(counts))

    return probability


@pytest.mark.parametrize("vocabulary", [3, 50_257])
def test_ngrams_equal_the_formula(vocabulary):
    rng = np.random.default_rng(0)
    train, test = (np.cumsum(rng.integers(0, 2, n)) % 3 for n in (300, 80))
    if vocabulary > 3:
        train, test = train * 25_000 + rng.integers(0, 2, 300), test * 25_000
    found = ngram_losses(train.astype(np.uint16), test.astype(np.uint16), vocabulary)
    for order, loss in enumerate(found, 1):
        model = witten_bell(train.tolist(), order, vocabulary)
        tokens = test.tolist()
        losses = [
            -np.log(model(tokens[i], tokens[max(0, i - order + 1) : i]))
            for i in range(1, len(tokens))
        ]
        assert loss == pytest.approx(np.mean(losses), rel=1e-9)


@pytest.mark.parametrize("train", [[0], [0, 1], [0, 0, 1], [2, 1, 0, 2]])
def test_short_training_texts_equal_the_formula(train):
    """The last n-gram is a context that nothing follows; long ones do not exist."""
    test = [0, 1, 2, 1, 0, 0, 2, 1]
    for order, loss in enumerate(ngram_losses(np.array(train), np.array(test), 3), 1):
        model = witten_bell(train, order, 3)
        losses = [-np.log(model(test[i], test[max(0, i - order + 1) : i])) for i in range(1, 8)]
        assert loss == pytest.approx(np.mean(losses))


def test_probabilities_sum_to_one():
    train = np.array([0, 1, 2, 0, 1, 1, 2, 0, 2])
    for context in ([0, 1], [3, 3], [1, 2]):
        tests = [np.array([*context, token]) for token in range(4)]
        before = ngram_losses(train, np.array(context), 4)
        total = sum(
            np.exp(before[2] - 2 * ngram_losses(train, test, 4, orders=3)[2]) for test in tests
        )
        assert total == pytest.approx(1)


def test_text_of_one_pattern_is_predicted_by_long_contexts():
    tokens = np.tile(np.arange(7), 300)
    first, *_, last = ngram_losses(tokens, tokens, 7)
    assert first == pytest.approx(np.log(7), abs=0.01)
    assert last < 0.02


@pytest.fixture
def prepared(tmp_path):
    (tmp_path / "a.txt").write_text("the cat sat on the mat\n" * 500)
    path = str(tmp_path / "a.txt")

    def prepare(**keys):
        config = DataConfig(source="text", path=path, cache=str(tmp_path / "cache"), **keys)
        return open_corpus(config)

    return prepare


@pytest.mark.parametrize("tokenizer", ["bytes", "chars", "bpe"])
def test_references_of_a_repetitive_text_are_low(prepared, tokenizer):
    corpus = prepared(tokenizer=tokenizer, vocab_size=270 if tokenizer == "bpe" else None)
    found = measure_text_references(corpus, 5000)
    assert found.tokens == min(5000, corpus.tokens["train"])
    assert found.ngram[-1] < 0.3 < 1 < found.ngram[0]
    assert 0 <= found.lzma < 0.5


def test_references_are_measured_once(prepared, monkeypatch):
    corpus = prepared()
    first = measure_text_references(corpus, 2000)
    other = measure_text_references(corpus, 1000)
    assert other.tokens == 1000
    assert other.ngram != first.ngram
    monkeypatch.setattr(references, "ngram_losses", None)
    assert measure_text_references(corpus, 2000) == first


def test_references_are_of_the_text_that_a_run_reads(prepared):
    corpus = prepared()
    part, whole = (measure_text_references(corpus, 2000, limit) for limit in (50, None))
    assert (part.test_tokens, whole.test_tokens) == (50, corpus.tokens["test"])
    train, test = corpus.split("train")[:2000], corpus.split("test")
    assert part.ngram == ngram_losses(train, test[:50], corpus.vocabulary)
    assert whole.ngram == ngram_losses(train, test, corpus.vocabulary)


@pytest.mark.parametrize("damage", ["", "{", '{"ngram": 3}', "of other data"])
def test_damaged_cache_is_measured_again(prepared, damage):
    corpus = prepared()
    first = measure_text_references(corpus, 2000)
    (path,) = corpus.folder.glob("references-*.json")
    if damage == "of other data":
        damage = json.dumps(json.loads(path.read_text()) | {"data_fingerprint": "x", "ngram": [1]})
    path.write_text(damage)
    assert measure_text_references(corpus, 2000) == first
    assert json.loads(path.read_text())["data_fingerprint"] == corpus.fingerprint


def test_missing_tokenizer_leaves_the_ngrams(prepared, monkeypatch):
    def load(description):
        raise UserError("data.tokenizer: not cached")

    corpus = prepared(tokenizer="chars")
    monkeypatch.setattr(references, "load_tokenizer", load)
    found = measure_text_references(corpus, 2000)
    assert found.lzma is None
    assert len(found.ngram) == 5


@pytest.mark.slow
def test_standard_library_is_measured_in_seconds(tmp_path):
    """The numbers of an independent audit: a 4-gram at 1.62, gzip at 1.51 nats per byte."""
    corpus = open_corpus(DataConfig(cache=str(tmp_path)))
    found = measure_text_references(corpus, 10**9)
    assert found.tokens == 2**21
    assert 1.4 < found.ngram[3] < 1.8
    assert found.lzma < found.ngram[3]


@pytest.mark.parametrize("test_tokens", [1_000, 100_000])
def test_ngrams_of_a_text_that_repeats_need_the_estimated_memory(test_tokens):
    train = np.random.default_rng(0).integers(0, 8, 100_000).astype(np.uint8)
    tracemalloc.start()
    try:
        ngram_losses(train, train[:test_tokens], 256)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    fixed = references.peak_bytes(0, 0)
    estimated = references.peak_bytes(len(train), test_tokens) - fixed
    assert estimated / 2 < peak < 1.05 * estimated
