"""Textbook versions of the statistics, and the JSON form of their results."""

import dataclasses
import json
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
