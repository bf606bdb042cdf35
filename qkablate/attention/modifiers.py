"""Modifiers between a QK circuit and its scores: norms, positions. Suffixes as in qk/base.py."""

import math
from typing import Any, Self

import torch
from torch import Tensor, nn

from qkablate.attention.qk import QK
from qkablate.attention.spec import Circuit, Spec, UnsupportedCombination
from qkablate.attention.tensors import empty_matrix, map_to_heads

NORMS = ("none", "qk", "unit_keys")
ROPE_THETA = 10000.0  # of Su et al.


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


class RopeDims(Circuit):
    """Rotated dimensions beside those of the circuit (decoupled RoPE, DeepSeek-V2, 2024).

    Each head has queries x W_q of width p and all heads share the keys y W_k; both are rotated. The
    scores are scale · (x_iᵀ B_h x_j) with √(k/(k + p)) of the circuit's scale, plus those of the
    rotated dimensions with 1/√(k + p), so that their sum has standard's spread. This is another
    model than standard attention with RoPE, which rotates the queries and keys of the circuit.
    """

    equation = "+ x_i W_qr R(j − i) (x_j W_kr)ᵀ of p rotated dimensions"
    source = "DeepSeek-V2 2024"
    params = "d h p + e p"
    match = "spread"

    def __init__(self, spec: Spec, qk: QK, scale: float) -> None:
        super().__init__(spec)
        if not qk.width:
            raise UnsupportedCombination("there are no queries and keys to add dimensions to")
        self.width, heads, d_head = spec.rope_dims, spec.heads, spec.d_head
        assert self.width % 2 == 0
        self.w_q = empty_matrix(spec.d_model, heads * self.width)
        self.w_k = empty_matrix(spec.d_keys, self.width)
        share = math.sqrt(d_head / (d_head + self.width))
        self.scale = share * scale
        self.query_factor = 1 / (self.scale * math.sqrt(d_head + self.width))
        # The gradient of the shared W_k sums over the heads.
        more = self.width / d_head * (1 + spec.key_speed / math.sqrt(heads))
        self.lr_scale = (1 + spec.key_speed) / (share * (1 + spec.key_speed + more))

    def head_count(self, name: str) -> int:
        return 1 if name == "w_k" else self.spec.heads

    def queries(self, x_BTD: Tensor) -> Tensor:
        """Return q_BHTP before the rotation."""
        return map_to_heads(x_BTD, self.w_q, None, self.spec.heads) * self.query_factor

    def keys(self, y_BSD: Tensor) -> Tensor:
        """Return k_B1SP before the rotation."""
        return map_to_heads(y_BSD, self.w_k, None, 1)


class PositionTable(nn.Module):
    """Numbers that depend on positions alone, up to a context: computed once, in fp64.

    They are a buffer of the type of the weights that is in no checkpoint. Wherever the module is
    moved, also from the meta device, they are computed anew.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(shape), persistent=False)
        self.table: Tensor
        self._fill()

    def compute(self) -> Tensor:
        """Return the table on the CPU."""
        raise NotImplementedError

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._fill()
        return self

    @torch.no_grad()
    def _fill(self) -> None:
        if not self.table.is_meta:
            self.table.copy_(self.compute())


class Rope(PositionTable):
    """Rotary positions (Su et al., 2021): cosines and sines, as 2TP with P = E/2 planes."""

    def __init__(self, width: int, context: int, theta: float = ROPE_THETA) -> None:
        self.width, self.context, self.theta = width, context, theta
        super().__init__((2, context, width // 2))

    def compute(self) -> Tensor:
        return torch.stack(_rotations(0, self.context, self.width, self.theta))

    def forward(self, x_BHTE: Tensor, first: int = 0) -> Tensor:
        """Rotate plane (a, a + E/2) by position · θ^(−2a/E); the first is `first`."""
        (length, width), dtype = x_BHTE.shape[-2:], torch.promote_types(x_BHTE.dtype, torch.float32)
        last = first + length
        if last <= self.context and self.table.dtype == dtype:
            cos_TP, sin_TP = self.table[:, first:last].unbind()
        else:
            angles = _rotations(first, length, width, self.theta)
            cos_TP, sin_TP = (angle.to(x_BHTE.device, dtype) for angle in angles)
        a, b = x_BHTE.chunk(2, dim=-1)
        rotated = torch.cat([a * cos_TP - b * sin_TP, a * sin_TP + b * cos_TP], -1)
        return rotated.type_as(x_BHTE).contiguous()  # fused kernels need it


class Alibi(PositionTable):
    """ALiBi biases (Press et al., 2022), −|i − j| · 2^(−8 (h + 1) / H), by j − i + T as H(2T).

    The paper interpolates where the number of heads is not a power of two; this formula does not.
    """

    def __init__(self, heads: int, context: int) -> None:
        self.heads, self.context = heads, context
        super().__init__((heads, 2 * context))

    def compute(self) -> Tensor:
        return _biases(self.heads, self.context)

    def forward(self, first: int, queries: int, keys: int, like: Tensor) -> Tensor:
        """Return the biases of queries from `first` on, as HTS."""
        last_query, context, table_HD = first + queries, self.context, self.table
        last = max(last_query, keys)
        # Of a CPU, the biases in 16 bits are rounded once.
        if last > context or (like.device.type == "cpu" and table_HD.dtype != like.dtype):
            context, table_HD = last, _biases(self.heads, last).to(like)
        windows_HXS = table_HD.unfold(-1, keys, 1)  # the first key at distance X − context
        rows_HTS = windows_HXS[:, 1 + context - last_query : 1 + context - first].flip(1)
        return rows_HTS.to(like.dtype)


def _rotations(first: int, length: int, width: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of RoPE's angles as TP, in fp64."""
    plane = torch.arange(width // 2, dtype=torch.float64, device="cpu")
    position = torch.arange(first, first + length, dtype=torch.float64, device="cpu")
    angle_TP = position.unsqueeze(1) * theta ** (-2 * plane / width)
    return angle_TP.cos(), angle_TP.sin()


def _biases(heads: int, length: int) -> Tensor:
    """Return ALiBi's biases of distances from −length on as HD, in fp64."""
    distance_D = torch.arange(-length, length, dtype=torch.float64, device="cpu")
    head_H = torch.arange(1, heads + 1, dtype=torch.float64, device="cpu")
    return -distance_D.abs() * (2.0 ** (-8 * head_H / heads))[:, None]


def check_rope(qk: QK) -> None:
    """Raise UnsupportedCombination where queries and keys cannot be rotated."""
    if qk.no_rope_reason:
        instead = "; or set variant.rope_dims=N, which adds N rotated dimensions" * bool(qk.width)
        raise UnsupportedCombination(f"model.position=rope: {qk.no_rope_reason}{instead}")
    if qk.width % 2:
        change = "model.heads or model.d_model" if qk.spec.rank is None else "variant.rank"
        raise UnsupportedCombination(
            f"model.position=rope rotates pairs of dimensions, but queries are {qk.width} wide, an"
            f" odd number: change {change}, or use model.position=learned or none (decoders: or"
            " alibi)"
        )
