"""Generated tasks: sequences drawn from named random generators.

Every draw is named by (seed, task, split, step), so no model, no other split and no order of calls
can change the data. Training data never ends; validation and test data are the same for all runs.

Shape suffixes: N sequences, T context, A answers.
"""

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from qkablate.config import DATA_KEYS, DataConfig
from qkablate.data.batches import DOCUMENT, IGNORE, Batch, evenly_spaced, group_neighbors
from qkablate.data.eval_metrics import EvalMetrics
from qkablate.errors import ImpossibleConfig, UserError
from qkablate.randomness import named_generator
from qkablate.strict_json import hash_json

MAX_TOKENS = 2**27  # of a split, which is kept in memory
FORMAT = 1  # raised when a task draws other sequences from the same generator


@dataclass(frozen=True)
class Examples:
    """Sequences with targets and their positions; a target of -100 does not count."""

    tokens_NT: np.ndarray
    targets_NA: np.ndarray
    positions_NA: np.ndarray | None = None  # None: every position has a target
    # Of each target, by name; of each sequence, with a single column.
    slices: dict[str, np.ndarray] = field(default_factory=dict)
    guessed_NA: np.ndarray | None = None  # targets that nothing determines; None: none
    sources_NS: np.ndarray | None = None  # of pairs, what an encoder reads

    def batch(self, rows: slice | np.ndarray) -> Batch:
        import torch

        positions_NA, count = self.positions_NA, len(self.targets_NA)
        read = [part for part in (self.sources_NS, self.tokens_NT) if part is not None]
        return Batch(
            tuple(torch.from_numpy(part[rows]) for part in read),
            torch.from_numpy(self.targets_NA[rows]),
            None if positions_NA is None else torch.from_numpy(positions_NA[rows]),
            {
                name: np.broadcast_to(part, (count, part.shape[1]))[rows]
                for name, part in self.slices.items()
            },
            None if self.guessed_NA is None else self.guessed_NA[rows],
        )


