"""How far apart two runs are as functions: what they predict at the same positions, while they
train. An arm stands beside its baseline, and beside what is no difference at all: the baseline with
another seed, and the baseline multiplied in another order.

Shape suffixes: P positions, V vocabulary.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from qkablate.analysis.comparison.curves import thinned
from qkablate.analysis.comparison.gaps import Family
from qkablate.analysis.stats import ALPHA, Interval, Sample
from qkablate.analysis.study.study import Entry, Record
from qkablate.runs import predictions
from qkablate.table import counted

ARM, ROUNDING, SEEDS = "arm", "rounding", "seeds"
_READINGS = 1_000  # pairs of files that a sweep is told from
_FAULTS = 20  # that are told one by one


@dataclass(frozen=True)
class Said:
    """What one run predicted at one step."""

    log_PV: np.ndarray
    p_PV: np.ndarray
    of: tuple[Any, ...] = ()  # what two must share to be compared

    @classmethod
    def from_logs(cls, log_PV: np.ndarray, of: tuple[Any, ...] = ()) -> "Said":
        return cls(log_PV, np.exp(log_PV, dtype=np.float64), of)


def divergence(one: Said, other: Said) -> float:
    """½ (KL(p‖q) + KL(q‖p)), averaged over the positions: ½ Σ (p − q) ln p/q. No term is below
    zero, so that what all but agrees is not lost in the rounding of larger numbers.
    """
    terms_PV = (one.p_PV - other.p_PV) * (one.log_PV - other.log_PV)
    return max(0.0, float(terms_PV.sum(axis=1).mean()) / 2)


@dataclass(frozen=True)
class Apart:
    """The distances of some pairs of runs, by tokens."""

    name: str
    kind: str
    variant: str
    readings: Mapping[int, tuple[float, ...]]  # by tokens: of each pair that is there
    last: int  # tokens of a whole training

    def mean(self, tokens: int) -> float:
        """The geometric: distances differ by factors."""
        values = self.readings[tokens]
        return math.exp(math.fsum(map(math.log, values)) / len(values)) if all(values) else 0.0

    def interval(self, tokens: int, level: float = 1 - ALPHA) -> Interval | None:
        """Of that mean, by Student's t of the logarithms. Neighbouring seeds share runs, and have
        none; nor has a distance of zero.
        """
        values = self.readings[tokens]
        if self.kind == SEEDS or not all(values):
            return None
        found = Sample(tuple(map(math.log, values))).interval(level)
        return found and (_exp(found[0]), _exp(found[1]))

    def band(self, tokens: int) -> Interval | None:
        """Intervals that hold together at all readings (Bonferroni's)."""
        return self.interval(tokens, 1 - ALPHA / max(1, len(self.readings)))

    @cached_property
    def end(self) -> float | None:
        """At the end of training; None where it is not known."""
        return self.mean(self.last) if self.last in self.readings else None


def _exp(value: float) -> float:
    return math.exp(max(-700.0, min(value, 700.0)))


@dataclass(frozen=True)
class Distances:
    """Of one size: the arms, and what is no difference."""

    baseline: str
    apart: list[Apart]
    positions: int
    faults: list[str]  # what could not be read, or is not there

    def of(self, kind: str) -> Apart | None:
        return next((one for one in self.apart if one.kind == kind), None)


def distances(families: Sequence[Family]) -> list[Distances]:
    """Of every size whose runs keep predictions."""
    pairs = sum(len(one.pairs) for family in families for one in family.gaps)
    most = max(1, _READINGS // max(1, pairs))
    found = (_of_family(family, most) for family in families)
    return [one for one in found if one is not None]


def _of_family(family: Family, most: int) -> Distances | None:
    base = {
        key: record
        for key, record in sorted(family.baseline.records.items())
        if record.status == "done"
    }
    arms = [one for one in family.gaps if one.pairs]
    files = _Files()
    for record in base.values():
        files.add(record, family.baseline)
    for one in arms:
        for key in one.pairs:
            files.add(one.arm.records[key], one.arm)
    if not files.steps:
        return None
    steps = _few(files.steps, most)
    files.name_missing(steps)
    tokens_per_step = family.baseline.tokens // int(family.baseline.arm.config.train.steps)
    values: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for step in steps:
        tokens = step * tokens_per_step
        said = {key: files.said(record, step) for key, record in base.items()}
        for one, other in neighbours([own for own in said.values() if own is not None]):
            files.compare(values[""][tokens], "another seed", one, other)
        for found in arms:
            for key in found.pairs:
                own = files.said(found.arm.records[key], step)
                files.compare(values[found.arm.name][tokens], found.arm.name, own, said[key])

    def apart(name: str, kind: str, entry: Entry) -> Apart:
        own = values["" if kind == SEEDS else name]
        readings = {tokens: tuple(found) for tokens, found in own.items() if found}
        return Apart(name, kind, entry.arm.variant, readings, family.baseline.tokens)

    every = [apart(one.arm.name, ROUNDING if one is family.twin else ARM, one.arm) for one in arms]
    every.append(apart(f"{family.baseline.name}, another seed", SEEDS, family.baseline))
    return Distances(
        family.baseline.name,
        [one for one in every if one.readings],
        files.positions,
        files.faults(),
    )


def neighbours(items: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Each with the next one, and the last with the first."""
    yield from pairwise(items)
    if len(items) > 2:
        yield items[-1], items[0]


def _few(steps: list[int], most: int) -> list[int]:
    """So many at most, the last always, and the start where there is room."""
    if len(steps) <= most:
        return steps
    return [steps[-1]] if most == 1 else thinned([step for step in steps if step], most)


class _Files:
    """What the runs of one size keep, and what is wrong with it."""

    def __init__(self) -> None:
        self.positions = 0
        self._kept: dict[str, dict[int, Any]] = {}  # of each run: paths by step
        self._records: dict[str, tuple[Record, Entry]] = {}
        self._faults: list[str] = []
        self._unlike: dict[str, int] = defaultdict(int)

    def add(self, record: Record, entry: Entry) -> None:
        if record.run.id not in self._kept:
            self._kept[record.run.id] = predictions.kept(record.folder)
            self._records[record.run.id] = record, entry

    @property
    def steps(self) -> list[int]:
        """At which any of them keeps something."""
        most = (int(entry.arm.config.train.steps) for _, entry in self._records.values())
        last = max(most, default=0)
        return sorted({step for own in self._kept.values() for step in own if step <= last})

    def name_missing(self, steps: list[int]) -> None:
        for id, (record, _) in self._records.items():
            absent = [step for step in steps if step not in self._kept[id]]
            if len(absent) == len(steps):
                self._faults.append(f"{record.folder.name} keeps no predictions")
            elif absent:
                shown = ", ".join(map(str, absent[:3])) + ", …" * (len(absent) > 3)
                self._faults.append(f"{record.folder.name} keeps no predictions of step {shown}")

    def said(self, record: Record, step: int) -> Said | None:
        """Read once for each that asks; what cannot be is named once."""
        path = self._kept[record.run.id].get(step)
        if path is None:
            return None
        context = self._records[record.run.id][1].arm.config.model.context
        try:
            about, log_PV = predictions.read(path)
            if about.run != record.run.id:
                raise ValueError("it is another run's")
            if about.data_fingerprint != record.facts["data_fingerprint"]:
                raise ValueError("it is of other data than its run")
            if about.context != context:
                raise ValueError(f"it says model.context={about.context}")
        except ValueError as error:
            self._faults.append(f"{record.folder.name}/{predictions.FOLDER}/{path.name}: {error}")
            del self._kept[record.run.id][step]
            return None
        self.positions = max(self.positions, len(log_PV))
        return Said.from_logs(
            log_PV, (about.data_fingerprint, about.positions_sha256, context, log_PV.shape)
        )

    def compare(self, values: list[float], name: str, one: Said | None, other: Said | None) -> None:
        if one is None or other is None:
            return
        if one.of == other.of:
            values.append(divergence(one, other))
        else:
            self._unlike[name] += 1

    def faults(self) -> list[str]:
        unlike = [
            f"{name}: {counted(n, 'pair')} of files at other positions, which are not compared"
            for name, n in self._unlike.items()
        ]
        more = len(self._faults) - _FAULTS
        shown = self._faults[:_FAULTS] + [f"{more:,} more of the kind"] * (more > 0)
        return shown + unlike
