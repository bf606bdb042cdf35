"""From text to token ids, and back.

Documents of a corpus are closed by one more token, which stands for the byte 0: so every tokenizer
counts the same bytes of the same corpus.
"""

import base64
import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, Self

import numpy as np

from qkablate.data import bpe
from qkablate.data.network import Unreachable, fetching_tokens
from qkablate.errors import UserError

# A run of white space of half a million characters overflows the stack of tiktoken.
CHUNK = 2**17


class Tokenizer(Protocol):
    """Turns a document into ids; `describe` holds all that decides which, and `load` reads it."""

    vocabulary: int
    token_bytes: np.ndarray  # how many bytes of text each id stands for

    @property
    def end(self) -> int | None:
        """The id that closes a document."""
        ...

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
    end = 0

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
        self.end = self.characters.find("\0") if "\0" in characters else None
        points = [ord(c) for c in self.characters]
        self._id = np.zeros(max(points, default=0) + 1, dtype=np.uint32)
        self._id[points] = np.arange(self.vocabulary, dtype=np.uint32)

    @classmethod
    def of(cls, texts: Iterable[bytes]) -> Self:
        """The characters of a corpus, in the order of their code points."""
        found: set[str] = set()
        for text in texts:
            found.update(text.decode("utf-8"))
        return cls("".join(sorted(found)))

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


class Subwords:
    """Byte-pair encoding, by tiktoken; any text can be written in it."""

    def __init__(self, encoding: Any) -> None:
        self.encoding = encoding
        self.vocabulary = encoding.n_vocab
        self.end = encoding.eot_token
        self.spelled = [self._spelled(token) for token in range(self.vocabulary)]
        self.token_bytes = np.array([len(token) for token in self.spelled])

    def encode(self, text: bytes) -> np.ndarray:
        parts = [
            self.encoding.encode_to_numpy(part.decode("utf-8"), disallowed_special=())
            for part in chunks(text)
        ]
        return np.concatenate(parts) if parts else np.empty(0, np.uint32)

    def decode(self, ids: Iterable[int]) -> bytes:
        return b"".join(self.spelled[i] for i in ids)

    def _spelled(self, token: int) -> bytes:
        if token == self.end:
            return b"\0"
        try:
            return bytes(self.encoding.decode_single_token_bytes(token))
        except KeyError:  # OpenAI's have gaps
            return b""

    def unknown(self, text: str) -> str:
        return ""

    def describe(self) -> dict[str, object]:
        """Of OpenAI's, the name and what tells whether it is the same one."""
        lines = b"\n".join(map(base64.b64encode, self.spelled))
        return {"name": self.encoding.name, "sha256": hashlib.sha256(lines).hexdigest()}

    @classmethod
    def load(cls, description: dict[str, Any]) -> Self:
        import tiktoken

        name = description["name"]
        try:
            found = cls(fetching_tokens(lambda: tiktoken.get_encoding(name)))
        except Unreachable as error:
            raise UserError(
                f"data.tokenizer: the files of '{name}' are not here and cannot be fetched"
                f" ({error}); set TIKTOKEN_CACHE_DIR to a folder that has them,"
                " or take data.tokenizer=bpe or bytes"
            ) from None
        if description.get("sha256", found.describe()["sha256"]) != found.describe()["sha256"]:
            raise ValueError(f"it was made with another '{name}' than is here")
        return found


class Learned(Subwords):
    """Our own, learned from the training split."""

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

    @classmethod
    def of(cls, texts: Iterable[bytes], size: int, progress: Callable[[int], object]) -> Self:
        return cls(bpe.learn((text.decode("utf-8") for text in texts), size - 1, progress))

    def describe(self) -> dict[str, object]:
        merged = [base64.b64encode(token).decode() for token in self.tokens[256:]]
        return {"name": "bpe", "merged": merged}

    @classmethod
    def load(cls, description: dict[str, Any]) -> Self:
        """The pattern is not in the description, which may be a stranger's."""
        merged = description.get("merged")
        if not isinstance(merged, list) or len(merged) > 2**24:
            raise ValueError("it holds no list of merged tokens")
        try:
            found = [base64.b64decode(token, validate=True) for token in merged]
        except (TypeError, ValueError):
            raise ValueError("its merged tokens are not base64") from None
        tokens = [bytes([byte]) for byte in range(256)] + found
        if len({*tokens}) != len(tokens) or not all(found):
            raise ValueError("its merged tokens are not each another one")
        return cls(tokens)


def chunks(text: bytes, size: int = CHUNK) -> Iterator[bytes]:
    """Pieces of a long text of about `size` bytes: whole lines, or whole characters at least."""
    start = 0
    while len(text) - start > size:
        end = text.rfind(b"\n", start + size // 2, start + size) + 1 or start + size
        while text[end] & 0xC0 == 0x80:  # inside a character
            end -= 1
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


_CLASSES: dict[str, type[Bytes] | type[Chars] | type[Subwords]]
_CLASSES = {"bytes": Bytes, "chars": Chars, "bpe": Learned}
_CLASSES |= dict.fromkeys(("gpt2", "cl100k_base", "o200k_base"), Subwords)


def load(description: object) -> Tokenizer:
    """The tokenizer that `describe` described; ValueError if it is no such thing."""
    name = description.get("name") if isinstance(description, dict) else None
    if not isinstance(name, str) or name not in _CLASSES:
        raise ValueError(f"it describes none of {', '.join(_CLASSES)}")
    assert isinstance(description, dict)
    return _CLASSES[name].load(description)


def smallest_dtype(vocabulary: int) -> np.dtype:
    """The narrowest unsigned type that holds every id."""
    fitting = (t for t in (np.uint8, np.uint16, np.uint32) if vocabulary - 1 <= np.iinfo(t).max)
    return np.dtype(next(fitting))
