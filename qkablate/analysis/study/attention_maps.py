"""What heads do with one text: the attention that runs keep at their end (see example.py).

Shape suffixes: L layers, H heads, T tokens.
"""

import json
import stat
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from qkablate.analysis.study.study import Entry, Record
from qkablate.data import tokenizers
from qkablate.data.tokenizers import Tokenizer
from qkablate.disk import read_file
from qkablate.errors import UserError, printable
from qkablate.runs import attention_map

# What is asked of a head, and how it is told.
ASKED = {
    "previous": "on the previous token",
    "first": "on the first",
    "self": "on itself",
}
_SPELLED = ("bytes", "chars", "bpe")  # what can be read without asking a network
_LONGEST, _SHOWN = 2**24, 16  # bytes of a tokenizer's file, and characters of a token


@dataclass(frozen=True)
class Example:
    """Of one run, mostly the first of its arm."""

    arm: str
    variant: str
    which: str  # of the arm's runs
    tokens: tuple[str, ...]
    a_LHTT: np.ndarray  # in 255ths

    @cached_property
    def asked(self) -> dict[str, np.ndarray]:
        """Of every head, how much of its weight goes where; mean over the queries that see three
        tokens or more, for which these are three. measure_LH.
        """
        a_LHQT = self.a_LHTT[:, :, 2:] / attention_map.WHOLE
        queries = np.arange(2, self.a_LHTT.shape[-1])
        if not len(queries):
            return {}
        keys = {"previous": queries - 1, "first": 0 * queries, "self": queries}
        return {name: a_LHQT[:, :, queries - 2, own].mean(-1) for name, own in keys.items()}

    @property
    def equal_share(self) -> float:
        """What each of these gets of a head that looks everywhere alike."""
        return float((1 / np.arange(3, self.a_LHTT.shape[-1] + 1)).mean())


def example_of(entry: Entry) -> Example | None:
    """Of the run with the lowest seed that is done and keeps one; what is damaged is noted."""
    for _, record in sorted(entry.records.items()):
        path = record.folder / attention_map.NAME
        if record.status != "done" or not (path.exists() or path.is_symlink()):
            continue
        try:
            tokens_T, a_LHTT = _read(path, entry, record)
        except ValueError as error:
            record.lacks.append(f"{attention_map.NAME}: {error}")
            continue
        tokens = _told(tokens_T, record.folder)
        return Example(entry.name, entry.arm.variant, record.seed, tokens, a_LHTT)
    return None


def _read(path: Path, entry: Entry, record: Record) -> tuple[np.ndarray, np.ndarray]:
    about, tokens_T, a_LHTT = attention_map.read(path)
    model = entry.arm.config.model
    if about.run != record.run.id:
        raise ValueError("it is another run's")
    if about.data_fingerprint != record.facts["data_fingerprint"]:
        raise ValueError("it is of other data than its run")
    if about.step != int(entry.arm.config.train.steps):
        raise ValueError(f"it is of step {about.step}")
    if a_LHTT.shape[:2] != (model.layers, model.heads):
        raise ValueError(f"its attention is of {a_LHTT.shape[0]} layers × {a_LHTT.shape[1]} heads")
    return tokens_T, a_LHTT


def _told(tokens_T: np.ndarray, folder: Path) -> tuple[str, ...]:
    """The tokens as text, where the run's own folder can tell it; else their ids."""
    ids = tokens_T.tolist()
    path = folder / "tokenizer.json"
    try:
        found = path.lstat()
        if stat.S_ISREG(found.st_mode) and found.st_size <= _LONGEST:
            tokenizer = _tokenizer(read_file(path))
            return tuple(seen(tokenizer.decode([one])) for one in ids)
    except (OSError, ValueError, LookupError, TypeError, RecursionError, UserError):
        pass
    return tuple(map(str, ids))


@lru_cache(maxsize=4)  # that of a sweep's first run is mostly that of all
def _tokenizer(content: bytes) -> Tokenizer:
    described = json.loads(content)
    if not isinstance(described, dict) or described.get("name") not in _SPELLED:
        raise ValueError("it cannot be read without asking a network")
    return tokenizers.load(described)


def seen(token: bytes) -> str:
    """Signs that cannot be seen, and parts of a character, as their numbers."""
    try:
        text = token.decode("utf-8")
    except UnicodeDecodeError:
        return token.hex(" ")
    signs = (one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
    return printable("".join(signs))[:_SHOWN]
