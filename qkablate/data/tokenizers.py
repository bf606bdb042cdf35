"""Conversion of text to token ids and back.

One more token, which stands for the byte 0, ends each document of a corpus, so that all tokenizers
count the same bytes of a corpus.
"""

import base64
import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Self

import numpy as np

from qkablate.data.network import Unreachable, with_token_files
from qkablate.data.text import bpe
from qkablate.errors import UserError

# Half a million consecutive spaces overflow the stack of tiktoken.
CHUNK_BYTES = 2**17
UNKNOWN_WORD = "<unknown>"


class Tokenizer(ABC):
    """Tokenizer that can be restored from its description by `load_tokenizer`."""

    vocabulary: int
    token_bytes: np.ndarray  # number of bytes of text of each id
    end: int | None  # id that ends a document; None if there is none

    @abstractmethod
    def encode(self, text: bytes) -> np.ndarray: ...

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> bytes: ...

    def unknown(self, text: str) -> str:
        """Return the characters without a token, each once."""
        return ""

    @abstractmethod
    def describe(self) -> dict[str, object]: ...

    @classmethod
    @abstractmethod
    def load(cls, description: dict[str, Any]) -> Self:
        """Restore the tokenizer from an untrusted description."""


class ByteTokenizer(Tokenizer):
    """One token per byte."""

    vocabulary = 256
    token_bytes = np.ones(256, dtype=np.int64)
    end = 0

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, ids: Iterable[int]) -> bytes:
        return bytes(ids)

    def describe(self) -> dict[str, object]:
        return {"name": "bytes"}

    @classmethod
    def load(cls, description: dict[str, Any]) -> Self:
        return cls()


class CharTokenizer(Tokenizer):
    """One token per character."""

    def __init__(self, characters: str) -> None:
        self.characters = characters
        self.vocabulary = len(self.characters)
        self.token_bytes = np.array([len(c.encode()) for c in self.characters])
        self.end = self.characters.find("\0") if "\0" in characters else None
        points = [ord(c) for c in self.characters]
        self._id = np.zeros(max(points, default=0) + 1, dtype=np.uint32)
        self._known = np.zeros(len(self._id), dtype=bool)
        self._known[points] = True
        self._id[points] = np.arange(self.vocabulary, dtype=np.uint32)

    @classmethod
    def of(cls, texts: Iterable[bytes]) -> Self:
        """Return the tokenizer of all characters of a corpus, sorted by code point."""
        characters: set[str] = set()
        for text in texts:
            characters.update(text.decode("utf-8"))
        return cls("".join(sorted(characters)))

    def encode(self, text: bytes) -> np.ndarray:
        points = np.frombuffer(text.decode("utf-8").encode("utf-32-le"), dtype=np.uint32)
        if points.max(initial=0) >= len(self._known) or not self._known[points].all():
            unknown = ", ".join(map(repr, self.unknown(text.decode("utf-8"))[:10]))
            raise UserError(f"data.tokenizer: these chars have no token for {unknown}")
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
            raise ValueError("its characters are not a text of distinct characters")
        return cls(characters)


class WordTokenizer(Tokenizer):
    """One token per word; words are separated by spaces, and rare ones are one token."""

    end = 0

    def __init__(self, words: list[str]) -> None:
        self.words = ["\0", UNKNOWN_WORD, *words]
        self.vocabulary = len(self.words)
        self.token_bytes = np.array([len(word.encode()) for word in self.words])
        self._id = {word: i for i, word in enumerate(self.words)}

    @classmethod
    def of(cls, texts: Iterable[bytes], vocabulary: int) -> Self:
        """Return the tokenizer of the most frequent words of a corpus."""
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(text.decode().split())
        del counts[UNKNOWN_WORD]
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        return cls(ranked[: vocabulary - 2])

    def encode(self, text: bytes) -> np.ndarray:
        ids = [self._id.get(word, 1) for word in text.decode().split()]
        return np.array(ids, dtype=np.uint32)

    def decode(self, ids: Iterable[int]) -> bytes:
        return " ".join(self.words[i] for i in ids).encode()

    def describe(self) -> dict[str, object]:
        return {"name": "words", "words": self.words[2:]}

    @classmethod
    def load(cls, description: dict[str, Any]) -> Self:
        words = description.get("words")
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise ValueError("its words are not a list of texts")
        if len({"\0", UNKNOWN_WORD, *words}) != len(words) + 2:
            raise ValueError("its words are not distinct")
        return cls(words)


