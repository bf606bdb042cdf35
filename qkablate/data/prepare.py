"""Documents → splits → tokens on disk.

Documents are taken in the order of their hashes, each once. Where no split was published, the
first of them make the test split, the next the validation split, the rest train: which document
stands where depends on the documents alone.
"""

import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qkablate.config import DataConfig
from qkablate.data import hub, sources, tokenizers
from qkablate.data.progress import Progress
from qkablate.data.sources import Source
from qkablate.data.spool import Room, Spans, Spool
from qkablate.data.tokenizers import Tokenizer
from qkablate.errors import UserError

SPLITS = ("train", "val", "test")
DOCUMENT_END = b"\0"  # what the token stands for that closes a document of several
LEARN_FROM = 2**25  # bytes of training text that a bpe is learned from
_THREADS = 4


def prepare(config: DataConfig, folder: Path, progress: Progress) -> dict[str, Any]:
    """Write <split>.bin into `folder`; what the manifest says of them, the tokenizer included."""
    source = _source(config)
    known = _known_tokenizer(config)  # before reading, which may be long
    spool = Spool(folder / "documents")
    progress.stage("reading")
    spool.fill(source, Room(config), progress)
    if not spool.size:
        key = next(key for key in ("path", "files", "name") if getattr(config, key))
        raise UserError(f"data.{key}: '{getattr(config, key)}' is empty")
    plan = _plan(config, spool)
    tokenizer = known or _tokenizer(config, spool, plan, progress)
    progress.stage("writing", spool.size)
    writer = _Writer(folder, spool, tokenizer, plan.closed, progress)
    found, rest = {}, plan.shared
    for split, room in (("test", config.test_tokens), ("val", config.val_tokens)):
        if split in plan.published:
            found[split] = writer.write(split, plan.published[split], room)
        else:
            found[split] = writer.write(split, rest, min(room, plan.share), plan.share)
            rest = rest[found[split]["documents"] :]
    found["train"] = writer.write("train", plan.published.get("train", rest), config.max_tokens)
    os.remove(folder / "documents")
    return {
        "sources": _told(config),
        "split": plan.rule,
        "vocabulary": tokenizer.vocabulary,
        "dtype": writer.dtype.name,
        "tokenizer": tokenizer.describe(),
        **{key: {split: found[split][key] for split in SPLITS} for key in found["train"]},
    }


@dataclass(frozen=True)
class _Plan:
    """Which documents go where."""

    published: dict[str, Spans]  # splits that are as they are
    shared: Spans  # the others: test and val take from these first, if they are not published
    share: int  # bytes, and tokens, that each may take
    closed: bool  # whether every document is followed by the token that ends it
    rule: str

    @property
    def missing(self) -> list[str]:
        return [split for split in ("test", "val") if split not in self.published]

    def learned_from(self) -> Spans:
        """Training documents, but for those that test and val may yet take."""
        if "train" in self.published:
            return self.published["train"]
        first = 0
        for _ in self.missing:
            left = self.share
            while left > 0 and first < len(self.shared):
                left -= int(self.shared[first, 1] - self.shared[first, 0])
                first += 1
        return self.shared[first:]


def _plan(config: DataConfig, spool: Spool) -> _Plan:
    arranged = spool.arrange()
    published = {split: arranged[split] for split in ("val", "test") if len(arranged[split])}
    shared = arranged["train"] if len(arranged["train"]) else arranged[""]
    missing = [split for split in ("val", "test") if split not in published]
    closed = any(len(spans) > 1 for spans in (shared, *published.values()))
    share = (int((shared[:, 1] - shared[:, 0]).sum()) + closed * len(shared)) // 20
    if not missing:
        rule = "as published"
    elif len(shared) == 1:
        ((start, end),) = shared.tolist()
        cuts = [spool.boundary(end - i * share) for i in range(len(missing), 0, -1)]
        edges = [start, *cuts, end]
        parts = [np.array([edge]) for edge in itertools.pairwise(edges)]
        published |= dict(zip(("train", *missing), parts, strict=True))
        rule = f"by position in the one document: the last 5 % each for {' and '.join(missing)}"
    else:
        first = " and ".join(missing[::-1])
        rule = f"documents in the order of their sha256: the first for {first}, at most 5 % each"
    return _Plan(published, shared, share, closed, rule)


def _known_tokenizer(config: DataConfig) -> Tokenizer | None:
    """That which does not depend on the text."""
    if config.tokenizer in ("chars", "bpe"):
        return None
    return tokenizers.load({"name": config.tokenizer})


def _tokenizer(config: DataConfig, spool: Spool, plan: _Plan, progress: Progress) -> Tokenizer:
    """That which is made of the text."""
    if config.tokenizer == "chars":
        # Of all splits: a character that was never seen has no token.
        everything = (spool.text(spans) for spans in (plan.shared, *plan.published.values()))
        texts = (text for text, _ in itertools.chain.from_iterable(everything))
        return tokenizers.Chars.of(itertools.chain([DOCUMENT_END] * plan.closed, texts))
    assert config.vocab_size is not None
    progress.stage("learning", config.vocab_size, "tokens")
    sample = _first(LEARN_FROM, (text for text, _ in spool.text(plan.learned_from())))
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

    def write(
        self, split: str, spans: Spans, room: int | None, share: int | None = None
    ) -> dict[str, Any]:
        """At most `room` tokens, of at most `share` bytes; where that ends, the document ends."""
        digest, tokens, size, documents = hashlib.sha256(), 0, 0, 0
        with (self._folder / f"{split}.bin").open("wb") as file:
            for text, ids, last in self._encoded(_cut(self._spool.text(spans), share)):
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


def _cut(pieces: Iterable[tuple[bytes, bool]], share: int | None) -> Iterator[tuple[bytes, bool]]:
    """The first `share` bytes of them, to the end of a character."""
    if share is None:
        yield from pieces
        return
    for text, last in pieces:
        if len(text) >= share:
            yield text[:share].decode("utf-8", "ignore").encode(), True
            return
        yield text, last
        share -= len(text)


def _source(config: DataConfig) -> Source:
    if config.source == "hub":
        return hub.documents(config)
    return [("", sources.read(sources.files(config), config.field))]


def _told(config: DataConfig) -> dict[str, Any]:
    """What a person is told of where it came from."""
    keys = ("source", "path", "name", "files", "subset", "revision", "split", "field")
    told = {key: getattr(config, key) for key in keys}
    return {key: value for key, value in told.items() if value is not None}
