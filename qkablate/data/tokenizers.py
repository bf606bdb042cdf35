"""From text to token ids."""

from collections.abc import Iterable
from typing import Protocol

import numpy as np


class Tokenizer(Protocol):
    """Turns a document into ids; `describe` holds all that decides which."""

    vocabulary: int
    token_bytes: np.ndarray  # how many bytes of text each id stands for

    def encode(self, text: bytes) -> np.ndarray: ...

    def describe(self) -> dict[str, object]: ...


class Bytes:
    """One token a byte."""

    vocabulary = 256
    token_bytes = np.ones(256, dtype=np.int64)

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, dtype=np.uint8)

    def describe(self) -> dict[str, object]:
        return {"name": "bytes"}


class Chars:
    """One token a character of the corpus, in the order of their code points."""

    def __init__(self, documents: Iterable[bytes]) -> None:
        self.characters = "".join(sorted({c for text in documents for c in text.decode("utf-8")}))
        self.vocabulary = len(self.characters)
        self.token_bytes = np.array([len(c.encode()) for c in self.characters])
        self._id = np.zeros(ord(self.characters[-1]) + 1 if self.characters else 1, dtype=np.uint32)
        self._id[[ord(c) for c in self.characters]] = np.arange(self.vocabulary, dtype=np.uint32)

    def encode(self, text: bytes) -> np.ndarray:
        points = np.frombuffer(text.decode("utf-8").encode("utf-32-le"), dtype=np.uint32)
        return self._id[points]

    def describe(self) -> dict[str, object]:
        return {"name": "chars", "characters": self.characters}


def make(name: str, documents: list[bytes]) -> Tokenizer:
    return Chars(documents) if name == "chars" else Bytes()


def smallest_dtype(vocabulary: int) -> np.dtype:
    """The narrowest unsigned type that holds every id."""
    fitting = (t for t in (np.uint8, np.uint16, np.uint32) if vocabulary - 1 <= np.iinfo(t).max)
    return np.dtype(next(fitting))
