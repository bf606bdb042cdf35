"""Scaling laws: known constants are recovered, and nothing is read out of reach."""

import numpy as np
import pytest

from qkablate.analysis.scaling.law import Observations, fit_law

SIZES, LENGTHS = np.array([1e5, 4e5, 1.6e6]), np.array([1e6, 2e6, 4e6, 8e6])
PARAMS_P, TOKENS_P = (x.ravel() for x in np.meshgrid(SIZES, LENGTHS, indexing="ij"))
E, A, ALPHA, B, BETA = 1.2, 60.0, 0.34, 400.0, 0.4


def law(params, tokens):
    return E + A * params**-ALPHA + B * tokens**-BETA


def observed(noise=0.0, seed=0):
    losses = law(PARAMS_P, TOKENS_P) + np.random.default_rng(seed).normal(0, noise, 12)
    return Observations(PARAMS_P, TOKENS_P, losses, 6 * PARAMS_P, noise or 1e-6)


@pytest.fixture(scope="module")
def exact():
    return fit_law(observed())


def test_constants_are_recovered(exact):
    assert exact.irreducible == pytest.approx(E, abs=1e-3)
    assert exact.uncentred_terms == pytest.approx((A, B), rel=1e-2)
    assert (exact.size_exponent, exact.token_exponent) == pytest.approx((ALPHA, BETA), abs=1e-3)
    assert not exact.problem


def test_noisy_losses_are_fitted_to_their_noise():
    noisy = fit_law(observed(0.003))
    miss = noisy.loss(PARAMS_P, TOKENS_P) - law(PARAMS_P, TOKENS_P)
    assert np.abs(miss).max() < 3 * 0.003


def test_one_bad_run_moves_the_fit_little():
    """A point that is off by 100 standard errors counts by its size, not its square."""
    data = observed(0.003)
    losses = data.losses_P.copy()
    losses[5] += 0.3
    spoilt = fit_law(Observations(PARAMS_P, TOKENS_P, losses, data.flops_P, data.error))
    miss = (spoilt.loss(PARAMS_P, TOKENS_P) - law(PARAMS_P, TOKENS_P))[np.arange(12) != 5]
    assert np.abs(miss).max() < 0.03


def test_cheapest_training_is_that_of_the_closed_form(exact):
    """With FLOPs 6·N·D the optimum has α A N^−α = β B D^−β (Hoffmann and others 2022)."""
    flops = 6 * 4e5 * 4e6
    best = min(
        (law(n, flops / 6 / n), n) for n in np.exp(np.linspace(np.log(5e4), np.log(3.2e6), 20_001))
    )
    assert exact.lowest_loss(flops) == pytest.approx(best[0], abs=1e-4)
    assert exact.least_flops(best[0]) == pytest.approx(flops, rel=2e-3)


def test_equivalents_invert_the_law(exact):
    loss = float(law(1e6, 3e6))
    assert exact.params_for(loss, 3e6) == pytest.approx(1e6, rel=1e-2)
    assert exact.tokens_for(loss, 1e6) == pytest.approx(3e6, rel=1e-2)
    assert float(exact.loss(1e6, np.inf)) == pytest.approx(E + A * 1e6**-ALPHA, abs=1e-3)


def test_nothing_is_read_beyond_twice_the_range(exact):
    assert exact.tokens_for(float(law(4e5, 15e6)), 4e5) is not None
    assert exact.tokens_for(float(law(4e5, 17e6)), 4e5) is None
    assert exact.tokens_for(E, 4e5) is None
    assert exact.params_for(float(law(3.1e6, 4e6)), 4e6) is not None
    assert exact.params_for(float(law(3.4e6, 4e6)), 4e6) is None
    assert exact.params_for(E, 4e6) is None
    assert exact.lowest_loss(6 * 3.3e6 * 17e6) is None
    assert exact.least_flops(float(law(3.3e6, 17e6))) is None


@pytest.mark.parametrize(
    ("losses", "problem"),
    [
        (2 + B * TOKENS_P**-BETA, "its loss does not fall with parameters as a power"),
        (2 + A * PARAMS_P**-ALPHA, "its loss does not fall with tokens as a power"),
        (2 + 0.1 * np.log(PARAMS_P) + B * TOKENS_P**-BETA, "its loss does not fall with param"),
    ],
)
def test_loss_without_a_law_is_named(losses, problem):
    data = Observations(PARAMS_P, TOKENS_P, losses, 6 * PARAMS_P, 1e-3)
    assert fit_law(data).problem.startswith(problem)
