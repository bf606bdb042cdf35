"""OV circuits without a W_v or W_o: heads read or write their slice of the stream."""

import math
from functools import partial

import torch
from torch import Tensor, nn

from qkablate.attention.linalg import fit_slices, head_slices
from qkablate.attention.ov.base import OV, join_heads, zero_
from qkablate.attention.projection.moments import Moments
from qkablate.attention.qk import QK
from qkablate.attention.spec import Draw, Spec
from qkablate.attention.tensors import (
    apply_matrix,
    concat_heads,
    empty_bias,
    empty_matrix,
    map_to_heads,
    split_heads,
)


class _SliceOV(OV):
    """Base of the circuits whose heads read their slice, unless a subclass projects the stream."""

    factors = 1
    has_head_slices = True
    match = "spread"
    naive_match = "none"
    cached = "x"

    def values(self, y_BSD: Tensor, k_BGSE: Tensor) -> Tensor:
        return split_heads(y_BSD, self.spec.heads)


class NoV(_SliceOV):
    """No W_v: head h's values are its slice of x, M_h = g E_h W_o,h.

    A slice of a normalized x is 1/(σ√d) times as long as standard's values; g = σ√d compensates
    (naive: g = 1). Only W_o is trained. In cross-attention with a source of width e, the slice is
    e/h wide, and g = σ √d of W_v's σ.
    """

    equation = "M_h = g E_h W_o, v is a slice of x"
    params = "d e"
    removes = "W_v"
    source = "question: is W_v needed?"

    def __init__(self, spec: Spec, qk: QK) -> None:
        super().__init__(spec, qk)
        self.width = spec.d_keys // spec.heads
        self.w_o = empty_matrix(spec.d_keys, spec.d_model)
        self.b_o = empty_bias(spec, spec.d_model)
        matched_gain = spec.key_std / math.sqrt(self.width_ratio)
        self.gain = matched_gain if spec.init == "matched" else 1.0
        self.lr_multiplier = self.standard_speed / self.gain / self.width_ratio
        self.bias_lr_multiplier = 1 + self.value_bias_gain

    @torch.no_grad()
    def init_(self, draw: Draw) -> None:
        super().init_(partial(draw, fan_in=self.spec.d_model))

    def write(self, o_BHTV: Tensor) -> Tensor:
        return apply_matrix(join_heads(o_BHTV) * self.gain, self.w_o, self.b_o)

    def set_circuit_(self, m_HDD: Tensor) -> None:
        """Set the rows of each head's slice; the other rows are lost."""
        self._set_rows_(head_slices(m_HDD))

    def set_nearest_(self, m_HDD: Tensor, moments: Moments) -> None:
        """Predict the output from the slice alone, by least squares."""
        assert moments.z_HDD is not None
        self._set_rows_(fit_slices(moments.z_HDD, m_HDD, self.width))

    def _set_rows_(self, rows_HKD: Tensor) -> None:
        self.w_o.copy_(rows_HKD.flatten(0, 1) / self.gain)
        zero_(self.b_o)


class NoO(_SliceOV):
    """No W_o: the layer writes the concatenated averages of the heads, M_h = W_v,h E_hᵀ.

    A gain g = σ_o √d replaces the scale of W_o (naive: g = 1), and W_v is the tensor that standard
    draws. Only W_v is trained.
    """

    equation = "M_h = g W_v E_hᵀ, heads write their slice"
    params = "d e"
    removes = "W_o"
    source = "question: is W_o needed?"
    cached = "v"

    def __init__(self, spec: Spec, qk: QK) -> None:
        super().__init__(spec, qk)
        self.w_v = empty_matrix(spec.d_keys, spec.heads * spec.d_head)
        self.b_v = empty_bias(spec, spec.heads * spec.d_head)
        self.gain = self.value_bias_gain if spec.init == "matched" else 1.0
        self.lr_multiplier = self.standard_speed / self.gain / self.width_ratio
        self.bias_lr_multiplier = (1 + self.value_bias_gain) / self.gain

    def values(self, y_BSD: Tensor, k_BGSE: Tensor) -> Tensor:
        return map_to_heads(y_BSD, self.w_v, self.b_v, self.spec.heads)

    def write(self, o_BHTV: Tensor) -> Tensor:
        return join_heads(o_BHTV) * self.gain

    def set_circuit_(self, m_HDD: Tensor) -> None:
        """Set the columns of each head's slice; the other columns are lost."""
        self.w_v.copy_(concat_heads(head_slices(m_HDD.mT).mT) / self.gain)
        zero_(self.b_v)

    def set_output_bias_(self, c_D: Tensor) -> None:
        if self.b_v is not None:
            self.b_v.copy_(c_D / self.gain)


class NoVO(_SliceOV):
    """Neither W_v nor W_o: M_h = g_h E_h E_hᵀ. A head copies its slice of x between positions.

    A learned gain per head (as in He & Hofmann's skipless block) sets how much it writes. It is
    initialized at the scale of standard's product, σ σ_o d (naive: 1). A single number cannot move
    like two matrices, so its learning rate is not matched.
    """

    equation = "M_h = g_h E_h E_hᵀ, slices in and out"
    params = "h"
    removes = "W_v, W_o"
    source = "He & Hofmann 2024"
    one_width_reason = "a slice of one stream is written to a slice of the other"

    def __init__(self, spec: Spec, qk: QK) -> None:
        super().__init__(spec, qk)
        self.gain = nn.Parameter(torch.empty(spec.heads))
        self.b_o = empty_bias(spec, spec.d_model)

    def write(self, o_BHTV: Tensor) -> Tensor:
        written_BTD = join_heads(o_BHTV * self.gain.view(-1, 1, 1))
        return written_BTD if self.b_o is None else written_BTD + self.b_o

    def set_circuit_(self, m_HDD: Tensor) -> None:
        """Set each gain to the mean of the diagonal of its slice, the nearest."""
        own_HKK = head_slices(head_slices(m_HDD).mT)
        self.gain.copy_(own_HKK.diagonal(dim1=1, dim2=2).mean(1))
        zero_(self.b_o)

    def set_nearest_(self, m_HDD: Tensor, moments: Moments) -> None:
        """Predict each head's output in its slice by a multiple of what it copies."""
        assert moments.z_HDD is not None
        crossed_HKK = head_slices(head_slices(moments.z_HDD @ m_HDD).mT)
        copied_HKK = head_slices(head_slices(moments.z_HDD).mT)
        traces = [m_HKK.diagonal(dim1=1, dim2=2).sum(1) for m_HKK in (crossed_HKK, copied_HKK)]
        self.gain.copy_(traces[0] / traces[1])
        zero_(self.b_o)

    def adjust_init_(self) -> None:
        spec = self.spec
        self.gain.fill_(spec.score_std * spec.residual if spec.init == "matched" else 1.0)