class Task:
    """A kind of sequence, at one difficulty and length."""

    name: ClassVar[str]
    summary: ClassVar[str]  # one line
    difficulty: ClassVar[str]  # the keys that make it harder
    # Keys that were added later: at zero they leave fingerprints of earlier runs as they were.
    later_keys: ClassVar[tuple[str, ...]] = ()
    has_pairs: ClassVar[bool] = False  # of source and target, for an encoder to read
    marker: int  # of pairs: the token that precedes the answer
    end: int | None = None  # the token that closes it; None: all are as long
    slice_labels: ClassVar[tuple[str, ...]] = ()  # by index, where an index is not a number
    tokenizer = None  # the tokens are not text
    pad = None  # all sequences are of one length
    chance: float  # accuracy of the best guess that does not depend on the sequence

    def __init__(
        self, config: DataConfig, context: int, *, form: str = "decoder", source: int = 0
    ) -> None:
        """Prepare sequences of `context` tokens, or pairs for another form than decoder.

        The source of a pair has up to `source` tokens.
        """
        self.config, self.length, self.form, self.source = config, context, form, source
        counts = {"val": config.val_tokens, "test": config.test_tokens}
        for split, tokens in counts.items():
            if tokens > MAX_TOKENS:
                raise self.error(
                    f"{split}_tokens", tokens, f"is more than a task keeps in memory ({MAX_TOKENS})"
                )
        self._counts = {split: max(1, tokens // context) for split, tokens in counts.items()}
        self._counts["train"] = self._counts["val"]  # when it is evaluated
        self.tokens = {split: count * context for split, count in self._counts.items()}
        self.vocabulary = self.setup()
        self._examples: dict[str, Examples] = {}

    # Implemented by each task.

    def setup(self) -> int:
        """Set `chance` and return the size of the vocabulary; UserError for unfit settings."""
        raise NotImplementedError

    def generate(self, rng: np.random.Generator, count: int) -> Examples:
        """Draw `count` sequences."""
        raise NotImplementedError

    def generate_test(self, rng: np.random.Generator, count: int) -> Examples:
        """Draw the test split, which may hold sequences that training never shows."""
        return self.generate(rng, count)

    def format_token(self, token: int) -> str:
        """Return a token as people read it."""
        raise NotImplementedError

    def join(
        self, source_NS: np.ndarray, answer_NA: np.ndarray, marker: int, **rest: Any
    ) -> Examples:
        """Return pairs as the model reads them: one sequence, two, or the source alone.

        The marker precedes the answer. An encoder alone answers at the positions of its source.
        """
        if self.form == "encoder":
            return Examples(source_NS, answer_NA, **rest)
        marker_N1 = np.full((len(answer_NA), 1), marker)
        known_NA = np.concatenate([marker_N1, answer_NA[:, :-1]], axis=1)
        if self.form == "encoder_decoder":
            return Examples(known_NA, answer_NA, sources_NS=source_NS, **rest)
        first, answers = source_NS.shape[1], answer_NA.shape[1]
        positions_NA = np.tile(np.arange(first, first + answers), (len(answer_NA), 1))
        tokens_NT = np.concatenate([source_NS, known_NA], axis=1)
        return Examples(tokens_NT, answer_NA, positions_NA, **rest)

    def check_lengths(self, key: str, answers: int) -> None:
        """Check that an answer of `data.<key>` tokens to a source as long fits the model."""
        if self.form == "decoder":
            if 2 * answers > self.length:
                raise self.error(
                    key,
                    answers,
                    f"tokens and their answer do not fit into model.context={self.length};"
                    f" the maximum is {self.length // 2}",
                )
            return
        if answers != self.length:
            raise ImpossibleConfig(
                f"model.context: {self.length} given, but an answer of data={self.name} has"
                f" data.{key}={answers} tokens; set model.context={answers}"
            )
        if answers > self.source:
            raise ImpossibleConfig(
                f"model.source: {self.source} is shorter than the data.{key}={answers} tokens that"
                f" a source of data={self.name} holds"
            )

    # Used by training.

    @property
    def description(self) -> str:
        keys = self._settings.items()
        settings = [f"{key} {value}" for key, value in keys if not key.endswith("_tokens")]
        counts = self._counts
        source = f"{self.source} to " if self.form == "encoder_decoder" else ""
        return (
            f"{self.name}, {', '.join(settings)}, length {source}{self.length}:"
            f" {counts['val']:,} sequences to validate, {counts['test']:,} to test"
        )

    @property
    def _settings(self) -> dict[str, Any]:
        """Return the keys of `data` that this task has, without later ones that are zero."""
        values = {key: getattr(self.config, key) for key in DATA_KEYS[self.name]}
        return {key: value for key, value in values.items() if value or key not in self.later_keys}

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of the settings and of the sequences drawn."""
        digest = hashlib.sha256()
        first = self.generate(named_generator(0, self.name, "train", 0), 16)
        for examples in (first, self._split("val"), self._split("test")):
            for part in (examples.tokens_NT, examples.targets_NA, examples.positions_NA):
                digest.update(b"" if part is None else part.tobytes())
            if examples.sources_NS is not None:
                digest.update(examples.sources_NS.tobytes())
        pairs = [] if self.form == "decoder" else [self.form]
        return hash_json(
            [FORMAT, self.name, self._settings, self.length, digest.hexdigest(), *pairs]
        )

    @functools.cached_property
    def answer_fraction(self) -> float:
        """Fraction of the positions that have a target."""
        return float(self._split("val").targets_NA.shape[1] / self.length)

    def check_context(self, context: int) -> None:
        """Do nothing: sequences are as long as the context, which `setup` has checked."""

    def batches(
        self, *, seed: int, batch_size: int, grad_accum: int, context: int
    ) -> "TaskBatches":
        return TaskBatches(self, seed, batch_size, grad_accum)

    def split_batches(
        self,
        split: str,
        *,
        batch_size: int,
        context: int,
        limit: int | None = None,
        by_document: bool = False,
    ) -> Iterator[Batch]:
        """Yield a whole split, or some `limit` tokens of it, in batches of one shape.

        The last batch is padded with ignored targets. With `by_document` the answers are counted
        by sequence, too; of very many, neighbors are counted as one.
        """
        examples, count = self._split(split), self._count_within(split, limit)
        groups = group_neighbors(count)
        for first in range(0, count, batch_size):
            rows = np.arange(first, first + batch_size)
            batch = examples.batch(rows % count)
            batch.targets_NA[rows >= count] = IGNORE
            if by_document:
                groups_N1 = groups[rows % count, None]
                groups_NA = np.broadcast_to(groups_N1, batch.targets_NA.shape)
                batch = batch._replace(slices={**(batch.slices or {}), DOCUMENT: groups_NA})
            yield batch

    def test_tokens(self, limit: int | None) -> int:
        """Return how many tokens of the test split are read: the first sequences within `limit`."""
        return self._count_within("test", limit) * self.length

    def _count_within(self, split: str, limit: int | None) -> int:
        count = self._counts[split]
        return count if limit is None else min(count, max(1, limit // self.length))

    def sample(self, split: str, *, count: int, context: int) -> Batch:
        examples = self._split(split)
        return examples.batch(evenly_spaced(count, len(examples.tokens_NT)))

    def metrics(self, split: str, totals: EvalMetrics) -> dict[str, float]:
        """Return the metrics of an evaluated split, also by slice."""
        metrics = {
            "loss": totals.all.mean,
            "accuracy": totals.all.accuracy,
            "exact": totals.sequences.accuracy,
        }
        for name, slices in totals.slices.items():
            for index in sorted(slices):
                label = f"{name}/{self.format_slice(name, index)}"
                metrics[f"accuracy/{label}"] = slices[index].accuracy
                metrics[f"loss/{label}"] = slices[index].mean
                if (sequences := totals.sequence_slices[name].get(index)) is not None:
                    metrics[f"exact/{label}"] = sequences.accuracy
        return metrics

    def format_slice(self, name: str, index: int) -> str:
        """Return the label of a slice; those of distances are octaves."""
        if self.slice_labels:
            return self.slice_labels[index]
        return octave_label(index) if name in ("gap", "position") else str(index)

    def _split(self, split: str) -> Examples:
        if split not in self._examples:
            rng = named_generator(0, self.name, "reading of", split)
            generate = self.generate_test if split == "test" else self.generate
            self._examples[split] = generate(rng, self._counts[split])
        return self._examples[split]

    def setting(self, key: str) -> int:
        """Return the value of a key of `data` that this task has."""
        value = getattr(self.config, key)
        assert isinstance(value, int)
        return value

    def error(self, key: str, value: object, problem: str) -> UserError:
        """Return the error for a setting that is impossible."""
        return ImpossibleConfig(f"data.{key}: {value} {problem}")


@dataclass(frozen=True)
class TaskBatches:
    """Training batches of a task."""

    task: Task
    seed: int
    batch_size: int
    grad_accum: int

    def step(self, step: int) -> list[Batch]:
        size = self.batch_size
        rng = named_generator(self.seed, self.task.name, "train", step)
        examples = self.task.generate(rng, size * self.grad_accum)
        return [examples.batch(slice(i * size, (i + 1) * size)) for i in range(self.grad_accum)]


def draw_distinct(rng: np.random.Generator, count: int, size: int, below: int) -> np.ndarray:
    """Draw `count` rows of `size` distinct integers below `below`, in random order."""
    if size * size > below:  # many rows would have to be drawn again
        return np.argsort(rng.random((count, below)), axis=1)[:, :size]
    rows = rng.integers(below, size=(count, size))
    while True:
        ordered = np.sort(rows, axis=1)
        repeated = np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(axis=1))
        if not len(repeated):
            return rows
        rows[repeated] = rng.integers(below, size=(len(repeated), size))


def octave(distance: np.ndarray) -> np.ndarray:
    """Return the octave of each distance: 0 for 1, 1 for 2 and 3, 2 for 4 to 7, and so on."""
    octaves: np.ndarray = np.log2(np.maximum(distance, 1)).astype(np.int64)
    return octaves


def octave_label(index: int) -> str:
    """Return the range of distances of an octave."""
    return f"{2**index}-{2 ** (index + 1) - 1}" if index else "1"
