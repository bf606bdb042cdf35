"""Modifiers between a QK circuit and its scores: norms, positions. Suffixes as in qk/base.py."""

import math

import torch
from torch import Tensor, nn

from qkablate.attention.qk import QK
from qkablate.attention.spec import Circuit, Spec, UnsupportedCombination

NORMS = ("none", "qk", "unit_keys")


class QKNorm(Circuit):
    """Queries and keys of unit length and a learned gain per head (Henry et al., 2020).

    The dot product of two random directions of width E has standard deviation 1/√E, so a gain of
    σ²d √E matches standard's scores; the naive gain √E corresponds to an RMS norm with scale 1/√E.
    The norm removes the scale of the weights, so `naive` concerns the gain alone.
    """

    equation = "q and k of length 1, a gain per head"
    source = "Henry et al. 2020"
    params = "h"
    match = "spread"
    naive_match = "none"

    def __init__(self, spec: Spec, qk: QK) -> None:
        super().__init__(spec)
        if not qk.width:
            raise UnsupportedCombination("there are no queries and keys to normalize")
        self.width, self.scale = qk.width, 1.0
        self.gain = nn.Parameter(torch.empty(spec.heads))
        self.matched_gain = spec.score_std / qk.spread * math.sqrt(self.width)
        # Factor on the circuit's learning-rate multiplier; a naive gain moves the scores faster.
        self.lr_scale = spec.score_std / qk.spread if spec.init == "naive" else 1.0

    def forward(self, q_BHTE: Tensor, k_BGSE: Tensor) -> tuple[Tensor, Tensor]:
        unit_q, unit_k = (nn.functional.normalize(t, dim=-1) for t in (q_BHTE, k_BGSE))
        return (unit_q * self.gain.view(-1, 1, 1)).type_as(q_BHTE), unit_k.type_as(k_BGSE)

    def adjust_init_(self) -> None:
        naive = self.spec.init == "naive"
        self.gain.fill_(math.sqrt(self.width) if naive else self.matched_gain)


class UnitKeys(Circuit):
    """Keys of unit length (Kitaev et al., 2020).

    The scale compensates for the initial length of a key, so that the scores have standard's
    spread; `naive` leaves it at 1/√d_head.
    """

    equation = "keys of length 1"
    params = "0"
    source = "Kitaev et al. 2020"
    match = "spread"  # the high scores of tokens with themselves are left to the self mask
    naive_match = "none"

    def __init__(self, spec: Spec, qk: QK) -> None:
        super().__init__(spec)
        if not qk.width:
            raise UnsupportedCombination("there are no keys to normalize")
        matched = qk.scale * qk.key_norm
        self.scale = 1 / math.sqrt(spec.d_head) if spec.init == "naive" else matched
        self.lr_scale = matched / self.scale

    def forward(self, q_BHTE: Tensor, k_BGSE: Tensor) -> tuple[Tensor, Tensor]:
        return q_BHTE, nn.functional.normalize(k_BGSE, dim=-1).type_as(k_BGSE)


def rotate(x_BHTE: Tensor, first: int = 0) -> Tensor:
    """Rotate plane (a, a + E/2) by position · 10000^(−2a/E), as RoPE does (Su et al., 2021)."""
    length, width = x_BHTE.shape[-2:]
    wide = torch.float32 if x_BHTE.device.type == "mps" else torch.float64  # MPS has no float64
    plane = torch.arange(width // 2, device=x_BHTE.device, dtype=wide)
    position = torch.arange(first, first + length, device=x_BHTE.device, dtype=wide)
    angle_TP = position.unsqueeze(1) * 10000 ** (-2 * plane / width)
    dtype = torch.promote_types(x_BHTE.dtype, torch.float32)
    cos_TP, sin_TP = angle_TP.cos().to(dtype), angle_TP.sin().to(dtype)
    a, b = x_BHTE.chunk(2, dim=-1)
    rotated = torch.cat([a * cos_TP - b * sin_TP, a * sin_TP + b * cos_TP], -1)
    return rotated.type_as(x_BHTE).contiguous()  # fused kernels need it


def alibi(heads: int, first: int, queries: int, keys: int, like: Tensor) -> Tensor:
    """Return the ALiBi biases (Press et al., 2022), −|i − j| · 2^(−8 (h + 1) / H), as HTS.

    The paper interpolates where the number of heads is not a power of two; this formula does not.
    """
    i_T1 = torch.arange(first, first + queries, device=like.device).unsqueeze(1)
    j_S = torch.arange(keys, device=like.device)
    wide = torch.float32 if like.device.type == "mps" else torch.float64  # MPS has no float64
    slope_H = 2.0 ** (-8 * torch.arange(1, heads + 1, device=like.device, dtype=wide) / heads)
    return (-(i_T1 - j_S).abs() * slope_H.view(-1, 1, 1)).to(like.dtype)


def check_rope(qk: QK) -> None:
    """Raise UnsupportedCombination where queries and keys cannot be rotated."""
    if qk.no_rope_reason:
        raise UnsupportedCombination(f"model.position=rope: {qk.no_rope_reason}")
    if qk.width % 2:
        raise UnsupportedCombination(
            f"model.position=rope rotates pairs of dimensions, but queries are {qk.width} wide, an"
            " odd number: change model.heads or model.d_model, or use model.position=learned, alibi"
            " or none"
        )
