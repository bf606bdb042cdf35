"""What a task is: sequences drawn by a generator of their own.

Every draw is named by (seed, task, split, step), so no model, no other split and no order of calls
can change the data. Training never ends; validation and test are the same for all runs.

Shape suffixes: N sequences, T context, A answers.
"""

import functools
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from qkablate.config import DATA_KEYS, DataConfig
from qkablate.data.batches import IGNORE, Batch, evenly
from qkablate.data.eval_metrics import Sums, Tally
from qkablate.errors import Impossible, UserError
from qkablate.randomness import stream

MOST = 2**27  # tokens of a split
FORMAT = 1  # raised when a task draws other sequences from the same generator


@dataclass(frozen=True)
class Examples:
    """Sequences, what they are to answer and where; a target of -100 does not count."""

    tokens_NT: np.ndarray
    targets_NA: np.ndarray
    where_NA: np.ndarray | None = None  # None: every position answers
    slices: dict[str, np.ndarray] = field(default_factory=dict)  # of each answer, by name

    def batch(self, rows: slice | np.ndarray) -> Batch:
        import torch

        shape = self.targets_NA.shape
        where_NA = None if self.where_NA is None else torch.from_numpy(self.where_NA[rows])
        return Batch(
            torch.from_numpy(self.tokens_NT[rows]),
            torch.from_numpy(self.targets_NA[rows]),
            where_NA,
            {k: np.broadcast_to(v, shape)[rows] for k, v in self.slices.items()},
        )


class Task:
    """A kind of sequence, at one difficulty and length."""

    name: ClassVar[str]
    what: ClassVar[str]  # in one line
    harder: ClassVar[str]  # what makes it so
    tokenizer = None  # its tokens are no text

    def __init__(self, config: DataConfig, context: int) -> None:
        self.config, self.length = config, context
        counts = {"val": config.val_tokens, "test": config.test_tokens}
        for split, tokens in counts.items():
            if tokens > MOST:
                raise self.refuse(
                    f"{split}_tokens", tokens, f"is more than a task keeps in memory ({MOST})"
                )
        self._counts = {split: max(1, tokens // context) for split, tokens in counts.items()}
        self._counts["train"] = self._counts["val"]  # of which a reading is made
        self.tokens = {split: count * context for split, count in self._counts.items()}
        self.vocabulary = self.size()
        self._readings: dict[str, Examples] = {}

    # What a task is made of.

    def size(self) -> int:
        """How many tokens there are; UserError where the settings make no sequence."""
        raise NotImplementedError

    def draw(self, rng: np.random.Generator, count: int) -> Examples:
        raise NotImplementedError

    def word(self, token: int) -> str:
        """How a person reads a token."""
        raise NotImplementedError

    def label(self, name: str, index: int) -> str:
        """What a slice is called."""
        return octave(index)

    # What training asks of data.

    @property
    def told(self) -> str:
        own = (key for key in DATA_KEYS[self.name] if not key.endswith("_tokens"))
        words = [f"{key} {getattr(self.config, key)}" for key in own]
        counts = self._counts
        return (
            f"{self.name}, {', '.join(words)}, length {self.length}: {counts['val']:,} sequences"
            f" to validate, {counts['test']:,} to test"
        )

    @functools.cached_property
    def fingerprint(self) -> str:
        """Of its settings, and of what it draws."""
        settings = {key: getattr(self.config, key) for key in DATA_KEYS[self.name]}
        drawn = hashlib.sha256()
        first = self.draw(stream(0, self.name, "train", 0), 16)
        for examples in (first, self._read("val"), self._read("test")):
            for part in (examples.tokens_NT, examples.targets_NA, examples.where_NA):
                drawn.update(b"" if part is None else part.tobytes())
        identity = [FORMAT, self.name, settings, self.length, drawn.hexdigest()]
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    @functools.cached_property
    def answers(self) -> float:
        """The part of the positions that answer."""
        return self._read("val").targets_NA.shape[1] / self.length

    def check_context(self, context: int) -> None:
        """Sequences are as long as the context; `size` has looked."""

    def batches(self, *, seed: int, batch_size: int, accumulate: int, context: int) -> "Drawn":
        return Drawn(self, seed, batch_size, accumulate)

    def reading(self, split: str, *, batch_size: int, context: int) -> Iterator[Batch]:
        """A whole split, in batches of one shape: the last is filled with what does not count."""
        examples = self._read(split)
        count = len(examples.tokens_NT)
        for first in range(0, count, batch_size):
            rows = np.arange(first, first + batch_size)
            batch = examples.batch(rows % count)
            batch.targets_NA[rows >= count] = IGNORE
            yield batch

    def sample(self, split: str, *, count: int, context: int) -> Batch:
        examples = self._read(split)
        return examples.batch(evenly(count, len(examples.tokens_NT)))

    def measures(self, split: str, tally: Tally) -> dict[str, float]:
        """What an evaluation says of a split."""
        found = {"loss": tally.all.mean, "accuracy": tally.all.accuracy}
        for name, slices in tally.slices.items():
            for index in sorted(slices):
                label = f"{name}/{self.label(name, index)}"
                found[f"accuracy/{label}"] = slices[index].accuracy
                found[f"loss/{label}"] = slices[index].mean
        return found

    def _read(self, split: str) -> Examples:
        if split not in self._readings:
            rng = stream(0, self.name, "reading of", split)
            self._readings[split] = self.draw(rng, self._counts[split])
        return self._readings[split]

    def number(self, key: str) -> int:
        """A key of `data` that this task has."""
        value = getattr(self.config, key)
        assert isinstance(value, int)
        return value

    def refuse(self, key: str, value: object, why: str) -> UserError:
        return Impossible(f"data.{key}: {value} {why}")


@dataclass(frozen=True)
class Drawn:
    """The training batches of a task."""

    task: Task
    seed: int
    batch_size: int
    accumulate: int

    def step(self, step: int) -> list[Batch]:
        size = self.batch_size
        rng = stream(self.seed, self.task.name, "train", step)
        examples = self.task.draw(rng, size * self.accumulate)
        return [examples.batch(slice(i * size, (i + 1) * size)) for i in range(self.accumulate)]


def distinct(rng: np.random.Generator, count: int, size: int, among: int) -> np.ndarray:
    """`count` rows of `size` different numbers below `among`, in any order."""
    if size * size > among:  # too many would come twice
        return np.argsort(rng.random((count, among)), axis=1)[:, :size]
    rows = rng.integers(among, size=(count, size))
    while True:
        ordered = np.sort(rows, axis=1)
        twice = np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(axis=1))
        if not len(twice):
            return rows
        rows[twice] = rng.integers(among, size=(len(twice), size))


def octaves(distance: np.ndarray) -> np.ndarray:
    """1 → 0; 2, 3 → 1; 4 to 7 → 2; …"""
    return np.log2(np.maximum(distance, 1)).astype(np.int64)


def octave(index: int) -> str:
    return f"{2**index}-{2 ** (index + 1) - 1}" if index else "1"


def together(sums: list[Sums]) -> Sums:
    return Sums(
        count=sum(s.count for s in sums),
        loss=sum(s.loss for s in sums),
        hits=sum(s.hits for s in sums),
    )
