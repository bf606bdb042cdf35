"""Studies with hidden truths: gaps of many shapes, tuned arms, and ranks of equal arms.

The tests of `stats` and `verdict` are computed for many studies at once; a test compares them with
the code that judges real ones. `python -m tests.analysis.simulation` prints the table.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from scipy import special, stats

from qkablate.analysis.claims.verdict import KINDS
from qkablate.analysis.comparison.decision import Verdict
from qkablate.analysis.outliers import TYPICAL_SIZE
from qkablate.analysis.stats import ALPHA
from tests.analysis.references import TTests
from tests.sweeps.planning import tuning_simulation

STUDIES = 4_000
MARGIN = 0.01  # nats
SD = 0.012
SIZE, FREQUENCY = 0.12, 1 / 8  # distance of outliers in nats, and how often they are
Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]


def _draw_normal(random: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    return random.normal(size=size)


# Noise of the gaps, with a mean of 0 and, but for the last two, a standard deviation of 1.
SHAPES: dict[str, Draw] = {
    "normal": _draw_normal,
    "t3": lambda random, size: random.standard_t(3, size) / math.sqrt(3),
    "skewed": lambda random, size: random.exponential(size=size) - 1,
    "skewed to the left": lambda random, size: 1 - random.exponential(size=size),
    "ties": lambda random, size: (
        math.sqrt(2) * random.normal(size=size) * (random.random(size) < 0.5)
    ),
    "heteroscedastic": lambda random, size: (
        random.normal(size=size) * np.exp(0.7 * random.normal(size=size) - 0.49)
    ),
}
# Normal noise, and outliers among the runs of the arm, of the baseline or of both.
FAILING = {
    "arm outliers": (True, False),
    "baseline outliers": (False, True),
    "both outliers": (True, True),
}
WORLDS = (*SHAPES, *FAILING)


class Studies(NamedTuple):
    """Gaps of many studies, and the failures that are seen in their losses."""

    tests: TTests  # of the gaps
    failed_S: tuple[
        np.ndarray, np.ndarray
    ]  # runs of the arm, and of the baseline, that are outliers
    size_S: np.ndarray  # of the failures, nats

    def is_below(self, bound: float | np.ndarray, alpha: float = ALPHA) -> np.ndarray:
        return np.asarray(self.tests.p_values(bound)[0] < alpha)

    def is_above(self, bound: float | np.ndarray, alpha: float = ALPHA) -> np.ndarray:
        return np.asarray(self.tests.p_values(bound)[1] < alpha)

    def shifts(self, alpha: float, *, guard: bool) -> list[np.ndarray]:
        """Return the shifts of the mean that failures of the arm and of the baseline may cause."""
        n = self.tests.n
        return [
            guard * self.size_S * (special.betaincinv(count + 1, n - count, 1 - alpha) - count / n)
            for count in self.failed_S
        ]

    def covers(self, mean: float, *, guard: bool) -> np.ndarray:
        """Return whether the 95 % intervals, moved by the shifts, hold a mean."""
        up_S, down_S = self.shifts(ALPHA / 2, guard=guard)
        beside = self.is_below(mean - up_S, ALPHA / 2) | self.is_above(mean + down_S, ALPHA / 2)
        return np.asarray(~beside)

    def words(self, kind: str, *, guard: bool) -> np.ndarray:
        """Return the verdict of a claim with one part of this kind.

        With the guard a verdict that holds "unless one run in k is an outlier" is UNDERPOWERED.
        """
        words_S = self._words(kind, [0.0, 0.0])
        if not guard:
            return words_S
        holds_S = words_S == self._words(kind, self.shifts(ALPHA, guard=True))
        return np.where(holds_S, words_S, str(Verdict.UNDERPOWERED))

    def _words(self, kind: str, shifts: Sequence[float | np.ndarray]) -> np.ndarray:
        def below(bound: float, alpha: float = ALPHA) -> np.ndarray:
            return self.is_below(bound - shifts[0], alpha)

        def above(bound: float, alpha: float = ALPHA) -> np.ndarray:
            return self.is_above(bound + shifts[1], alpha)

        within = below(MARGIN) & above(-MARGIN)
        supported, refuted = {
            "noninferior": (below(MARGIN), above(MARGIN)),
            "equivalent": (within, above(MARGIN, ALPHA / 2) | below(-MARGIN, ALPHA / 2)),
            "better": (below(-MARGIN), above(-MARGIN)),
            "worse": (above(MARGIN), below(MARGIN)),
        }[kind]
        cases = [supported, within & (kind in ("better", "worse")), refuted]
        names = [Verdict.SUPPORTED, Verdict.EQUIVALENT, Verdict.REFUTED]
        return np.select(cases, [str(name) for name in names], str(Verdict.UNDERPOWERED))


def draw_losses(
    world: str, truth: float, n: int, studies: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Draw losses of an arm and its baseline, whose mean gap is the truth, in margins.

    What a seed does to both is common to a pair. Failures are part of the mean.
    """
    random = np.random.default_rng([seed, n, WORLDS.index(world)])
    size = studies, n
    gap_SN = MARGIN * truth + SD * SHAPES.get(world, _draw_normal)(random, size)
    baseline_SN = 2 + SD * random.normal(size=size)
    losses = baseline_SN + gap_SN, baseline_SN
    for losses_SN, are_failing in zip(losses, FAILING.get(world, (False, False)), strict=True):
        if are_failing:
            losses_SN += SIZE * ((random.random(size) < FREQUENCY) - FREQUENCY)
    return losses


