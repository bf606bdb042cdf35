"""Diagnostics of attention heads over training: the rows `diagnostics` of metrics.jsonl.

Shape suffixes: L layers, H heads, K singular values, S seeds.
"""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qkablate.analysis.comparison.curves import Curve, combine_curves
from qkablate.analysis.stats import Interval
from qkablate.analysis.study.loss_curves import read_metrics, report_damage
from qkablate.analysis.study.study import Entry
from qkablate.runs.records import decode_row, is_number

SPECTRUM, OV_SPECTRUM = "qk/singular", "ov/singular"
# Measures that are drawn, by their names in the rows.
BY_HEAD = {
    "qk/stable_rank": "stable rank of B",
    "qk/symmetry": "symmetry of B",
    "attention/entropy": "entropy of attention, nats",
    "attention/previous": "attention to the previous token",
    "attention/induction": "induction",
}
# Beside these, of an imported model.
BY_IMPORTED_HEAD = BY_HEAD | {
    "qk/effective_rank": "effective rank of B",
    "qk/directionality": "directionality of B",
    "qk/balance": "balance of the factors of B",
    "ov/stable_rank": "stable rank of M",
    "ov/effective_rank": "effective rank of M",
    "ov/symmetry": "symmetry of M",
    "ov/directionality": "directionality of M",
    "ov/balance": "balance of the factors of M",
}
BY_TOKENS = {
    "qk/stable_rank": "stable rank of B",
    "attention/entropy": "entropy of attention, nats",
    "qk/moved": "distance of B from its initialization",
}
ROUNDING = {
    "attention/rounding": "in the precision of training",
    "attention/rounding_fp64": "in fp64",
}
MEASURES = (SPECTRUM, *dict.fromkeys([*BY_HEAD, *BY_TOKENS, *ROUNDING]))
IMPORTED_MEASURES = (*MEASURES, OV_SPECTRUM, *(BY_IMPORTED_HEAD.keys() - BY_HEAD.keys()))
_SIGN = b'"diagnostics"'
_TOKENS = re.compile(rb'"tokens": ?(\d{1,18})[,}]')
_MAX_BYTES = 2**24  # of one row
_MAX_LENGTH = 2**12  # layers, heads or singular values of a run
_MAX_EXPANSION = 4  # numbers per byte of a row: one null may stand for many numbers

# By measure, such as `qk/stable_rank`; NaN where a head has none.
HeadValues = dict[str, np.ndarray]


@dataclass(frozen=True)
class HeadMetrics:
    """Head metrics of one arm: of its finished runs, by tokens."""

    entry: Entry
    runs: list[dict[int, HeadValues]]

    def curve(self, name: str, most: int) -> Curve | None:
        """Return the mean over all heads that have the measure, run by run."""
        curves = []
        for run in self.runs:
            known = {t: heads[name] for t, heads in run.items() if t and name in heads}
            finite = {t: array[np.isfinite(array)] for t, array in known.items()}
            curves.append({t: float(values.mean()) for t, values in finite.items() if len(values)})
        return combine_curves([*filter(None, curves)], most)

    def at(self, name: str, tokens: int) -> list[np.ndarray]:
        """Return each run's measure_LH at a reading, where known."""
        arrays = (run.get(tokens, {}).get(name) for run in self.runs)
        known = [array for array in arrays if array is not None]
        return [array for array in known if array.shape == known[0].shape]  # of the same model

    def bounds(self, name: str) -> Interval:
        """Return the least and the largest value that a measure can have."""
        model = self.entry.arm.config.model
        if name == "attention/entropy":  # uniform: mean of ln n over queries that see n = 2, 3, …
            return 0.0, math.lgamma(model.context + 1) / max(1, model.context - 1)
        return (1.0, model.d_model) if name == "qk/stable_rank" else (0.0, math.inf)

    @property
    def tokens(self) -> list[int]:
        """Readings common to all runs."""
        return sorted(set.intersection(*map(set, self.runs))) if self.runs else []


