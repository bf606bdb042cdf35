"""Documents → splits → tokens on disk.

A published split is kept. Otherwise a document's hash decides which split it is in, whatever else
the corpus holds; a few documents are split by position, as one is.
"""

import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from qkablate.config import DataConfig
from qkablate.data import hub, sources, tokenizers
from qkablate.data.document_store import HELD_OUT, Room, Spans, Spool, held_out
from qkablate.data.progress import Progress
from qkablate.data.sources import Source
from qkablate.data.tokenizers import Tokenizer
from qkablate.errors import UserError

SPLITS = ("train", "val", "test")
DOCUMENT_END = b"\0"  # what the token stands for that closes a document of several
FEW = 300  # documents; of fewer, no hash would hold out 3 % for sure
LEARN_FROM = 2**25  # bytes of training text that a bpe is learned from
_THREADS = 4


def prepare(config: DataConfig, folder: Path, progress: Progress) -> dict[str, Any]:
    """Write <split>.bin into `folder`; what the manifest says of them, the tokenizer included."""
    source, known = within_reach(config)
    spool = Spool(folder / "documents")
    progress.stage("reading")
    spool.fill(source, Room(config), progress)
    if not spool.size:
        raise UserError(f"{_place(config)} is empty")
    splits, rule = _divided(spool)
    closed = any(len(spans) > 1 for spans in splits.values())
    tokenizer = known or _made_tokenizer(config, spool, splits, closed, progress)
    progress.stage("writing", spool.size)
    writer = _Writer(folder, spool, tokenizer, closed, progress)
    rooms = {"train": config.max_tokens, "val": config.val_tokens, "test": config.test_tokens}
    found = {split: writer.write(split, splits[split], rooms[split]) for split in SPLITS}
    for split in SPLITS:
        if found[split]["tokens"] < 2:
            hint = "; raise data.max_tokens" if spool.cut else ""
            raise UserError(
                f"{_place(config)} is too little text: nothing is left for {split}{hint}"
            )
    os.remove(folder / "documents")
    return {
        "sources": _told(config),
        "split": rule,
        "duplicates": spool.duplicates,
        "vocabulary": tokenizer.vocabulary,
        "dtype": writer.dtype.name,
        "tokenizer": tokenizer.describe(),
        **{key: {split: found[split][key] for split in SPLITS} for key in found["train"]},
    }


def _divided(spool: Spool) -> tuple[dict[str, Spans], str]:
    """The documents of each split, and the rule in words."""
    arranged = spool.arrange()
    splits = {split: arranged[split][0] for split in ("val", "test") if len(arranged[split][0])}
    missing = [split for split in ("val", "test") if split not in splits]
    spans, places = arranged["train" if len(arranged["train"][0]) else ""]
    if not missing:
        return {**splits, "train": spans}, "as published"
    told = " and ".join(missing)
    if not len(spans):
        return {**dict.fromkeys(SPLITS, spans), **splits}, "as published"
    if len(spans) < FEW and not spool.cut:  # more would turn them into many
        parts = _by_position(spool, spans, len(missing))
        rule = f"by position: the last 5 % each for {told}"
        return {**splits, **dict(zip(("train", *missing), parts, strict=True))}, rule
    kinds = np.array([held_out(place) or "train" for place in places.tolist()])
    kinds[np.isin(kinds, missing, invert=True)] = "train"
    for split in ("train", *missing):
        splits[split] = spans[kinds == split]
    return splits, f"by the sha256 of a document: {HELD_OUT:.0%} each are held out for {told}"


def _by_position(spool: Spool, spans: Spans, missing: int) -> list[Spans]:
    """All but the last parts of 5 %, then these: cut between documents where one ends near by."""
    ends = np.cumsum(spans[:, 1] - spans[:, 0])
    share = int(ends[-1]) // 20
    parts: list[Spans] = []
    rest, before = spans, 0
    for left in range(missing, 0, -1):
        cut = int(ends[-1]) - left * share
        nearest = int(ends[np.abs(ends - cut).argmin()])
        if abs(nearest - cut) <= share // 2:
            cut = nearest
        part, rest = _cut(spool, rest, cut - before)
        parts, before = [*parts, part], cut
    return [*parts, rest]


def _cut(spool: Spool, spans: Spans, size: int) -> tuple[Spans, Spans]:
    """The first `size` bytes, to the beginning of a character, and the rest."""
    if not len(spans):
        return spans, spans
    ends = np.cumsum(spans[:, 1] - spans[:, 0])
    index = int(np.searchsorted(ends, size))  # the first whose end is there or later
    start, end = spans[index].tolist()
    middle = spool.boundary(end - (int(ends[index]) - size))
    head = [[start, middle]] if start < middle else []
    tail = [[middle, end]] if middle < end else []
    left = np.array([*spans[:index].tolist(), *head], dtype=np.int64)
    right = np.array([*tail, *spans[index + 1 :].tolist()], dtype=np.int64)
    return left.reshape(-1, 2), right.reshape(-1, 2)


