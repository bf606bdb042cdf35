"""The OV circuit: ways to parametrise what a key position writes,  write_h(j) = x_jᵀ M_h.

Shape suffixes as in qk/base.py, V for the width of a head's value and G for value heads. In the
first-step ratios, standard's speed is √d (σ + σ_o): W_v hears W_o's entries (σ_o), W_o hears values
(σ√d).
"""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from qkablate.attention.projection.moments import Seen
from qkablate.attention.qk import QK
from qkablate.attention.spec import Circuit, Draw, Meaningless, Spec


class OV(Circuit):
    """Base of the OV circuits: values from the key/value stream, and the way back to d_model."""

    # What a decoder has to keep to have the values: "v" them, "k" the keys, "x" the stream.
    cached: ClassVar[str] = "v"

    def __init__(self, spec: Spec, qk: QK) -> None:
        super().__init__(spec)
        self.width = spec.d_head  # V
        self.value_heads = spec.heads  # G

    def values(self, y_BSD: Tensor, k_BGSE: Tensor) -> Tensor:
        """v_BGSV. The keys are offered, as projected, for circuits that use them as values."""
        raise NotImplementedError(f"{type(self).__name__} has no `values`")

    def write(self, o_BHTV: Tensor) -> Tensor:
        """From the heads' averages to what the layer adds to the residual stream."""
        raise NotImplementedError(f"{type(self).__name__} has no `write`")

    @torch.no_grad()
    def init_(self, draw: Draw) -> None:
        """From draws by name; what writes to the stream, "w_o…", starts as small as W_o."""
        for name, parameter in self.named_parameters():
            shape = tuple(parameter.shape)
            parameter.copy_(draw(name, shape, residual=name.startswith("w_o")))

    def circuit(self, qk: QK) -> Tensor:
        """M_HDD."""
        v_HDV = self._values_of_units(qk)
        one_head_HHDV = torch.diag_embed(v_HDV.movedim(0, -1)).permute(2, 3, 0, 1)
        nothing_HHDV = torch.zeros_like(one_head_HHDV[:1])
        return self.write(one_head_HHDV) - self.write(nothing_HHDV)

    def thin(self, qk: QK) -> tuple[Tensor, Tensor] | None:
        """(left_HDV, right_HDV) with M_h = left_h right_hᵀ; None where the whole matrix is
        learned.
        """
        # What head h writes for each unit vector, while the others have nothing to write.
        one_head_HHVV = torch.eye(self.spec.heads)[..., None, None] * torch.eye(self.width)
        one_head_HHVV = one_head_HHVV.to(self.like)
        w_HVD = self.write(one_head_HHVV) - self.write(torch.zeros_like(one_head_HHVV[:1]))
        return self._values_of_units(qk), w_HVD.mT

    def _values_of_units(self, qk: QK) -> Tensor:
        """v_HDV: values are affine and writing is, so the images of 0 and of the unit vectors say
        all.
        """
        d, heads = self.spec.d_model, self.spec.heads
        x_1ND = torch.cat([self.like.new_zeros(1, d), torch.eye(d).to(self.like)]).unsqueeze(0)
        v_GNV = self.values(x_1ND, qk.keys(x_1ND))[0]
        return (v_GNV[:, 1:] - v_GNV[:, :1]).repeat_interleave(heads // v_GNV.shape[0], 0)

    def set_circuit_(self, m_HDD: Tensor) -> None:
        """Take over M_h, or what of it this form can hold."""
        raise Meaningless(f"{type(self).__name__} cannot be set from a given M_h")

    def set_nearest_(self, m_HDD: Tensor, seen: Seen) -> None:
        """The same, such that what is written of what is `seen` loses little."""
        self.set_circuit_(m_HDD)

    def offset(self, qk: QK) -> Tensor:
        """c_D: what is written whatever the stream holds, all of it by biases."""
        nothing_11D = self.like.new_zeros(1, 1, self.spec.d_model)
        v_1G1V = self.values(nothing_11D, qk.keys(nothing_11D))
        return self.write(v_1G1V.repeat_interleave(self.spec.heads // v_1G1V.shape[1], 1))[0, 0]

    @torch.no_grad()
    def set_offset_(self, c_D: Tensor) -> None:
        """Take over c, after `set_circuit_` has left every bias at zero."""
        bias = getattr(self, "b_o", None)
        if bias is not None:
            bias.copy_(c_D)
        elif self.spec.bias:
            raise Meaningless(f"{type(self).__name__} has no bias to hold what another one writes")

    @property
    def written(self) -> float:
        """Size of an entry of v W_o at the start, for a v of ones: what b_v has beside b_o's 1."""
        return self.spec.length * self.spec.residual

    @property
    def speed(self) -> float:
        """Σ|gradient| of standard's W_v and W_o at the start, in units of d² entries of size 1."""
        spec = self.spec
        return math.sqrt(spec.d_model) * spec.sigma * (1 + spec.residual)


def join_heads(o_BHTV: Tensor) -> Tensor:
    """(B, H, T, V) → (B, T, H·V)."""
    return o_BHTV.transpose(1, 2).flatten(2)


@torch.no_grad()
def zero_(*biases: nn.Parameter | None) -> None:
    for bias in biases:
        if bias is not None:
            bias.zero_()
