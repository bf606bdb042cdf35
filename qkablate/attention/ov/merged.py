"""The OV circuit as one free matrix per head."""

import torch
from torch import Tensor

from qkablate.attention.ov.base import OV, join_heads, zero_
from qkablate.attention.ov.factored import SeparateOV
from qkablate.attention.qk import QK
from qkablate.attention.qk.no_content import Uniform
from qkablate.attention.spec import Draw, Spec, matrix, project, vector


class MergedOV(OV):
    """One free d × d matrix per head instead of W_v W_o.

    Computed as (A_h X) M_h: the heads average x, so a decoder caches only x, and no values of width
    h·d are stored. The FLOPs are those of A_h (X M_h).
    """

    factors = 1
    equation = "M_h = W, free d × d"
    params = "h d²"
    removes = "W_v, W_o for one W"
    source = "Elhage et al. 2021"
    cached = "x"
    naive_match = "none"

    def __init__(self, spec: Spec, qk: QK) -> None:
        super().__init__(spec, qk)
        self.width, self.value_heads = spec.d_model, 1
        self.w_ov = matrix(spec.heads * spec.d_model, spec.d_model)
        self.b_ov = vector(spec, spec.d_model)  # as expressive as b_v and b_o

    def values(self, y_BSD: Tensor, k_BGSE: Tensor) -> Tensor:
        return y_BSD.unsqueeze(1)

    def write(self, o_BHTV: Tensor) -> Tensor:
        return project(join_heads(o_BHTV), self.w_ov, self.b_ov)

    @torch.no_grad()
    def init_(self, draw: Draw) -> None:
        if self.spec.init == "naive":
            super().init_(draw)
            return
        # The product of the tensors that standard draws under these names.
        qk = Uniform(self.spec)
        standard = SeparateOV(self.spec, qk)
        standard.init_(draw)
        self.set_circuit_(standard.circuit(qk))
        if self.b_ov is not None and standard.b_o is not None and standard.b_v is not None:
            self.b_ov.copy_(standard.b_o + standard.b_v @ standard.w_o)

    @torch.no_grad()
    def set_circuit_(self, m_HDD: Tensor) -> None:
        """Set any d × d matrices."""
        self.w_ov.copy_(m_HDD.flatten(0, 1))
        zero_(self.b_ov)

    @torch.no_grad()
    def set_output_bias_(self, c_D: Tensor) -> None:
        if self.b_ov is not None:
            self.b_ov.copy_(c_D)

    def circuit(self, qk: QK) -> Tensor:
        m_HDD: Tensor = self.w_ov.unflatten(0, (self.spec.heads, -1))
        return m_HDD

    def low_rank_factors(self, qk: QK) -> None:
        return None

    def lr_multiplier(self) -> float:
        return self.standard_speed / self.spec.heads

    def bias_lr_multiplier(self) -> float:
        return 1 + self.value_bias_gain
