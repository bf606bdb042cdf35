"""Runs compared with n-grams and a compressor, as the verbs show them."""

import math

import pytest

from qkablate.runs.text_references import find_text_references, has_beaten_ngrams

REFERENCES = {"tokens": 2_097_152, "ngram": [3.1, 2.4, 1.9, 1.62, 1.7], "lzma": 1.51}


def result(loss, **other):
    return {"text_references": REFERENCES, "loss": {"test": loss}, "data_fingerprint": "a", **other}


def test_line_names_the_arms_that_do_not_beat_the_best_ngram():
    results = [("standard", result(1.6)), ("no_q", result(1.7)), ("no_q", result(1.5))]
    (found,) = find_text_references([*results, ("uniform", result(2.5))])
    assert str(found) == (
        "4-gram 1.62, lzma 1.51 nats per token, learned from 2,097,152 tokens;"
        " runs that do not beat the best n-gram: no_q (1/2), uniform"
    )


def test_line_says_that_all_runs_beat_the_ngrams():
    (found,) = find_text_references([("standard", result(1.6))])
    assert str(found).endswith("; every run beats the best n-gram")


def test_equal_loss_does_not_beat_the_ngrams():
    assert has_beaten_ngrams(result(1.62)) is False
    assert has_beaten_ngrams(result(1.61)) is True


def test_each_text_has_its_own_references():
    found = find_text_references([("a", result(1)), ("b", result(1, data_fingerprint="b"))])
    assert [references.data_fingerprint for references in found] == ["a", "b"]


@pytest.mark.parametrize(
    "other",
    [
        {"text_references": None},
        {"text_references": {"ngram": []}},
        {"text_references": REFERENCES | {"ngram": [1, "x"]}},
        {"text_references": REFERENCES | {"ngram": [math.inf]}},
        {"text_references": REFERENCES | {"tokens": "many"}},
        {"text_references": REFERENCES | {"lzma": []}},
        {"loss": {"test": None}},
        {"loss": None},
    ],
)
def test_results_without_references_are_skipped(other):
    assert find_text_references([("a", result(1) | other)]) == []
    assert has_beaten_ngrams(result(1) | other) is None
