"""Attention weights of all heads over one text, recorded at the end of a run.

The text is the beginning of the validation split. Imports no torch.

<run>/attention_map.safetensors
    attention       uint8, layers × heads × queries × keys: 255 is all of a query's weight
    tokens          int64, the ids
    its header      run, step, fingerprint of the data, checksum

Shape suffixes: L layers, H heads, T tokens.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qkablate.runs.tensor_file import TensorFile

FILE_NAME = "attention_map.safetensors"
MAX_TOKENS = 32
MAX_BYTES = 2**20  # of the attention
FULL_WEIGHT = 255  # a weight of 1


@dataclass(frozen=True)
class AttentionMapHeader:
    """Origin of an attention map."""

    run: str
    step: int
    data_fingerprint: str


_FILE = TensorFile(
    AttentionMapHeader,
    {"attention": (np.uint8, 4), "tokens": (np.int64, 1)},
    MAX_BYTES + 8 * MAX_TOKENS,
)


def token_count(layers: int, heads: int, context: int) -> int:
    """Return the number of recorded tokens: fewer for very many heads."""
    return min(MAX_TOKENS, context, math.isqrt(MAX_BYTES // (layers * heads)))


def quantize(a_LHTT: np.ndarray) -> np.ndarray:
    """Return attention weights as integers in 255ths."""
    quantized: np.ndarray = np.rint(a_LHTT * FULL_WEIGHT).astype(np.uint8)
    return quantized


def write_attention_map(
    folder: Path, header: AttentionMapHeader, tokens_T: np.ndarray, a_LHTT: np.ndarray
) -> None:
    """Write the quantized attention of a text into a run's folder."""
    _FILE.write(folder / FILE_NAME, header, a_LHTT, tokens_T)


def read_attention_map(path: Path) -> tuple[AttentionMapHeader, np.ndarray, np.ndarray]:
    """Read an untrusted file, header, tokens_T and a_LHTT; ValueError for what no run writes."""
    header, (a_LHTT, tokens_T) = _FILE.read(path)
    if len(tokens_T) > MAX_TOKENS or tokens_T.min() < 0:
        raise ValueError("its tokens are too many, or not token ids")
    check_weights(a_LHTT, len(tokens_T))
    return header, tokens_T, a_LHTT


def check_weights(a_LHTT: np.ndarray, tokens: int) -> None:
    """Raise ValueError unless these are quantized causal attention weights of so many tokens."""
    if a_LHTT.shape[2:] != (tokens, tokens):
        raise ValueError(f"its attention has shape {a_LHTT.shape} for {tokens} tokens")
    # Each weight was rounded by half of a 255th at most.
    error_LHT = np.abs(a_LHTT.sum(-1, dtype=np.int64) - FULL_WEIGHT)
    if np.triu(a_LHTT, 1).any() or error_LHT.max() > tokens / 2 + 1:
        raise ValueError("its numbers are not attention weights")
