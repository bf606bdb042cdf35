"""Gaps of two evaluations, and the mistakes that `qkablate.evaluate` refuses."""

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats

import qkablate as api
from qkablate.api.evaluate import Evaluation, compare_evaluations
from qkablate.training.recorders.run_evaluation import DocumentSums

COUNTS = np.array([10, 30, 5, 55])
LOSSES = np.array([21.0, 70.0, 9.0, 120.0])


def evaluation(run, losses=LOSSES, counts=COUNTS, **changes):
    """Return an evaluation with these sums by document."""
    loss = float(losses.sum() / counts.sum())
    sums = DocumentSums(losses, np.zeros(len(counts)), counts)
    numbers = {"answers": int(counts.sum()), "documents": len(counts), "loss": loss}
    known = {"loss_se": None, "perplexity": math.exp(loss), "bits_per_byte": None, "accuracy": 0.0}
    known |= {"accuracy_se": None, "exact": None, "measures": {}, "device": "cpu"}
    values = {"run": run, "step": 1, "data": "text", "split": "val", "precision": "fp32"}
    values |= {"data_fingerprint": "same", "sums": sums}
    return Evaluation(**values | numbers | known | changes)


def test_gap_is_a_difference_of_means_over_tokens():
    other = LOSSES + np.array([1.0, -2.0, 0.5, 11.0])
    gap = compare_evaluations(evaluation("a", other), evaluation("b"))
    assert (gap.run, gap.baseline, gap.documents) == ("a", "b", 4)
    assert gap.gap == pytest.approx(10.5 / 100)
    low, high = gap.interval
    # Student's t with one degree of freedom less than there are documents.
    assert high - gap.gap == pytest.approx(stats.t.ppf(0.975, 3) * gap.se)
    assert gap.gap - low == pytest.approx(high - gap.gap)
    back = compare_evaluations(evaluation("b"), evaluation("a", other))
    assert (back.gap, back.se) == (pytest.approx(-gap.gap), pytest.approx(gap.se))


def test_equal_runs_have_no_gap_and_no_error():
    gap = compare_evaluations(evaluation("a"), evaluation("b"))
    assert (gap.gap, gap.se, gap.interval) == (0, 0, (0, 0))


def test_a_constant_gap_per_token_has_no_error():
    """A difference that all documents share is no uncertainty."""
    gap = compare_evaluations(evaluation("a", LOSSES + 0.25 * COUNTS), evaluation("b"))
    assert gap.gap == pytest.approx(0.25)
    assert gap.se == pytest.approx(0, abs=1e-12)


def test_one_document_gives_no_error():
    one = LOSSES[:1], COUNTS[:1]
    gap = compare_evaluations(evaluation("a", one[0] + 1, one[1]), evaluation("b", *one))
    assert gap.gap == pytest.approx(0.1)
    assert (gap.se, gap.interval) == (None, None)


@pytest.mark.parametrize(
    "other",
    [
        evaluation("b", data_fingerprint="another"),
        evaluation("b", split="test"),
        evaluation("b", counts=COUNTS[::-1]),
        evaluation("b", LOSSES[:3], COUNTS[:3]),
    ],
)
def test_other_tokens_have_no_gap(other):
    assert compare_evaluations(evaluation("a"), other) is None
    assert compare_evaluations(other, evaluation("a")) is None


def test_no_documents_have_no_gap():
    empty = dataclasses.replace(
        evaluation("a"), documents=0, sums=DocumentSums(*(np.array([]) for _ in range(3)))
    )
    assert compare_evaluations(empty, empty) is None


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ({"tokns": 3}, r"tokns: there is no such key \(nearest: tokens\)"),
        ({"data.pth": "x"}, r"data\.pth: there is no such key \(nearest: data\.path\)"),
        ({"split": "train"}, "split: 'train' is not one of val, test"),
        ({"tokens": 1}, "tokens: '1' is not a whole number from 2 or all"),
        ({"tokens": 2.5}, "tokens: '2.5' is not a whole number"),
        ({"step": -1}, "step: '-1' is not a whole number from 0"),
        ({"threads": 10**9}, "threads: 1000000000 is not auto, or a number from 1 to"),
        ({"device": "cuda:x"}, "device: 'cuda:x'"),
        ({"out": "my (out)"}, r"there is no run 'standard' in 'my \(out\)'"),
        ({"threads": 10**18}, "threads: .* is not a whole number from 1"),
        ({"precision": "fp17"}, "precision: 'fp17'"),
        ({"data": "stdlb"}, r"data: 'stdlb' \(nearest: stdlib\)"),
        ({"out": "nowhere"}, "there is no run 'standard' in 'nowhere'"),
    ],
)
def test_mistakes_are_refused_before_a_run_is_read(words, reason):
    with pytest.raises(api.UserError, match=reason) as error:
        api.evaluate("standard", **words)
    assert "\n" not in str(error.value)
