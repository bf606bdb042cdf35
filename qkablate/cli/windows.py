"""Windows of data as `qkablate data show` prints them."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from qkablate.data import IGNORE, MaskedText, Pairs, TaggedSentences, Task, tokenizers
from qkablate.data.batches import PAD
from qkablate.data.window_texts import WindowTexts, window_texts

if TYPE_CHECKING:
    from qkablate.data import Data
    from qkablate.data.batches import Batch

_Decode = Callable[[list[int]], str]


def window_formatter(data: "Data") -> "Callable[[Batch, int], list[str]]":
    """Return the function that formats a row of a batch."""
    if isinstance(data, Task):
        return partial(_format_task, data)
    tokenizer = tokenizers.load_tokenizer(data.tokenizer)

    def decode(tokens: list[int]) -> str:
        return tokenizer.decode(tokens).decode("utf-8", "replace")

    if isinstance(data, TaggedSentences):
        return partial(_format_tags, data, decode)
    if isinstance(data, Pairs):
        return partial(_format_pair, data, decode)
    if isinstance(data, MaskedText):
        return partial(_format_masks, window_texts(data))
    return partial(_format_text, decode)


def _format_text(decode: _Decode, batch: "Batch", row: int) -> list[str]:
    length = int((batch.targets_NA[row] != IGNORE).sum())
    return _indent(decode(batch.tokens_NT[row, :length].tolist()))


def _format_masks(texts: WindowTexts, batch: "Batch", row: int) -> list[str]:
    """Return the text as it is read, and the tokens to predict in order."""
    answers = [token for token in batch.targets_NA[row].tolist() if token != IGNORE]
    text = texts.read(batch.tokens_NT[row].tolist())
    return [*_indent(text), f"→ {texts.write(answers, answers)}"]


def _format_tags(data: TaggedSentences, decode: _Decode, batch: "Batch", row: int) -> list[str]:
    parts = (batch.tokens_NT[row].tolist(), batch.targets_NA[row].tolist())
    words = (
        decode([word]) + ("" if tag == IGNORE else f"/{data.tags[tag]}")
        for word, tag in zip(*parts, strict=True)
        if word != PAD
    )
    return _indent(" ".join(words))


def _format_pair(data: Pairs, decode: _Decode, batch: "Batch", row: int) -> list[str]:
    ignored = (PAD, data.end, IGNORE)
    parts = (batch.inputs[0][row].tolist(), batch.targets_NA[row].tolist())
    texts = (decode([token for token in part if token not in ignored]) for part in parts)
    return [f"{mark} {_printable(text)}" for mark, text in zip(" →", texts, strict=True)]


def _indent(text: str) -> list[str]:
    return [f"  {_printable(line)}" for line in text.split("\n")]


def _format_task(task: Task, batch: "Batch", number: int) -> list[str]:
    """Return a sequence with its answers, or the source and the target of a pair."""
    if task.form == "decoder":
        return [f"  {_sequence(task, batch, number)}"]
    texts = (
        " ".join(task.format_token(token) for token in tokens_NT[number].tolist() if token >= 0)
        for tokens_NT in (batch.inputs[0], batch.targets_NA)
    )
    return [f"  source  {next(texts)}", f"  target  {next(texts)}"]


def _printable(text: str) -> str:
    """Replace what could control the terminal."""
    return "".join(c if c.isprintable() or c == "\t" else "�" for c in text)


def _sequence(task: Task, batch: "Batch", number: int) -> str:
    texts = [task.format_token(token) for token in batch.tokens_NT[number].tolist()]
    if batch.positions_NA is not None:
        positions, targets = batch.positions_NA[number].tolist(), batch.targets_NA[number].tolist()
        for position, target in zip(positions, targets, strict=True):
            if target >= 0:
                texts[position] += f"→{task.format_token(target)}"
    return " ".join(texts)
