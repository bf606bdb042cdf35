"""From text to token ids, and back."""

from collections.abc import Iterable
from typing import Any, Protocol, Self

import numpy as np


class Tokenizer(Protocol):
    """Turns a document into ids; `describe` holds all that decides which, and `load` reads it."""

    vocabulary: int
    token_bytes: np.ndarray  # how many bytes of text each id stands for

    def encode(self, text: bytes) -> np.ndarray: ...

    def decode(self, ids: Iterable[int]) -> bytes: ...

    def unknown(self, text: str) -> str:
        """The characters that no token stands for, each once."""
        ...

    def describe(self) -> dict[str, object]: ...


class Bytes:
    """One token a byte."""

    vocabulary = 256
    token_bytes = np.ones(256, dtype=np.int64)

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, ids: Iterable[int]) -> bytes:
        return bytes(ids)

    def unknown(self, text: str) -> str:
        return ""

    def describe(self) -> dict[str, object]:
        return {"name": "bytes"}

    @classmethod
    def load(cls, description: dict[str, Any]) -> Self:
        return cls()


class Chars:
    """One token a character."""

    def __init__(self, characters: str) -> None:
        self.characters = characters
        self.vocabulary = len(self.characters)
        self.token_bytes = np.array([len(c.encode()) for c in self.characters])
        points = [ord(c) for c in self.characters]
        self._id = np.zeros(max(points, default=0) + 1, dtype=np.uint32)
        self._id[points] = np.arange(self.vocabulary, dtype=np.uint32)

    @classmethod
    def of(cls, documents: Iterable[bytes]) -> Self:
        """The characters of a corpus, in the order of their code points."""
        return cls("".join(sorted({c for text in documents for c in text.decode("utf-8")})))

    def encode(self, text: bytes) -> np.ndarray:
        points = np.frombuffer(text.decode("utf-8").encode("utf-32-le"), dtype=np.uint32)
        return self._id[points]

    def decode(self, ids: Iterable[int]) -> bytes:
        return "".join(self.characters[i] for i in ids).encode("utf-8")

    def unknown(self, text: str) -> str:
        return "".join(c for c in dict.fromkeys(text) if c not in self.characters)

    def describe(self) -> dict[str, object]:
        return {"name": "chars", "characters": self.characters}

    @classmethod
    def load(cls, description: dict[str, Any]) -> Self:
        characters = description.get("characters")
        if not isinstance(characters, str) or len({*characters}) != len(characters):
            raise ValueError("its characters are no text in which each stands once")
        return cls(characters)


TOKENIZERS: dict[str, type[Bytes] | type[Chars]] = {"bytes": Bytes, "chars": Chars}


def make(name: str, documents: list[bytes]) -> Tokenizer:
    return Chars.of(documents) if name == "chars" else Bytes()


def load(description: object) -> Tokenizer:
    """The tokenizer that `describe` described; ValueError if it is no such thing."""
    for name, tokenizer in TOKENIZERS.items():
        if isinstance(description, dict) and description.get("name") == name:
            return tokenizer.load(description)
    raise ValueError(f"it describes none of {', '.join(TOKENIZERS)}")


def smallest_dtype(vocabulary: int) -> np.dtype:
    """The narrowest unsigned type that holds every id."""
    fitting = (t for t in (np.uint8, np.uint16, np.uint32) if vocabulary - 1 <= np.iinfo(t).max)
    return np.dtype(next(fitting))
