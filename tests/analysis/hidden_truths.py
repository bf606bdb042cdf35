"""Studies with hidden truths: gaps of many shapes, tuned arms, and ranks of equal arms.

The tests of `stats` and `verdict` are computed for many studies at once; a test compares them with
the code that judges real ones. `python -m tests.analysis.simulation` prints the table.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from qkablate.analysis.claims.verdict import KINDS
from qkablate.analysis.comparison.decision import Verdict
from qkablate.analysis.stats import ALPHA
from tests.analysis.references import p_values
from tests.sweeps.planning import tuning_simulation

STUDIES = 4_000
MARGIN = 0.01  # nats
SD = 0.012
LEFT_BEHIND, FAILURE = 0.12, 1 / 8  # nats, and how often
Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]


def _failures(random: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    return LEFT_BEHIND * (random.random(size) < FAILURE)


# Gaps of these shapes have a mean of zero. A failure is left behind by LEFT_BEHIND.
SHAPES: dict[str, Draw] = {
    "normal": lambda random, size: SD * random.normal(size=size),
    "t3": lambda random, size: SD * random.standard_t(3, size) / math.sqrt(3),
    "skewed": lambda random, size: SD * (random.exponential(size=size) - 1),
    "skewed to the left": lambda random, size: SD * (1 - random.exponential(size=size)),
    "ties": lambda random, size: (
        SD * math.sqrt(2) * random.normal(size=size) * (random.random(size) < 0.5)
    ),
    "heteroscedastic": lambda random, size: (
        SD * random.normal(size=size) * np.exp(0.7 * random.normal(size=size) - 0.49)
    ),
    "arm left behind": lambda random, size: (
        SD * random.normal(size=size) + _failures(random, size) - LEFT_BEHIND * FAILURE
    ),
    "baseline left behind": lambda random, size: (
        SD * random.normal(size=size) - _failures(random, size) + LEFT_BEHIND * FAILURE
    ),
    "both left behind": lambda random, size: (
        SD * random.normal(size=size) + _failures(random, size) - _failures(random, size)
    ),
}
FAILING = ("arm left behind", "baseline left behind", "both left behind")


def least_n(shape: str, margin: float = MARGIN) -> int:
    """Return the guard: pairs that exclude failures which move the mean by a margin, 3 D / m."""
    return math.ceil(3 * LEFT_BEHIND / margin) if shape in FAILING else 3


class SampleTests(NamedTuple):
    """One-sided tests of many samples."""

    x_SN: np.ndarray

    def covers(self, mean: float) -> np.ndarray:
        """Return whether the 95 % intervals hold a mean."""
        beside = self.is_below(mean, ALPHA / 2) | self.is_above(mean, ALPHA / 2)
        return np.asarray(~beside)

    def is_below(self, bound: float, alpha: float = ALPHA) -> np.ndarray:
        return np.asarray(p_values(self.x_SN, bound)[0] < alpha)

    def is_above(self, bound: float, alpha: float = ALPHA) -> np.ndarray:
        return np.asarray(p_values(self.x_SN, bound)[1] < alpha)

    def words(self, kind: str, margin: float = MARGIN) -> np.ndarray:
        """Return the verdict of a claim with one part of this kind."""
        below, above = self.is_below(margin), self.is_above(margin)
        within = below & self.is_above(-margin)
        supported, refuted = {
            "noninferior": (below, above),
            "equivalent": (
                within,
                self.is_above(margin, ALPHA / 2) | self.is_below(-margin, ALPHA / 2),
            ),
            "better": (self.is_below(-margin), self.is_above(-margin)),
            "worse": (above, below),
        }[kind]
        equivalent = within & (kind in ("better", "worse"))
        cases = [supported, equivalent, refuted]
        names = [Verdict.SUPPORTED, Verdict.EQUIVALENT, Verdict.REFUTED]
        return np.select(cases, [str(name) for name in names], str(Verdict.UNDERPOWERED))


def draw_gaps(shape: str, truth: float, n: int, studies: int, seed: int = 0) -> np.ndarray:
    """Draw the gaps of studies with this true mean, in margins."""
    random = np.random.default_rng([seed, n, [*SHAPES].index(shape)])
    return MARGIN * truth + SHAPES[shape](random, (studies, n))


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
    """Rates of one row; the verdicts' are the largest over the kinds of claim and the truths."""

    coverage: float
    false: dict[str, float]  # by verdict
    guarded: dict[str, float]  # with no SUPPORTED or EQUIVALENT below the guard's n


def measure(shape: str, n: int, studies: int = STUDIES) -> Errors:
    """Return coverage and false verdicts at a null, inside and at both edges."""
    words = (Verdict.SUPPORTED, Verdict.REFUTED, Verdict.EQUIVALENT)
    false: dict[str, float] = dict.fromkeys(map(str, words), 0.0)
    covered = []
    for truth in (0.0, 0.5, 1.0, -1.0):
        tests = SampleTests(draw_gaps(shape, truth, n, studies))
        covered.append(float(np.mean(tests.covers(MARGIN * truth))))
        for kind, word in itertools.product(KINDS, false):
            if is_false(word, kind, truth):
                rate = float(np.mean(tests.words(kind) == word))
                false[word] = max(false[word], rate)
    kept = n >= least_n(shape)
    guarded = {w: r if kept or w == Verdict.REFUTED else 0.0 for w, r in false.items()}
    return Errors(min(covered), false, guarded)


def surely_beaten(arms: int, n: int = 6, studies: int = STUDIES) -> float:
    """Return how often any of some equal arms is called surely beaten, by Holm over all pairs.

    Holm rejects something if and only if the smallest p-value is below α over their number.
    """
    random = np.random.default_rng([arms, n])
    pairs = list(itertools.combinations(range(arms), 2))
    limit = ALPHA / len(pairs) / 2
    x_SAN = SD * random.normal(size=(studies, arms, n))
    found_S = np.zeros(studies, dtype=bool)
    for arm, other in pairs:
        found_S |= np.minimum(*p_values(x_SAN[:, arm] - x_SAN[:, other], 0.0)) < limit
    return float(found_S.mean())


def _percent(*rates: float) -> str:
    return " ".join(f"{100 * rate:8.1f}" for rate in rates)


def table(studies: int = STUDIES, tuned_studies: int = 2_000) -> Iterator[str]:
    """Yield the lines of the table; rates are percent."""
    yield f"Hidden truths, {studies} studies a row and truth, sd {SD}, margin {MARGIN}; percent"
    yield f"{'gaps':<22}{'n':>4}  coverage  false SUPPORTED, REFUTED, EQUIVALENT; with the guard"
    for shape, n in itertools.product(SHAPES, (6, 16, 36)):
        row = measure(shape, n, studies)
        rates = _percent(row.coverage, *row.false.values(), *row.guarded.values())
        yield f"{shape:<22}{n:>4} {rates}"
    yield ""
    yield "Equal arms of which one is called surely beaten, n = 6"
    for arms in (4, 8, 20):
        yield f"{f'{arms} arms':<26} {_percent(surely_beaten(arms, studies=studies))}"
    yield ""
    yield f"Tuned equal arms, {tuned_studies} studies a row: coverage of the gap's interval"
    for bowl, n in itertools.product(tuning_simulation.SHAPES, (6, 16)):
        covered = tuning_simulation.simulate(bowl, 2.0, 0.02, n, tuned_studies).covered
        yield f"{bowl:<22}{n:>4} {_percent(covered)}"
