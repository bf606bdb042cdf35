"""Text and generated tasks → tokens → batches. Knows no model."""

from collections.abc import Iterator
from typing import Any, Protocol

from qkablate.config import DataConfig
from qkablate.data.batches import IGNORE, Batch
from qkablate.data.corpus import Corpus, open_corpus
from qkablate.data.eval_metrics import Tally
from qkablate.data.tasks import TASKS, Task

__all__ = ["IGNORE", "TASKS", "Batch", "Corpus", "Data", "Steps", "Tally", "Task", "open_data"]


class Steps(Protocol):
    def step(self, step: int) -> list[Batch]:
        """The micro-batches of a step."""
        ...


class Data(Protocol):
    """What training asks of its data; a Corpus or a Task."""

    @property
    def name(self) -> str: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def vocabulary(self) -> int: ...

    @property
    def tokens(self) -> dict[str, int]:
        """Of each split."""
        ...

    @property
    def answers(self) -> float:
        """The part of the positions that answer."""
        ...

    @property
    def told(self) -> str:
        """For a person."""
        ...

    @property
    def tokenizer(self) -> Any:
        """The description of it, where tokens are text."""
        ...

    def check_context(self, context: int) -> None: ...

    def batches(self, *, seed: int, batch_size: int, accumulate: int, context: int) -> Steps: ...

    def reading(self, split: str, *, batch_size: int, context: int) -> Iterator[Batch]: ...

    def sample(self, split: str, *, count: int, context: int) -> Batch:
        """So many windows of a split, spread evenly over it."""
        ...

    def measures(self, split: str, tally: Tally) -> dict[str, float]: ...


def open_data(config: DataConfig, context: int) -> Data:
    """The data of a run, prepared now where it must be; UserError where it cannot be."""
    if config.source in TASKS:
        return TASKS[config.source](config, context)
    return open_corpus(config)
