"""Compute, parameters and tokens that a baseline needs for the loss of an arm.

Both arms have a scaling law of their own, fitted to mean losses over seeds. Uncertainty is from the
jackknife: the laws are fitted again without each seed, in all runs of both arms at once, and the
pseudo-values are treated as a sample of one number per seed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qkablate.analysis.comparison.gaps import Family, Gap
from qkablate.analysis.scaling.asymptote import Asymptote, fit_asymptote
from qkablate.analysis.scaling.law import REACH, Observations, ScalingLaw, fit_law
from qkablate.analysis.scaling.series import find_grids
from qkablate.analysis.stats import MIN_PAIRS, Estimate, Interval, Sample, describe_sample
from qkablate.analysis.study.study import Entry, Seeds

MIN_SIZES = MIN_LENGTHS = 3
_MIN_HELD_OUT_SIZES = 4  # from which a law is fitted without the largest


@dataclass(frozen=True)
class Gain:
    """Ratio of what a baseline needs for the loss of an arm to what the arm needs."""

    times: float | None  # None: unknown, with the reason
    interval: Interval | None = None
    reason: str = ""


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
    """Scaling laws of an arm and its baseline, and what the arm is worth at the largest run."""

    arm: str
    baseline: str
    sizes: int
    lengths: int
    seeds: int
    reason: str  # why there is no answer, or ''
    laws: list[LawSummary]
    params: float  # of the largest arm
    tokens: float  # of its longest training
    flops: float  # of both
    compute: Gain | None = None
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
    return [_fit(name, gaps) for name, gaps in find_grids(families)]


def _fit(name: str, gaps: Sequence[Gap]) -> GridFit:
    gaps = sorted(gaps, key=lambda gap: (gap.baseline.arm.params, gap.baseline.tokens))
    arms, baselines = [gap.arm for gap in gaps], [gap.baseline for gap in gaps]
    seeds = [key for key in gaps[0].pairs if all(key in gap.pairs for gap in gaps)]
    lengths: dict[int, set[int]] = {}
    for entry in baselines:
        lengths.setdefault(entry.arm.params, set()).add(entry.tokens)
    counted = min(map(len, lengths.values()))
    largest = arms[-1].arm
    about: dict[str, Any] = {
        "arm": name,
        "baseline": baselines[-1].arm.variant,
        "sizes": len(lengths),
        "lengths": counted,
        "seeds": len(seeds),
        "params": float(largest.params),
        "tokens": float(largest.tokens),
        "flops": largest.train_flops,
    }
    reason = ""
    if len(lengths) < MIN_SIZES or counted < MIN_LENGTHS:
        reason = (
            f"{len(lengths)} sizes × {counted} lengths of training; a scaling law takes"
            f" {MIN_SIZES} × {MIN_LENGTHS} at least"
        )
    elif len(seeds) < MIN_PAIRS:
        reason = f"{len(seeds)} seeds have every run of both arms; {MIN_PAIRS} are needed"
    if reason:
        return GridFit(ScalingSummary(**about, reason=reason, laws=[]), [], gaps)
    both = [_observe(side, seeds) for side in (arms, baselines)]
    laws = [fit_law(data) for data in both]
    names = [name, baselines[-1].arm.variant]
    summaries = [_describe_law(*pair) for pair in zip(names, laws, strict=True)]
    for law, arm in zip(laws, names, strict=True):
        if law.problem:
            reason = f"{arm}: {law.problem}"
            return GridFit(ScalingSummary(**about, reason=reason, laws=summaries), [], gaps)
    without_one = [
        [
            fit_law(_observe(side, [key for key in seeds if key != left_out]), law)
            for side, law in zip((arms, baselines), laws, strict=True)
        ]
        for left_out in seeds
    ]
    where = _Place(*(float(x) for x in (largest.params, baselines[-1].arm.params, largest.tokens)))

    def gain(measure: Callable[[ScalingLaw, ScalingLaw], float | None], need: str) -> Gain:
        sample = jackknife(measure, laws, without_one)
        if sample is None:
            beyond = f"{baselines[-1].arm.variant} would need more than {REACH:g} times its {need}"
            return Gain(None, reason=f"{beyond}, or less than 1/{REACH:g} of its least")
        ends = sample.interval()
        return Gain(math.exp(sample.mean), ends and (math.exp(ends[0]), math.exp(ends[1])))

    asymptote = fit_asymptote([gap for gap in gaps if gap.arm.arm.params == largest.params])
    summary = ScalingSummary(
        **about,
        reason="",
        laws=summaries,
        compute=gain(where.compute, "largest size and length"),
        parameters=gain(where.parameters, "largest size"),
        training_tokens=gain(where.training_tokens, "greatest length"),
        asymptote=None if asymptote is None else describe_sample(asymptote.sample),
    )
    return GridFit(summary, laws, gaps, asymptote)


@dataclass(frozen=True)
class _Place:
    """The largest, longest run, at which an arm is compared with its baseline."""

    params: float
    baseline_params: float
    tokens: float

    def compute(self, arm: ScalingLaw, baseline: ScalingLaw) -> float | None:
        """Return ln of the baseline's FLOPs by the arm's, both spent in the best way."""
        index = int(np.argmax(arm.data.params_P * arm.data.tokens_P))
        flops = float(arm.data.flops_P[index]) * self.tokens
        loss = arm.lowest_loss(flops)
        needed = None if loss is None else baseline.least_flops(loss)
        return None if needed is None else math.log(needed / flops)

    def parameters(self, arm: ScalingLaw, baseline: ScalingLaw) -> float | None:
        """Return ln of the baseline's parameters by the arm's, at equal tokens."""
        needed = baseline.params_for(float(arm.loss(self.params, self.tokens)), self.tokens)
        return None if needed is None else math.log(needed / self.params)

    def training_tokens(self, arm: ScalingLaw, baseline: ScalingLaw) -> float | None:
        """Return ln of the baseline's tokens by the arm's, at the largest width of both."""
        loss = float(arm.loss(self.params, self.tokens))
        needed = baseline.tokens_for(loss, self.baseline_params)
        return None if needed is None else math.log(needed / self.tokens)


def jackknife(
    measure: Callable[[ScalingLaw, ScalingLaw], float | None],
    laws: Sequence[ScalingLaw],
    without_one: Sequence[Sequence[ScalingLaw]],
) -> Sample | None:
    """Return the pseudo-values of a measure of both laws; None where it is out of reach."""
    whole, parts = measure(*laws), [measure(*pair) for pair in without_one]
    if whole is None or any(part is None for part in parts):
        return None
    n = len(parts)
    return Sample(tuple(n * whole - (n - 1) * part for part in parts if part is not None))


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
