"""Function distance: how much the predictions of two runs differ at the same positions.

An arm is compared with its baseline, and this distance with what counts as no difference: the
baseline with another seed, and the baseline with reordered matmuls (rounding).

Shape suffixes: P positions, V vocabulary.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import TypeVar

import numpy as np

from qkablate.analysis.comparison.curves import Reading, thin
from qkablate.analysis.comparison.gaps import Family
from qkablate.analysis.stats import ALPHA, Interval, Sample
from qkablate.analysis.study.study import Entry, Record
from qkablate.runs import predictions
from qkablate.table import format_count

ARM, ROUNDING, SEEDS = "arm", "rounding", "seeds"
MEASURE = "mean of the two KL divergences between arm and baseline, nats per position"
_MAX_PAIRS = 1_000  # pairs of files that are compared for a sweep
_MAX_FAULTS = 20  # listed one by one
T = TypeVar("T")


@dataclass(frozen=True)
class Predictions:
    """Predicted distributions of one run at one step."""

    log_PV: np.ndarray
    key: tuple[object, ...] = ()  # equal for predictions that can be compared

    @cached_property
    def probabilities(self) -> np.ndarray:
        return np.asarray(np.exp(self.log_PV, dtype=np.float64))


def symmetric_kl(first: Predictions, second: Predictions) -> float:
    """Return ½ (KL(p‖q) + KL(q‖p)) = ½ Σ (p − q) ln p/q, averaged over the positions."""
    # No term is negative, so that small distances do not drown in rounding errors.
    terms_PV = (first.probabilities - second.probabilities) * (first.log_PV - second.log_PV)
    return max(0.0, float(terms_PV.sum(axis=1).mean()) / 2)


@dataclass(frozen=True)
class Distance:
    """Distances of some pairs of runs, by tokens."""

    name: str
    kind: str
    variant: str
    readings: dict[int, list[float]]  # by tokens: one distance per pair
    last: int  # tokens of a whole training

    def mean(self, tokens: int) -> float:
        """Return the geometric mean, since distances differ by factors."""
        values = self.readings[tokens]
        return math.exp(math.fsum(map(math.log, values)) / len(values)) if all(values) else 0.0

    def interval(self, tokens: int, level: float = 1 - ALPHA) -> Interval | None:
        """Return the interval of the geometric mean; None for seeds and where a value is zero."""
        values = self.readings[tokens]
        if self.kind == SEEDS or not all(values):  # pairs of seeds share runs
            return None
        ends = Sample(tuple(map(math.log, values))).interval(level)
        return ends and (_exp(ends[0]), _exp(ends[1]))

    @cached_property
    def end(self) -> float | None:
        """Distance at the end of training; None if unknown."""
        return self.mean(self.last) if self.last in self.readings else None


def _exp(value: float) -> float:
    return math.exp(max(-700.0, min(value, 700.0)))


@dataclass(frozen=True)
class DistanceSummary:
    """Function distance of one arm, or of what counts as no difference."""

    arm: str
    kind: str
    variant: str
    n: int
    end: float | None
    interval: Interval | None
    times_another_seed: float | None
    times_rounding: float | None
    readings: list[Reading]


@dataclass(frozen=True)
class FunctionDistance:
    """Function distances of the arms of one size, and of what counts as no difference."""

    baseline: str
    measure: str
    positions: int
    distances: list[DistanceSummary]
    faults: list[str]  # missing and unreadable files


def measure_distances(families: Sequence[Family]) -> list[FunctionDistance]:
    """Measure the distances of every size whose runs keep predictions."""
    pairs = sum(len(gap.pairs) for family in families for gap in family.gaps)
    most = max(1, _MAX_PAIRS // max(1, pairs))
    return list(filter(None, (_measure_family(family, most) for family in families)))


def _measure_family(family: Family, most: int) -> FunctionDistance | None:
    base, last = family.baseline, family.baseline.tokens
    records = {key: run for key, run in sorted(base.records.items()) if run.status == "done"}
    gaps = [gap for gap in family.gaps if gap.pairs]
    runs = [(record, base) for record in records.values()]
    runs += [(record, gap.arm) for gap in gaps for record, _ in gap.runs]
    files = _PredictionFiles(runs)
    if not (steps := files.steps):
        return None
    if len(steps) > most:  # always the last, and step 0 only if all are kept
        steps = [steps[-1]] if most == 1 else thin([step for step in steps if step], most)
    files.note_missing(steps)
    tokens_per_step = last // int(base.arm.config.train.steps)
    distances = {}
    for gap in gaps:
        kind = ROUNDING if gap is family.rounding_gap else ARM
        distances[gap.arm.name] = Distance(gap.arm.name, kind, gap.arm.arm.variant, {}, last)
    other_seed = "another seed"
    name = f"{base.name}, {other_seed}"
    distances[other_seed] = Distance(name, SEEDS, base.arm.variant, {}, last)
    for step in steps:
        by_seed = {key: files.read(record, step) for key, record in records.items()}
        of_seeds = neighbors([known for known in by_seed.values() if known is not None])
        pairs = chain(
            ((other_seed, first, second) for first, second in of_seeds),
            (
                (gap.arm.name, files.read(gap.arm.records[key], step), by_seed[key])
                for gap in gaps
                for key in gap.pairs
            ),
        )
        for name, first, second in pairs:
            if (value := files.compare(name, first, second)) is not None:
                distances[name].readings.setdefault(step * tokens_per_step, []).append(value)
    measured = [distance for distance in distances.values() if distance.readings]
    summaries = [_describe_distance(distance, measured) for distance in measured]
    return FunctionDistance(base.name, MEASURE, files.positions, summaries, files.list_faults())


def _describe_distance(distance: Distance, measured: list[Distance]) -> DistanceSummary:
    def ratio_to(kind: str) -> float | None:
        others = (d.end for d in measured if d.kind == kind and d is not distance)
        scale = next(others, None)
        return distance.end / scale if scale and distance.end is not None else None

    level = 1 - ALPHA / len(distance.readings)  # simultaneous over all readings (Bonferroni)
    return DistanceSummary(
        arm=distance.name,
        kind=distance.kind,
        variant=distance.variant,
        n=len(distance.readings.get(distance.last, [])),
        end=distance.end,
        interval=None if distance.end is None else distance.interval(distance.last),
        times_another_seed=ratio_to(SEEDS),
        times_rounding=ratio_to(ROUNDING),
        readings=[
            Reading(tokens, len(values), distance.mean(tokens), distance.interval(tokens, level))
            for tokens, values in distance.readings.items()
        ],
    )


def neighbors(items: Sequence[T]) -> Iterator[tuple[T, T]]:
    """Pair each item with the next one, and the last with the first."""
    yield from pairwise(items)
    if len(items) > 2:
        yield items[-1], items[0]


class _PredictionFiles:
    """Prediction files of the runs of one size, with their faults."""

    def __init__(self, runs: Iterable[tuple[Record, Entry]]) -> None:
        self.positions = 0
        self._runs = {record.run.id: (record, entry.arm.config) for record, entry in runs}
        self._paths = {  # by step
            id: predictions.find_predictions(record.folder)
            for id, (record, _) in self._runs.items()
        }
        self._faults: list[str] = []
        self._mismatched: Counter[str] = Counter()

    @property
    def steps(self) -> list[int]:
        """Steps at which any run keeps predictions."""
        lengths = [int(config.train.steps) for _, config in self._runs.values()]
        return [s for s in sorted({*chain(*self._paths.values())}) if s <= max(lengths)]

    def note_missing(self, steps: list[int]) -> None:
        """Record which runs lack predictions at these steps."""
        for id, (record, _) in self._runs.items():
            missing = [step for step in steps if step not in self._paths[id]]
            if len(missing) == len(steps):
                self._faults.append(f"{record.folder.name} keeps no predictions")
            elif missing:
                shown = ", ".join(map(str, missing[:3])) + ", …" * (len(missing) > 3)
                self._faults.append(f"{record.folder.name} keeps no predictions of step {shown}")

    def read(self, record: Record, step: int) -> Predictions | None:
        """Read the predictions of a run; a file that cannot be read is noted once."""
        path = self._paths[record.run.id].get(step)
        if path is None:
            return None
        context = self._runs[record.run.id][1].model.context
        try:
            header, log_PV = predictions.read_predictions(path)
            record.check_origin(header.run, header.data_fingerprint)
            if header.context != context:
                raise ValueError(f"it has model.context={header.context}")
        except ValueError as error:
            self._faults.append(f"{record.folder.name}/{predictions.FOLDER}/{path.name}: {error}")
            del self._paths[record.run.id][step]
            return None
        self.positions = max(self.positions, len(log_PV))
        return Predictions(
            log_PV, (header.data_fingerprint, header.positions_sha256, context, log_PV.shape)
        )

    def compare(
        self, name: str, first: Predictions | None, second: Predictions | None
    ) -> float | None:
        """Return the distance of two predictions; None if they are unknown or not comparable."""
        if first is None or second is None:
            return None
        if first.key == second.key:
            return symmetric_kl(first, second)
        self._mismatched[name] += 1
        return None

    def list_faults(self) -> list[str]:
        """Return the faults as lines, the first of them one by one."""
        mismatched = [
            f"{name}: {format_count(n, 'pair')} of files at different positions are not compared"
            for name, n in self._mismatched.items()
        ]
        more = len(self._faults) - _MAX_FAULTS
        return self._faults[:_MAX_FAULTS] + [f"{more:,} more faults"] * (more > 0) + mismatched
