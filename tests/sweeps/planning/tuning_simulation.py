"""Tuned comparisons of equal arms: how often the interval of the gap covers zero.

The rates are chosen by the tool's own search on simulated losses: bowls in ln lr and in ln of the
circuit's multiplier that are quadratic, lopsided, or end in a cliff beyond which training diverges.
In a fragile one most seeds fail at high rates, and the others have their least loss there.
`python -m tests.sweeps.planning.tuning_simulation` prints the table in some twenty minutes.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from qkablate.analysis.stats import Sample
from qkablate.sweeps.planning import tuning
from qkablate.sweeps.planning.manifest import Rates, SweepRun
from qkablate.sweeps.planning.surface import excess_moment
from qkablate.sweeps.planning.tuning_losses import RULES

STUDIES = 2_000
SHAPES = ("quadratic", "lopsided", "cliff")
MULTIPLIERS = (1.0, 2.0, 0.1)  # matched learning rate of the circuit; 1: that of standard
NOISE = ((0.007, 16), (0.02, 16), (0.02, 6))  # standard deviation between runs, and seeds
SEEDS = [1000, 1001, 1002]
FAILURE = 0.5  # nats that it costs in a fragile bowl
LUCKY = 0.4  # of the seeds


class Bowl:
    """Expected loss of an arm by its rates, and noisy runs of it."""

    def __init__(self, shape: str, noise: float, matched: float, rng: np.random.Generator) -> None:
        self.shape, self.noise, self.rng = shape, noise, rng
        low, high = sorted((0.0, math.log(matched)))
        self.lr = 4e-3 * math.exp(rng.uniform(-1.2, 1.2))
        self.circuit = math.exp(rng.uniform(low - 0.35, high + 0.35))
        self.steepness = 0.12 * math.exp(rng.normal(0, 0.3))
        self.circuit_steepness = 0.01 * math.exp(rng.normal(0, 0.5))
        self.luck: dict[int, bool] = {}  # by seed

    def is_fragile_at(self, rates: Rates) -> bool:
        """Return whether most seeds fail there, though it is near the least loss."""
        return self.shape == "fragile" and math.log(rates.lr / self.lr) > -0.5

    def excess(self, rates: Rates) -> float:
        """Return the expected loss beyond the minimum."""
        y = math.log(rates.circuit / self.circuit)
        x = math.log(rates.lr / self.lr) + 0.3 * y  # the two rates make up for each other
        loss = self.steepness * x * x + self.circuit_steepness * y * y
        if self.shape == "lopsided" and x > 0:
            loss += 0.35 * self.steepness * x**3
        if self.shape == "cliff":
            loss += 0.6 * max(0.0, x - 0.9)
        return loss

    def run(self, rates: Rates, seed: int | None = None) -> float | None:
        """Return the loss of one run; None if it diverges."""
        beyond = math.log(rates.lr / self.lr)
        if self.shape == "cliff" and beyond > 1.6:
            return None
        noise = self.noise * (1 + 3 * max(0.0, beyond) * (self.shape == "cliff"))
        loss = 2 + self.excess(rates) + float(self.rng.normal(0, noise))
        if seed is not None and self.is_fragile_at(rates):
            is_lucky = self.luck.setdefault(seed, self.rng.random() < LUCKY)
            loss += 0 if is_lucky else FAILURE
        return loss


class _Arm:
    """The part of an arm that the search reads."""

    name = "arm"

    def __init__(self, matched: float) -> None:
        self.overrides: dict[str, str] = {}
        self.matched_lr, self.has_circuit_lr = matched, True
        self.config = SimpleNamespace(optim=SimpleNamespace(lr=4e-3))
        self.default_rates = Rates(4e-3, matched)

    def run(self, changes: dict[str, Any], *, tuning: bool) -> SweepRun:
        return SweepRun(str(sorted(changes.items())), "run", self.name, tuning, changes)

    def rates_of(self, run: SweepRun) -> Rates:
        changes = run.changes
        return Rates(changes["optim.lr"], changes.get("variant.lr", self.matched_lr))


class Tuned(NamedTuple):
    """An arm at the rates that the search has chosen."""

    bowl: Bowl
    search: tuning.LrSearch

    @property
    def rates(self) -> Rates:
        assert self.search.rates is not None
        return self.search.rates

    @property
    def variance(self) -> float:
        return excess_moment(self.search.losses, self.rates)


def tune(bowl: Bowl, matched: float, rules: int = RULES) -> Tuned:
    """Run the search of one arm to its end."""
    arm: Any = _Arm(matched)
    first = tuning.tuning_runs(arm, [], SEEDS)
    results: dict[str, dict[str, Any]] = {}

    def find(run: SweepRun) -> dict[str, Any]:
        if run.id not in results:
            loss = bowl.run(arm.rates_of(run), int(run.changes["seed"]))
            status = "diverged" if loss is None else "done"
            results[run.id] = {"status": status, "loss": {"val": loss}}
        return results[run.id]

    others = SEEDS[1:] if rules > 2 else []  # the first third is that of the search
    return Tuned(bowl, tuning._search(arm, first, find, rules, others)[1])


class Row(NamedTuple):
    """Results of a number of studies with the same truth."""

    covered: float  # fraction of the 95 % intervals that hold the true gap, zero
    covered_without: float  # the same without the variance of tuning
    error: float  # standard error of the first
    at_minimum: float  # fraction of the searches that end at a minimum
    runs: float  # of the second arm's search
    excess: float  # root mean square of the second arm's true excess
    wider: float  # median factor by which tuning widens the interval


def simulate(
    shape: str,
    matched: float,
    noise: float,
    n: int,
    studies: int,
    note: Callable[[], object] = lambda: None,
) -> Row:
    """Compare standard with an arm of the same minimum, whose circuit has another matched rate."""
    rng = np.random.default_rng(1)
    covered: list[bool] = []
    without: list[bool] = []
    minima: list[float] = []
    runs: list[int] = []
    excess: list[float] = []
    wider: list[float] = []
    while len(covered) < studies:
        arms = [tune(Bowl(shape, noise, m, rng), m) for m in (1.0, matched)]
        if any(arm.search.rates is None for arm in arms):
            continue
        finals = [[arm.bowl.run(arm.rates) for _ in range(n)] for arm in arms]
        if any(loss is None for losses in finals for loss in losses):
            continue  # an arm that diverges has no closed interval
        gaps = tuple(float(b - a) for a, b in zip(*finals, strict=True))
        for extra, hits in ((sum(arm.variance for arm in arms), covered), (0.0, without)):
            low, high = Sample(gaps, extra).interval() or (0.0, 0.0)
            hits.append(low <= 0 <= high)
        with_tuning = Sample(gaps, sum(arm.variance for arm in arms)).standard_error
        wider.append(with_tuning / Sample(gaps).standard_error)
        minima.append(float(np.mean([arm.search.at_minimum for arm in arms])))
        runs.append(arms[1].search.runs)
        excess.append(arms[1].bowl.excess(arms[1].rates) ** 2)
        note()
    rate = float(np.mean(covered))
    error = math.sqrt(max(rate * (1 - rate), 1 / studies) / studies)
    return Row(
        covered=rate,
        covered_without=float(np.mean(without)),
        error=error,
        at_minimum=float(np.mean(minima)),
        runs=float(np.mean(runs)),
        excess=math.sqrt(float(np.mean(excess))),
        wider=float(np.median(wider)),
    )


def main() -> None:
    from tqdm import tqdm

    cases = [(s, m, *noise) for s in SHAPES for m in MULTIPLIERS for noise in NOISE]
    head = ("bowl", "matched", "noise", "n", "covered", "without", "±", "minimum", "runs")
    print(" | ".join((*head, "rms excess", "wider")))
    with tqdm(total=STUDIES * len(cases), disable=None) as bar:
        for shape, matched, noise, n in cases:
            row = simulate(shape, matched, noise, n, STUDIES, bar.update)
            tqdm.write(
                f"{shape} | {matched} | {noise} | {n} | {row.covered:.3f} |"
                f" {row.covered_without:.3f} | {row.error:.3f} | {row.at_minimum:.2f} |"
                f" {row.runs:.1f} | {row.excess:.4f} | × {row.wider:.2f}"
            )


if __name__ == "__main__":
    main()
