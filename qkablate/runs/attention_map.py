"""The attention of one text, kept at the end of a run: the first tokens of the validation split,
and how much every head of every layer looks from each at which. Imports no torch.

<run>/example.safetensors
    attention       uint8, layers × heads × queries × keys: 255 is all of a query's weight
    tokens          int64, the ids
    its metadata    run, step, fingerprint of the data, checksum

Shape suffixes: L layers, H heads, T tokens.
"""

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from qkablate.runs.predictions import ABOUT, unpacked
from qkablate.runs.records import write_atomic

NAME = "example.safetensors"
MOST_TOKENS = 32
MOST_BYTES = 2**20  # of the attention
WHOLE = 255  # a weight of 1
_ATTENTION, _TOKENS = "attention", "tokens"


@dataclass(frozen=True)
class About:
    run: str
    step: int
    data_fingerprint: str


def length(layers: int, heads: int, context: int) -> int:
    """How many tokens are kept: with very many heads fewer."""
    return min(MOST_TOKENS, context, math.isqrt(MOST_BYTES // (layers * heads)))


def rounded(a_LHTT: np.ndarray) -> np.ndarray:
    """Weights in 255ths."""
    return np.rint(a_LHTT * WHOLE).astype(np.uint8)


def write(folder: Path, about: About, tokens_T: np.ndarray, a_LHTT: np.ndarray) -> None:
    """In a run's folder; all of it or nothing, and the same bytes whenever it is done again."""
    for unfinished in folder.glob(f".{NAME}.*.tmp"):
        unfinished.unlink(missing_ok=True)
    a_LHTT = np.ascontiguousarray(a_LHTT, np.uint8)
    tokens_T = np.ascontiguousarray(tokens_T, np.int64)
    # In one piece: of several the order would change from process to process.
    told = json.dumps({**asdict(about), "sha256": _checksum(about, a_LHTT, tokens_T)})
    tensors = {_ATTENTION: a_LHTT, _TOKENS: tokens_T}
    write_atomic(folder / NAME, safetensors.numpy.save(tensors, {ABOUT: told}))


def read(path: Path) -> tuple[About, np.ndarray, np.ndarray]:
    """tokens_T and a_LHTT of a file, as data of a stranger: ValueError for what no run writes."""
    own, tensors = unpacked(path, MOST_BYTES + 8 * MOST_TOKENS)
    try:
        digest = own.pop("sha256")
        about = About(**own)
        tokens_T, a_LHTT = tensors[_TOKENS], tensors[_ATTENTION]
    except (LookupError, TypeError):
        raise ValueError("it is not what a run writes") from None
    _check(about, digest, tokens_T, a_LHTT)
    return about, tokens_T, a_LHTT


def _checksum(about: About, a_LHTT: np.ndarray, tokens_T: np.ndarray) -> str:
    told = json.dumps([asdict(about), a_LHTT.shape], sort_keys=True).encode()
    return hashlib.sha256(told + a_LHTT.tobytes() + tokens_T.tobytes()).hexdigest()


def _check(about: About, digest: Any, tokens_T: np.ndarray, a_LHTT: np.ndarray) -> None:
    for key, kind in About.__annotations__.items():
        if type(getattr(about, key)) is not kind:
            raise ValueError(f"its {key} is not what a run writes")
    if tokens_T.dtype != np.int64 or not 1 <= tokens_T.size <= MOST_TOKENS or tokens_T.ndim != 1:
        raise ValueError(f"its tokens are {tokens_T.dtype} {tokens_T.shape}")
    square = a_LHTT.shape[2:] == (len(tokens_T), len(tokens_T))
    if a_LHTT.dtype != np.uint8 or a_LHTT.ndim != 4 or not (a_LHTT.size and square):
        raise ValueError(f"its attention is {a_LHTT.dtype} {a_LHTT.shape}")
    if _checksum(about, a_LHTT, tokens_T) != digest:
        raise ValueError("it does not have its checksum")
    if tokens_T.min() < 0:
        raise ValueError("its tokens are no ids")
    # Each number was rounded, by half of a 255th at most.
    off_LHT = np.abs(a_LHTT.sum(-1, dtype=np.int64) - WHOLE)
    if np.triu(a_LHTT, 1).any() or off_LHT.max() > len(tokens_T) / 2 + 1:
        raise ValueError("its numbers are no attention")
