"""Attention maps: the attention weights of one text that runs keep at their end.

Shape suffixes: L layers, H heads, T tokens, S tokens of the keys.
"""

import json
import os
import stat
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from qkablate.analysis.study.study import Entry
from qkablate.config import Config
from qkablate.data import TASKS, open_task, tokenizers
from qkablate.data.tokenizers import Tokenizer
from qkablate.disk import read_file
from qkablate.errors import UserError, sanitize
from qkablate.runs import attention_map

# Positions whose mean attention weight is reported.
TARGETS = {"previous": "on the previous token", "first": "on the first", "self": "on itself"}
_OFFLINE = ("bytes", "chars", "bpe")  # tokenizers that load without network
_MAX_BYTES, _MAX_CHARACTERS = 2**24, 16  # of a tokenizer's file, of a shown token


@dataclass(frozen=True)
class ArmAttention:
    """Attention weights of one run, of the layers of one site."""

    arm: str
    variant: str
    which: str  # seed or step
    tokens: tuple[str, ...]  # of the queries
    a_LHTS: np.ndarray  # in 255ths
    separator: str = ""  # between tokens: a space where they are ids or symbols of a task
    keys: tuple[str, ...] = ()  # tokens of the keys, if they are not those of the queries
    site: str = "decoder"

    @property
    def key_tokens(self) -> tuple[str, ...]:
        return self.keys or self.tokens

    @property
    def causal(self) -> bool:
        return self.site == "decoder"

    @cached_property
    def mean_weights(self) -> dict[str, np.ndarray]:
        """Mean weight of every head on each target position: measure_LH."""
        if not self.causal:
            return {}
        # Of the queries that see three tokens or more, for which the targets are distinct.
        a_LHQT = self.a_LHTS[:, :, 2:] / attention_map.FULL_WEIGHT
        queries = np.arange(2, self.a_LHTS.shape[-1])
        if not len(queries):
            return {}
        keys = {"previous": queries - 1, "first": 0 * queries, "self": queries}
        return {name: a_LHQT[:, :, queries - 2, k].mean(-1) for name, k in keys.items()}

    @property
    def uniform_share(self) -> float:
        """Mean weight on each target of a head with uniform attention."""
        return float((1 / np.arange(3, self.a_LHTS.shape[-1] + 1)).mean())


def read_arm_attention(entry: Entry) -> ArmAttention | None:
    """Read the attention map of the first finished run that keeps one; damage is recorded."""
    model, steps = entry.arm.config.model, int(entry.arm.config.train.steps)
    for _, record in sorted(entry.records.items()):
        path = record.folder / attention_map.FILE_NAME
        if record.status != "done" or not os.path.lexists(path):
            continue
        try:
            header, tokens_T, a_LHTT = attention_map.read_attention_map(path)
            record.check_origin(header.run, header.data_fingerprint)
            if header.step != steps:
                raise ValueError(f"its step is {header.step}")
            if a_LHTT.shape[:2] != (model.layers, model.heads):
                raise ValueError(f"it has {a_LHTT.shape[0]} layers × {a_LHTT.shape[1]} heads")
        except ValueError as error:
            record.problems.append(f"{attention_map.FILE_NAME}: {error}")
            continue
        tokens, separator = decode_tokens(tokens_T.tolist(), entry.arm.config, record.folder)
        arm, variant = entry.name, entry.arm.variant
        return ArmAttention(arm, variant, record.seed_label, tokens, a_LHTT, separator)
    return None


def decode_tokens(ids: list[int], config: Config, folder: Path) -> tuple[tuple[str, ...], str]:
    """Decode tokens with the run's task or tokenizer, or return their ids; also a separator."""
    path = folder / "tokenizer.json"
    try:
        if config.data.source in TASKS:
            task = open_task(config.data, config.model)
            return tuple(task.format_token(id) for id in ids), " "
        status = path.lstat()
        if stat.S_ISREG(status.st_mode) and status.st_size <= _MAX_BYTES:
            tokenizer = _tokenizer(read_file(path))
            return tuple(show_token(tokenizer.decode([id])) for id in ids), ""
    except (OSError, ValueError, LookupError, TypeError, RecursionError, UserError):
        pass
    return tuple(map(str, ids)), " "


@lru_cache(maxsize=4)  # the runs of a sweep mostly share one
def _tokenizer(content: bytes) -> Tokenizer:
    described = json.loads(content)
    if not isinstance(described, dict) or described.get("name") not in _OFFLINE:
        raise ValueError("it cannot be loaded without network")
    return tokenizers.load_tokenizer(described)


def show_token(token: bytes) -> str:
    """Return a token as text; invisible characters and incomplete ones are escaped."""
    try:
        text = token.decode("utf-8")
    except UnicodeDecodeError:
        return token.hex(" ")
    characters = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return sanitize("".join(characters))[:_MAX_CHARACTERS]
