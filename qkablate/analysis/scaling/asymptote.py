"""Gap after infinitely many tokens, extrapolated from whole trainings of several lengths.

The losses of an arm and its baseline are fitted by L∞ + B·D^−β with one β for both, so that the
gap is a straight line in D^−β. Uncertainty is from the jackknife over seeds, β included.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from qkablate.analysis.comparison.gaps import Gap
from qkablate.analysis.scaling.power_curve import MOST_EXPONENT, find_exponent, make_design
from qkablate.analysis.scaling.series import MIN_POINTS, common_seeds, has_diverged
from qkablate.analysis.stats import MIN_PAIRS, Sample

LEAST_EXPONENT = 0.1  # below, a curve has not begun to level off


@dataclass(frozen=True)
class Asymptote:
    """Gap by tokens and its limit: gap(D) = limit + slope·(D/D₀)^−β."""

    sample: Sample  # of the limit: the jackknife's pseudo-values, one per seed
    exponent: float
    limit: float
    slope: float
    reference: float  # D₀, tokens
    weights: tuple[float, ...]  # of the gap at each length in the limit

    def gap(self, tokens: np.ndarray) -> np.ndarray:
        """Return the fitted gap after so many tokens."""
        return np.asarray(self.limit + self.slope * (tokens / self.reference) ** -self.exponent)


def fit_asymptote(gaps: Sequence[Gap]) -> Asymptote | None:
    """Fit gaps of three lengths of training or more.

    None where the losses do not level off, or where runs diverged.
    """
    gaps = sorted(gaps, key=lambda gap: gap.arm.tokens)
    seeds = common_seeds(gaps) if gaps else []
    lengths = {gap.arm.tokens for gap in gaps}
    if len(lengths) < MIN_POINTS or len(seeds) < MIN_PAIRS or has_diverged(gaps):
        return None
    tokens_T = np.array([float(gap.arm.tokens) for gap in gaps])
    arm_ST = np.array([[gap.arm.losses[key] for gap in gaps] for key in seeds])
    baseline_ST = np.array([[gap.baseline.losses[key] for gap in gaps] for key in seeds])
    fit = fit_curves(tokens_T, arm_ST, baseline_ST)
    if fit is None:
        return None
    # The error of imperfect rates is common to all seeds, and as much magnified as the gaps.
    parts = zip(fit.weights, gaps, strict=True)
    extra = sum(weight**2 * gap.sample.extra_variance for weight, gap in parts)
    return replace(fit, sample=replace(fit.sample, extra_variance=extra))


def fit_curves(
    tokens_T: np.ndarray, arm_ST: np.ndarray, baseline_ST: np.ndarray
) -> Asymptote | None:
    """Fit the losses of two arms by seed and length."""
    reference = float(np.exp(np.log(tokens_T).mean()))
    log_d = np.log(tokens_T / reference)

    def fit(keep_S: np.ndarray) -> tuple[float, float, float, np.ndarray] | None:
        means = np.stack([arm_ST[keep_S].mean(axis=0), baseline_ST[keep_S].mean(axis=0)])
        exponent = _find_exponent(log_d, means)
        if exponent is None:
            return None
        inverse = np.linalg.pinv(make_design(log_d, exponent))
        limit, slope = inverse @ (means[0] - means[1])
        return exponent, float(limit), float(slope), inverse[0]

    n = len(arm_ST)
    whole = fit(np.ones(n, dtype=bool))
    parts = [fit(np.arange(n) != out) for out in range(n)]
    if whole is None or any(part is None for part in parts):
        return None
    exponent, limit, slope, weights = whole
    values = tuple(n * limit - (n - 1) * part[1] for part in parts if part is not None)
    return Asymptote(Sample(values), exponent, limit, slope, reference, tuple(map(float, weights)))


def _find_exponent(log_d: np.ndarray, means: np.ndarray) -> float | None:
    """Return the β of both curves; None if they do not level off, or do not fall."""
    exponent = find_exponent(log_d, means)
    falls = means[:, 0] > means[:, -1]
    within = LEAST_EXPONENT < exponent < 0.98 * MOST_EXPONENT
    return exponent if within and falls.all() else None