def within_reach(config: DataConfig) -> tuple[Source, Tokenizer | None]:
    """The text, not read yet, and the tokenizer if it does not depend on it; UserError where one of
    them cannot be had.
    """
    return _source(config), _known_tokenizer(config)


def _known_tokenizer(config: DataConfig) -> Tokenizer | None:
    """That which does not depend on the text."""
    if config.tokenizer in ("chars", "bpe"):
        return None
    return tokenizers.load({"name": config.tokenizer})


def _made_tokenizer(
    config: DataConfig, spool: Spool, splits: dict[str, Spans], closed: bool, progress: Progress
) -> Tokenizer:
    """That which is made of the text."""
    if config.tokenizer == "chars":
        # Of all splits: a character that was never seen has no token.
        everything = itertools.chain.from_iterable(map(spool.text, splits.values()))
        texts = (text for text, _ in everything)
        return tokenizers.Chars.of(itertools.chain([DOCUMENT_END] * closed, texts))
    assert config.vocab_size is not None
    progress.stage("learning", config.vocab_size, "tokens")
    sample = _first(LEARN_FROM, (text for text, _ in spool.text(splits["train"])))
    return tokenizers.Learned.of(sample, config.vocab_size, progress.at)


def _first(size: int, texts: Iterable[bytes]) -> Iterator[bytes]:
    for text in texts:
        yield text
        size -= len(text)
        if size <= 0:
            return


class _Writer:
    """Turns documents into files of tokens."""

    def __init__(
        self, folder: Path, spool: Spool, tokenizer: Tokenizer, closed: bool, progress: Progress
    ) -> None:
        self._folder, self._spool, self._tokenizer = folder, spool, tokenizer
        self._closed, self._progress = closed, progress
        self._done = self._tokens = 0
        self.dtype = tokenizers.smallest_dtype(tokenizer.vocabulary)

    def write(self, split: str, spans: Spans, room: int | None) -> dict[str, Any]:
        """At most `room` tokens; where that ends, the document ends."""
        digest, tokens, size, documents = hashlib.sha256(), 0, 0, 0
        with (self._folder / f"{split}.bin").open("wb") as file:
            for text, ids, last in self._encoded(self._spool.text(spans)):
                kept = ids[: None if room is None else room - tokens].astype(self.dtype)
                file.write(kept.data)
                digest.update(kept.data)
                tokens += len(kept)
                size += int(self._tokenizer.token_bytes[kept].sum())
                self._done += len(text)
                self._tokens += len(kept)
                self._progress.at(self._done, f"{self._tokens / 1e6:,.1f} M tokens")
                full = tokens == room
                documents += last or full
                if full:
                    break
            file.flush()
            os.fsync(file.fileno())
        counts = {"documents": documents, "tokens": tokens, "bytes": size}
        return {**counts, "sha256": digest.hexdigest()}

    def _encoded(
        self, pieces: Iterator[tuple[bytes, bool]]
    ) -> Iterator[tuple[bytes, np.ndarray, bool]]:
        """Pieces with their tokens, in order; several at once, for tiktoken can do that."""
        with ThreadPoolExecutor(_THREADS) as pool:
            at_once = 1  # a split may be full soon
            while some := list(itertools.islice(pieces, at_once)):
                for (text, last), ids in zip(some, pool.map(self._encode, some), strict=True):
                    yield text, ids, last
                at_once = min(2 * at_once, 64)

    def _encode(self, piece: tuple[bytes, bool]) -> np.ndarray:
        text, last = piece
        ids = self._tokenizer.encode(text)
        if last and self._closed:
            assert self._tokenizer.end is not None
            ids = np.append(ids, np.array(self._tokenizer.end, dtype=ids.dtype))
        return ids


def _source(config: DataConfig) -> Source:
    if config.source == "hub":
        return hub.documents(config)
    return [("", sources.read(sources.files(config), config.field))]


def _place(config: DataConfig) -> str:
    """What the user wrote for where the text is."""
    key = next((key for key in ("path", "files", "name") if getattr(config, key)), "source")
    return f"data.{key}: '{getattr(config, key)}'"


def _told(config: DataConfig) -> dict[str, Any]:
    """What a person is told of where it came from."""
    keys = ("source", "path", "name", "files", "subset", "revision", "split", "field")
    told = {key: getattr(config, key) for key in keys}
    return {key: value for key, value in told.items() if value is not None}