class SubwordTokenizer(Tokenizer):
    """Byte-pair encoding of any text, by tiktoken."""

    def __init__(self, encoding: Any) -> None:
        self.encoding = encoding
        self.vocabulary = encoding.n_vocab
        self.end = encoding.eot_token
        self.token_texts = [self._token_text(token) for token in range(self.vocabulary)]
        self.token_bytes = np.array([len(token) for token in self.token_texts])

    def encode(self, text: bytes) -> np.ndarray:
        parts = (part.decode("utf-8") for part in split_chunks(text))
        ids = [self.encoding.encode_to_numpy(part, disallowed_special=()) for part in parts]
        return np.concatenate([np.empty(0, np.uint32), *ids])

    def decode(self, ids: Iterable[int]) -> bytes:
        return b"".join(self.token_texts[i] for i in ids)

    def _token_text(self, token: int) -> bytes:
        if token == self.end:
            return b"\0"
        try:
            return bytes(self.encoding.decode_single_token_bytes(token))
        except KeyError:  # OpenAI's encodings have gaps
            return b""

    def describe(self) -> dict[str, object]:
        """Return the name of OpenAI's encoding and the hash of its tokens."""
        lines = b"\n".join(map(base64.b64encode, self.token_texts))
        return {"name": self.encoding.name, "sha256": hashlib.sha256(lines).hexdigest()}

    @classmethod
    def load(cls, description: dict[str, Any]) -> Self:
        import tiktoken

        name = description["name"]
        try:
            tokenizer = cls(with_token_files(lambda: tiktoken.get_encoding(name)))
        except Unreachable as error:
            raise UserError(
                f"data.tokenizer: the files of '{name}' are not cached and cannot be downloaded"
                f" ({error}); set TIKTOKEN_CACHE_DIR to a folder that has them,"
                " or use data.tokenizer=bpe or bytes"
            ) from None
        sha256 = tokenizer.describe()["sha256"]
        if description.get("sha256", sha256) != sha256:
            raise ValueError(f"it was made with another version of '{name}' than is installed")
        return tokenizer


class BpeTokenizer(SubwordTokenizer):
    """Byte-pair encoding learned from the training split."""

    def __init__(self, tokens: list[bytes]) -> None:
        import tiktoken

        self.tokens = tokens
        encoding = tiktoken.Encoding(
            "bpe",
            pat_str=bpe.PATTERN,
            mergeable_ranks={token: rank for rank, token in enumerate(tokens)},
            special_tokens={"<|endoftext|>": len(tokens)},
        )
        super().__init__(encoding)

    def describe(self) -> dict[str, object]:
        merged = [base64.b64encode(token).decode() for token in self.tokens[256:]]
        return {"name": "bpe", "merged": merged}

    @classmethod
    def load(cls, description: dict[str, Any]) -> Self:
        merged = description.get("merged")
        if not isinstance(merged, list) or len(merged) > 2**24:
            raise ValueError("it has no list of merged tokens")
        try:
            decoded = [base64.b64decode(token, validate=True) for token in merged]
        except (TypeError, ValueError):
            raise ValueError("its merged tokens are not base64") from None
        tokens = [bytes([byte]) for byte in range(256)] + decoded
        if len({*tokens}) != len(tokens) or not all(decoded):
            raise ValueError("its merged tokens are empty or not distinct")
        return cls(tokens)


def split_chunks(text: bytes, size: int = CHUNK_BYTES) -> Iterator[bytes]:
    """Yield pieces of about `size` bytes: whole lines, or whole characters at least."""
    start = 0
    while len(text) - start > size:
        end = text.rfind(b"\n", start + size // 2, start + size) + 1 or start + size
        while text[end] & 0xC0 == 0x80:  # inside a character
            end -= 1
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


_CLASSES: dict[str, type[Tokenizer]]
_CLASSES = {"bytes": ByteTokenizer, "chars": CharTokenizer, "words": WordTokenizer}
_CLASSES["bpe"] = BpeTokenizer
_CLASSES |= dict.fromkeys(("gpt2", "cl100k_base", "o200k_base"), SubwordTokenizer)


def load_tokenizer(description: object) -> Tokenizer:
    """Return the tokenizer of a description; ValueError for anything else."""
    if not isinstance(description, dict) or description.get("name") not in [*_CLASSES]:
        raise ValueError(f"it does not describe one of {', '.join(_CLASSES)}")
    return _CLASSES[description["name"]].load(description)


def smallest_dtype(vocabulary: int) -> np.dtype:
    """Return the smallest unsigned type that holds every id."""
    return np.min_scalar_type(vocabulary - 1)
