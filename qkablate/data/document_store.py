"""Documents of a corpus on disk: stored as they are read, returned in the order of their hashes."""

import hashlib
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from qkablate.config import DataConfig
from qkablate.data import tokenizers
from qkablate.data.progress import Progress
from qkablate.data.sources import Source

_KINDS = ("test", "val", "train", "")  # of equal documents the first kind is kept
_READ = 2**24
_SUBWORD_BYTES = 6  # upper bound of the mean bytes of a subword token in natural text

# Of many documents: for validation, and as much for testing. The standard library has some 600
# files: three percent of them are too few to represent it.
HELD_OUT_FRACTION, STDLIB_HELD_OUT_FRACTION = 0.03, 0.2
_MIN_TRAIN_FRACTION = 0.88  # however few documents there are

# Start and end of documents in the file: rows of two columns.
Spans = np.ndarray


def held_out_split(hash_fraction: float, held_out: float = HELD_OUT_FRACTION) -> str | None:
    """Return the split that a document of this hash is held out for, if any."""
    if hash_fraction < 2 * held_out:
        return "test" if hash_fraction < held_out else "val"
    return None


class DocumentStore:
    """Text of all documents in one file; their ends and hashes are kept in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ends, self._digests, self._kinds = array("Q", [0]), bytearray(), bytearray()
        self._part_starts = array("Q")  # of the parts of the source
        self.size = self.duplicates = 0
        self.truncated = False  # the source has more documents than were read

    def fill(self, source: Source, budget: "TokenBudget", progress: Progress) -> None:
        """Read the documents of a source until the budget is spent."""
        with self._path.open("wb") as file:
            for split, documents in source:
                self._part_starts.append(self.size)
                for pieces in documents:
                    digest, tokens = hashlib.sha256(), 0.0
                    for piece in pieces:
                        file.write(piece)
                        digest.update(piece)
                        tokens += budget.estimate_tokens(piece)
                        progress.update(file.tell())
                    if file.tell() == self.size:  # empty documents are skipped
                        continue
                    self.size = file.tell()
                    self._ends.append(self.size)
                    self._digests += digest.digest()[:16]
                    self._kinds.append(_KINDS.index(split))
                    if budget.is_spent(split, tokens, digest.digest()):
                        self.truncated |= split in ("train", "")
                        break

    def arrange(self) -> dict[str, tuple[Spans, np.ndarray]]:
        """Return the spans and hashes of each published split, "" if there are none.

        Duplicates are removed and documents sorted by their hashes, which are numbers from 0 to 1.
        """
        ends = np.frombuffer(self._ends, dtype=np.uint64).astype(np.int64)
        spans = np.stack([ends[:-1], ends[1:]], axis=1)
        digests = np.frombuffer(bytes(self._digests), dtype=">u8").reshape(-1, 2)
        kinds = np.frombuffer(bytes(self._kinds), dtype=np.uint8)
        order = np.lexsort((kinds, digests[:, 1], digests[:, 0]))
        duplicate = (digests[order[1:]] == digests[order[:-1]]).all(axis=1)
        order = np.delete(order, 1 + np.flatnonzero(duplicate))
        self.duplicates = int(duplicate.sum())
        arranged = {}
        for i, kind in enumerate(_KINDS):
            members = order[kinds[order] == i]
            arranged[kind] = spans[members], digests[members, 0] / 2.0**64
        return arranged

    def find_parts(self, spans: Spans) -> np.ndarray:
        """Return the number of the part of the source that each document was read from."""
        starts = np.frombuffer(self._part_starts, dtype=np.uint64).astype(np.int64)
        return np.searchsorted(starts, spans[:, 0], side="right")

    def text(self, spans: Spans) -> Iterator[tuple[bytes, bool]]:
        """Yield the text of documents in pieces, and whether a piece is a document's last."""
        with self._path.open("rb") as file:
            for start, end in spans.tolist():
                file.seek(start)
                remaining, rest = end - start, b""
                while remaining:
                    read = file.read(min(remaining, _READ))
                    remaining -= len(read)
                    *chunks, rest = tokenizers.split_chunks(rest + read)
                    yield from ((chunk, False) for chunk in chunks)
                yield rest, True

    def character_start(self, position: int) -> int:
        """Return the start of the character that the byte at `position` is part of."""
        with self._path.open("rb") as file:
            file.seek(position)
            while position and (file.read(1) or b"\0")[0] & 0xC0 == 0x80:
                position -= 1
                file.seek(position)
        return position


class TokenBudget:
    """Limit on the documents read of a Hub data set, by `data.max_tokens`.

    Files are read completely, so that their splits do not depend on it. The number of tokens is
    estimated from below, so enough is read, and the excess is cut off in the end.
    """

    def __init__(self, config: DataConfig) -> None:
        self._remaining: dict[str, float] = {}
        if config.max_tokens is not None and config.source == "hub":
            limit = config.max_tokens / _MIN_TRAIN_FRACTION
            self._remaining = {"val": config.val_tokens, "test": config.test_tokens}
            self._remaining |= {"train": limit, "": limit}
        self._tokenizer = config.tokenizer

    def estimate_tokens(self, piece: bytes) -> float:
        """Return a lower bound of the number of tokens."""
        if not self._remaining or self._tokenizer == "bytes":
            return len(piece)
        if self._tokenizer == "chars":
            return len(piece.decode("utf-8", "ignore"))
        return len(piece) / _SUBWORD_BYTES

    def is_spent(self, split: str, tokens: float, digest: bytes) -> bool:
        """Count a document, and return whether it is the last one to read."""
        if not self._remaining:
            return False
        if split in ("val", "test") or held_out_split(int.from_bytes(digest[:8]) / 2.0**64) is None:
            self._remaining[split] -= tokens
        return self._remaining[split] <= 0
