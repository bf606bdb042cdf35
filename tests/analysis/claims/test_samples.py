"""Medians, exact numbers, and the largest gap of a training."""

import math

import numpy as np
import pytest
from scipy import stats

from qkablate.analysis.claims.samples import Censored, Course, Exact, Median
from qkablate.analysis.claims.verdict import Part, judge_parts
from qkablate.analysis.comparison.decision import Verdict
from qkablate.analysis.stats import Sample


def numbers(n, mean=0.0, sd=1.0, seed=0):
    return tuple(map(float, np.random.default_rng(seed).normal(mean, sd, n)))


# Medians


@pytest.mark.parametrize("n", [6, 7, 16, 36])
def test_interval_of_a_median_is_that_of_the_sign_test(n):
    x = sorted(numbers(n))
    low, high = Median(tuple(x)).interval(0.9)
    for bound, side in ((low, "less"), (high, "greater")):
        inside = bound + (1e-9 if side == "less" else -1e-9)
        above = sum(v > inside for v in x)
        p = stats.binomtest(above, n, alternative="greater" if side == "less" else "less").pvalue
        # Just within the interval a median is not rejected, just beyond it is.
        assert p > 0.05
    assert Median(tuple(x)).p_above(low - 1e-9) <= 0.05
    assert Median(tuple(x)).p_below(high + 1e-9) <= 0.05


def test_median_of_few_numbers_has_no_bounds():
    assert Median(numbers(3)).interval(0.95) == (-math.inf, math.inf)
    assert Median((1.0,)).interval() is None


def test_order_of_censored_numbers_is_enough():
    known, censored = (-0.3, -0.2, -0.2, -0.1, -0.1, 0.2, 0.3, 0.4), (math.inf,) * 2
    sample = Median(known + censored)
    assert sample.mean == 0.05
    low, high = sample.interval(0.9)
    assert low == -0.2
    assert high == math.inf
    assert Median(known[:4] + (math.inf,) * 6).mean == math.inf
    assert sample.sd is None


def test_a_bound_counts_only_where_it_decides():
    """Half of the numbers are only known to be above 0.1."""
    bounds = ((1.0, 1.0),) * 8 + ((0.1, math.inf),) * 8
    sample = Censored((1.0,) * 8 + (math.inf,) * 8, 0.0, bounds)
    assert sample.p_above(0.05) == 0.5**16
    assert sample.p_above(0.4) == pytest.approx(0.598, abs=1e-3)  # 8 of 16
    assert sample.p_below(2.0) == pytest.approx(0.598, abs=1e-3)
    assert sample.interval(0.9) == (0.1, math.inf)
    mirrored = Censored(
        tuple(-value for value in sample.values), 0.0, tuple((-b, -a) for a, b in bounds)
    )
    assert mirrored.p_below(-0.4) == sample.p_above(0.4)
    assert mirrored.interval(0.9) == (-math.inf, -0.1)
    known = numbers(16)
    exact = Censored(known, 0.0, tuple((x, x) for x in known))
    assert exact.interval(0.9) == Median(known).interval(0.9)
    assert exact.p_below(0.3) == Median(known).p_below(0.3)
    assert Censored(()).interval() is None
    assert Censored(()).p_below(0) == 1


@pytest.mark.parametrize(("kind", "size"), [("better", -0.1), ("worse", 0.1), ("noninferior", 0.1)])
def test_exact_number_on_the_bound_refutes_what_it_does_not_support(kind, size):
    part = Part("cache", kind, 0.1, Exact((size,)))
    assert (part.p_supported, part.p_refuted) == (1, 0)
    assert Part("cache", kind, 0.1, Exact(())).p_refuted == 1


def test_distribution_does_not_matter_to_a_median():
    values = numbers(16, mean=-1)
    stretched = tuple(math.copysign(math.expm1(3 * abs(v)), v) for v in values)
    assert Median(values).p_below(0) == Median(stretched).p_below(0)


def test_power_of_a_median_is_counted():
    random = np.random.default_rng(1)
    found = [Median(tuple(x)).p_below(1) < 0.05 for x in random.normal(0.4, 1, (4000, 16)).tolist()]
    promised = Median(()).power(16, 0.4, 1.0, 1.0, 0.05, above=False)
    assert np.mean(found) == pytest.approx(promised, abs=0.025)
    above = Median(()).power(16, 1.6, 1.0, 1.0, 0.05, above=True)
    assert above == pytest.approx(promised)


# Exact numbers


@pytest.mark.parametrize(
    ("kind", "value", "word"),
    [
        ("worse", 0.5, Verdict.SUPPORTED),
        ("worse", -0.5, Verdict.REFUTED),
        ("worse", 0.1, Verdict.EQUIVALENT),
        ("better", -0.5, Verdict.SUPPORTED),
        ("noninferior", 0.1, Verdict.SUPPORTED),
        ("noninferior", 0.3, Verdict.REFUTED),
        ("equivalent", 0.0, Verdict.SUPPORTED),
        ("equivalent", -0.3, Verdict.REFUTED),
    ],
)
def test_exact_number_decides_alone(kind, value, word):
    assert judge_parts([Part("part", kind, 0.2, Exact((value,)))]).word == word


def test_number_that_was_not_counted_decides_nothing():
    assert judge_parts([Part("part", "worse", 0.2, Exact(()))]).word == Verdict.UNDERPOWERED


# Courses


def course(*means, sd=0.001, n=8):
    return Course.from_readings([Sample(numbers(n, m, sd, seed)) for seed, m in enumerate(means)])


def word(kind, sample, margin=0.02):
    return judge_parts([Part("part", kind, margin, sample)]).word


@pytest.mark.parametrize(
    ("means", "noninferior", "worse"),
    [
        ((0.0, 0.01, -0.01), "SUPPORTED", "REFUTED"),
        ((0.0, 0.05, 0.0), "REFUTED", "SUPPORTED"),
        ((0.0, -0.05, 0.0), "REFUTED", "SUPPORTED"),  # on either side
        ((0.0, 0.0201, 0.0), "UNDERPOWERED", "UNDERPOWERED"),
    ],
)
def test_one_reading_is_enough_to_be_apart_and_all_are_needed_not_to(means, noninferior, worse):
    assert word("noninferior", course(*means)) == noninferior
    assert word("worse", course(*means)) == worse


def test_size_of_a_course_has_no_sign():
    one, other = course(0.03, -0.05), course(-0.03, 0.05)
    assert one.mean == pytest.approx(0.05, abs=0.002)
    assert other.mean == pytest.approx(0.05, abs=0.002)
    assert one.interval()[0] > 0.03


def test_interval_and_tests_of_a_course_agree():
    sample = course(0.01, 0.02, 0.015, sd=0.01)
    for level in (0.9, 0.95):
        low, high = sample.interval(level)
        tail = (1 - level) / 2
        assert sample.p_below(high) == pytest.approx(tail, rel=1e-3)
        assert sample.p_above(low) == pytest.approx(tail, rel=1e-3)


def test_more_readings_widen_the_lower_end_only():
    few, many = course(0.1, sd=0.01), course(*(0.1,) + (0.0,) * 15, sd=0.01)
    assert many.interval()[0] < few.interval()[0]
    assert many.interval()[1] == pytest.approx(few.interval()[1])
