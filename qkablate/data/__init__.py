"""Text and generated tasks → tokens → batches. Imports no model."""

import itertools
from collections.abc import Iterator
from typing import Any, Protocol

from qkablate.config import DataConfig
from qkablate.data.batches import IGNORE, Batch
from qkablate.data.corpus import Corpus, open_corpus
from qkablate.data.eval_metrics import EvalMetrics
from qkablate.data.tasks import TASKS, Task

__all__ = [
    "IGNORE",
    "TASKS",
    "Batch",
    "Corpus",
    "Data",
    "EvalMetrics",
    "Task",
    "TrainingBatches",
    "iterate_windows",
    "open_data",
]


class TrainingBatches(Protocol):
    """Batches of the training split by step."""

    def step(self, step: int) -> list[Batch]:
        """Return the micro-batches of a step."""
        ...


class Data(Protocol):
    """Data of a run, as training uses it: a Corpus or a Task."""

    @property
    def name(self) -> str: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def vocabulary(self) -> int: ...

    @property
    def tokens(self) -> dict[str, int]:
        """Number of tokens of each split."""
        ...

    @property
    def answer_fraction(self) -> float:
        """Fraction of the positions that have a target."""
        ...

    @property
    def chance(self) -> float | None:
        """Accuracy of the best guess that does not depend on the sequence; None for text."""
        ...

    @property
    def description(self) -> str:
        """One line for people."""
        ...

    @property
    def tokenizer(self) -> Any:
        """Description of the tokenizer; None if the tokens are not text."""
        ...

    def check_context(self, context: int) -> None: ...

    def batches(
        self, *, seed: int, batch_size: int, grad_accum: int, context: int
    ) -> TrainingBatches: ...

    def split_batches(self, split: str, *, batch_size: int, context: int) -> Iterator[Batch]: ...

    def sample(self, split: str, *, count: int, context: int) -> Batch:
        """Return `count` windows that are spread evenly over a split."""
        ...

    def metrics(self, split: str, totals: EvalMetrics) -> dict[str, float]: ...


def open_data(config: DataConfig, context: int) -> Data:
    """Return the data of a run, preparing it if needed; UserError where that is impossible."""
    if config.source in TASKS:
        return TASKS[config.source](config, context)
    return open_corpus(config)


def iterate_windows(
    data: Data, split: str, *, seed: int, batch_size: int, grad_accum: int, context: int
) -> Iterator[tuple[Batch, int]]:
    """Yield the windows of a split in order, as batch and row; of `train`, those of a run."""
    if split == "train":
        steps = data.batches(
            seed=seed, batch_size=batch_size, grad_accum=grad_accum, context=context
        )
        batches: Iterator[Batch] = itertools.chain.from_iterable(map(steps.step, itertools.count()))
    else:
        batches = data.split_batches(split, batch_size=16, context=context)
    for batch in batches:
        for row, targets_A in enumerate(batch.targets_NA):
            if (targets_A != IGNORE).any():  # the others pad the last batch
                yield batch, row
