"""The function distance for a person, and in plain types."""

from collections.abc import Iterable
from typing import Any

from qkablate.analysis.comparison.function_distance import ROUNDING, SEEDS, Apart, Distances
from qkablate.report.text.table import Table

MEASURE = "mean of the two KL divergences between arm and baseline, nats per position"


def describe_distances(found: Iterable[Distances]) -> list[dict[str, Any]]:
    return [
        {
            "baseline": one.baseline,
            "measure": MEASURE,
            "positions": one.positions,
            "apart": [_described(apart, one) for apart in one.apart],
            "faults": one.faults,
        }
        for one in found
    ]


def _described(own: Apart, found: Distances) -> dict[str, Any]:
    def times(kind: str) -> float | None:
        beside = found.of(kind)
        floor = beside.end if beside is not None and beside is not own else None
        return own.end / floor if floor and own.end is not None else None

    last = own.last if own.last in own.readings else None
    interval = last and own.interval(last)
    return {
        "arm": own.name,
        "kind": own.kind,
        "variant": own.variant,
        "n": len(own.readings[last]) if last else 0,
        "end": own.end,
        "interval": interval and [*interval],
        "times_another_seed": times(SEEDS),
        "times_rounding": times(ROUNDING),
        "readings": [
            {"tokens": tokens, "n": len(values), "mean": own.mean(tokens)}
            | {"band": (band := own.band(tokens)) and [*band]}
            for tokens, values in own.readings.items()
        ],
    }


def apart_table(found: dict[str, Any]) -> Table:
    rows = []
    for one in found["apart"]:
        cells = [one["arm"], str(one["n"]), _plain(one["end"])]
        interval = one["interval"] and [*map(_plain, one["interval"])]
        cells.append(f"[{', '.join(interval)}]" if interval else "–")
        cells += [_times(one["times_another_seed"]), _times(one["times_rounding"])]
        rows.append(cells)
    return Table(
        f"function distance from {found['baseline']} at the end",
        ["arm", "n", "nats", "95 % interval", "times another seed", "times rounding"],
        rows,
        [
            f"½ (KL(p‖q) + KL(q‖p)) at {found['positions']:,} positions of the validation split;"
            " geometric mean over pairs. It has no direction: less is not better",
            *(f"not read: {line}" for line in found["faults"]),
        ],
    )


def _plain(value: float | None) -> str:
    """Of any size."""
    return "–" if value is None else f"{value:.3g}"


def _times(value: float | None) -> str:
    return "–" if value is None else f"× {told_times(value)}"


def told_times(value: float) -> str:
    """0.37, 1,234 or 1.2e+11."""
    return f"{value:,.0f}" if 99.5 <= value < 1e5 else f"{value:.2g}"
