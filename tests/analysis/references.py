"""Textbook versions of the statistics, to which those of the package are compared."""

import math
from collections.abc import Sequence

import numpy as np
from scipy import optimize, stats


def holm_reference(p_values: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p-values, as R's p.adjust computes them."""
    p_M = np.array(p_values)
    order = np.argsort(p_M)
    factors = len(p_M) - np.arange(len(p_M))
    adjusted = np.empty_like(p_M)
    adjusted[order] = np.minimum(1, np.maximum.accumulate(factors * p_M[order]))
    return [*map(float, adjusted)]


def t_test_power(effect: float, n: float, *, two_sided: bool) -> float:
    """Return the power of a t test at 5 % by the noncentral t distribution."""
    shift, df = effect * math.sqrt(n), n - 1
    beyond = stats.t.isf(0.025 if two_sided else 0.05, df)
    lower = stats.nct.cdf(-beyond, df, shift) if two_sided else 0.0
    return float(stats.nct.sf(beyond, df, shift) + lower)


def t_test_sample_size(effect: float, *, two_sided: bool) -> float:
    """Return the fractional sample size at which a t test has 80 % power."""
    power = 0.8
    return float(
        optimize.brentq(
            lambda n: t_test_power(effect, n, two_sided=two_sided) - power, 2 + 1e-9, 1e6
        )
    )
