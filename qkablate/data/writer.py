"""Documents of a split → its files of tokens."""

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

from qkablate.config.data import HELD_OUT_SPLITS
from qkablate.data import tokenizers
from qkablate.data.document_store import DocumentStore, Spans
from qkablate.data.progress import Progress
from qkablate.data.tokenizers import Tokenizer
from qkablate.disk import write_synced

DOCUMENT_END = b"\0"  # the byte of the token that ends each of several documents
THREADS = 4


@dataclass
class SplitWriter:
    """Files of tokens, made from documents."""

    folder: Path
    store: DocumentStore
    tokenizer: Tokenizer
    closed: bool  # a token ends each document
    progress: Progress
    is_pairs: bool = False  # documents are two sentences, with the byte 0 between them
    has_files: bool = False  # each part of the source is a file with several documents
    is_distinct: bool = False  # no source, as tokens, is written twice, in any of the splits
    max_length: int | None = None  # of a sentence with its end
    left_out: int = 0  # longer pairs
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
        read, chosen = 0, array("Q")  # documents: the number of those read, and the written ones
        is_left_out = False  # the pair that this piece is of
        with (self.folder / f"{split}.bin").open("wb") as file:
            for text, ids, last in self._encode_pieces(self.store.text(spans)):
                document, read = read, read + last
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
                    chosen.append(document)
                if full:
                    break
            file.flush()
            os.fsync(file.fileno())
        written: dict[str, Any] = {"documents": len(ends), "tokens": tokens, "bytes": size}
        written["sha256"] = digest.hexdigest()
        if split in HELD_OUT_SPLITS:
            written["ends_sha256"] = self._write_array(f"{split}.ends.bin", ends)
            if self.has_files:
                files = _number(self.store.find_parts(spans)[chosen].tolist())
                written["files_sha256"] = self._write_array(f"{split}.files.bin", files)
        return written

    def _write_array(self, name: str, values: "array[int]") -> str:
        """Write numbers; return their checksum."""
        write_synced(self.folder / name, values.tobytes())
        return hashlib.sha256(values).hexdigest()

    def _encode_pieces(
        self, pieces: Iterator[tuple[bytes, bool]]
    ) -> Iterator[tuple[bytes, np.ndarray, bool]]:
        """Yield pieces with their tokens, in order; tiktoken encodes several in parallel."""
        with ThreadPoolExecutor(THREADS) as pool:
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


def _number(values: Iterable[int]) -> "array[int]":
    """Return values as numbers from 0, in the order of their appearance."""
    numbers: dict[int, int] = {}
    return array("Q", [numbers.setdefault(value, len(numbers)) for value in values])