def draw(world: str, truth: float, n: int, studies: int, seed: int = 0) -> Studies:
    """Draw studies, and find the outliers as the analysis does."""
    losses = draw_losses(world, truth, n, studies, seed)
    failed_S, size_S = [], np.full(studies, TYPICAL_SIZE)
    for losses_SN in losses:
        excess_SN = losses_SN - np.median(losses_SN, axis=1, keepdims=True)
        deviation_S = np.median(np.abs(excess_SN), axis=1) / stats.norm.ppf(0.75)
        is_left_SN = excess_SN > np.maximum(5 * deviation_S, 0.05)[:, None]
        failed_S.append(is_left_SN.sum(axis=1))
        size_S = np.maximum(size_S, np.where(is_left_SN, excess_SN, 0).max(axis=1))
    return Studies(TTests(losses[0] - losses[1]), (failed_S[0], failed_S[1]), size_S)


def is_false(word: str, kind: str, truth: float) -> bool:
    """Return whether a verdict is wrong; on the margin both sides are."""
    bound = -1 if kind == "better" else 1
    if word == Verdict.EQUIVALENT:
        return abs(truth) >= 1
    inside, outside = {
        "equivalent": (abs(truth) <= 1, abs(truth) >= 1),
        "worse": (truth >= bound, truth <= bound),
    }.get(kind, (truth <= bound, truth >= bound))
    return inside if word == Verdict.REFUTED else outside


class Errors(NamedTuple):
    """Rates of one row: the largest of false verdicts, over the kinds of claim and the truths."""

    coverage: float
    false: dict[str, float]  # by verdict


def measure(world: str, n: int, studies: int = STUDIES, *, guard: bool) -> Errors:
    """Return coverage and false verdicts at a null, inside and at both edges.

    With the guard against failures not yet seen, the interval is moved by them, and only a verdict
    that holds with them counts.
    """
    false = {str(word): 0.0 for word in (Verdict.SUPPORTED, Verdict.REFUTED, Verdict.EQUIVALENT)}
    covered = []
    for truth in (0.0, 0.5, 1.0, -1.0):
        drawn = draw(world, truth, n, studies)
        covered.append(float(np.mean(drawn.covers(MARGIN * truth, guard=guard))))
        for kind in KINDS:
            words_S = drawn.words(kind, guard=guard)
            for word in false:
                if is_false(word, kind, truth):
                    false[word] = max(false[word], float(np.mean(words_S == word)))
    return Errors(min(covered), false)


def dominated(arms: int, n: int = 6, studies: int = STUDIES) -> float:
    """Return how often any of some equal arms is called dominated, by Holm over all pairs.

    Holm rejects something if and only if the smallest p-value is below α over their number.
    """
    random = np.random.default_rng([arms, n])
    pairs = list(itertools.combinations(range(arms), 2))
    limit = ALPHA / len(pairs) / 2
    x_SAN = SD * random.normal(size=(studies, arms, n))
    found_S = np.zeros(studies, dtype=bool)
    for arm, other in pairs:
        found_S |= np.minimum(*TTests(x_SAN[:, arm] - x_SAN[:, other]).p_values(0.0)) < limit
    return float(found_S.mean())


def _percent(*rates: float) -> str:
    return " ".join(f"{100 * rate:8.1f}" for rate in rates)


def table(studies: int = STUDIES, tuned_studies: int = 2_000) -> Iterator[str]:
    """Yield the lines of the table; rates are percent."""
    yield f"Hidden truths, {studies} studies a row and truth, sd {SD}, margin {MARGIN}; percent"
    yield f"{'':<27}{'not guarded':^36}{'with the guard against failures':^36}"
    yield f"{'gaps':<22}{'n':>4} {2 * ' coverage  SUPP.ED  REFUTED    EQUIV.'}"
    for world, n in itertools.product(WORLDS, (6, 16, 36)):
        rows = (measure(world, n, studies, guard=guard) for guard in (False, True))
        rates = (_percent(row.coverage, *row.false.values()) for row in rows)
        yield f"{world:<22}{n:>4} {' '.join(rates)}"
    yield ""
    yield "Equal arms of which one is called dominated, n = 6"
    for arms in (4, 8, 20):
        yield f"{f'{arms} arms':<26} {_percent(dominated(arms, studies=studies))}"
    yield ""
    yield f"Tuned equal arms, {tuned_studies} studies a row: coverage of the gap's interval"
    for bowl, n in itertools.product(tuning_simulation.SHAPES, (6, 16)):
        covered = tuning_simulation.simulate(bowl, 2.0, 0.02, n, tuned_studies).covered
        yield f"{bowl:<22}{n:>4} {_percent(covered)}"
