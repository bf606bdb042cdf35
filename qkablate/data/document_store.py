"""The documents of a corpus on their way: written down as they come, then taken in another
order.
"""

import hashlib
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from qkablate.config import DataConfig
from qkablate.data import tokenizers
from qkablate.data.progress import Progress
from qkablate.data.sources import Source

_KINDS = ("test", "val", "train", "")  # of two equal documents the earlier kind is kept
_READ = 2**24
_SUBWORD_BYTES = 6  # that a token stands for at most, on average, in any text one would train on

HELD_OUT = 0.03  # of many documents: the part that validation may take, and as much for testing
_TRAINED_ON = 0.88  # of few documents, at least, and of many without those

# Documents are told by where their text begins and ends: rows of two columns.
Spans = np.ndarray


def held_out(place: float) -> str | None:
    """The split that a document of many is held out for: its hash alone decides."""
    return "test" if place < HELD_OUT else "val" if place < 2 * HELD_OUT else None


class Spool:
    """The text of all documents in one file. In memory: where each ends, and its hash."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ends, self._digests, self._kinds = array("Q", [0]), bytearray(), bytearray()
        self.size = self.duplicates = 0
        self.cut = False  # whether there is more than was read

    def fill(self, source: Source, room: "Room", progress: Progress) -> None:
        with self._path.open("wb") as file:
            for split, documents in source:
                for pieces in documents:
                    digest, tokens = hashlib.sha256(), 0.0
                    for piece in pieces:
                        file.write(piece)
                        digest.update(piece)
                        tokens += room.tokens(piece)
                        progress.at(file.tell())
                    if file.tell() == self.size:  # an empty one is none
                        continue
                    self.size = file.tell()
                    self._ends.append(self.size)
                    self._digests += digest.digest()[:16]
                    self._kinds.append(_KINDS.index(split))
                    if room.is_full(split, tokens, digest.digest()):
                        self.cut |= split in ("train", "")
                        break

    def arrange(self) -> dict[str, tuple[Spans, np.ndarray]]:
        """The documents of each published split ("" where there was none): each once, in the order
        of their hashes; and these hashes, as numbers from 0 to 1.
        """
        ends = np.frombuffer(self._ends, dtype=np.uint64).astype(np.int64)
        spans = np.stack([ends[:-1], ends[1:]], axis=1)
        digests = np.frombuffer(bytes(self._digests), dtype=">u8").reshape(-1, 2)
        kinds = np.frombuffer(bytes(self._kinds), dtype=np.uint8)
        order = np.lexsort((kinds, digests[:, 1], digests[:, 0]))
        again = (digests[order[1:]] == digests[order[:-1]]).all(axis=1)
        order = np.delete(order, 1 + np.flatnonzero(again))
        self.duplicates = int(again.sum())
        arranged = {}
        for i, kind in enumerate(_KINDS):
            own = order[kinds[order] == i]
            arranged[kind] = spans[own], digests[own, 0] / 2.0**64
        return arranged

    def text(self, spans: Spans) -> Iterator[tuple[bytes, bool]]:
        """Their text in pieces, and whether a piece is a document's last."""
        with self._path.open("rb") as file:
            for start, end in spans.tolist():
                file.seek(start)
                left, held = end - start, b""
                while left:
                    read = file.read(min(left, _READ))
                    left -= len(read)
                    *whole, held = tokenizers.chunks(held + read)
                    yield from ((piece, False) for piece in whole)
                yield held, True

    def boundary(self, position: int) -> int:
        """Where the character begins that the byte at `position` is part of."""
        with self._path.open("rb") as file:
            file.seek(position)
            while position and (file.read(1) or b"\0")[0] & 0xC0 == 0x80:
                position -= 1
                file.seek(position)
        return position


class Room:
    """How much of a set of the Hub `data.max_tokens` asks for; of files everything is read, so that
    the splits stay what they are. Tokens that are not known yet can't be counted, so
    enough is read for the longest; what is too much is left out in the end.
    """

    def __init__(self, config: DataConfig) -> None:
        self._left: dict[str, float] = {}
        if config.max_tokens is not None and config.source == "hub":
            most = config.max_tokens / _TRAINED_ON
            self._left = {"val": config.val_tokens, "test": config.test_tokens}
            self._left |= {"train": most, "": most}
        self._tokenizer = config.tokenizer

    def tokens(self, piece: bytes) -> float:
        """As many as it may be, at least."""
        if not self._left or self._tokenizer == "bytes":
            return len(piece)
        if self._tokenizer == "chars":
            return len(piece.decode("utf-8", "ignore"))
        return len(piece) / _SUBWORD_BYTES

    def is_full(self, split: str, tokens: float, digest: bytes) -> bool:
        """Whether this document was the last one to read."""
        if not self._left:
            return False
        if split in ("val", "test") or held_out(int.from_bytes(digest[:8]) / 2.0**64) is None:
            self._left[split] -= tokens
        return self._left[split] <= 0
