"""Studies with a known truth: how often the statistics of `analysis` err, and their power.

Every study is judged by the code that judges real ones.
`python -m tests.analysis.simulation` prints the table, with hidden truths in some 20 minutes;
`test_simulation.py` compares it with what is promised. Lengths are in units of the margin.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qkablate.analysis.claims.verdict import KINDS, ClaimVerdict, Part, judge_parts, spend_alpha
from qkablate.analysis.comparison.curves import Curve
from qkablate.analysis.comparison.decision import Verdict
from qkablate.analysis.stats import (
    ALPHA,
    POWER,
    Sample,
    detectable_effect,
    holm,
    power_below,
    power_equivalence,
    power_two_sided,
    required_n,
)
from tests.analysis import hidden_truths

STUDIES = 2_000
VERDICTS = [verdict for verdict in Verdict if verdict != Verdict.INCOMPLETE]
MARGIN = 0.01
EDGE = {"noninferior": 1, "equivalent": 1, "better": -1, "worse": 1}
# So far inside that a part with a narrow spread is always supported.
INSIDE = {"noninferior": -1, "equivalent": 0, "better": -3, "worse": 3}
LOOKS = (6, 12, 20)
# Truth and spread of one part: a null of which little is known; edges at which the two one-sided
# tests err as often as they may, and edges at which nothing is narrow enough to be equivalent:
# where better and worse are refuted as often as they may.
ONE = ((0, 1), (-1, 0.25), (1, 0.25), (-1, 4), (1, 4))
# Kind, spread and correlation of four parts at their edges, likewise.
FOUR = (
    *(("noninferior", 0.25, correlation) for correlation in (0, 0.8)),
    *(("equivalent", 0.25, correlation) for correlation in (0, 0.8)),
    *(("better", 4, correlation) for correlation in (0, 0.8)),
    ("better", 0.25, 0.8),
    *(("worse", 4, correlation) for correlation in (0, 0.8)),
    ("worse", 0.25, 0.8),
)


@dataclass(frozen=True)
class Rate:
    """Rate over a number of studies."""

    hits: int
    studies: int

    def __float__(self) -> float:
        return self.hits / self.studies

    def error(self, at: float | None = None) -> float:
        """Return the standard error, for the measured rate or a given one."""
        rate = float(self) if at is None else at
        return math.sqrt(max(rate * (1 - rate), 1 / self.studies) / self.studies)

    def __str__(self) -> str:
        return f"{100 * float(self):5.1f} %"


def rate(hits: Sequence[bool]) -> Rate:
    return Rate(sum(map(bool, hits)), len(hits))


def untrue(kind: str, truth: float) -> set[str]:
    """Return the verdicts that are wrong about one part.

    At the margin itself both sides are wrong, since errors are most frequent there.
    """
    inside, outside = {
        "noninferior": (truth <= 1, truth >= 1),
        "equivalent": (abs(truth) <= 1, abs(truth) >= 1),
        "better": (truth <= -1, truth >= -1),
        "worse": (truth >= 1, truth <= 1),
    }[kind]
    wrong = {
        Verdict.SUPPORTED: outside,
        Verdict.REFUTED: inside,
        Verdict.EQUIVALENT: abs(truth) >= 1,
    }
    return {word for word, is_wrong in wrong.items() if is_wrong}


def normals(
    studies: int, n: int, *, parts: int = 1, correlation: float = 0.0, seed: int = 0
) -> Any:
    """Return standard normal gaps [study, part, seed], correlated between the parts of a seed."""
    random = np.random.default_rng([seed, n, parts])
    shared = random.normal(size=(studies, 1, n))
    own = random.normal(size=(studies, parts, n))
    return math.sqrt(correlation) * shared + math.sqrt(1 - correlation) * own


def samples(truth: float, spread: float, n: int, studies: int = STUDIES) -> list[Sample]:
    x_SN = MARGIN * (truth + spread * normals(studies, n)[:, 0])
    return [Sample(tuple(x_N)) for x_N in x_SN.tolist()]


# Intervals


def coverage(n: int, studies: int = STUDIES) -> Rate:
    """Return the coverage of the 95 % interval."""
    found = [sample.interval() for sample in samples(1, 1, n, studies)]
    return rate([low <= MARGIN <= high for low, high in filter(None, found)])


def bca_coverage(n: int, studies: int = STUDIES) -> Rate:
    """Return the coverage of the BCa bootstrap interval."""
    found = [sample.bca for sample in samples(1, 1, n, studies)]
    return rate([low <= MARGIN <= high for low, high in filter(None, found)])


def band_coverage(
    n: int, readings: int = 12, correlation: float = 0.9, studies: int = STUDIES
) -> Rate:
    """Return the coverage of bands around whole curves with autocorrelated readings."""
    x_STN = normals(studies, n, parts=readings)
    for t in range(1, readings):
        fresh = math.sqrt(1 - correlation**2) * x_STN[:, t]
        x_STN[:, t] = correlation * x_STN[:, t - 1] + fresh
    covered = []
    for x_TN in (x_STN + 1).tolist():
        curve = Curve([*range(readings)], [Sample(tuple(x_N)) for x_N in x_TN], Sample(()))
        covered.append(all(low <= 1 <= high for low, high in filter(None, curve.band())))
    return rate(covered)


# Verdicts


def judged(
    asks: Sequence[tuple[str, float]],
    *,
    spread: float,
    n: int = 6,
    correlation: float = 0.0,
    studies: int = STUDIES,
) -> list[ClaimVerdict]:
    """Studies of one claim, whose parts are of these kinds and have these truths."""
    x_SPN = spread * normals(studies, n, parts=len(asks), correlation=correlation)
    x_SPN = MARGIN * (x_SPN + np.array([truth for _, truth in asks])[:, None])
    return [
        judge_parts(
            [
                Part(kind, kind, MARGIN, Sample(tuple(x_N)))
                for (kind, _), x_N in zip(asks, x_PN, strict=True)
            ]
        )
        for x_PN in x_SPN.tolist()
    ]


def rates(verdicts: Sequence[ClaimVerdict]) -> dict[str, Rate]:
    counted = Counter(verdict.word for verdict in verdicts)
    return {word: Rate(counted[word], len(verdicts)) for word in VERDICTS}


def of_one(kind: str, truth: float, spread: float, n: int = 6) -> dict[str, Rate]:
    return rates(judged([(kind, truth)], spread=spread, n=n))


def of_four(
    kind: str,
    truths: Sequence[float],
    spread: float,
    correlation: float = 0.0,
    studies: int = STUDIES,
) -> dict[str, Rate]:
    """Four parts of one kind."""
    asks = [(kind, truth) for truth in truths]
    return rates(judged(asks, spread=spread, correlation=correlation, studies=studies))


def looked(kind: str, truth: float, spread: float, studies: int = STUDIES) -> dict[str, Rate]:
    """Studies that stop at the first look that settles them, each look with its share of α."""
    x_SN = MARGIN * (truth + spread * normals(studies, LOOKS[-1])[:, 0])
    ends = [
        _first_settled(kind, x_N, zip(LOOKS, spend_alpha(LOOKS), strict=True))
        for x_N in x_SN.tolist()
    ]
    return rates(ends)


def _first_settled(kind: str, gaps: list[float], looks: Any) -> ClaimVerdict:
    verdict = ClaimVerdict(Verdict.UNDERPOWERED, [])
    for n, alpha in looks:
        verdict = judge_parts([Part(kind, kind, MARGIN, Sample(tuple(gaps[:n])))], alpha)
        if verdict.word != Verdict.UNDERPOWERED:
            break
    return verdict


def peeked(studies: int = STUDIES) -> Rate:
    """Return the rate of false rejections when every n from 6 to 20 is a look at the full α."""
    return rate(
        [
            any((Sample(sample.values[:n]).p or 1) < ALPHA for n in range(6, 21))
            for sample in samples(0, 1, 20, studies)
        ]
    )


def family(arms: int, correlation: float, n: int = 6, studies: int = STUDIES) -> Rate:
    """Return the rate of studies in which Holm finds a difference where there is none.

    A common baseline correlates the gaps of the arms by one half.
    """
    x_SAN = normals(studies, n, parts=arms, correlation=correlation)
    return rate(
        [min(holm([Sample(tuple(x_N)).p or 0 for x_N in x_AN])) < ALPHA for x_AN in x_SAN.tolist()]
    )


# Power


@dataclass(frozen=True)
class Promise:
    """Predicted and counted frequency of a finding."""

    what: str
    promised: float
    counted: Rate


def _apart(sample: Sample) -> bool:
    return sample.p is not None and sample.p < ALPHA


def _promise(
    what: str,
    power: float,
    found: Callable[[Sample], bool],
    truth: float,
    n: int,
    studies: int,
) -> Promise:
    return Promise(
        f"{what}, n = {n}", power, rate([found(s) for s in samples(truth, 1, n, studies)])
    )


def promises(n: int, studies: int = STUDIES) -> list[Promise]:
    """Return the power of three tests at effects of moderate power."""
    unit = 3 / math.sqrt(n)
    sd = MARGIN

    def below(sample: Sample) -> bool:
        return sample.p_below(unit * sd) < ALPHA

    def within(sample: Sample) -> bool:
        return Part("", "equivalent", 1.2 * unit * sd, sample).p_supported < ALPHA

    return [
        _promise("apart", power_two_sided(unit * sd, sd, n), _apart, unit, n, studies),
        _promise("below", power_below(0, unit * sd, sd, n), below, 0, n, studies),
        _promise(
            "within", power_equivalence(0.2 * sd, 1.2 * unit * sd, sd, n), within, 0.2, n, studies
        ),
    ]


def power_promises(kind: str, truth: float, spread: float, n: int) -> tuple[Promise, Promise]:
    """Return the promised and the measured power of a part, to be supported and to be refuted."""
    found = [Part(kind, kind, MARGIN, one) for one in samples(truth, spread, n)]
    mean, sd = truth * MARGIN, spread * MARGIN
    return (
        Promise(
            "supported", found[0].power(n, mean, sd), rate([p.p_supported < ALPHA for p in found])
        ),
        Promise(
            "refuted",
            found[0].power_to_refute(n, mean, sd),
            rate([p.p_refuted < ALPHA for p in found]),
        ),
    )


def enough(kind: str, truth: float, spread: float) -> tuple[int, Rate]:
    """Return the seeds that a known truth requires, and the rate of decided studies with them."""
    part = Part(kind, kind, MARGIN, Sample(()))
    mean, sd = MARGIN * truth, MARGIN * spread
    n = required_n(lambda n: max(part._outcomes(n, mean, sd, ALPHA, 1)))
    assert n is not None
    found = of_one(kind, truth, spread, n)
    settled = found[Verdict.UNDERPOWERED].studies - found[Verdict.UNDERPOWERED].hits
    return n, Rate(settled, found[Verdict.UNDERPOWERED].studies)


def detected(n: int, studies: int = STUDIES) -> Promise:
    """Return the power at the effect that is called detectable."""
    effect = detectable_effect(MARGIN, n)
    assert effect is not None

    return _promise("detectable", POWER, _apart, effect / MARGIN, n, studies)


# The table


def _line(label: str, cells: Sequence[object], width: int = 14) -> str:
    return f"{label:<44}" + "".join(f"{cell!s:>{width}}" for cell in cells)


def _words(label: str, found: dict[str, Rate], wrong: set[str]) -> str:
    """Format the rates of all verdicts; an asterisk marks errors."""
    return _line(label, [f"{found[word]}{'*' if word in wrong else ' '}" for word in VERDICTS])


def table() -> Iterator[str]:
    yield from hidden_truths.table()
    yield ""
    heads = [f"{word} " for word in VERDICTS]
    yield f"{STUDIES} studies a line, α = {ALPHA}, lengths in margins; * the word is an error"
    yield ""
    yield _line("Intervals of 95 % that hold the truth", ["t", "BCa"])
    for n in (6, 10, 20):
        yield _line(f"  n = {n}", [coverage(n), bca_coverage(n)])
    yield _line("Bands of 12 readings that do, n = 6", [])
    for correlation in (0, 0.9):
        yield _line(f"  readings correlated {correlation}", [band_coverage(6, 12, correlation)])
    yield ""
    yield _line("One part, n = 6", heads)
    for kind in KINDS:
        for truth, spread in ONE:
            label = f"  {kind:<13}truth {truth:>2}, spread {spread}"
            yield _words(label, of_one(kind, truth, spread), untrue(kind, truth))
    yield ""
    yield _line("Four parts at their edges, n = 6", heads)
    for kind, spread, correlation in FOUR:
        found = of_four(kind, [EDGE[kind]] * 4, spread, correlation)
        label = f"  {kind:<13}spread {spread}, correlated {correlation}"
        yield _words(label, found, untrue(kind, EDGE[kind]))
    yield _line("One part at its edge, three inside", heads)
    for kind in KINDS:
        found = of_four(kind, [EDGE[kind], *[INSIDE[kind]] * 3], 0.25)
        yield _words(f"  {kind:<13}spread 0.25", found, untrue(kind, EDGE[kind]))
    yield ""
    yield _line(f"Looks at {', '.join(map(str, LOOKS))}", heads)
    for kind in KINDS:
        for truth, spread in ((EDGE[kind], 0.5), (INSIDE[kind], 1)):
            label = f"  {kind:<13}truth {truth:>2}, spread {spread}"
            yield _words(label, looked(kind, truth, spread), untrue(kind, truth))
    yield ""
    yield _line("True nulls that are rejected", [])
    for correlation in (0, 0.5):
        yield _line(f"  one of four, by Holm, correlated {correlation}", [family(4, correlation)])
    yield _line("  looking after each seed from 6 to 20", [peeked()])
    yield ""
    for arms in (4, 8, 20):
        yield _line(f"  one of {arms} equal arms, by Holm, n = 6", [family(arms, 0.5)])
    yield ""
    yield _line("Power", ["promised", "counted"])
    for n in (6, 12, 20):
        for one in [*promises(n), detected(n)]:
            yield _line(f"  {one.what}", [f"{100 * one.promised:.1f} %", one.counted])


if __name__ == "__main__":
    for line in table():
        print(line, flush=True)
