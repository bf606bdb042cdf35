"""Numbers as a report tells them: with no more digits than their interval supports."""

from collections.abc import Mapping, Sequence
from typing import Any

from qkablate.analysis.stats import ALPHA, Sample
from qkablate.errors import printable
from qkablate.table import digits


def told_gap(
    mean: float, interval: Sequence[float] | None, *, below: bool = False, above: bool = False
) -> str:
    """+0.012 [+0.008, +0.016]; a side on which runs diverged has no end."""
    half = half_of(interval)
    said = digits(mean, half, signed=True)
    if interval is None:
        return f"{said}, no interval"
    low, high = (digits(end, half, signed=True) for end in interval)
    return f"{said} {'(−∞' if below else f'[{low}'}, {'∞)' if above else f'{high}]'}"


def told_open(one: Mapping[str, Any]) -> str:
    """The gap of an arm as it was described."""
    above, below = one["arm_diverged"] > 0, one["baseline_diverged"] > 0
    return told_gap(one["mean"], one["interval"], below=below, above=above)


def told_loss(sample: Sample, level: float = 1 - ALPHA) -> str:
    interval = sample.interval(level)
    half = half_of(interval)
    said = digits(sample.mean, half)
    if interval is None:
        return f"{said}, no interval"
    return f"{said} [{', '.join(digits(end, half) for end in interval)}]"


def half_of(interval: Sequence[float] | None) -> float | None:
    return None if interval is None else (interval[1] - interval[0]) / 2


def cleaned(value: Any) -> Any:
    """Without signs that steer: files may hold them, and neither page nor picture has a use for
    any.
    """
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(key): cleaned(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [cleaned(inner) for inner in value]
    return value
