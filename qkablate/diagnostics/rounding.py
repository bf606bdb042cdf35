"""Rounding of scores: the two orders of multiplication, X (W_q W_kᵀ) Xᵀ and (X W_q)(X W_k)ᵀ.

They are equal in exact arithmetic. What they differ by in the precision of training is what a
merged matrix can change by rounding alone.

Shape suffixes: B sequences, T positions, H heads, D d_model, E width of the product.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from qkablate.attention import Attention

MEASURES = ("rounding", "rounding_fp64")


def compute_rounding(
    layer: Attention, x_BTD: Tensor, autocast: Callable[[], AbstractContextManager[Any]]
) -> dict[str, list[float]]:
    """Return the relative difference of the two orders by head, as training computes, and in fp64.

    Empty for circuits without two factors, and where a norm or a rotation lies between them.
    """
    factors = layer.qk.low_rank_factors() if not layer.qk.no_circuit_reason else None
    if factors is None or layer.norm is not None or layer.position == "rope":
        return {}
    with autocast():
        rounded_H = _difference(x_BTD, *factors)
    device = "cpu" if x_BTD.device.type == "mps" else x_BTD.device  # which has no fp64
    exact_H = _difference(*(part.to(device, torch.float64) for part in (x_BTD, *factors)))
    return {"rounding": rounded_H.tolist(), "rounding_fp64": exact_H.tolist()}


def _difference(x_BTD: Tensor, left_HDE: Tensor, right_HDE: Tensor) -> Tensor:
    x_B1TD = x_BTD.unsqueeze(1)
    separate_BHTT = (x_B1TD @ left_HDE) @ (x_B1TD @ right_HDE).mT
    merged_BHTT = (x_B1TD @ (left_HDE @ right_HDE.mT)) @ x_B1TD.mT
    # The norms are taken in fp32 at least: in 16 bits they would add rounding of their own.
    wide = torch.promote_types(separate_BHTT.dtype, torch.float32)
    separate_BHTT, merged_BHTT = separate_BHTT.to(wide), merged_BHTT.to(wide)
    squares_H = [s.square().sum((0, 2, 3)) for s in (merged_BHTT - separate_BHTT, separate_BHTT)]
    return (squares_H[0] / squares_H[1]).sqrt()
