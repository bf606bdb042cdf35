"""Documents → splits → tokens on disk.

A published split is kept. Otherwise the split of a document depends on its hash alone; few
documents are split by position, as a single one is.
"""

import hashlib
import itertools
import os
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from qkablate.config import DataConfig
from qkablate.config.data import HELD_OUT_SPLITS, PAIR_SOURCES, SPLITS
from qkablate.data import bpe, hub, sources, tokenizers
from qkablate.data.document_store import (
    HELD_OUT_FRACTION,
    STDLIB_HELD_OUT_FRACTION,
    DocumentStore,
    Spans,
    TokenBudget,
    held_out_split,
)
from qkablate.data.pairs.sources import SPLIT_RULES, open_pairs
from qkablate.data.progress import Progress
from qkablate.data.sources import Source, describe_source
from qkablate.data.tokenizers import Tokenizer
from qkablate.disk import write_synced
from qkablate.errors import UserError

DOCUMENT_END = b"\0"  # the byte of the token that ends each of several documents
MIN_HASHED_DOCUMENTS = 300  # fewer are not sure to fill splits of 3 %
MIN_HELD_OUT_DOCUMENTS = 100  # of a full split, where there are as many
_MIN_EXCERPT_BYTES = 1024
_MIN_SUBWORD_BYTES = 3  # lower bound of the mean bytes of a subword token in natural text
BPE_SAMPLE_BYTES = 2**25  # of the training split
_THREADS = 4


def prepare(config: DataConfig, folder: Path, progress: Progress) -> dict[str, Any]:
    """Write <split>.bin into `folder`; return their entries of the manifest and the tokenizer."""
    source, known = open_source(config)
    store = DocumentStore(folder / "documents")
    progress.stage("reading")
    store.fill(source, TokenBudget(config), progress)
    if not store.size:
        raise UserError(f"{describe_source(config)} is empty")
    splits, rule = _divide(store, config)
    is_pairs = config.source in PAIR_SOURCES
    closed = is_pairs or any(len(spans) > 1 for spans in splits.values())
    tokenizer = known or _make_tokenizer(config, store, splits, closed, progress)
    progress.stage("writing", store.size)
    writer = _Writer(
        *(folder, store, tokenizer, closed, progress, is_pairs, config.max_length),
        is_distinct=config.tokenizer == "words",
    )
    limits = {"train": config.max_tokens, "val": config.val_tokens, "test": config.test_tokens}
    written = {split: writer.write(split, splits[split], limits[split]) for split in SPLITS}
    for split in SPLITS:
        if written[split]["tokens"] < 2:
            hint = "; raise data.max_tokens" if store.truncated else ""
            hint = f"; raise data.max_length={config.max_length}" if writer.left_out else hint
            raise UserError(
                f"{describe_source(config)} is too little text: nothing is left for {split}{hint}"
            )
    os.remove(folder / "documents")
    source_keys = ["source", "path", "name", "files", "subset", "revision", "split", "field"]
    source_keys += ["source_field", "target_field"]
    if writer.left_out:
        rule += f"; {writer.left_out:,} pairs of more than {config.max_length} tokens are left out"
    if repeats := ", ".join(f"{count:,} of {split}" for split, count in writer.repeats.items()):
        rule += f"; repeats of a sentence, with rare words as <unknown>, are left out: {repeats}"
    return {
        "sources": {
            key: value for key in source_keys if (value := getattr(config, key)) is not None
        },
        "split": rule,
        "duplicates": store.duplicates,
        "vocabulary": tokenizer.vocabulary,
        "dtype": writer.dtype.name,
        "tokenizer": tokenizer.describe(),
        "ends_sha256": {split: written[split].pop("ends_sha256") for split in HELD_OUT_SPLITS},
        **{key: {split: written[split][key] for split in SPLITS} for key in written["train"]},
    }


def _divide(store: DocumentStore, config: DataConfig) -> tuple[dict[str, Spans], str]:
    """Return the documents of each split, and the rule in words."""
    arranged = store.arrange()
    splits = {split: arranged[split][0] for split in HELD_OUT_SPLITS if len(arranged[split][0])}
    missing = [split for split in HELD_OUT_SPLITS if split not in splits]
    spans, hashes = arranged["train" if len(arranged["train"][0]) else ""]
    if not missing or not len(spans):
        rule = SPLIT_RULES.get(config.source, "as published")
        return {**dict.fromkeys(SPLITS, spans), **splits}, rule
    names = " and ".join(missing)
    if config.source in PAIR_SOURCES:
        raise UserError(f"{describe_source(config)}: no pair is left for {names}")
    if len(spans) < MIN_HASHED_DOCUMENTS and not store.truncated:  # else their number is not known
        parts = _by_position(store, spans, len(missing))
        rule = f"by position: the last 5 % each for {names}"
        return {**splits, **dict(zip(("train", *missing), parts, strict=True))}, rule
    held_out = STDLIB_HELD_OUT_FRACTION if config.source == "stdlib" else HELD_OUT_FRACTION
    kinds = np.array([held_out_split(value, held_out) or "train" for value in hashes.tolist()])
    splits["train"] = spans[~np.isin(kinds, missing)]
    token_bytes = 1 if config.tokenizer in ("bytes", "chars") else _MIN_SUBWORD_BYTES
    tokens = {"val": config.val_tokens, "test": config.test_tokens}
    for split in missing:
        own = kinds == split
        size = token_bytes * tokens[split]
        splits[split] = _cut_excerpts(store, spans[own], hashes[own], size)
    return splits, (
        f"by the sha256 of a document: {held_out:.0%} each are held out for {names}; an excerpt"
        f" of each is used, 1/{MIN_HELD_OUT_DOCUMENTS} of the split or what it takes to fill it"
    )


