"""Verdicts adjusted for all parts of the study."""

from types import SimpleNamespace

import pytest

from qkablate.analysis.claims.verdict import Part
from qkablate.analysis.comparison.decision import Verdict
from qkablate.analysis.stats import ALPHA, Sample
from qkablate.report.study.multiplicity import find_fragile, format_multiplicity

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
    above = tuple(0.05 + value for value in FAR)
    assert find_fragile([judge("out", above, Verdict.REFUTED)]) == []
    assert find_fragile([judge("within", FAR, Verdict.EQUIVALENT, "worse")]) == []
    wide = (0.5, -0.5, 0.4, -0.4)
    parts = [judge("wide", wide, word) for word in (Verdict.REFUTED, Verdict.EQUIVALENT)]
    assert min(part.part.p_refuted for part in parts) > ALPHA  # such verdicts do not occur
    assert find_fragile(parts) == []


def test_text_counts_the_parts(near):
    undecided = [judge("open", FAR, Verdict.UNDERPOWERED)] * 2
    claims = [
        SimpleNamespace(claim=SimpleNamespace(name="first"), deciding=[near, judge("sure", FAR)]),
        SimpleNamespace(claim=SimpleNamespace(name="second"), deciding=undecided),
    ]
    text = format_multiplicity(claims)
    assert text.startswith("Of 2 decided parts, 1 remain decided when they are adjusted for all 4")
    assert text.endswith(" The others: first (near).")
    assert format_multiplicity(claims[1:]) == ""


def test_figures_of_the_study(studied):
    parts = [part for one in studied for part in one.deciding]
    text = format_multiplicity(studied)
    assert f"all {len(parts)} parts" in text
    for part in find_fragile(parts):
        assert part.word in (Verdict.SUPPORTED, Verdict.REFUTED, Verdict.EQUIVALENT)
        assert f"({part.part.name})" in text.replace("\\", "")
