"""The documents of a corpus on their way: written down as they come, then taken in another
order."""

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

# Documents are told by where their text begins and ends: rows of two columns.
Spans = np.ndarray


class Spool:
    """The text of all documents in one file. In memory: where each ends, and its hash."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ends, self._digests, self._kinds = array("Q", [0]), bytearray(), bytearray()
        self.size = 0

    def fill(self, source: Source, room: "Room", progress: Progress) -> None:
        with self._path.open("wb") as file:
            for split, documents in source:
                for pieces in documents:
                    digest = hashlib.sha256()
                    for piece in pieces:
                        file.write(piece)
                        digest.update(piece)
                        room.take(piece, split)
                        progress.at(file.tell())
                    if file.tell() > self.size:  # an empty one is none
                        self.size = file.tell()
                        self._ends.append(self.size)
                        self._digests += digest.digest()[:16]
                        self._kinds.append(_KINDS.index(split))
                    if room.is_full(split):
                        break

    def arrange(self) -> dict[str, Spans]:
        """The documents of each published split ("" where there was none): each once, in the order
        of their hashes."""
        ends = np.frombuffer(self._ends, dtype=np.uint64).astype(np.int64)
        spans = np.stack([ends[:-1], ends[1:]], axis=1)
        digests = np.frombuffer(bytes(self._digests), dtype=">u8").reshape(-1, 2)
        kinds = np.frombuffer(bytes(self._kinds), dtype=np.uint8)
        order = np.lexsort((kinds, digests[:, 1], digests[:, 0]))
        again = (digests[order[1:]] == digests[order[:-1]]).all(axis=1)
        order = np.delete(order, 1 + np.flatnonzero(again))
        return {kind: spans[order[kinds[order] == i]] for i, kind in enumerate(_KINDS)}

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
    """How much text `data.max_tokens` asks for. Tokens that are not known yet can't be counted, so
    enough is read for the longest; what is too much is left out in the end."""

    def __init__(self, config: DataConfig) -> None:
        held_out = {"val": config.val_tokens, "test": config.test_tokens}
        self._left: dict[str, float] = {}
        if config.max_tokens is not None:
            most = config.max_tokens + sum(held_out.values())
            self._left = {**held_out, "train": most, "": most}
        self._tokenizer = config.tokenizer

    def take(self, piece: bytes, split: str) -> None:
        if not self._left:
            return
        size: float = len(piece)
        if self._tokenizer == "chars":
            size = len(piece.decode("utf-8", "ignore"))
        elif self._tokenizer != "bytes":
            size /= _SUBWORD_BYTES
        self._left[split] -= size

    def is_full(self, split: str) -> bool:
        return bool(self._left) and self._left[split] <= 0
