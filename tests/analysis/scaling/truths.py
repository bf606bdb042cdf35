"""Simulated scaling sweeps with a known law: coverage of the interval of the compute gain.

python -m tests.analysis.scaling.truths prints the table for several truths, noises and seeds.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from qkablate.analysis.scaling.compute_gain import find_largest_budget, jackknife
from qkablate.analysis.scaling.law import Observations, ScalingLaw, fit_law
from qkablate.analysis.stats import Sample

STUDIES = 300
SIZES = (1e5, 4e5, 1.6e6)
LENGTHS = (1e6, 2e6, 4e6, 8e6)
SHORT = (1.25e5, 2.5e5, 5e5, 1e6)  # the best size for the budget of the largest run trains longer
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
    part: float  # median budget, of that of the largest run

    @property
    def rate(self) -> float:
        return self.hits / self.given


def log_gain(arm: ScalingLaw, baseline: ScalingLaw, flops: float) -> float | str:
    """Return ln of the compute gain for a budget."""
    loss = arm.lowest_loss(flops)
    needed = None if loss is None else baseline.least_flops(loss)
    return "out of reach" if needed is None else math.log(needed / flops)


@dataclass(frozen=True)
class Grid:
    """Parameters and tokens of the runs of one arm."""

    lengths: tuple[float, ...] = LENGTHS

    @property
    def params(self) -> np.ndarray:
        return np.repeat(SIZES, len(self.lengths))

    @property
    def tokens(self) -> np.ndarray:
        return np.tile(self.lengths, len(SIZES))

    @property
    def budgets(self) -> tuple[float, float]:
        """FLOPs of the largest, longest run, and of the smallest, shortest one."""
        flops_P = 6 * self.params * self.tokens
        return float(flops_P.max()), float(flops_P.min())

    def losses(self, constants: Sequence[float]) -> np.ndarray:
        e, a, alpha, b, beta = constants
        return np.asarray(e + a * self.params**-alpha + b * self.tokens**-beta)

    def fit(
        self, losses_PS: np.ndarray, error: float, start: ScalingLaw | None = None
    ) -> ScalingLaw:
        means_P, flops_P = losses_PS.mean(axis=1), 6 * self.params
        return fit_law(Observations(self.params, self.tokens, means_P, flops_P, error), start)

    def noiseless_law(self, constants: Sequence[float]) -> ScalingLaw:
        """Return the law that is read off losses without noise."""
        return self.fit(self.losses(constants)[:, None], 1e-6)


def noiseless_gain(arm: Sequence[float], baseline: Sequence[float]) -> float | str:
    """Return ln of the compute gain, for the budget of the largest run."""
    grid = Grid()
    laws = grid.noiseless_law(arm), grid.noiseless_law(baseline)
    return log_gain(*laws, grid.budgets[0])


def _measure(
    laws: Sequence[ScalingLaw], without: Sequence[Sequence[ScalingLaw]], flops: float
) -> Sample | str:
    return jackknife(partial(log_gain, flops=flops), laws, without)


def cover(
    truth: str,
    seeds: int = 5,
    noise: float = 0.005,
    studies: int = STUDIES,
    lengths: tuple[float, ...] = LENGTHS,
) -> Coverage:
    """Simulate sweeps whose runs have noise of their own and as much that a pair shares."""
    rng = np.random.default_rng(0)
    grid = Grid(lengths)
    pair = [grid.losses(TRUTHS[truth]), grid.losses(_BASELINE)]
    true_laws = grid.noiseless_law(TRUTHS[truth]), grid.noiseless_law(_BASELINE)
    hits, widths, parts = 0, [], []
    for _ in range(studies):
        shared = rng.normal(0, noise, (len(grid.params), seeds))
        sides = [losses[:, None] + shared + rng.normal(0, noise, shared.shape) for losses in pair]
        error = noise * math.sqrt(2 / seeds)
        laws = [grid.fit(side, error) for side in sides]
        without = [
            [
                grid.fit(np.delete(side, seed, axis=1), error, law)
                for side, law in zip(sides, laws, strict=True)
            ]
            for seed in range(seeds)
        ]
        flops, sample, _ = find_largest_budget(partial(_measure, laws, without), *grid.budgets)
        if isinstance(sample, Sample) and (interval := sample.interval()) is not None:
            true = log_gain(*true_laws, flops)
            widths.append(interval[1] - interval[0])
            parts.append(flops / grid.budgets[0])
            hits += isinstance(true, float) and interval[0] <= true <= interval[1]
    width, part = (float(np.median(x)) if x else math.nan for x in (widths, parts))
    return Coverage(len(widths), hits, studies, math.exp(width), part)


def table(studies: int = STUDIES) -> Iterator[str]:
    """Yield the rows of the table."""
    yield (
        f"{'truth':<22}{'lengths':>8}{'noise':>7}{'seeds':>6}{'given':>8}{'covers':>8}{'width':>8}"
        f"{'budget':>8}"
    )
    for name, lengths in {"long": LENGTHS, "short": SHORT}.items():
        for truth, noise, seeds in itertools.product(TRUTHS, (0.003, 0.01), (5, 8)):
            found = cover(truth, seeds, noise, studies, lengths)
            given = found.given / found.studies
            yield (
                f"{truth:<22}{name:>8}{noise:>7}{seeds:>6}{given:>8.1%}{found.rate:>8.1%}"
                f"{found.width:>8.3f}{found.part:>8.2f}"
            )


if __name__ == "__main__":
    for line in table():
        print(line, flush=True)
