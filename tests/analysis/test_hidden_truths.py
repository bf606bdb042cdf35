"""Error rates on hidden truths of many shapes; `hidden_truths.py` makes the table."""

import math

import pytest

from qkablate.analysis.claims.verdict import KINDS, Part, judge_parts
from qkablate.analysis.comparison.decision import Verdict
from qkablate.analysis.stats import Sample
from tests.analysis import hidden_truths
from tests.analysis.hidden_truths import MARGIN, SHAPES, SampleTests, draw_gaps, measure
from tests.sweeps.planning import tuning_simulation

STUDIES = 1_000
SLACK = 3 * math.sqrt(0.05 * 0.95 / STUDIES)
SYMMETRIC = ("normal", "t3", "ties", "heteroscedastic", "both left behind")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_vectorized_verdicts_are_those_of_the_analysis(kind, shape):
    for truth in (0.0, 1.0, -1.0):
        x_SN = draw_gaps(shape, truth, 16, 20, seed=3)
        judged = [
            judge_parts([Part(kind, kind, MARGIN, Sample(tuple(x_N)))]).word
            for x_N in x_SN.tolist()
        ]
        assert [str(word) for word in judged] == SampleTests(x_SN).words(kind).tolist()


@pytest.mark.parametrize("n", [6, 16])
@pytest.mark.parametrize("shape", SYMMETRIC)
def test_symmetric_gaps_keep_their_promises(shape, n):
    found = measure(shape, n, STUDIES)
    assert found.coverage >= 0.935 - SLACK
    assert max(found.guarded.values()) <= 0.065 + SLACK


@pytest.mark.parametrize(("n", "most"), [(6, 0.1), (16, 0.075), (36, 0.065)])
@pytest.mark.parametrize("shape", ["skewed", "skewed to the left"])
def test_skewed_gaps_are_covered(shape, n, most):
    """Six exponential numbers rarely show their long tail: some false verdicts remain."""
    found = measure(shape, n, STUDIES)
    assert found.coverage >= 0.935 - SLACK
    assert max(found.guarded.values()) <= most + SLACK


@pytest.mark.parametrize("shape", ["arm left behind", "baseline left behind"])
def test_rare_failures_of_one_arm_need_the_guard(shape):
    """Record the interval's limits: it cannot see a failure that has not occurred yet."""
    assert measure(shape, 6, STUDIES).coverage < 0.8
    found = measure(shape, 16, STUDIES)
    assert found.false[Verdict.SUPPORTED] > 0.065
    assert found.guarded[Verdict.SUPPORTED] == found.guarded[Verdict.EQUIVALENT] == 0
    assert measure(shape, 36, STUDIES).coverage >= 0.92 - SLACK


@pytest.mark.parametrize("arms", [4, 8, 20])
def test_equal_arms_are_rarely_surely_beaten(arms):
    assert hidden_truths.surely_beaten(arms, studies=STUDIES) <= 0.06 + SLACK


@pytest.mark.slow
@pytest.mark.parametrize("shape", tuning_simulation.SHAPES)
def test_interval_of_tuned_equal_arms_holds_zero(shape):
    found = tuning_simulation.simulate(shape, 2.0, 0.02, 6, 100)
    assert found.covered >= 0.935 - 3 * found.error
