"""Sources and targets of pairs, as people write them and as tokens."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from qkablate.data.batches import IGNORE, PAD, Batch
from qkablate.data.tasks.base import Task
from qkablate.data.tokenizers import Tokenizer
from qkablate.errors import UserError, nearest_hint

_MOST_SHOWN = 10  # unknown tokens


class TargetTokens(NamedTuple):
    """The tokens around a target."""

    start: int  # precedes it
    end: int | None = None  # follows it; None: all targets are as long as the model's context

    def read_pair(self, batch: Batch, row: int) -> tuple[list[int], list[int]]:
        """Return the source and the target of a row, without padding and end."""
        source, target = batch.inputs[0][row].tolist(), batch.targets_NA[row].tolist()
        ignored = (self.end, PAD, IGNORE)
        return [i for i in source if i not in ignored], [i for i in target if i not in ignored]


class Sentences(Protocol):
    """Converts sentences to tokens and back."""

    @property
    def tokens(self) -> TargetTokens:
        """The tokens around a target."""

    def encode(self, text: str, key: str = "source") -> list[int]:
        """Return the tokens of a sentence, given as `key`; UserError for unknown ones."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of a sentence."""


class TaskSentences:
    """Tokens of a task, separated by spaces, as `qkablate data show` prints them."""

    def __init__(self, task: Task) -> None:
        self.task, self.tokens = task, TargetTokens(task.marker, task.end)
        self._ids = {task.format_token(i): i for i in range(task.vocabulary)}

    def encode(self, text: str, key: str = "source") -> list[int]:
        known, words = [*self._ids], text.split()
        if unknown := [word for word in dict.fromkeys(words) if word not in self._ids]:
            shown = [*known[:2], "…", *known[-3:]] if len(known) > 12 else known
            raise UserError(
                f"{key}: {_quote(unknown)} not known to data={self.task.name} (allowed:"
                f" {', '.join(shown)}){nearest_hint(unknown[0], known)}"
            )
        return [self._ids[word] for word in words]

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(map(self.task.format_token, ids))


class TextSentences:
    """Text by a tokenizer; the token that ends a document starts and ends a target."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    @property
    def tokens(self) -> TargetTokens:
        assert self.tokenizer.end is not None
        return TargetTokens(self.tokenizer.end, self.tokenizer.end)

    def encode(self, text: str, key: str = "source") -> list[int]:
        if unknown := self.tokenizer.unknown(text):
            raise UserError(f"{key}: {_quote(unknown)} not known to the tokenizer of this run")
        ids: list[int] = self.tokenizer.encode(text.encode()).tolist()
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return self.tokenizer.decode(ids).decode("utf-8", "replace")


def _quote(unknown: Sequence[str]) -> str:
    more = ["…"] if len(unknown) > _MOST_SHOWN else []
    words = ", ".join([*map(repr, unknown[:_MOST_SHOWN]), *more])
    return f"{words} {'is' if len(unknown) == 1 else 'are'}"
