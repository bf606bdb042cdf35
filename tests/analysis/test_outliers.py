"""Rare failures of training: found, counted, and excluded or named in the verdict."""

import math

import numpy as np
import pytest

from qkablate.analysis.claims.verdict import Part, judge_parts
from qkablate.analysis.comparison.decision import Verdict
from qkablate.analysis.outliers import TYPICAL_SIZE, FailureRisk, find_outliers
from qkablate.analysis.stats import Sample


def losses(*values):
    return {(("seed", number),): value for number, value in enumerate(values)}


def test_run_far_above_the_others_is_an_outlier():
    found = find_outliers(losses(2.0, 2.01, 1.99, 2.0, 2.12))
    assert found == {(("seed", 4),): pytest.approx(0.12)}


def test_run_far_below_the_others_is_not():
    assert find_outliers(losses(2.0, 2.01, 1.99, 2.0, 1.5)) == {}


def test_spread_that_is_the_arm_s_own_is_no_failure():
    assert find_outliers(losses(2.0, 2.1, 1.9, 2.05, 2.2)) == {}


def test_quiet_arms_have_no_failure_below_the_floor():
    assert find_outliers(losses(2.0, 2.0, 2.0, 2.0, 2.04)) == {}


def test_three_runs_are_too_few():
    assert find_outliers(losses(2.0, 2.0, 3.0)) == {}


def test_normal_noise_is_rarely_called_a_failure():
    random = np.random.default_rng(0)
    draws_SN = 2 + 0.1 * random.normal(size=(1_000, 16))
    assert sum(bool(find_outliers(losses(*row))) for row in draws_SN.tolist()) < 20


@pytest.mark.parametrize("n", [16, 36, 100])
def test_shift_follows_the_rule_of_three(n):
    shift = FailureRisk("arm", 0, n).unseen_shift(0.05)
    assert shift == pytest.approx(TYPICAL_SIZE * (1 - 0.05 ** (1 / n)))
    assert shift == pytest.approx(TYPICAL_SIZE * 3 / n, rel=0.1)


def part(kind, mean, n, *, failed=0, spread=1e-4):
    values = tuple(mean + spread * math.cos(i) for i in range(n))
    raising, lowering = (FailureRisk("arm", failed, n),), (FailureRisk("base", 0, n),)
    return Part("part", kind, 0.01, Sample(values), raising=raising, lowering=lowering)


@pytest.mark.parametrize(
    ("kind", "mean", "word", "names"),
    [
        ("noninferior", 0.0, Verdict.SUPPORTED, ["arm"]),
        ("better", -0.02, Verdict.SUPPORTED, ["arm"]),
        ("worse", 0.02, Verdict.SUPPORTED, ["base"]),
        ("equivalent", 0.0, Verdict.SUPPORTED, ["arm", "base"]),
        ("better", 0.0, Verdict.EQUIVALENT, ["arm", "base"]),
        ("noninferior", 0.02, Verdict.REFUTED, ["base"]),
        ("equivalent", 0.02, Verdict.REFUTED, ["base"]),
        ("equivalent", -0.02, Verdict.REFUTED, ["arm"]),
        ("worse", -0.02, Verdict.REFUTED, ["arm"]),
    ],
)
def test_verdict_names_the_failures_that_would_overturn_it(kind, mean, word, names):
    few, many = (judge_parts([part(kind, mean, n)]) for n in (6, 100))
    assert few.word == many.word == word
    assert [text.split(" of ")[1].split()[0] for text in few.unless] == names
    assert many.unless == []


def test_condition_tells_how_many_runs():
    assert judge_parts([part("noninferior", 0.0, 6)]).unless == [
        "one run in 13 of arm is an outlier by 0.12 nats"
    ]


def test_underpowered_verdict_has_no_condition():
    found = judge_parts([part("noninferior", 0.01, 6, spread=0.1)])
    assert (found.word, found.unless) == (Verdict.UNDERPOWERED, [])


def test_claim_refuted_by_one_part_for_certain_has_no_condition():
    parts = [part("noninferior", 0.5, 6), part("noninferior", 0.02, 6)]
    verdict = judge_parts(parts)
    assert (verdict.word, verdict.unless) == (Verdict.REFUTED, [])
    first, second = verdict.conditions  # of the parts by themselves
    assert first == []
    assert second == ["one run in 13 of base is an outlier by 0.12 nats"]


def test_least_certain_part_has_the_strictest_condition():
    """By Holm's method the second part is decided at twice its share of α, which leaves no room."""
    sure = part("better", 0.0, 100)
    frequencies = []
    for spread in (0.008, 0.011, 0.014):
        near = part("better", 0.0, 6, spread=spread)
        verdict = judge_parts([sure, near])
        assert verdict.parts == [Verdict.EQUIVALENT] * 2
        assert (near.p_equivalent > 0.025) == (spread > 0.012)
        frequencies.append(verdict.conditions[1][0])
    seldom, seldomer, never = frequencies
    k = [int(text.removeprefix("one run in ").partition(" ")[0]) for text in (seldom, seldomer)]
    assert k[0] < k[1]
    assert never == "a run of arm, however rarely, is an outlier by 0.12 nats"


def test_each_of_several_parts_is_judged_at_its_share_of_alpha():
    """Refuted alone, whatever fails; beside others its interval is wider, and failures count."""
    one = part("noninferior", 0.047, 16, spread=0.021)
    others = [part("noninferior", -0.5, 16)] * 3
    assert judge_parts([one]).unless == []
    beside = judge_parts([one, *others])
    assert (beside.word, len(beside.unless)) == (Verdict.REFUTED, 1)
