"""The OV circuit: parametrizations of what a key position writes,  write_h(j) = x_jᵀ M_h.

Shape suffixes as in qk/base.py, V for the width of a head's value and G for value heads. In the
ratios of first steps, standard's speed is √d (σ + σ_o): the gradient of W_v scales with the entries
of W_o (σ_o), that of W_o with the values (σ√d). Where the stream of the values is e wide and not d,
W_v has e/d times as many entries, and the values are of its size.
"""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from qkablate.attention.linalg import affine_basis
from qkablate.attention.projection.moments import Moments
from qkablate.attention.qk import QK
from qkablate.attention.spec import Circuit, Spec, UnsupportedCombination


class OV(Circuit):
    """Base of the OV circuits: values from the key stream, and the map back to d_model."""

    # What a decoder must cache for the values: "v" them, "k" the keys, "x" the stream, "c" the
    # latent stream.
    cached: ClassVar[str] = "v"

    def __init__(self, spec: Spec, qk: QK) -> None:
        super().__init__(spec)
        self.width, self.value_heads = spec.d_head, spec.heads  # V, G
        # Initial size of the entries of b_v W_o, relative to those of b_o.
        self.value_bias_gain = spec.projection_std * spec.residual
        self.width_ratio = spec.d_keys / spec.d_model
        # Initial Σ|gradient| of standard's W_o and W_v in units of σ√d · d², and of both in units
        # of d² entries of size 1.
        self.w_o_speed, self.w_v_speed = spec.key_ratio, self.width_ratio * spec.residual
        both = self.w_o_speed + self.w_v_speed
        self.standard_speed = math.sqrt(spec.d_model) * spec.sigma * both

    @property
    def reads_keys(self) -> bool:
        """True if the values are the keys or of their latent stream."""
        return self.cached in ("k", "c")

    def values(self, y_BSD: Tensor, k_BGSE: Tensor) -> Tensor:
        """Return v_BGSV; the unmodified keys are passed for circuits that use them as values."""
        raise NotImplementedError(f"{type(self).__name__} does not define `values`")

    def write(self, o_BHTV: Tensor) -> Tensor:
        """Return what the layer adds to the residual stream, from the averages of the heads."""
        raise NotImplementedError(f"{type(self).__name__} does not define `write`")

    def circuit(self, qk: QK) -> Tensor:
        """Return M_HDD."""
        one_head_HHDV = torch.diag_embed(self._unit_values(qk).movedim(0, -1)).permute(2, 3, 0, 1)
        return self.write(one_head_HHDV) - self.write(torch.zeros_like(one_head_HHDV[:1]))

    def low_rank_factors(self, qk: QK) -> tuple[Tensor, Tensor] | None:
        """Return (left_HDV, right_HDV) with M_h = left_h right_hᵀ; None for a full matrix."""
        # What head h writes for each unit vector while the other heads write nothing.
        unit_HH11, unit_VV = torch.eye(self.spec.heads)[..., None, None], torch.eye(self.width)
        one_head_HHVV = (unit_HH11 * unit_VV).to(self.like)
        w_HVD = self.write(one_head_HHVV) - self.write(torch.zeros_like(one_head_HHVV[:1]))
        return self._unit_values(qk), w_HVD.mT

    def _unit_values(self, qk: QK) -> Tensor:
        """Return v_HDV, the linear part of the affine map to the values."""
        y_1ND = affine_basis(self.like, self.spec.d_keys)
        v_GNV = self.values(y_1ND, qk.keys(y_1ND))[0]
        per_group = self.spec.heads // v_GNV.shape[0]
        return (v_GNV[:, 1:] - v_GNV[:, :1]).repeat_interleave(per_group, 0)

    def set_circuit_(self, m_HDD: Tensor) -> None:
        """Set M_h, or the part of it that this form can hold, and zero every bias.

        Like the methods that follow, it is called under `torch.no_grad`.
        """
        raise UnsupportedCombination("its outputs cannot be set from a given M_h")

    def set_nearest_(self, m_HDD: Tensor, moments: Moments) -> None:
        """Set M_h so that the output for a stream of these moments changes little."""
        self.set_circuit_(m_HDD)

    def set_given_scores_(self, m_HDD: Tensor, qk: QK, moments: Moments | None) -> None:
        """Set M_h, weighted by the moments, if any; values that are keys are read from `qk`."""
        if moments is None:
            self.set_circuit_(m_HDD)
        else:
            self.set_nearest_(m_HDD, moments)

    def output_bias(self, qk: QK) -> Tensor:
        """Return c_D, what the biases write for any stream."""
        zero_11D = self.like.new_zeros(1, 1, self.spec.d_keys)
        v_1G1V = self.values(zero_11D, qk.keys(zero_11D))
        return self.write(v_1G1V.repeat_interleave(self.spec.heads // v_1G1V.shape[1], 1))[0, 0]

    def set_output_bias_(self, c_D: Tensor) -> None:
        """Set c, or what is left of it beside the biases of keys, once `b_o` is zero."""
        bias = getattr(self, "b_o", None)
        if bias is not None:
            bias.copy_(c_D)
        elif self.spec.bias:
            raise UnsupportedCombination("it has no bias to hold the output bias of another form")


def join_heads(o_BHTV: Tensor) -> Tensor:
    """(B, H, T, V) → (B, T, H·V)."""
    return o_BHTV.transpose(1, 2).flatten(2)


def zero_(*biases: nn.Parameter | None) -> None:
    """Zero the biases that are there."""
    for bias in biases:
        if bias is not None:
            bias.zero_()
