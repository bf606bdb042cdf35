"""Windows of data as people read them: what a model reads, and the answers to it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from qkablate.data import Data, MaskedText, TaggedSentences, Task
from qkablate.data.batches import PAD
from qkablate.data.pairs.sentences import Sentences, TaskSentences, TextSentences
from qkablate.data.tokenizers import load_tokenizer

MASK = "▒"


@dataclass(frozen=True)
class WindowTexts:
    """Texts of what a model reads, and of answers at its positions."""

    sentences: Sentences
    mask: int | None = None  # the token of a mask, if there are any
    tags: Mapping[int, str] = field(default_factory=dict)  # names of answers that are tags

    def read(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens, without padding and with its masks."""
        kept = (token for token in tokens if token != PAD)
        return "".join(
            MASK * len([*run]) if is_mask else self.sentences.decode(run)
            for is_mask, run in groupby(kept, lambda token: token == self.mask)
        )

    def write(self, answers: Sequence[int], words: Sequence[int]) -> str:
        """Return the text of answers: in quotation marks if masked, with their words if tags."""
        if self.tags:
            named = (self.tags.get(tag, self.sentences.decode([tag])) for tag in answers)
            texts = map(self.sentences.decode, ([word] for word in words))
            return " ".join(map("/".join, zip(texts, named, strict=True)))
        if self.mask is not None:
            return " ".join(repr(self.read([token])) for token in answers)
        return self.sentences.decode(answers)


def window_texts(data: Data) -> WindowTexts:
    """Return the texts of the windows of data."""
    if isinstance(data, Task):
        return WindowTexts(TaskSentences(data))
    return WindowTexts(
        TextSentences(load_tokenizer(data.tokenizer)),
        mask=data.mask if isinstance(data, MaskedText) else None,
        tags=data.tags if isinstance(data, TaggedSentences) else {},
    )
