"""Compute, parameters and tokens that a baseline needs for the loss of an arm.

Both arms have a scaling law of their own, fitted to mean losses over seeds. Uncertainty is from the
jackknife: the laws are fitted again without each seed, in all runs of both arms at once, and the
pseudo-values are treated as a sample of one number per seed.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from qkablate.analysis.comparison.gaps import Family, Gap
from qkablate.analysis.scaling.asymptote import Asymptote, fit_asymptote
from qkablate.analysis.scaling.law import REACH, Observations, ScalingLaw, fit_law
from qkablate.analysis.scaling.series import common_seeds, find_grids
from qkablate.analysis.stats import MIN_PAIRS, Estimate, Interval, Sample, describe_sample, exp
from qkablate.analysis.study.study import Entry, Seeds
from qkablate.table import format_count

MIN_SIZES = MIN_LENGTHS = 3
_BUDGETS_PER_DOUBLING = 4
_MIN_HELD_OUT_SIZES = 4  # from which a law is fitted without the largest
_BEYOND = f"is beyond {REACH:g} times what was trained, or below 1/{REACH:g} of it"

Measure = Callable[[ScalingLaw, ScalingLaw], float | str]


@dataclass(frozen=True)
class Gain:
    """Ratio of what a baseline needs for the loss of an arm to what the arm needs."""

    times: float | None  # None: unknown, with the reason
    interval: Interval | None = None
    reason: str = ""  # or why it is not known at the largest run, but for less compute


@dataclass(frozen=True)
class LawSummary:
    """Scaling law of one arm, and how well it predicts runs that it was not fitted to."""

    arm: str
    irreducible: float  # E, nats
    size_term: float  # A
    size_exponent: float
    token_term: float  # B
    token_exponent: float
    residual: float  # root mean square, nats
    error: float  # typical standard error of the losses it is fitted to
    held_out: str  # which points
    held_out_miss: float  # mean of loss minus prediction, nats
    held_out_largest: float  # largest miss without its sign


@dataclass(frozen=True)
class ScalingSummary:
    """Scaling laws of an arm and its baseline, and what the arm is worth.

    Parameters and tokens are compared at the largest, longest run; compute for its FLOPs, or fewer.
    """

    arm: str
    baseline: str
    largest: str  # name of the arm at its largest size and length, where it is compared
    sizes: int
    lengths: int
    seeds: int
    reason: str  # why there is no answer, or ''
    laws: list[LawSummary]
    params: float  # of the largest arm
    tokens: float  # of its longest training
    flops: float  # of that training
    compute: Gain | None = None
    compute_flops: float | None = None  # for which that is: the most within reach, up to `flops`
    parameters: Gain | None = None
    training_tokens: Gain | None = None
    asymptote: Estimate | None = None  # gap after infinitely many tokens: an extrapolation

    @property
    def gains(self) -> dict[str, Gain]:
        """The three factors, by what they count."""
        gains = {"compute": self.compute, "parameters": self.parameters}
        gains["tokens"] = self.training_tokens
        return {name: gain for name, gain in gains.items() if gain is not None}


@dataclass(frozen=True)
class GridFit:
    """Scaling laws of an arm and its baseline, with their summary; no laws without an answer."""

    summary: ScalingSummary
    laws: list[ScalingLaw]
    gaps: list[Gap]
    asymptote: Asymptote | None = None  # of the gap at the largest size


def fit_grids(families: Sequence[Family]) -> list[GridFit]:
    """Fit scaling laws to every grid of sizes and lengths of an arm and its baseline."""
    return [_fit(names, gaps) for names, gaps in find_grids(families)]


def _fit(names: tuple[str, str], gaps: Sequence[Gap]) -> GridFit:
    gaps = sorted(gaps, key=lambda gap: (gap.baseline.arm.params, gap.baseline.tokens))
    sides = [gap.arm for gap in gaps], [gap.baseline for gap in gaps]
    seeds = common_seeds(gaps)
    largest, of_baseline = gaps[-1].arm.arm, gaps[-1].baseline.arm
    lengths = Counter(gap.baseline.arm.params for gap in gaps)
    summary = ScalingSummary(
        arm=names[0],
        baseline=names[1],
        largest=gaps[-1].arm.name,
        sizes=len(lengths),
        lengths=min(lengths.values()),
        seeds=len(seeds),
        reason=_find_lack(gaps, lengths, seeds),
        laws=[],
        params=float(largest.params),
        tokens=float(largest.tokens),
        flops=largest.train_flops,
    )
    if summary.reason:
        return GridFit(summary, [], gaps)
    laws = [fit_law(_observe(side, seeds)) for side in sides]
    described = [_describe_law(name, law) for name, law in zip(names, laws, strict=True)]
    for name, law in zip(names, laws, strict=True):
        if law.problem:
            reason = f"{name}: {law.problem}"
            return GridFit(replace(summary, laws=described, reason=reason), [], gaps)
    refits = _Refits(
        [[_observe(side, [s for s in seeds if s != out]) for side in sides] for out in seeds],
        laws,
        [[entry.tuning_variance for entry in side] for side in sides],
    )
    place = _Place(summary.params, float(of_baseline.params), summary.tokens, summary.flops)
    least = min(gap.arm.arm.train_flops for gap in gaps)
    compute_flops, compute, reason = find_largest_budget(
        lambda flops: refits.measure(replace(place, flops=flops).compute), place.flops, least
    )
    asymptote = fit_asymptote([gap for gap in gaps if gap.arm.arm.params == largest.params])
    summary = replace(
        summary,
        laws=described,
        compute=_make_gain(compute, reason),
        compute_flops=None if isinstance(compute, str) else compute_flops,
        parameters=_make_gain(refits.measure(place.parameters)),
        training_tokens=_make_gain(refits.measure(place.training_tokens)),
        asymptote=None if asymptote is None else describe_sample(asymptote.sample),
    )
    return GridFit(summary, laws, gaps, asymptote)


def _find_lack(gaps: Sequence[Gap], lengths: Counter[int], seeds: Sequence[Seeds]) -> str:
    """Return what the runs of a grid lack for a scaling law, or ''."""
    if len(lengths) < MIN_SIZES or min(lengths.values()) < MIN_LENGTHS:
        return (
            f"{len(lengths)} sizes × {min(lengths.values())} lengths of training; a scaling law"
            f" takes {MIN_SIZES} × {MIN_LENGTHS} at least"
        )
    for gap in gaps:
        for entry, count in ((gap.arm, gap.arm_diverged), (gap.baseline, gap.baseline_diverged)):
            if count:
                return (
                    f"{format_count(count, 'run')} of {entry.name} diverged: the law would be of"
                    " the others alone"
                )
    if len(seeds) < MIN_PAIRS:
        fewest = min(gaps, key=lambda gap: len(gap.pairs))
        return (
            f"{format_count(len(seeds), 'seed')} with every run of both arms, and {MIN_PAIRS} are"
            f" needed; {fewest.arm.name} has {format_count(len(fewest.pairs), 'pair')}"
        )
    return ""


@dataclass(frozen=True)
class _Place:
    """The place of a comparison: an arm's largest, longest run, or fewer FLOPs than it took.

    Each measure returns the logarithm of a factor, or the reason why it is out of reach.
    """

    params: float
    baseline_params: float
    tokens: float
    flops: float

    def compute(self, arm: ScalingLaw, baseline: ScalingLaw) -> float | str:
        """Return ln of the baseline's FLOPs by the arm's, each at its best size."""
        loss = arm.lowest_loss(self.flops)
        if loss is None:
            return f"the arm's best size or length for this compute {_BEYOND}"
        needed = baseline.least_flops(loss)
        if needed is None:
            return f"the baseline's best size or length for the arm's loss {_BEYOND}"
        return math.log(needed / self.flops)

    def parameters(self, arm: ScalingLaw, baseline: ScalingLaw) -> float | str:
        """Return ln of the baseline's parameters by the arm's, at equal tokens."""
        needed = baseline.params_for(float(arm.loss(self.params, self.tokens)), self.tokens)
        if needed is None:
            return f"the size that the baseline needs {_BEYOND}"
        return math.log(needed / self.params)

    def training_tokens(self, arm: ScalingLaw, baseline: ScalingLaw) -> float | str:
        """Return ln of the baseline's tokens by the arm's, at the largest width of both."""
        loss = float(arm.loss(self.params, self.tokens))
        needed = baseline.tokens_for(loss, self.baseline_params)
        if needed is None:
            return f"the length that the baseline needs {_BEYOND}"
        return math.log(needed / self.tokens)


@dataclass
class _Refits:
    """Both laws fitted again: without each seed, and with each loss moved a little."""

    without_seed: list[list[Observations]]  # by seed: arm, baseline
    laws: list[ScalingLaw]
    tuning_variances: list[list[float]]  # by side, of each loss: the error of imperfect rates

    @cached_property
    def _jackknifed(self) -> list[list[ScalingLaw]]:
        return [
            [fit_law(data, law) for data, law in zip(sides, self.laws, strict=True)]
            for sides in self.without_seed
        ]

    @cached_property
    def _moved(self) -> list[tuple[list[ScalingLaw], float, float]]:
        """The laws with one loss moved, by how much, and the variance of its tuning."""
        moved = []
        for side, variances in enumerate(self.tuning_variances):
            data = self.laws[side].data
            for point, variance in enumerate(variances):
                if variance:
                    by = max(data.error, 1e-4)
                    losses_P = data.losses_P.copy()
                    losses_P[point] += by
                    law = fit_law(replace(data, losses_P=losses_P), self.laws[side])
                    pair = [law if i == side else other for i, other in enumerate(self.laws)]
                    moved.append((pair, by, variance))
        return moved

    def measure(self, measure: Measure) -> Sample | str:
        """Return the pseudo-values of ln of a factor, or the reason why it is unknown."""
        sample = jackknife(measure, self.laws, self._jackknifed)
        if isinstance(sample, str):
            return sample
        whole, extra = measure(*self.laws), 0.0
        for pair, by, variance in self._moved:
            moved = measure(*pair)
            if isinstance(moved, str) or isinstance(whole, str):
                return f"{moved}, within the error of tuning"
            extra += ((moved - whole) / by) ** 2 * variance
        return replace(sample, extra_variance=extra)


def _make_gain(sample: Sample | str, reason: str = "") -> Gain:
    """Return the factor whose logarithms a sample has, and why it has none at the largest run."""
    if isinstance(sample, str):
        return Gain(None, reason=sample)
    ends = sample.interval()
    interval = ends and (exp(ends[0]), exp(ends[1]))
    return Gain(exp(sample.mean), interval, reason)


def find_largest_budget(
    measure: Callable[[float], Sample | str], most: float, least: float
) -> tuple[float, Sample | str, str]:
    """Return the largest compute budget for which a gain is known, in FLOPs, with the gain.

    Last is the reason why it is unknown for the largest of all, or ''.

    The best sizes for the budget of the largest, longest run may lie out of reach. If there is
    none, the reason is that for the largest, down to the smallest.
    """
    first = measure(most)
    reason = first if isinstance(first, str) else ""
    for step in range(int(_BUDGETS_PER_DOUBLING * math.log2(most / least)) + 1):
        flops = most * 2.0 ** (-step / _BUDGETS_PER_DOUBLING)
        sample = measure(flops) if step else first
        if not isinstance(sample, str):
            return flops, sample, reason
    return most, f"{reason}, nor is it within reach for a smaller budget", reason


def jackknife(
    measure: Measure, laws: Sequence[ScalingLaw], without_one: Sequence[Sequence[ScalingLaw]]
) -> Sample | str:
    """Return the pseudo-values of a measure of both laws, or why one of them is out of reach."""
    whole = measure(*laws)
    if isinstance(whole, str):
        return whole
    n, values = len(without_one), []
    for pair in without_one:
        part = measure(*pair)
        if isinstance(part, str):
            return f"{part}, without one of the seeds"
        values.append(n * whole - (n - 1) * part)
    return Sample(tuple(values))


def _observe(entries: Sequence[Entry], seeds: Sequence[Seeds]) -> Observations:
    """Return the mean losses over these seeds, and their typical standard error."""
    losses_PS = np.array([[entry.losses[key] for key in seeds] for entry in entries])
    error = float(np.median(losses_PS.std(axis=1, ddof=1))) / math.sqrt(len(seeds))
    return Observations(
        np.array([float(entry.arm.params) for entry in entries]),
        np.array([float(entry.tokens) for entry in entries]),
        losses_PS.mean(axis=1),
        np.array([entry.arm.flops for entry in entries]),
        error,
    )


def _describe_law(arm: str, law: ScalingLaw) -> LawSummary:
    data = law.data
    residual = data.losses_P - law.loss(data.params_P, data.tokens_P)
    sizes = np.unique(data.params_P)
    held_P = data.params_P == sizes[-1]
    text = "the largest size"
    if len(sizes) < _MIN_HELD_OUT_SIZES:  # two sizes alone do not tell an exponent
        held_P &= data.tokens_P > data.tokens_P[held_P].min()
        text = "the largest size, but for its shortest training"
    without = fit_law(data.where(~held_P))
    miss = (data.losses_P - without.loss(data.params_P, data.tokens_P))[held_P]
    size_term, token_term = law.uncentred_terms
    return LawSummary(
        *(arm, law.irreducible, size_term, law.size_exponent, token_term, law.token_exponent),
        *(float(np.sqrt(np.square(residual).mean())), data.error, text),
        *(float(miss.mean()), float(np.abs(miss).max())),
    )
