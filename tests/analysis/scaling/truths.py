"""Simulated scaling sweeps with a known law: coverage of the interval of the compute gain.

python -m tests.analysis.scaling.truths prints the table for several truths, noises and seeds.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from qkablate.analysis.scaling.compute_gain import jackknife
from qkablate.analysis.scaling.law import Observations, ScalingLaw, fit_law
from qkablate.analysis.stats import Sample

STUDIES = 300
_SIZES, _LENGTHS = np.array([1e5, 4e5, 1.6e6]), np.array([1e6, 2e6, 4e6, 8e6])
PARAMS_P, TOKENS_P = (x.ravel() for x in np.meshgrid(_SIZES, _LENGTHS, indexing="ij"))
_FLOPS_P = 6 * PARAMS_P
# E, A, α, B, β of the baseline, and what the arm changes of it.
_BASELINE = (1.2, 100.0, 0.34, 400.0, 0.4)
TRUTHS = {
    "equal": _BASELINE,
    "tokens worth 0.9": (1.2, 100.0, 0.34, 400 * 0.9**-0.4, 0.4),
    "parameters worth 0.8": (1.2, 100 * 0.8**-0.34, 0.34, 400.0, 0.4),
    "a higher floor": (1.23, 100.0, 0.34, 400.0, 0.4),
    "another exponent": (1.2, 80.0, 0.32, 400.0, 0.4),
}


@dataclass(frozen=True)
class Coverage:
    """Number of intervals that are given, and that hold the true gain."""

    given: int
    hits: int
    studies: int
    width: float  # median, as a factor

    @property
    def rate(self) -> float:
        return self.hits / self.given


def log_gain(arm: ScalingLaw, baseline: ScalingLaw) -> float | str:
    """Return ln of the compute gain at the largest run."""
    flops = float(_FLOPS_P[-1] * TOKENS_P[-1])
    loss = arm.lowest_loss(flops)
    needed = None if loss is None else baseline.least_flops(loss)
    return "out of reach" if needed is None else math.log(needed / flops)


def _losses(constants: Sequence[float]) -> np.ndarray:
    e, a, alpha, b, beta = constants
    return np.asarray(e + a * PARAMS_P**-alpha + b * TOKENS_P**-beta)


def noiseless_gain(arm: Sequence[float], baseline: Sequence[float]) -> float | str:
    """Return ln of the compute gain that is read off losses without noise."""
    return log_gain(*[fit_law(_observe(_losses(x)[:, None], 1e-6)) for x in (arm, baseline)])


def cover(truth: str, seeds: int = 5, noise: float = 0.005, studies: int = STUDIES) -> Coverage:
    """Simulate sweeps whose runs have noise of their own and as much that a pair shares."""
    rng = np.random.default_rng(0)
    pair = [_losses(TRUTHS[truth]), _losses(_BASELINE)]
    true = noiseless_gain(TRUTHS[truth], _BASELINE)
    assert isinstance(true, float)
    hits, widths = 0, []
    for _ in range(studies):
        shared = rng.normal(0, noise, (len(PARAMS_P), seeds))
        sides = [losses[:, None] + shared + rng.normal(0, noise, shared.shape) for losses in pair]
        error = noise * math.sqrt(2 / seeds)
        laws = [fit_law(_observe(side, error)) for side in sides]
        without = [
            [
                fit_law(_observe(np.delete(side, seed, axis=1), error), law)
                for side, law in zip(sides, laws, strict=True)
            ]
            for seed in range(seeds)
        ]
        sample = jackknife(log_gain, laws, without)
        if isinstance(sample, Sample) and (interval := sample.interval()) is not None:
            widths.append(interval[1] - interval[0])
            hits += interval[0] <= true <= interval[1]
    width = math.exp(float(np.median(widths))) if widths else math.nan
    return Coverage(len(widths), hits, studies, width)


def _observe(losses_PS: np.ndarray, error: float) -> Observations:
    return Observations(PARAMS_P, TOKENS_P, losses_PS.mean(axis=1), _FLOPS_P, error)


def table(studies: int = STUDIES) -> Iterator[str]:
    """Yield the rows of the table."""
    yield f"{'truth':<22}{'noise':>7}{'seeds':>6}{'given':>8}{'covers':>8}{'width':>8}"
    for truth in TRUTHS:
        for noise in (0.003, 0.01):
            for seeds in (5, 8):
                found = cover(truth, seeds, noise, studies)
                given = found.given / found.studies
                yield (
                    f"{truth:<22}{noise:>7}{seeds:>6}{given:>8.1%}{found.rate:>8.1%}"
                    f"{found.width:>8.3f}"
                )


if __name__ == "__main__":
    for line in table():
        print(line, flush=True)
