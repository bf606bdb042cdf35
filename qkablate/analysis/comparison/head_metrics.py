"""What the diagnosing steps of runs measured, head by head: the rows `mechanism` of metrics.jsonl.

Shape suffixes: L layers, H heads, K singular values, S seeds.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qkablate.analysis.comparison.curves import Curve, together
from qkablate.analysis.study.study import Course, Entry, metrics_of
from qkablate.errors import tell
from qkablate.runs.records import is_number, read_row

SPECTRUM = "qk/singular"
# What is drawn of each, by its name in the rows.
BY_HEAD = {
    "qk/stable_rank": "stable rank of B",
    "qk/symmetry": "symmetry of B",
    "attention/entropy": "entropy of attention, nats",
    "attention/previous": "attention to the previous token",
    "attention/induction": "induction",
}
BY_TOKENS = {
    "qk/stable_rank": "stable rank of B",
    "attention/entropy": "entropy of attention, nats",
    "qk/moved": "distance of B from its start",
}
MEASURES = (SPECTRUM, *dict.fromkeys([*BY_HEAD, *BY_TOKENS]))
_SIGN = b'"mechanism"'
_TOKENS = re.compile(rb'"tokens": ?(\d{1,18})[,}]')
_LONGEST = 2**24  # bytes of one row
_MOST = 2**12  # layers, heads or singular values of a run
_BEYOND = 4  # times as many numbers as a row has bytes: a null may stand for many of them

# By the measure's name, as `qk/stable_rank`: NaN where a head has none.
Heads = dict[str, np.ndarray]


@dataclass(frozen=True)
class Watched:
    """Of one arm: what its runs that are done measured, by tokens."""

    entry: Entry
    runs: list[dict[int, Heads]]

    def curve(self, name: str, most: int) -> Curve | None:
        """The mean over all heads that have the measure, over the runs."""
        courses = (_course(run, name) for run in self.runs)
        return together([course for course in courses if course], most)

    def last(self, name: str) -> list[np.ndarray]:
        """Of each run that has it, at the end of training: measure_LH."""
        at_end = (run.get(self.entry.tokens, {}).get(name) for run in self.runs)
        return alike([one for one in at_end if one is not None])

    def at(self, name: str, tokens: int) -> list[np.ndarray]:
        found = (run.get(tokens, {}).get(name) for run in self.runs)
        return alike([one for one in found if one is not None])

    @property
    def tokens(self) -> list[int]:
        """At which all of them have looked."""
        return sorted(set.intersection(*map(set, self.runs))) if self.runs else []


def alike(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Those that have the shape of the first: the others are another model's."""
    return [one for one in arrays if one.shape == arrays[0].shape]


def sorted_heads(arrays_LH: list[np.ndarray]) -> np.ndarray:
    """The mean over seeds, with each layer's heads in the order of their values: the head that has
    a number in one run has nothing to do with the one that has it in another.
    """
    ordered_SLH = np.stack([-np.sort(-one_LH, axis=1) for one_LH in arrays_LH])
    return mean(ordered_SLH, axis=0)


def spectra(arrays_LHK: list[np.ndarray]) -> np.ndarray:
    """By layer: each head's singular values by its largest, their mean over heads and seeds."""
    stacked_SLHK = np.stack(arrays_LHK)
    largest_SLH1 = stacked_SLHK[..., :1]
    with np.errstate(divide="ignore", invalid="ignore"):
        relative_SLHK = np.where(largest_SLH1 > 0, stacked_SLHK / largest_SLH1, np.nan)
    return mean(mean(relative_SLHK, axis=2), axis=0)


def mean(values: np.ndarray, axis: int) -> np.ndarray:
    """Of those that are known; NaN where none is."""
    known = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        return np.where(known, values, 0).sum(axis=axis) / known.sum(axis=axis)


def _course(run: dict[int, Heads], name: str) -> Course:
    found = {tokens: heads[name] for tokens, heads in run.items() if name in heads}
    known = {tokens: array[np.isfinite(array)] for tokens, array in found.items()}
    return {tokens: float(own.mean()) for tokens, own in known.items() if tokens and len(own)}


def watch(entry: Entry, names: Iterable[str], most: int) -> Watched:
    names = tuple(names)
    done = (
        readings(record.folder, names, most, record.lacks.append) for record in entry.having("done")
    )
    return Watched(entry, [one for one in done if one])


def readings(
    folder: Path,
    names: Iterable[str],
    most: int,
    note: Callable[[str], None] | None = None,
) -> dict[int, Heads]:
    """By tokens, so many at most. Lines that are none are passed over, and that is told and noted;
    numbers that are none are not known.
    """
    lines: dict[int, bytes] = {}
    content = metrics_of(folder) or b""  # `courses` tells of what is not the result's
    for line in content[: content.rfind(b"\n") + 1].splitlines():
        if _SIGN in line and len(line) <= _LONGEST and (tokens := _TOKENS.search(line)):
            lines[int(tokens[1])] = line
    found: dict[int, Heads] = {}
    damaged = 0
    for tokens_read in _evenly(sorted(lines), most):
        try:
            heads = _heads(lines[tokens_read], names)
        except ValueError:
            damaged += 1
            continue
        if heads:
            found[tokens_read] = heads
    if damaged:
        said = f"is damaged: of its rows on heads, {damaged} are not shown"
        tell(f"qkablate: '{folder / 'metrics.jsonl'}' {said}")
        if note is not None:
            note(f"metrics.jsonl {said}")
    return found


def _evenly(tokens: list[int], most: int) -> list[int]:
    """First and last stay."""
    if len(tokens) <= most:
        return tokens
    places = np.linspace(0, len(tokens) - 1, max(2, most)).round().astype(int)
    return [tokens[i] for i in sorted({*map(int, places)})]


def _heads(line: bytes, names: Iterable[str]) -> Heads:
    found, row, length = {}, read_row(line), len(line)
    for name in names:
        part, _, measure = name.partition("/")
        try:
            depth = 3 if name == SPECTRUM else 2
            array = _array(row["mechanism"][part][measure], depth, _BEYOND * length)
        except (ValueError, LookupError, TypeError):
            continue
        if array is not None:
            found[name] = array
    return found


def _array(layers: Any, depth: int, most: int) -> np.ndarray | None:
    """Of lists in each other, as many as `depth`; what is null on any level is NaN. ValueError for
    what is ragged or no list; None where it would be of more numbers than `most`.
    """
    shape: list[int] = [0] * depth

    def measure(value: Any, level: int) -> None:
        if value is None or level == depth:
            return
        if not isinstance(value, list) or not 0 < len(value) <= _MOST:
            raise ValueError("no list of heads")
        if shape[level] not in (0, len(value)):
            raise ValueError("ragged")
        shape[level] = len(value)
        for inner in value:
            measure(inner, level + 1)

    measure(layers, 0)
    if 0 in shape or np.prod(shape, dtype=float) > most:
        return None
    array = np.full(shape, np.nan)

    def fill(value: Any, place: tuple[int, ...]) -> None:
        if len(place) == depth:
            if is_number(value):
                array[place] = value
        elif value is not None:
            for i, inner in enumerate(value):
                fill(inner, (*place, i))

    fill(layers, ())
    return array if np.isfinite(array).any() else None
