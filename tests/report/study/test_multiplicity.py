"""Verdicts adjusted for all parts of the study."""

import math
from types import SimpleNamespace

import pytest

from qkablate.analysis.claims.samples import Median
from qkablate.analysis.claims.verdict import Part
from qkablate.analysis.comparison.decision import Verdict
from qkablate.analysis.stats import ALPHA, Sample
from qkablate.report.study.multiplicity import (
    find_fragile,
    format_multiplicity,
    p_of_verdict,
)

FAR = (0.011, 0.013, 0.012, 0.012, 0.011, 0.013)


def judge(name, values, word=Verdict.SUPPORTED, kind="noninferior"):
    part = Part(name, kind, 0.02, Sample(values))
    return SimpleNamespace(part=part, word=word)


@pytest.fixture
def near():
    """Return a part that is supported with a p-value of 0.02."""
    near = judge("near", (0.018, 0.0, 0.017, 0.004, 0.017, 0.013))
    assert ALPHA / 3 < near.part.p_supported < ALPHA / 2
    return near


def test_a_verdict_is_fragile_if_the_others_make_it_so(near):
    sure = [judge(f"sure {number}", FAR) for number in range(3)]
    assert find_fragile([near]) == []
    assert find_fragile([near, *sure]) == []  # by Holm the surer ones leave it all of α
    undecided = [judge("open", FAR, Verdict.UNDERPOWERED)] * 2
    assert find_fragile([near, *sure, *undecided]) == [near]  # those were tested, too


def test_each_verdict_has_the_p_value_of_its_test():
    values = (-0.03, 0.01, -0.02, 0.0, -0.03, 0.005)
    part = judge("any", values).part
    expected = {
        Verdict.SUPPORTED: part.p_supported,
        Verdict.REFUTED: part.p_refuted,
        Verdict.EQUIVALENT: part.p_equivalent,
        Verdict.UNDERPOWERED: 1.0,
    }
    found = {word: p_of_verdict(judge("any", values, word)) for word in expected}
    assert len({*found.values()}) == len(found)
    assert found == expected


def test_text_counts_the_parts(near):
    undecided = [judge("open", FAR, Verdict.UNDERPOWERED)] * 2
    claims = [
        SimpleNamespace(claim=SimpleNamespace(name="first"), deciding=[near, judge("sure", FAR)]),
        SimpleNamespace(claim=SimpleNamespace(name="second"), deciding=undecided),
    ]
    text = format_multiplicity(claims)
    assert text.startswith("Of 2 decided parts, 0 have no variance")
    assert "Adjusted for all 4 parts" in text
    assert text.endswith(" 1 of the 2 remain decided. The others: first (near).")
    assert format_multiplicity(claims[1:]) == ""


def test_only_equal_numbers_have_no_variance():
    """Only a bound of its time is known of a run that does not reach the loss."""
    part = Part("time", "noninferior", 0.02, Median((0.5, 0.3, 0.4, 0.6, 0.7, math.inf)))
    decided = SimpleNamespace(part=part, word=Verdict.REFUTED)
    equal = judge("equal", (0.0, 0.0, 0.0))
    claim = SimpleNamespace(claim=SimpleNamespace(name="one"), deciding=[decided, equal])
    assert format_multiplicity([claim]).startswith("Of 2 decided parts, 1 have no variance")


def test_figures_of_the_study(studied):
    """A part on which Holm over the study matters is named; the clearest one is not."""
    text = format_multiplicity(studied)
    assert "encoder_translation (shared)" in text  # p = 0.03
    assert "qq_worse" not in text