def _cut_excerpts(store: DocumentStore, spans: Spans, hashes: np.ndarray, size: int) -> Spans:
    """Cut long documents of a split of `size` bytes, so that the split is not a few of them.

    The start of an excerpt depends on the hash of its document; the rest is in no split.
    """
    limit = max(
        size // MIN_HELD_OUT_DOCUMENTS,
        _MIN_EXCERPT_BYTES,
        _filling_limit(spans[:, 1] - spans[:, 0], size),
    )
    excerpts = []
    for (start, end), value in zip(spans.tolist(), hashes.tolist(), strict=True):
        excerpt = start, end
        if (excess := end - start - limit) > 0:
            first = store.character_start(start + int(value * 2**20 % 1 * excess))
            excerpt = first, store.character_start(first + limit)
        excerpts.append(excerpt)
    return np.array(excerpts, dtype=np.int64).reshape(-1, 2)


def _filling_limit(sizes: np.ndarray, total: int) -> int:
    """Return the smallest limit on each size with which their sum still reaches the total."""
    sizes = np.sort(sizes)
    below = np.cumsum(sizes) - sizes
    larger = len(sizes) - np.arange(len(sizes))  # the number of those that are no smaller
    enough = np.flatnonzero(below + sizes * larger >= total)
    if not len(enough):
        return int(sizes.max(initial=0))
    first = enough[0]
    return -int(-(total - below[first]) // larger[first])


def _by_position(store: DocumentStore, spans: Spans, missing: int) -> list[Spans]:
    """Split off the last `missing` parts of 5 %, between documents if one ends close by."""
    ends = np.cumsum(spans[:, 1] - spans[:, 0])
    share = int(ends[-1]) // 20
    parts: list[Spans] = []
    rest, before = spans, 0
    for left in range(missing, 0, -1):
        cut = int(ends[-1]) - left * share
        nearest = int(ends[np.abs(ends - cut).argmin()])
        if abs(nearest - cut) <= share // 2 and nearest > before:  # no part is empty
            cut = nearest
        part, rest = _cut(store, rest, cut - before)
        parts, before = [*parts, part], cut
    return [*parts, rest]


def _cut(store: DocumentStore, spans: Spans, size: int) -> tuple[Spans, Spans]:
    """Return the first `size` bytes, up to a whole character, and the rest."""
    if not len(spans):
        return spans, spans
    ends = np.cumsum(spans[:, 1] - spans[:, 0])
    index = int(np.searchsorted(ends, size))  # the first that ends there or later
    start, end = spans[index].tolist()
    middle = store.character_start(end - (int(ends[index]) - size))
    left = np.vstack([spans[:index], [[start, middle]]])
    right = np.vstack([[[middle, end]], spans[index + 1 :]])
    return left[left[:, 0] < left[:, 1]], right[right[:, 0] < right[:, 1]]


def open_source(config: DataConfig) -> tuple[Source, Tokenizer | None]:
    """Return the text, not read yet, and the tokenizer unless it is made from the text.

    UserError where one of them is not available.
    """
    if config.source in PAIR_SOURCES:
        source = open_pairs(config)
    elif config.source == "hub":
        source = hub.read_documents(config)
    else:
        source = [("", sources.read_documents(sources.find_files(config), config.field))]
    if config.tokenizer in ("chars", "bpe", "words"):
        return source, None
    return source, tokenizers.load_tokenizer({"name": config.tokenizer})


def _make_tokenizer(
    config: DataConfig,
    store: DocumentStore,
    splits: dict[str, Spans],
    closed: bool,
    progress: Progress,
) -> Tokenizer:
    """Return the tokenizer that is made from the text."""
    if config.tokenizer == "chars":
        # Of all splits: a character that does not occur has no token.
        pieces = itertools.chain.from_iterable(map(store.text, splits.values()))
        texts = (text for text, _ in pieces)
        return tokenizers.CharTokenizer.of(itertools.chain([DOCUMENT_END] * closed, texts))
    assert config.vocab_size is not None
    progress.stage("learning", config.vocab_size, "tokens")
    texts = (text for text, _ in store.text(splits["train"]))
    if config.source in PAIR_SOURCES:  # no token has a part of both sentences
        texts = (text.replace(DOCUMENT_END, b"\n") for text in texts)
    if config.tokenizer == "words":
        return tokenizers.WordTokenizer.of(texts, config.vocab_size)
    sample = _first(BPE_SAMPLE_BYTES, texts)
    merged = bpe.learn_tokens(map(bytes.decode, sample), config.vocab_size - 1, progress.update)
    return tokenizers.BpeTokenizer(merged)


def _first(size: int, texts: Iterable[bytes]) -> Iterator[bytes]:
    for text in texts:
        yield text
        size -= len(text)
        if size <= 0:
            return


@dataclass
class _Writer:
    """Files of tokens, made from documents."""

    folder: Path
    store: DocumentStore
    tokenizer: Tokenizer
    closed: bool  # a token ends each document
    progress: Progress
    is_pairs: bool = False  # documents are two sentences, with the byte 0 between them
    max_length: int | None = None  # of a sentence with its end
    left_out: int = 0  # longer pairs
    is_distinct: bool = False  # no source, as tokens, is written twice, in any of the splits
    repeats: Counter[str] = field(default_factory=Counter)  # left out, by split
    sources: set[bytes] = field(default_factory=set)  # as tokens, where they are distinct
    bytes_read: int = 0
    tokens_written: int = 0

    @property
    def dtype(self) -> np.dtype:
        return tokenizers.smallest_dtype(self.tokenizer.vocabulary)

    def write(self, split: str, spans: Spans, limit: int | None) -> dict[str, Any]:
        """Write at most `limit` tokens of a split; return its entries of the manifest."""
        digest, tokens, size, ends = hashlib.sha256(), 0, 0, array("Q")
        is_left_out = False  # the pair that this piece is of
        with (self.folder / f"{split}.bin").open("wb") as file:
            for text, ids, last in self._encode_pieces(self.store.text(spans)):
                is_left_out = is_left_out or self._is_longer(ids, last)
                if is_left_out:
                    self.left_out += last
                    is_left_out = not last
                    continue
                if self.is_distinct and self._is_repeat(ids):
                    self.repeats[split] += 1
                    continue
                kept = ids[: None if limit is None else limit - tokens].astype(self.dtype)
                file.write(kept.data)
                digest.update(kept.data)
                tokens += len(kept)
                size += int(self.tokenizer.token_bytes[kept].sum())
                self.bytes_read += len(text)
                self.tokens_written += len(kept)
                self.progress.update(self.bytes_read, f"{self.tokens_written / 1e6:,.1f} M tokens")
                full = tokens == limit
                if last or full:
                    ends.append(tokens)
                if full:
                    break
            file.flush()
            os.fsync(file.fileno())
        written: dict[str, Any] = {"documents": len(ends), "tokens": tokens, "bytes": size}
        written["sha256"] = digest.hexdigest()
        if split in HELD_OUT_SPLITS:
            write_synced(self.folder / f"{split}.ends.bin", ends.tobytes())
            written["ends_sha256"] = hashlib.sha256(ends).hexdigest()
        return written

    def _encode_pieces(
        self, pieces: Iterator[tuple[bytes, bool]]
    ) -> Iterator[tuple[bytes, np.ndarray, bool]]:
        """Yield pieces with their tokens, in order; tiktoken encodes several in parallel."""
        with ThreadPoolExecutor(_THREADS) as pool:
            at_once = 1  # the split may be full soon
            while batch := list(itertools.islice(pieces, at_once)):
                yield from pool.map(self._encode, batch)
                at_once = min(2 * at_once, 64)

    def _encode(self, piece: tuple[bytes, bool]) -> tuple[bytes, np.ndarray, bool]:
        text, last = piece
        source, *targets = text.split(DOCUMENT_END) if self.is_pairs else [text]
        ids = self.tokenizer.encode(source)
        for target in targets:
            ids = np.concatenate([self._close(ids), self.tokenizer.encode(target)])
        return text, self._close(ids) if last and self.closed else ids, last

    def _is_longer(self, ids: np.ndarray, is_whole: bool) -> bool:
        """Return whether a source, or a target with its end, has too many tokens."""
        if self.max_length is None or not is_whole:  # what comes in pieces is far longer
            return self.max_length is not None
        source, target = np.diff(np.flatnonzero(ids == self.tokenizer.end), prepend=-1)
        return bool(source - 1 > self.max_length or target > self.max_length)

    def _is_repeat(self, ids: np.ndarray) -> bool:
        """Return whether a pair with this source, as tokens, was here before."""
        source = ids[: np.argmax(ids == self.tokenizer.end)].tobytes()
        is_repeat = source in self.sources
        self.sources.add(source)
        return is_repeat

    def _close(self, ids: np.ndarray) -> np.ndarray:
        """Return the tokens of a document, or a sentence, with its end."""
        assert self.tokenizer.end is not None
        return np.append(ids, np.array(self.tokenizer.end, dtype=ids.dtype))
