"""Table of the function distance."""

from qkablate.analysis.comparison.function_distance import FunctionDistance
from qkablate.report.text.table import Table


def make_distance_table(family: FunctionDistance) -> Table:
    """Return the distances of one size at the end of training."""
    rows = [
        [
            distance.arm,
            str(distance.n),
            _number(distance.end),
            f"[{', '.join(map(_number, distance.interval))}]" if distance.interval else "–",
            _ratio(distance.times_another_seed),
            _ratio(distance.times_rounding),
        ]
        for distance in family.distances
    ]
    return Table(
        f"function distance from {family.baseline} at the end",
        ["arm", "n", "nats", "95 % interval", "times another seed", "times rounding"],
        rows,
        [
            f"½ (KL(p‖q) + KL(q‖p)) at {family.positions:,} positions of the validation split;"
            " geometric mean over pairs. It has no direction: less is not better",
            *(f"not read: {line}" for line in family.faults),
        ],
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"× {format_ratio(value)}"


def format_ratio(value: float) -> str:
    """Format a ratio: 0.37, 1,234 or 1.2e+11."""
    return f"{value:,.0f}" if 99.5 <= value < 1e5 else f"{value:.2g}"
