"""Values that are read from the latent stream of the keys. Suffixes as in qk/latent.py."""

import math

import torch
from torch import Tensor

from qkablate.attention.linalg import truncated_svd
from qkablate.attention.ov.base import OV, join_heads, zero_
from qkablate.attention.projection.moments import Moments
from qkablate.attention.projection.shared_keys import fit_outputs
from qkablate.attention.qk import QK
from qkablate.attention.qk.latent import LatentQK
from qkablate.attention.spec import Draw, Spec, UnsupportedCombination
from qkablate.attention.tensors import (
    apply_matrix,
    by_head,
    concat_heads,
    empty_bias,
    empty_matrix,
    map_to_heads,
)


class LatentOV(OV):
    """Multi-head latent attention: values c W_v, from the latent stream c = y W_c of the keys.

    Where a layer decodes, the heads average c itself, and what they write absorbs W_v. W_c is of
    the QK circuit and has its learning rate and decay; W_v and W_o take the rest of standard's (of
    a layer without norm and rotated dimensions, which change the rate of W_c, too).
    """

    factors = 3
    equation = "M_h = W_c W_v W_o"
    params = "d r + d²"
    source = "DeepSeek-V2 2024"
    cached = "c"
    match = "spread"
    naive_match = "none"

    def __init__(self, spec: Spec, qk: QK) -> None:
        if not isinstance(qk, LatentQK):
            raise UnsupportedCombination("ov=latent reads the latent stream of qk=latent")
        super().__init__(spec, qk)
        self.width, self.value_heads = qk.width, 1
        self.w_v = empty_matrix(qk.width, spec.d_model)
        self.w_o = empty_matrix(spec.d_model, spec.d_model)
        self.b_v, self.b_o = empty_bias(spec, spec.d_model), empty_bias(spec, spec.d_model)
        self.v_gain = qk.up_std / spec.key_std * math.sqrt(spec.d_keys)
        w_o, w_v, length = self.w_o_speed, self.w_v_speed, qk.key_length
        latent = qk.lr_multiplier * w_v * qk.latent_speed
        moved = w_o * length + w_v * qk.width / spec.d_keys * qk.latent_std
        self.lr_multiplier = (w_o + w_v - latent) / moved

    @torch.no_grad()
    def init_(self, draw: Draw) -> None:
        super().init_(draw)
        self.w_v.copy_(draw("w_v", self.w_v.shape, fan_in=self.spec.d_keys) * self.v_gain)

    def flops_per_key(self) -> int:
        """Return the FLOPs of W_v per key, unless the outputs absorb it."""
        return 2 * self.w_v.numel() * self.is_by_head

    def values(self, y_BSD: Tensor, k_BGSE: Tensor) -> Tensor:
        return k_BGSE

    def write(self, o_BHTV: Tensor) -> Tensor:
        o_BHTK = o_BHTV @ by_head(self.w_v, self.spec.heads)
        if self.b_v is not None:
            o_BHTK = o_BHTK + self.b_v.view(self.spec.heads, 1, -1)
        return self.write_heads(o_BHTK)

    def set_given_scores_(self, m_HDD: Tensor, qk: QK, moments: Moments | None) -> None:
        """Predict the output from the latent stream, by products of rank d_head."""
        w_HRD = fit_outputs(m_HDD, self._unit_values(qk), moments, self.spec.d_head)
        w_v_HRK, w_o_HDK = truncated_svd(w_HRD, self.spec.d_head)
        self.w_v.copy_(concat_heads(w_v_HRK))
        self.w_o.copy_(w_o_HDK.mT.flatten(0, 1))
        zero_(self.b_v, self.b_o)

    def head_values(self, c_B1SR: Tensor) -> Tensor:
        """Return the values c W_v of the heads."""
        return map_to_heads(c_B1SR.squeeze(1), self.w_v, self.b_v, self.spec.heads)

    def write_heads(self, o_BHTK: Tensor) -> Tensor:
        """Return what the layer adds, from the averages of `head_values`."""
        return apply_matrix(join_heads(o_BHTK), self.w_o, self.b_o)
