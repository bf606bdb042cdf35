"""Format numbers, rounded to the precision of their interval."""

import math
from collections.abc import Sequence
from typing import Any

from qkablate.analysis.claims.measures import Unit
from qkablate.analysis.comparison.summary import GapSummary
from qkablate.analysis.stats import ALPHA, Sample
from qkablate.errors import sanitize
from qkablate.table import format_digits, format_nats


def format_gap(
    mean: float,
    interval: Sequence[float] | None,
    *,
    below: bool = False,
    above: bool = False,
    signed: bool = True,
) -> str:
    """Format a gap: +0.012 [+0.008, +0.016]; unbounded where runs diverged."""
    half = half_width(interval)
    text = format_digits(mean, half, signed=signed)
    if interval is None:
        return f"{text}, no interval"
    low, high = (format_digits(end, half, signed=signed) for end in interval)
    return f"{text} {'(−∞' if below else f'[{low}'}, {'∞)' if above else f'{high}]'}"


def format_gap_summary(gap: GapSummary) -> str:
    """Format the mean gap of an arm with its interval."""
    assert gap.mean is not None
    above, below = gap.arm_diverged > 0, gap.baseline_diverged > 0
    return format_gap(gap.mean, gap.interval, below=below, above=above)


def format_loss(sample: Sample, level: float = 1 - ALPHA) -> str:
    """Format a mean loss with its interval: 3.210 [3.205, 3.215]."""
    return format_gap(sample.mean, sample.interval(level), signed=False)


def format_value(unit: Unit, value: float) -> str:
    """Format a value in the unit that is shown: +0.0123, or ×1.040."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return f"×{value:.3f}" if unit is Unit.RATIO else format_nats(value)


def half_width(interval: Sequence[float] | None) -> float | None:
    """Return half the width of an interval."""
    return None if interval is None else (interval[1] - interval[0]) / 2


def sanitize_all(value: Any) -> Any:
    """Strip control characters from all strings of a JSON-like value."""
    if isinstance(value, str):
        return sanitize(value)
    if isinstance(value, dict):
        return {sanitize(key): sanitize_all(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [sanitize_all(inner) for inner in value]
    return value
