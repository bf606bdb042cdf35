"""Promised error rates of intervals and verdicts, and their power, with a known truth.

See `simulation.py`, which prints the table. A rate may be three standard errors off; the
draws are always the same.
"""

import math

import pytest

from qkablate.analysis.claims.verdict import KINDS
from qkablate.analysis.comparison.decision import Verdict
from qkablate.analysis.stats import ALPHA
from tests.analysis import simulation
from tests.analysis.simulation import EDGE, FOUR, INSIDE, ONE, STUDIES, untrue

FEWER = 1_000  # of what takes several verdicts each; the table has all


def at_most(studies=STUDIES):
    return ALPHA + 3 * math.sqrt(ALPHA * (1 - ALPHA) / studies)


def errors(found, wrong):
    return {
        word: str(found[word])
        for word in wrong
        if float(found[word]) > at_most(found[word].studies)
    }


def is_kept(promise):
    return abs(float(promise.counted) - promise.promised) <= 3 * promise.counted.error(
        promise.promised
    )


# Intervals


@pytest.mark.parametrize("n", [6, 10, 20])
def test_t_interval_holds_the_truth_in_95_of_100_studies(n):
    assert float(simulation.coverage(n)) == pytest.approx(0.95, abs=0.015)


def test_bootstrap_does_not_with_six_numbers():
    """Show why the bootstrap decides nothing: 500 studies suffice to see its coverage."""
    found = simulation.bca_coverage(6, studies=500)
    assert float(found) + 3 * found.error() < float(simulation.coverage(6))


@pytest.mark.parametrize("correlation", [0, 0.9])
def test_band_holds_the_whole_curve(correlation):
    found = simulation.band_coverage(6, 12, correlation, FEWER)
    assert float(found) >= 0.95 - 3 * found.error(0.95)


# Errors


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("truth", "spread"), ONE)
def test_each_error_is_rare(kind, truth, spread):
    assert not errors(simulation.of_one(kind, truth, spread), untrue(kind, truth))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "spread", "correlation"), FOUR)
def test_each_error_is_rare_with_four_parts(kind, spread, correlation):
    found = simulation.of_four(kind, [EDGE[kind]] * 4, spread, correlation, FEWER)
    assert not errors(found, untrue(kind, EDGE[kind]))


@pytest.mark.parametrize("kind", KINDS)
def test_one_false_part_among_true_ones_is_rarely_overlooked(kind):
    """The likeliest way in which a false claim is supported: all hangs on one part."""
    found = simulation.of_four(kind, [EDGE[kind], *[INSIDE[kind]] * 3], 0.25, 0, FEWER)
    assert not errors(found, untrue(kind, EDGE[kind]))


@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_as_rare_with_looks(kind):
    found = simulation.looked(kind, EDGE[kind], 0.5, FEWER)
    assert not errors(found, untrue(kind, EDGE[kind]))


@pytest.mark.slow
@pytest.mark.parametrize("correlation", [0, 0.5])
def test_family_wise_error_of_four_arms_is_controlled(correlation):
    assert float(simulation.family(4, correlation)) <= at_most()


@pytest.mark.slow
def test_tests_would_notice():
    """Show that a level twice too high, or looks without spending α, would be noticed."""
    often = ALPHA - (at_most() - ALPHA)
    narrow, wide = (simulation.of_one("better", -1, spread) for spread in (0.25, 4))
    assert float(narrow[Verdict.SUPPORTED]) > often
    assert float(narrow[Verdict.EQUIVALENT]) > often
    assert float(wide[Verdict.REFUTED]) > often
    assert float(simulation.peeked(studies=300)) > 2 * at_most()


# Power


@pytest.mark.parametrize("n", [6, 20])
def test_power_equals_the_simulated_rate(n):
    assert [one for one in simulation.promises(n) if not is_kept(one)] == []


@pytest.mark.parametrize("n", [6, 10])
def test_detectable_effect_is_found_with_80_percent_power(n):
    assert is_kept(simulation.detected(n))


@pytest.mark.parametrize(
    ("kind", "truth"), [("noninferior", 0.3), ("equivalent", 0.2), ("better", -1.8), ("worse", 1.8)]
)
def test_part_is_supported_with_the_promised_power(kind, truth):
    supported, _ = simulation.power_promises(kind, truth, 1, 10)
    assert 0.5 < supported.promised < 0.95
    assert is_kept(supported)


@pytest.mark.parametrize(
    ("kind", "truth"),
    [("noninferior", 1.8), ("equivalent", -1.9), ("better", -0.2), ("worse", 0.2)],
)
def test_part_is_refuted_with_the_promised_power(kind, truth):
    _, refuted = simulation.power_promises(kind, truth, 1, 10)
    assert 0.5 < refuted.promised < 0.95
    assert is_kept(refuted)


@pytest.mark.parametrize(
    ("kind", "truth", "spread"),
    [
        ("noninferior", 0, 1.2),  # will be supported
        ("equivalent", 0.2, 0.9),
        ("better", -2, 1.4),
        ("worse", 0, 0.8),  # equivalent
        ("equivalent", 2.5, 2),  # refuted
    ],
)
def test_seeds_needed_give_80_percent_power(kind, truth, spread):
    """Or more often: only the likeliest of the words that settle it is counted on."""
    n, settled = simulation.enough(kind, truth, spread)
    assert 3 < n < 30
    assert float(settled) >= 0.8 - 3 * settled.error(0.8)


@pytest.mark.parametrize("kind", KINDS)
def test_clear_effects_are_decided_at_some_look(kind):
    found = simulation.looked(kind, INSIDE[kind], 0.5, studies=200)
    assert float(found[Verdict.SUPPORTED]) > 0.99
    assert found[Verdict.UNDERPOWERED].hits <= 2
