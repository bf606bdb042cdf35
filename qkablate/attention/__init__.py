"""Attention as two circuits; this package depends on torch and no other part of the project."""

from qkablate.attention.layer import Attention, Cache
from qkablate.attention.ov import OV, OV_CIRCUITS
from qkablate.attention.qk import QK, QK_CIRCUITS
from qkablate.attention.spec import Draw, Spec, UnsupportedCombination
from qkablate.attention.tensors import by_head, matrix, project, side_by_side, split_heads, vector

__all__ = [
    "OV",
    "OV_CIRCUITS",
    "QK",
    "QK_CIRCUITS",
    "Attention",
    "Cache",
    "Draw",
    "Spec",
    "UnsupportedCombination",
    "by_head",
    "matrix",
    "project",
    "side_by_side",
    "split_heads",
    "vector",
]
