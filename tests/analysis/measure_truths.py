"""Studies with hidden truths for the measures of claims other than the gap.

Every study is judged by the code that judges real ones. `python -m tests.analysis.measure_truths`
prints the table in some minutes; `test_measure_truths.py` runs a short version.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from qkablate.analysis.claims.measures import (
    MEASURES,
    Unit,
    known_number,
    log_tokens_ratio,
    loss_halfway,
)
from qkablate.analysis.claims.samples import Censored, Course, Exact, Median
from qkablate.analysis.claims.verdict import Part, judge_parts
from qkablate.analysis.comparison.decision import Verdict
from qkablate.analysis.outliers import FailureRisk
from qkablate.analysis.stats import Sample
from tests.analysis.hidden_truths import is_false

STUDIES = 2_000
SIZES = (6, 16, 36)
TRUTHS = (0.0, 0.5, 1.0, -1.0)  # in margins
READINGS, CORRELATION = 12, 0.9  # of a loss curve, and from one to the next
FREQUENCY = 1 / 8  # of runs that fail

Random = np.random.Generator
# Makes the part of one study: kind, truth in margins, number of pairs.
Draw = Callable[[Random, str, float, int], Part]


def _course(profile: str) -> Draw:
    """Return studies of curves whose largest gap is the truth: at all readings, or at one."""

    def draw(random: Random, kind: str, truth: float, n: int) -> Part:
        noise_TN = random.normal(size=(READINGS, n))
        for t in range(1, READINGS):
            step = math.sqrt(1 - CORRELATION**2)
            noise_TN[t] = CORRELATION * noise_TN[t - 1] + step * noise_TN[t]
        mean_T = np.full(READINGS, 0.01 * truth)
        if profile == "peak":
            mean_T *= np.arange(READINGS) == READINGS // 2
        readings = [Sample(tuple(x_N)) for x_N in (mean_T[:, None] + 0.012 * noise_TN).tolist()]
        return Part("part", kind, 0.01, Course.from_readings(readings))

    return draw


def _accuracy(fails: bool = False, solved: bool = False) -> Draw:
    """Return studies of accuracies near one.

    An arm may fail in one run of eight; the baseline may have solved the task in every run, so that
    the difference is as skewed as the arm's accuracy.
    """

    def draw(random: Random, kind: str, truth: float, n: int) -> Part:
        margin, size = 0.02, 0.9
        sides = 1 - random.exponential(0.01, size=(2, n))
        if solved:
            sides[1] = 1 - 0.01
        failed_N = random.random(n) < FREQUENCY if fails else np.zeros(n, dtype=bool)
        sides[0] -= margin * truth
        sides[0] -= size * (failed_N - FREQUENCY * fails)  # failures are part of the truth
        costs = tuple((sides[1] - sides[0]).tolist())
        risks = [FailureRisk("arm", int(failed_N.sum()), n, size), FailureRisk("base", 0, n, size)]
        return Part("part", kind, margin, Sample(costs), raising=(risks[0],), lowering=(risks[1],))

    return draw


def _ratio(shape: str) -> Draw:
    """Return studies of ratios whose median is the truth."""

    def draw(random: Random, kind: str, truth: float, n: int) -> Part:
        margin = Unit.RATIO.margin(0.05)
        noise_N = {
            "normal": lambda: random.normal(size=n),
            "t2": lambda: random.standard_t(2, size=n),
            "skewed": lambda: random.exponential(size=n) - math.log(2),
            "ties": lambda: np.round(random.normal(size=n)),
        }[shape if shape != "censored" else "normal"]()
        costs_N = margin * truth + 0.1 * noise_N
        if shape == "censored":  # the arm does not reach the loss
            costs_N = np.where(costs_N > 0.12, math.inf, costs_N)
        return Part("part", kind, margin, Median(tuple(costs_N.tolist())))

    return draw


def _curves(random: Random, kind: str, truth: float, n: int) -> Part:
    """Return a study of noisy loss curves; the arm's is the baseline's, stretched by the truth."""
    margin, tokens_T = Unit.RATIO.margin(0.05), np.arange(1, 21) / 20
    noise = random.normal(0, 0.02, size=(2, n, len(tokens_T)))
    stretch = [[math.exp(margin * truth)], [1.0]]
    losses = 3 - 0.3 * np.log(tokens_T / np.array(stretch))[:, None] + noise
    curves, others = (
        [dict(zip((tokens_T * 10**6).astype(int).tolist(), row.tolist(), strict=True)) for row in x]
        for x in losses
    )
    targets = [loss_halfway(others[:i] + others[i + 1 :]) for i in range(n)]
    found = (log_tokens_ratio(*one) for one in zip(curves, others, targets, strict=True))
    bounds = tuple(one for one in found if one is not None)
    costs = tuple(map(known_number, bounds))
    return Part("part", kind, margin, Censored(costs, 0.0, bounds))


def _interaction(fails: bool) -> Draw:
    """Return studies of the difference of two gaps, of four arms; one may fail."""

    def draw(random: Random, kind: str, truth: float, n: int) -> Part:
        losses = 0.012 * random.normal(size=(4, n))
        failed_N = random.random(n) < FREQUENCY if fails else np.zeros(n, dtype=bool)
        losses[0] += 0.01 * truth + 0.12 * (failed_N - FREQUENCY * fails)
        gaps = tuple((losses[0] - losses[1] - (losses[2] - losses[3])).tolist())
        counts = (int(failed_N.sum()), 0, 0, 0)
        arm, base, other, another = (FailureRisk(str(i), c, n) for i, c in enumerate(counts))
        return Part(
            "part", kind, 0.01, Sample(gaps), raising=(arm, another), lowering=(base, other)
        )

    return draw


def _normal(random: Random, kind: str, truth: float, n: int) -> Part:
    return Part("part", kind, 0.01, Sample(tuple(random.normal(0.01 * truth, 0.012, n).tolist())))


def _exact(random: Random, kind: str, truth: float, n: int) -> Part:
    return Part("part", kind, 0.05, Exact((0.05 * truth,)))


FALSE = ("SUPPORTED", "REFUTED", "EQUIV.")


class Row(NamedTuple):
    """Studies of one measure, in one world."""

    measure: str
    world: str
    draw: Draw
    guarded: bool = False  # what the runs do not show is left to the guard: see `Errors`


ROWS = (
    Row("course", "flat", _course("flat")),
    Row("course", "peak", _course("peak")),
    Row("train_loss", "normal", _normal),
    Row("accuracy", "near one", _accuracy()),
    Row("accuracy", "solved", _accuracy(solved=True), guarded=True),
    Row("accuracy", "an arm fails", _accuracy(fails=True), guarded=True),
    Row("exact", "an arm fails", _accuracy(fails=True), guarded=True),
    Row("tokens_to_loss", "curves", _curves),
    Row("tokens_to_loss", "normal", _ratio("normal")),
    Row("tokens_to_loss", "censored", _ratio("censored")),
    Row("steps_to_loss", "skewed", _ratio("skewed")),
    Row("seconds", "t2", _ratio("t2")),
    Row("memory", "ties", _ratio("ties")),
    Row("kv_bytes", "exact", _exact),
    Row("params", "exact", _exact),
    Row("than", "normal", _interaction(fails=False)),
    Row("than", "an arm fails", _interaction(fails=True), guarded=True),
)


class Errors(NamedTuple):
    """Rates of one row, the largest over kinds and truths."""

    false: dict[str, float]  # by verdict
    guarded: float  # false verdicts that hold whatever fails: those without "unless"
    decided: float  # studies with a conclusive verdict at a truth of two margins, least over kinds


def measure(row: Row, n: int, studies: int = STUDIES) -> Errors:
    """Return how often verdicts are false at a null, inside and at both edges."""
    kinds = MEASURES["gap" if row.measure == "than" else row.measure].kinds
    is_signed = row.measure != "course"
    false = {str(word): 0.0 for word in (Verdict.SUPPORTED, Verdict.REFUTED, Verdict.EQUIVALENT)}
    guarded, decided = 0.0, 1.0
    for kind in kinds:
        for truth in (*TRUTHS, 4.0):
            random = np.random.default_rng([n, abs(hash_of(row)), kinds.index(kind)])
            drawn = [row.draw(random, kind, truth, n) for _ in range(studies)]
            verdicts = [judge_parts([part]) for part in drawn]
            words = [str(verdict.word) for verdict in verdicts]
            size = truth if is_signed else abs(truth)
            if truth == 4.0:
                decided = min(
                    decided, float(np.mean([word != Verdict.UNDERPOWERED for word in words]))
                )
                continue
            if row.world == "exact" and abs(size) == 1:
                continue  # a number on the margin is on neither side of it
            for word in false:
                if is_false(word, kind, size):
                    false[word] = max(false[word], float(np.mean([w == word for w in words])))
                    bare = [str(v.word) == word and not v.unless for v in verdicts]
                    guarded = max(guarded, float(np.mean(bare)))
    return Errors(false, guarded, float(decided))


def hash_of(row: Row) -> int:
    """Return a number that is always the same for a row."""
    return sum(i * ord(c) for i, c in enumerate(f"{row.measure} {row.world}", 1))


def table(studies: int = STUDIES) -> Iterator[str]:
    yield f"{studies:,} studies a row, kind and truth; largest rates of false verdicts, percent"
    heads = "".join(f"{head:>10}" for head in (*FALSE, "guarded", "decided"))
    yield f"{'measure':<16}{'truth':<14}{'n':>4}{heads}"
    for row in ROWS:
        for n in SIZES:
            found = measure(row, n, studies)
            rates = (*found.false.values(), found.guarded, found.decided)
            cells = "".join(f"{100 * rate:10.1f}" for rate in rates)
            yield f"{row.measure:<16}{row.world:<14}{n:>4}{cells}"


if __name__ == "__main__":
    for line in table():
        print(line, flush=True)
