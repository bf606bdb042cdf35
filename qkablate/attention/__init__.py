"""Attention as two circuits; this package depends on torch and no other part of the project."""

from qkablate.attention.cache import Cache, SourceCache
from qkablate.attention.layer import Attention
from qkablate.attention.ov import OV, OV_CIRCUITS
from qkablate.attention.qk import QK, QK_CIRCUITS
from qkablate.attention.spec import CircuitLr, Draw, Spec, UnsupportedCombination
from qkablate.attention.tensors import (
    apply_matrix,
    by_head,
    concat_heads,
    empty_bias,
    empty_matrix,
    split_heads,
)

__all__ = [
    "OV",
    "OV_CIRCUITS",
    "QK",
    "QK_CIRCUITS",
    "Attention",
    "Cache",
    "CircuitLr",
    "Draw",
    "SourceCache",
    "Spec",
    "UnsupportedCombination",
    "apply_matrix",
    "by_head",
    "concat_heads",
    "empty_bias",
    "empty_matrix",
    "split_heads",
]
