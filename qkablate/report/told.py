"""Numbers as a report tells them: with no more digits than their interval supports."""

from collections.abc import Sequence

from qkablate.analysis.sample import ALPHA, Sample
from qkablate.table import digits


def told_gap(mean: float, interval: Sequence[float] | None) -> str:
    """+0.012 [+0.008, +0.016], with no more digits than the interval supports."""
    half = half_of(interval)
    said = digits(mean, half, signed=True)
    if interval is None:
        return f"{said}, no interval"
    return f"{said} [{', '.join(digits(end, half, signed=True) for end in interval)}]"


def told_loss(sample: Sample, level: float = 1 - ALPHA) -> str:
    interval = sample.interval(level)
    half = half_of(interval)
    said = digits(sample.mean, half)
    if interval is None:
        return f"{said}, no interval"
    return f"{said} [{', '.join(digits(end, half) for end in interval)}]"


def half_of(interval: Sequence[float] | None) -> float | None:
    return None if interval is None else (interval[1] - interval[0]) / 2