def sort_heads(arrays_LH: list[np.ndarray]) -> np.ndarray:
    """Return the mean over seeds of each layer's sorted heads: their numbers carry no meaning."""
    return nan_mean(np.stack([-np.sort(-array_LH, axis=1) for array_LH in arrays_LH]), axis=0)


def relative_spectra(arrays_LHK: list[np.ndarray]) -> np.ndarray:
    """Return singular values relative to the largest: their mean over heads and seeds, by layer."""
    stacked_SLHK = np.stack(arrays_LHK)
    largest_SLH1 = stacked_SLHK[..., :1]
    with np.errstate(divide="ignore", invalid="ignore"):
        relative_SLHK = np.where(largest_SLH1 > 0, stacked_SLHK / largest_SLH1, np.nan)
    return nan_mean(nan_mean(relative_SLHK, axis=2), axis=0)


def nan_mean(values: np.ndarray, axis: int) -> np.ndarray:
    """Return the mean of the finite values; NaN where there is none."""
    known = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        means = np.where(known, values, 0).sum(axis=axis) / known.sum(axis=axis)
    return np.asarray(means)


def read_head_metrics(entry: Entry, names: Iterable[str], most: int) -> HeadMetrics:
    """Read the head metrics of an arm's finished runs, at most `most` readings each."""
    names = tuple(names)
    runs = (
        read_head_rows(record.folder, names, most, record.problems.append)
        for record in entry.with_status("done")
    )
    return HeadMetrics(entry, [run for run in runs if run])


def read_head_rows(
    folder: Path, names: Iterable[str], most: int, note: Callable[[str], None] | None = None
) -> dict[int, HeadValues]:
    """Read the head metrics of a run by tokens; malformed rows are skipped with a warning."""
    lines: dict[int, bytes] = {}
    content = read_metrics(folder) or b""  # `read_loss_curves` warns if damaged
    for line in content[: content.rfind(b"\n") + 1].splitlines():
        if _SIGN in line and len(line) <= _MAX_BYTES and (tokens := _TOKENS.search(line)):
            lines[int(tokens[1])] = line
    rows: dict[int, HeadValues] = {}
    damaged = 0
    for reading in pick_evenly(sorted(lines), max(2, most)):
        try:
            if heads := _parse_row(lines[reading], names):
                rows[reading] = heads
        except ValueError:
            damaged += 1
    if damaged:
        report_damage(folder, f"rows of head metrics skipped: {damaged}", note)
    return rows


def _parse_row(line: bytes, names: Iterable[str]) -> HeadValues:
    diagnostics = decode_row(line).get("diagnostics")
    return parse_diagnostics(diagnostics, names, _MAX_EXPANSION * len(line))


def parse_diagnostics(diagnostics: Any, names: Iterable[str], most: int) -> HeadValues:
    """Return measures of a row, of at most so many numbers each; malformed ones are left out."""
    values = {}
    for name in names:
        part, _, measure = name.partition("/")
        try:
            nested = diagnostics[part][measure]
        except (LookupError, TypeError):
            continue
        array = _array(nested, 3 if name in (SPECTRUM, OV_SPECTRUM) else 2, most)
        if array is not None:
            values[name] = array
    return values


def pick_evenly(items: list[int], count: int) -> list[int]:
    """Return at most `count` evenly spaced items, first and last included; of one, the last."""
    if len(items) <= count:
        return items
    if count == 1:
        return items[-1:]
    return [items[round(i)] for i in np.linspace(0, len(items) - 1, count)]


def _array(layers: Any, depth: int, most: int) -> np.ndarray | None:
    """Return nested lists as an array with NaN for null; None if ragged, empty or above `most`."""
    values, shape = [layers], []
    for _ in range(depth):
        lengths = {len(v) if isinstance(v, list) else 0 for v in values if v is not None}
        length = lengths.pop() if len(lengths) == 1 else 0
        if not 0 < length <= _MAX_LENGTH or len(values) * length > most:
            return None
        values = [inner for value in values for inner in value or [None] * length]
        shape.append(length)
    array = np.array([v if is_number(v) else np.nan for v in values], float).reshape(shape)
    return array if np.isfinite(array).any() else None
