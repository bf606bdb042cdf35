"""Verdicts of claims, by the intervals and the kinds of their parts."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from qkablate.analysis.claims.verdict import KINDS, Part, judge_parts, spend_alpha
from qkablate.analysis.comparison.decision import Verdict
from qkablate.analysis.stats import Sample, required_n
from tests.analysis.references import t_test_sample_size

WORD = {
    "S": Verdict.SUPPORTED,
    "R": Verdict.REFUTED,
    "E": Verdict.EQUIVALENT,
    "M": Verdict.MIXED,
    "U": Verdict.UNDERPOWERED,
}
MEANS = (-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0)
SHAPE_8 = np.array([-1.4, -1.0, -0.6, -0.2, 0.2, 0.6, 1.0, 1.4])
NUMBERS = st.floats(-10, 10).map(lambda v: round(v, 4))
PARTS = st.builds(
    Part,
    st.just("part"),
    st.sampled_from(KINDS),
    st.sampled_from([0.0, 0.3, 1.0, 4.0]),
    st.lists(NUMBERS, max_size=8).map(lambda values: Sample(tuple(values))),
    st.booleans(),
    st.booleans(),
)


def around(mean, half, n=8):
    """N numbers whose interval of 90 % is mean ± half: the two bounds of 95 %."""
    shape = np.resize(SHAPE_8, n) if n > 1 else np.zeros(1)
    shape = shape - shape.mean()
    sd = half * math.sqrt(n) / stats.t.isf(0.05, n - 1) if n > 1 else 0
    scaled = mean + sd * shape / (shape.std(ddof=1) if n > 1 else 1)
    return Sample(tuple(map(float, scaled)))


def part(kind, sample, margin=1.0, **more):
    return Part(kind, kind, margin, sample, **more)


def with_p_refuted(p, name="part"):
    """Not worse by 0.5: a mean at which the part is refuted with this p."""
    at = 0.5 + stats.t.isf(p, 7) * 0.1 / stats.t.isf(0.05, 7)
    made = Part(name, "noninferior", 0.5, around(at, 0.1))
    assert made.p_refuted == pytest.approx(p)
    return made


def word(kind, sample, margin=1.0, **more):
    verdict = judge_parts([part(kind, sample, margin, **more)])
    assert verdict.parts == [verdict.word]
    return verdict.word


def test_helper_is_right():
    sample = around(0.3, 0.2)
    assert sample.interval(0.9) == pytest.approx((0.1, 0.5))


# One part


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        #                -2   -1  -½   0   ½   1   2     with margin 1
        ("noninferior", "S   S   S   S   S   U   R"),
        ("equivalent", " R   U   S   S   S   U   R"),
        ("better", "     S   U   E   E   E   R   R"),
        ("worse", "      R   R   E   E   E   U   S"),
    ],
)
def test_narrow_interval_gets_the_verdict_of_its_place(kind, words):
    assert [word(kind, around(mean, 0.2)) for mean in MEANS] == [WORD[w] for w in words.split()]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("noninferior", "S   S   S   U   R   R   R"),
        ("equivalent", " R   R   R   U   R   R   R"),
        ("better", "     S   S   S   U   R   R   R"),
        ("worse", "      R   R   R   U   S   S   S"),
    ],
)
def test_without_a_margin_only_the_sign_matters(kind, words):
    """Nothing is ever equivalent."""
    found = [word(kind, around(mean, 0.2), margin=0.0) for mean in MEANS]
    assert found == [WORD[w] for w in words.split()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mean", MEANS)
def test_wide_interval_is_underpowered(kind, mean):
    assert word(kind, around(mean, 4)) == Verdict.UNDERPOWERED


@pytest.mark.parametrize(
    ("kind", "edge", "inwards", "word_within"),
    [
        ("noninferior", 1, -1, Verdict.SUPPORTED),
        ("equivalent", 1, -1, Verdict.SUPPORTED),
        ("equivalent", -1, 1, Verdict.SUPPORTED),
        ("better", -1, -1, Verdict.SUPPORTED),
        ("worse", 1, 1, Verdict.SUPPORTED),
        ("better", 1, -1, Verdict.EQUIVALENT),
        ("better", -1, 1, Verdict.EQUIVALENT),
        ("worse", 1, -1, Verdict.EQUIVALENT),
        ("worse", -1, 1, Verdict.EQUIVALENT),
        ("noninferior", 1, 1, Verdict.REFUTED),
        ("better", -1, 1, Verdict.REFUTED),
        ("worse", 1, -1, Verdict.REFUTED),
    ],
)
def test_bound_of_95_percent_decides(kind, edge, inwards, word_within):
    """The interval of 90 % ends just on one side of the margin, or just on the other."""
    half = 0.2 if word_within != Verdict.REFUTED else 2.2  # so wide that nothing is equivalent
    just, not_quite = (edge + inwards * (half + slack) for slack in (1e-6, -1e-6))
    assert word(kind, around(just, half)) == word_within
    assert word(kind, around(not_quite, half)) != word_within


@pytest.mark.parametrize("side", [-1, 1])
def test_interval_of_95_percent_refutes_equivalence(side):
    """Outside may lie on either side: two-sided."""
    half_95 = 0.2 * stats.t.isf(0.025, 7) / stats.t.isf(0.05, 7)
    assert word("equivalent", around(side * (1 + half_95 + 1e-6), 0.2)) == Verdict.REFUTED
    assert word("equivalent", around(side * (1 + half_95 - 1e-6), 0.2)) == Verdict.UNDERPOWERED


@pytest.mark.parametrize("kind", ["better", "worse"])
def test_equivalent_goes_before_refuted(kind):
    """No difference of the size that matters says more than: not as claimed."""
    made = part(kind, around(0, 0.2))
    assert made.p_refuted < 0.05
    assert made.p_equivalent < 0.05
    assert judge_parts([made]).word == Verdict.EQUIVALENT


@pytest.mark.parametrize("kind", ["noninferior", "equivalent"])
def test_only_directed_parts_can_be_equivalent(kind):
    assert all(word(kind, around(mean, 0.2)) != Verdict.EQUIVALENT for mean in MEANS)


@pytest.mark.parametrize("kind", KINDS)
def test_smaller_alpha_asks_for_more(kind):
    mean = {"noninferior": 0, "equivalent": 0, "better": -2, "worse": 2}[kind]
    made = part(kind, around(mean, 0.9))
    assert judge_parts([made]).word == Verdict.SUPPORTED
    assert judge_parts([made], alpha=0.01).word == Verdict.UNDERPOWERED


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("values", [(), (-9.0,), (0.0,), (9.0,)])
@pytest.mark.parametrize("margin", [0.0, 1.0])
def test_one_pair_decides_nothing(kind, values, margin):
    assert word(kind, Sample(values), margin) == Verdict.UNDERPOWERED
    assert part(kind, Sample(values), margin).seeds_needed() is None


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("noninferior", "S S R"),
        ("equivalent", " R S R"),
        ("better", "     S E R"),
        ("worse", "      R E S"),
    ],
)
def test_equal_gaps_are_certain(kind, words):
    """Check two arms that compute the same: each gap is exactly zero."""
    found = [word(kind, Sample((mean,) * 6)) for mean in (-2.0, 0.0, 2.0)]
    assert found == [WORD[w] for w in words.split()]


@pytest.mark.parametrize("kind", KINDS)
def test_identical_arms_are_not_equivalent_within_a_zero_margin(kind):
    assert word(kind, Sample((0.0,) * 6), margin=0.0) == Verdict.UNDERPOWERED


@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (-0.4, 0.4)])
@pytest.mark.parametrize("n", [3, 6, 20])
def test_equivalence_test_equals_two_one_sided_t_tests(low, high, n):
    half = np.random.default_rng(n).normal(0, 0.6, n // 2)
    values = 0.2 + np.concatenate((half, -half, [0.0] * (n % 2)))  # without skewness
    made = part("equivalent", Sample(tuple(map(float, values))), margin=high)
    above = stats.ttest_1samp(values, low, alternative="greater")
    below = stats.ttest_1samp(values, high, alternative="less")
    assert made.p_supported == pytest.approx(max(above.pvalue, below.pvalue))
    assert made.p_above(low) == pytest.approx(above.pvalue)
    assert made.p_below(high) == pytest.approx(below.pvalue)
    assert above.statistic > below.statistic


# Several parts


def test_all_parts_must_hold_without_adjustment():
    """Each at p just below 0.05: were it adjusted, none would."""
    parts = [
        part(kind, around(at, 0.2))
        for kind, at in zip(KINDS, (0.79, 0.79, -1.21, 1.21), strict=True)
    ]
    assert all(0.04 < one.p_supported < 0.05 for one in parts)
    assert judge_parts(parts).word == Verdict.SUPPORTED
    assert judge_parts(parts).parts == [Verdict.SUPPORTED] * 4
    missing = part("better", around(-1.19, 0.2))
    assert judge_parts([*parts, missing]).parts == [Verdict.SUPPORTED] * 4 + [Verdict.UNDERPOWERED]
    assert judge_parts([*parts, missing]).word == Verdict.UNDERPOWERED


def test_part_is_refuted_by_holm():
    """P = 0.03 refutes a claim of one part, and none of four: each could have erred."""
    one, holds = with_p_refuted(0.03), part("noninferior", around(0, 0.2))
    assert judge_parts([one]).word == Verdict.REFUTED
    verdict = judge_parts([one, holds, holds, holds])
    assert verdict.parts == [
        Verdict.UNDERPOWERED,
        Verdict.SUPPORTED,
        Verdict.SUPPORTED,
        Verdict.SUPPORTED,
    ]
    assert verdict.word == Verdict.UNDERPOWERED
    assert judge_parts([with_p_refuted(0.012), holds, holds, holds]).word == Verdict.REFUTED


def test_second_part_is_refuted_by_holms_second_step():
    """0.012 × 4 and 0.016 × 3 pass; 0.016 × 4 would not."""
    holds = part("noninferior", around(0, 0.2))
    verdict = judge_parts([with_p_refuted(0.016), holds, with_p_refuted(0.012), holds])
    assert verdict.parts == [Verdict.REFUTED, Verdict.SUPPORTED, Verdict.REFUTED, Verdict.SUPPORTED]
    assert judge_parts([with_p_refuted(0.016), holds, holds, holds]).word == Verdict.UNDERPOWERED


@pytest.mark.parametrize(
    ("words", "whole"),
    [
        ("S S", "S"),
        ("S E", "M"),
        ("E E", "E"),
        ("S U", "U"),
        ("E U", "U"),
        ("U U", "U"),
        ("S R", "R"),
        ("E R", "R"),
        ("U R", "R"),
        ("S E U R", "R"),
        ("S E U", "U"),
    ],
)
def test_verdict_of_the_claim(words, whole):
    """Refuted by one part; else open while one is; else mixed if only some show no difference."""
    of = {
        "S": part("better", around(-3, 0.2)),
        "E": part("better", around(0, 0.2)),
        "U": part("better", around(-1, 0.2)),
        "R": part("better", around(9, 0.2)),
    }
    for order in (words.split(), words.split()[::-1]):
        verdict = judge_parts([of[w] for w in order])
        assert verdict.parts == [WORD[w] for w in order]
        assert verdict.word == WORD[whole]


@settings(deadline=None)
@given(st.lists(PARTS, min_size=1, max_size=5), st.floats(0.001, 0.49))
def test_claim_verdict_follows_its_parts(parts, alpha):
    verdict = judge_parts(parts, alpha)
    assert verdict.word in {*Verdict} - {Verdict.INCOMPLETE}
    assert len(verdict.parts) == len(parts)
    assert (verdict.word == Verdict.SUPPORTED) == ({*verdict.parts} == {Verdict.SUPPORTED})
    assert (verdict.word == Verdict.REFUTED) == (Verdict.REFUTED in verdict.parts)
    for one, found in zip(parts, verdict.parts, strict=True):
        alone = judge_parts([one], alpha).word
        # Company can only take away what is adjusted for it: what is nil may still be refuted.
        weaker = {
            Verdict.REFUTED: [Verdict.UNDERPOWERED],
            Verdict.EQUIVALENT: [Verdict.REFUTED, Verdict.UNDERPOWERED],
        }
        assert found in [alone, *weaker.get(alone, [])]


@settings(deadline=None)
@given(PARTS, st.floats(0.001, 0.49))
def test_nothing_is_both_supported_and_refuted(one, alpha):
    for p in (one.p_supported, one.p_refuted, one.p_equivalent):
        assert 0 <= p <= 1
    assert not (one.p_supported < alpha and one.p_refuted < alpha)
    if one.kind in ("better", "worse"):  # nor both a difference and none
        assert not (one.p_supported < alpha and one.p_equivalent < alpha)


@settings(deadline=None)
@given(PARTS, st.floats(0.001, 0.49))
def test_better_is_worse_in_the_mirror(one, alpha):
    mirror = {"better": "worse", "worse": "better", "equivalent": "equivalent"}
    if one.kind in mirror:
        values = Sample(tuple(-v for v in one.sample.values))
        sides = one.open_below, one.open_above
        other = Part("part", mirror[one.kind], one.margin, values, *sides)
        assert judge_parts([other], alpha) == judge_parts([one], alpha)


# Runs that diverged


@pytest.mark.parametrize(
    ("kind", "above", "below", "both"),
    [
        # what can be said while the mean has no upper bound, no lower one, neither
        ("noninferior", "R", "S", ""),
        ("equivalent", "R", "R", ""),
        ("better", "R", "S", ""),
        ("worse", "S", "R", ""),
    ],
)
def test_side_without_an_end_bounds_nothing(kind, above, below, both):
    for sides, allowed in (((1, 0), above), ((0, 1), below), ((1, 1), both)):
        opened = dict(zip(("open_above", "open_below"), map(bool, sides), strict=True))
        for margin in (0.0, 1.0):
            found = {word(kind, around(mean, 0.2), margin, **opened) for mean in (-9, *MEANS, 9)}
            assert found == {Verdict.UNDERPOWERED, *(WORD[w] for w in allowed)}


@pytest.mark.parametrize(("side", "opened"), [(1, "open_below"), (-1, "open_above")])
def test_open_side_refutes_equivalence_on_the_other_only(side, opened):
    assert word("equivalent", around(side * 9, 0.2)) == Verdict.REFUTED
    assert word("equivalent", around(side * 9, 0.2), **{opened: True}) == Verdict.UNDERPOWERED
    assert word("equivalent", around(-side * 9, 0.2), **{opened: True}) == Verdict.REFUTED


@settings(deadline=None)
@given(PARTS, st.floats(0.001, 0.49))
def test_diverged_run_only_takes_certainty_away(one, alpha):
    closed = Part(one.name, one.kind, one.margin, one.sample)
    found, before = judge_parts([one], alpha).word, judge_parts([closed], alpha).word
    assert found in (before, Verdict.UNDERPOWERED) or (before, found) == (
        Verdict.EQUIVALENT,
        Verdict.REFUTED,
    )


@pytest.mark.parametrize(
    ("kind", "mean", "expected"),
    [
        ("better", 2.0, Verdict.REFUTED),  # worse, as any experiment may show
        ("better", 0.0, Verdict.INSENSITIVE),
        ("better", -0.3, Verdict.INSENSITIVE),  # a difference that is too small is not the opposite
        ("worse", -2.0, Verdict.REFUTED),
        ("worse", 0.3, Verdict.INSENSITIVE),
        ("noninferior", 2.0, Verdict.REFUTED),
        ("noninferior", 0.0, Verdict.INSENSITIVE),
    ],
)
def test_only_what_was_not_shown_is_insensitive(kind, mean, expected):
    assert word(kind, around(mean, 0.2), is_sensitive=False) == expected


def test_opposite_difference_is_judged_by_holm():
    """Each alone would be shown at 5 %, and not beside another."""
    barely = around(0.21, 0.2)
    assert word("better", barely, margin=0.1, is_sensitive=False) == Verdict.REFUTED
    two = [part("better", barely, 0.1, is_sensitive=False), part("better", around(-9, 0.2))]
    assert judge_parts(two).parts == [Verdict.INSENSITIVE, Verdict.SUPPORTED]


# Seeds needed


def seeds_needed_of_truth(one, mean, sd, alpha=0.05):
    """Return the seeds that decide a part with 80 % power, given the truth."""
    return required_n(lambda n: max(one._outcomes(n, mean, sd, alpha, 1)))


@pytest.mark.parametrize(("kind", "mean"), [("noninferior", 0.0), ("better", -2.0), ("worse", 2.0)])
@pytest.mark.parametrize("spread", [0.7, 1.0, 2.5])
def test_seeds_needed_of_a_known_truth_equal_a_power_table(kind, mean, spread):
    """The mean lies one margin inside: a one-sided t test of an effect of 1 / spread."""
    reference = t_test_sample_size(1 / spread, two_sided=False)
    needed = seeds_needed_of_truth(part(kind, Sample(())), mean, spread)
    # Allowing for skewness takes one more.
    assert math.ceil(reference) <= needed <= math.ceil(reference) + 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mean", [-2.6, -0.2, 0.3, 2.6])
def test_seeds_needed_by_the_estimates_lie_in_the_interval(kind, mean):
    made = part(kind, around(mean, 0.3))
    low, high = made.seeds_needed()
    found = seeds_needed_of_truth(made, mean, made.sample.sd)
    assert low <= found
    assert high is None or found <= high


@pytest.mark.parametrize("kind", KINDS)
def test_seeds_needed_have_no_upper_end_where_the_gap_may_lie_on_the_margin(kind):
    edge = -1.0 if kind == "better" else 1.0
    low, high = part(kind, Sample((edge - 0.5, edge, edge + 0.5))).seeds_needed()
    assert low >= 2
    assert high is None
    assert part(kind, Sample((0.0,) * 6)).seeds_needed() is None  # there is no spread to go by


def test_no_number_of_seeds_makes_an_experiment_sensitive():
    sample = around(0.5, 0.3)
    assert Part("a", "noninferior", 1.0, sample, is_sensitive=False).seeds_needed().low is None
    above = around(1.5, 0.9)  # which refutes it, sensitive or not
    assert Part("a", "noninferior", 1.0, above, is_sensitive=False).seeds_needed().low is not None


def test_no_number_of_seeds_bounds_a_side_on_which_runs_diverged():
    sample = Sample(around(0, 0.1).values)
    assert Part("a", "noninferior", 1.0, sample, open_above=True).seeds_needed() == (None, None)
    low, high = Part("a", "noninferior", 1.0, sample).seeds_needed()
    assert 2 <= low <= high


def test_wider_spreads_and_stricter_levels_need_more_seeds():
    at = [part("noninferior", around(0, half)).seeds_needed().low for half in (0.2, 1, 2, 4)]
    assert at == sorted({*at})
    made = part("noninferior", around(0, 0.5))
    assert made.seeds_needed(alpha=0.01).high > made.seeds_needed().high
    # All must hold: support is not adjusted.
    assert made.seeds_needed(parts=4) == made.seeds_needed()
    refuted = part("noninferior", around(2, 0.5))
    assert refuted.seeds_needed(parts=4).high > refuted.seeds_needed().high


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "mean", "spread"),
    [
        ("noninferior", 0.0, 3.0),  # the audit's case: 58 seeds are needed
        ("noninferior", 0.0, 0.8),
        ("noninferior", 1.0, 1.0),  # on the margin: no number of seeds
        ("equivalent", 0.0, 0.6),
        ("equivalent", 0.5, 1.0),
        ("better", 0.0, 1.0),
        ("worse", 2.0, 1.0),
    ],
)
def test_seeds_needed_lie_in_the_prediction_interval_four_times_of_five(kind, mean, spread):
    random = np.random.default_rng(7)
    needed = seeds_needed_of_truth(part(kind, Sample(())), mean, spread) or math.inf
    held = []
    for values in random.normal(mean, spread, (120, 6)).tolist():
        low, high = part(kind, Sample(tuple(values))).seeds_needed()
        held.append((low or math.inf) <= needed <= (high or math.inf))
    assert np.mean(held) >= 0.8 - 2 * math.sqrt(0.8 * 0.2 / len(held))


# Looks


def test_looks_spend_as_obrien_and_fleming():
    """Compare with 2 − 2Φ(1.96 / √t) at t = 0.2, 0.4, …, from tables of Φ.

    4.383, 3.099, 2.530, 2.191 and 1.960 standard deviations.
    """
    total = np.cumsum(spend_alpha([4, 8, 12, 16, 20]))
    assert total == pytest.approx([0.00001, 0.00194, 0.01140, 0.02842, 0.05], abs=1e-5)


@pytest.mark.parametrize("n", [2, 6, 100])
def test_one_look_has_all_of_alpha(n):
    assert spend_alpha([n]) == pytest.approx([0.05])


@given(st.sets(st.integers(2, 400), min_size=1, max_size=12).map(sorted))
def test_all_looks_together_spend_alpha(looks):
    shares = spend_alpha(looks)
    assert len(shares) == len(looks)
    assert min(shares) >= 0
    assert sum(shares) == pytest.approx(0.05)


@pytest.mark.parametrize("count", range(2, 11))
def test_last_look_has_the_most(count):
    """Check that early looks spend little α and the last look nearly all of it."""
    shares = spend_alpha([6 * (i + 1) for i in range(count)])
    assert shares == sorted({*shares})
    assert shares[-1] > 0.05 / count


def test_first_of_three_looks_spends_little_alpha():
    shares = spend_alpha([6, 12, 20])
    assert shares == sorted(shares)
    assert shares[0] < 0.001 < 0.035 < shares[-1]
