"""Gap after infinitely many tokens: known limits are found, and curves without one are refused."""

import numpy as np
import pytest

from qkablate.analysis.comparison.gaps import find_families
from qkablate.analysis.scaling.asymptote import fit_asymptote, fit_curves

TOKENS_T = np.array([1e6, 2e6, 4e6])
SEEDS = 8


def curves(limit=0.03, slope=5.0, exponent=0.4, noise=0.0, seed=0, tokens=TOKENS_T):
    """Return losses by seed and length of an arm and its baseline."""
    rng = np.random.default_rng(seed)
    shape = SEEDS, len(tokens)
    shared = rng.normal(0, noise, shape)
    baseline = 1.5 + 300 * tokens**-exponent + shared + rng.normal(0, noise / 2, shape)
    arm = 1.5 + limit + (300 + slope) * tokens**-exponent + shared
    return arm + rng.normal(0, noise / 2, shape), baseline


def test_limit_and_exponent_are_recovered():
    fit = fit_curves(TOKENS_T, *curves())
    assert fit.limit == pytest.approx(0.03, abs=1e-4)
    assert fit.exponent == pytest.approx(0.4, abs=1e-3)
    assert fit.gap(TOKENS_T) == pytest.approx(0.03 + 5 * TOKENS_T**-0.4, abs=1e-5)
    assert fit.sample.mean == pytest.approx(0.03, abs=1e-4)


def test_weights_are_those_of_the_limit():
    arm, baseline = curves(noise=0.003)
    fit = fit_curves(TOKENS_T, arm, baseline)
    assert np.dot(fit.weights, (arm - baseline).mean(axis=0)) == pytest.approx(fit.limit)
    assert sum(fit.weights) == pytest.approx(1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("lengths", [3, 4])
@pytest.mark.parametrize("noise", [0.003, 0.01])
def test_interval_covers_the_limit(lengths, noise):
    tokens = 1e6 * 2.0 ** np.arange(lengths)
    hits, known, studies = 0, 0, 200
    for seed in range(studies):
        fit = fit_curves(tokens, *curves(noise=noise, seed=seed, tokens=tokens))
        if fit is not None:
            low, high = fit.sample.interval()
            known += 1
            hits += low <= 0.03 <= high
    assert known > 0.9 * studies
    assert hits / known > 0.93 - 2 * np.sqrt(0.93 * 0.07 / known)


def test_losses_that_do_not_level_off_have_no_limit():
    falling = np.tile(3 - 0.2 * np.log(TOKENS_T / 1e6), (SEEDS, 1))  # a line in ln D
    assert fit_curves(TOKENS_T, falling + 0.02, falling) is None
    rising = np.tile(2 + 0.1 * np.log(TOKENS_T / 1e6), (SEEDS, 1))
    assert fit_curves(TOKENS_T, rising, falling) is None


def test_limit_of_a_sweep_over_lengths(cached_world):
    words = ("variant=standard,no_q", "seed=range(4)")
    for steps, known in (("12,24,48", True), ("12,24", False)):
        world = cached_world(*words, f"train.steps={steps}")

        def loss(run, arms=world.manifest.arms):
            arm = arms[run.arm]
            return 1.5 + 9 * arm.tokens**-0.5 + 0.04 * (arm.variant == "no_q")

        gaps = [g for f in find_families(world.finish(loss).study()) for g in f.gaps]
        fit = fit_asymptote(gaps)
        assert (fit is not None) == known
        if fit is not None:
            assert fit.limit == pytest.approx(0.04, abs=1e-4)
