"""Encoding of published runs: as columns, and their curves as rounded differences."""

from collections.abc import Iterable, Mapping
from typing import Any

from qkablate.analysis.study.loss_curves import LossCurve

MAX_READINGS = 64  # of a curve
_JOINT = "\x1f"  # between the keys of a path: the keys of measures contain slashes
Fields = dict[str, Any]


def to_columns(runs: Mapping[str, Fields]) -> list[Fields]:
    """Return the runs as columns, those with equal fields together: they compress far better."""
    groups: dict[tuple[str, ...], dict[str, Fields]] = {}
    for id, run in sorted(runs.items()):
        flat = _flatten(run)
        groups.setdefault(tuple(sorted(flat)), {})[id] = flat
    tables = []
    for keys, members in sorted(groups.items()):
        rows = [*members.values()]
        equal = {key: rows[0][key] for key in keys if all(r[key] == rows[0][key] for r in rows)}
        each = {key: [row[key] for row in rows] for key in keys if key not in equal}
        tables.append({"ids": [*members], "equal": equal, "each": each})
    return tables


def from_columns(tables: Iterable[Fields]) -> dict[str, Fields]:
    """Return the runs that `to_columns` has packed."""
    runs: dict[str, Fields] = {}
    for table in tables:
        for number, id in enumerate(table["ids"]):
            flat = table["equal"] | {key: column[number] for key, column in table["each"].items()}
            runs[id] = _unflatten(flat)
    return runs


def _flatten(values: Fields, prefix: str = "") -> Fields:
    """Return the leaves by their path, its keys joined by _JOINT; an empty map is a leaf."""
    flat: Fields = {}
    for key, value in values.items():
        is_map = isinstance(value, dict) and value
        flat |= _flatten(value, f"{prefix}{key}{_JOINT}") if is_map else {f"{prefix}{key}": value}
    return flat


def _unflatten(flat: Fields) -> Fields:
    values: Fields = {}
    for path, value in flat.items():
        *parents, leaf = path.split(_JOINT)
        inner = values
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[leaf] = value
    return values


def pack_curve(curve: LossCurve, scale: float) -> Fields:
    """Return tokens and losses of a curve, rounded to 1 / scale, as differences."""
    shown = thin(curve)
    losses = [round(loss * scale) for loss in shown.values()]
    return {"tokens": _differences([*shown]), "losses": _differences(losses), "scale": scale}


def unpack_curve(packed: Fields) -> LossCurve:
    """Return the curve that `pack_curve` has packed."""
    losses = (loss / packed["scale"] for loss in _sums(packed["losses"]))
    return dict(zip(_sums(packed["tokens"]), losses, strict=True))


def thin(curve: LossCurve) -> LossCurve:
    """Return at most MAX_READINGS of a curve, evenly on a log scale, the first and last included.

    A reading at 0 tokens has no place on the scale, which begins with the next one.
    """
    tokens = sorted(curve)
    if len(tokens) <= MAX_READINGS:
        return {t: curve[t] for t in tokens}
    first, last = next(t for t in tokens if t > 0), tokens[-1]
    steps = MAX_READINGS - 2
    picked = {tokens[0], last}
    for i in range(steps):
        at = first * (last / first) ** (i / steps)
        picked.add(next(t for t in tokens if t >= max(first, at - 0.5)))
    return {t: curve[t] for t in sorted(picked)}


def _differences(numbers: list[int]) -> list[int]:
    return [b - a for a, b in zip([0, *numbers], numbers, strict=False)]


def _sums(differences: Iterable[int]) -> list[int]:
    total, sums = 0, []
    for difference in differences:
        total += int(difference)
        sums.append(total)
    return sums
