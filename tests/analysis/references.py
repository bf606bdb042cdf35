"""Textbook versions of the statistics, and the JSON form of their results."""

import dataclasses
import json
import math
import warnings
from collections.abc import Sequence

import numpy as np
from scipy import optimize, special, stats


def holm_reference(p_values: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p-values, as R's p.adjust computes them."""
    p_M = np.array(p_values)
    order = np.argsort(p_M)
    factors = len(p_M) - np.arange(len(p_M))
    adjusted = np.empty_like(p_M)
    adjusted[order] = np.minimum(1, np.maximum.accumulate(factors * p_M[order]))
    return [*map(float, adjusted)]


def hall_t(t_S: np.ndarray, skewness_S: np.ndarray, n: int) -> np.ndarray:
    """Return Hall's transformation (1992) of t."""
    w, g = t_S / math.sqrt(n), skewness_S
    return math.sqrt(n) * np.asarray(w + g * w**2 / 3 + g**2 * w**3 / 27 + g / (6 * n))


class TTests:
    """One-sided tests of the means of many samples.

    From six numbers on each p-value is the more cautious of Student's and Hall's.
    """

    def __init__(self, x_SN: np.ndarray) -> None:
        self.n = x_SN.shape[1]
        self.mean_S = x_SN.mean(axis=1)
        self.error_S = x_SN.std(axis=1, ddof=1) / math.sqrt(self.n)
        with warnings.catch_warnings(action="ignore"):  # equal numbers have none
            skewness_S = stats.skew(x_SN, axis=1)
        self.skewness_S = np.nan_to_num(skewness_S) * (self.n >= 6)

    def p_values(self, mean: float | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the p-values against a mean at or above, and at or below, a number."""
        with np.errstate(all="ignore"):
            t_S = (self.mean_S - mean) / self.error_S
            is_skewed = (self.skewness_S != 0) & np.isfinite(t_S)
            hall_S = np.where(is_skewed, hall_t(t_S, self.skewness_S, self.n), t_S)
        high_S, low_S = np.maximum(t_S, hall_S), np.minimum(t_S, hall_S)
        return special.stdtr(self.n - 1, high_S), special.stdtr(self.n - 1, -low_S)


def t_test_power(effect: float, n: float, *, two_sided: bool) -> float:
    """Return the power of a t test at 5 % by the noncentral t distribution."""
    shift, df = effect * math.sqrt(n), n - 1
    beyond = stats.t.isf(0.025 if two_sided else 0.05, df)
    lower = stats.nct.cdf(-beyond, df, shift) if two_sided else 0.0
    return float(stats.nct.sf(beyond, df, shift) + lower)


def t_test_sample_size(effect: float, *, two_sided: bool) -> float:
    """Return the fractional sample size at which a t test has 80 % power."""
    high = 4.0
    while t_test_power(effect, high, two_sided=two_sided) < 0.8:  # NaN in the far tails
        high *= 2
    return float(
        optimize.brentq(
            lambda n: t_test_power(effect, n, two_sided=two_sided) - 0.8, 2 + 1e-9, high
        )
    )


def to_json(value: object) -> str:
    """Return the JSON text of dataclasses, lists and maps; NaN is an error."""
    return json.dumps(value, default=dataclasses.asdict, allow_nan=False)
