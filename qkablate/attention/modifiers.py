"""What stands between a QK circuit and its scores: norms, positions. Suffixes as in qk/base.py."""

import math

import torch
from torch import Tensor, nn

from qkablate.attention.qk import QK
from qkablate.attention.spec import Circuit, Meaningless, Spec

NORMS = ("none", "qk", "unit_keys")
POSITIONS = ("none", "alibi", "rope")


class QKNorm(Circuit):
    """Queries and keys of length one, and a learned gain per head (Henry et al., 2020).

    Two random directions of width E meet at 1/√E, so the gain σ²d √E gives standard's spread; the
    naive gain √E is what an RMS norm with the scale 1/√E amounts to, a spread of 1. The weights'
    own scale is normed away, so `naive` is about the gain alone.
    """

    equation = "q and k of length 1, a gain per head"
    source = "Henry et al. 2020"
    params = "h"

    def __init__(self, spec: Spec, qk: QK) -> None:
        super().__init__(spec)
        if not qk.width:
            raise Meaningless("there are no queries and keys to norm")
        self.width, self.scale = qk.width, 1.0
        self.gain = nn.Parameter(torch.empty(spec.heads))
        self.match = "none" if spec.init == "naive" else "spread"

    def forward(self, q_BHTE: Tensor, k_BGSE: Tensor) -> tuple[Tensor, Tensor]:
        unit_q, unit_k = (nn.functional.normalize(t, dim=-1) for t in (q_BHTE, k_BGSE))
        return (unit_q * self.gain.view(-1, 1, 1)).type_as(q_BHTE), unit_k.type_as(k_BGSE)

    @property
    def start(self) -> float:
        """The gain at the start."""
        return math.sqrt(self.width) * (self.spec.score_std if self.spec.init == "matched" else 1.0)

    @torch.no_grad()
    def init_(self, draw: object) -> None:
        self.gain.fill_(self.start)

    def slow_down(self) -> float:
        """What the circuit's multiplier is to be multiplied by: a naive gain moves scores more."""
        return self.spec.score_std if self.spec.init == "naive" else 1.0


class UnitKeys(Circuit):
    """Keys of length one (Kitaev et al., 2020): however long, a key scores by direction.

    The scale makes up for the length a key has at the start, so that the spread is standard's;
    naive leaves it at 1/√d_head.
    """

    equation = "keys of length 1"
    params = "0"
    source = "Kitaev et al. 2020"

    def __init__(self, spec: Spec, qk: QK) -> None:
        super().__init__(spec)
        if not qk.width:
            raise Meaningless("there are no keys to norm")
        self.length = qk.key_length
        self.scale = qk.scale * self.length
        # The keys' own scores, the trouble of shared projections, are the self mask's to remove.
        self.match = "spread"
        if spec.init == "naive":
            self.scale, self.match = 1 / math.sqrt(spec.d_head), "none"
        self._matched_scale = qk.scale * self.length

    def forward(self, q_BHTE: Tensor, k_BGSE: Tensor) -> tuple[Tensor, Tensor]:
        return q_BHTE, nn.functional.normalize(k_BGSE, dim=-1).type_as(k_BGSE)

    def slow_down(self) -> float:
        return self._matched_scale / self.scale


def rotate(x_BHTE: Tensor, first: int = 0) -> Tensor:
    """Rotary positions (Su et al., 2021): plane (a, a + E/2) turned by position · 10000^(−2a/E)."""
    length, width = x_BHTE.shape[-2:]
    wide = torch.float32 if x_BHTE.device.type == "mps" else torch.float64  # MPS has no float64
    plane = torch.arange(width // 2, device=x_BHTE.device, dtype=wide)
    position = torch.arange(first, first + length, device=x_BHTE.device, dtype=wide)
    angle_TP = position.unsqueeze(1) * 10000 ** (-2 * plane / width)
    dtype = torch.float64 if x_BHTE.dtype == torch.float64 else torch.float32
    cos_TP, sin_TP = angle_TP.cos().to(dtype), angle_TP.sin().to(dtype)
    a, b = x_BHTE.chunk(2, dim=-1)
    turned = torch.cat([a * cos_TP - b * sin_TP, a * sin_TP + b * cos_TP], -1)
    return turned.type_as(x_BHTE).contiguous()  # fused kernels ask for it


def alibi(heads: int, first: int, queries: int, keys: int, like: Tensor) -> Tensor:
    """Linear biases (Press et al., 2022): −|i − j| times a slope 2^(−8 (h + 1) / H), as HTS.

    For a number of heads that is no power of two the paper interpolates; here it is this one
    formula.
    """
    i_T1 = torch.arange(first, first + queries, device=like.device).unsqueeze(1)
    j_S = torch.arange(keys, device=like.device)
    # Where MPS has no float64, float32 has to do.
    wide = torch.float32 if like.device.type == "mps" else torch.float64
    slope_H = 2.0 ** (-8 * torch.arange(1, heads + 1, device=like.device, dtype=wide) / heads)
    return (-(i_T1 - j_S).abs() * slope_H.view(-1, 1, 1)).to(like.dtype)


def check_rope(qk: QK) -> None:
    if qk.no_rope:
        raise Meaningless(f"model.position=rope: {qk.no_rope}")
    if qk.width % 2:
        raise Meaningless(
            f"model.position=rope turns pairs, and queries are {qk.width} wide, an odd number:"
            " choose another model.heads or model.d_model, or the position learned, alibi or none"
        )
