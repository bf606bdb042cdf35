"""The OV circuit as one free matrix per head."""

import torch
from torch import Tensor

from qkablate.attention.ov.base import OV, join_heads, zero_
from qkablate.attention.ov.factored import SeparateOV
from qkablate.attention.qk import QK
from qkablate.attention.qk.contentless import Uniform
from qkablate.attention.spec import (
    Draw,
    Spec,
    matrix,
    project,
    vector,
)


class MergedOV(OV):
    """One free d × d matrix per head instead of W_v W_o.

    Computed as (A_h X) M_h: the averages are of x, so a decoder keeps x alone, and no value h·d
    wide is ever written. That costs the same products as A_h (X M_h).
    """

    factors = 1
    equation = "M_h = W, free d × d"
    params = "h d²"
    removes = "W_v, W_o for one W"
    source = "Elhage et al. 2021"
    cached = "x"

    def __init__(self, spec: Spec, qk: QK) -> None:
        super().__init__(spec, qk)
        self.width, self.value_heads = spec.d_model, 1
        self.w_ov = matrix(spec.heads * spec.d_model, spec.d_model)
        self.b_ov = vector(spec, spec.d_model)  # all that b_v and b_o can do
        if spec.init == "naive":
            self.match = "none"

    def values(self, y_BSD: Tensor, k_BGSE: Tensor) -> Tensor:
        return y_BSD.unsqueeze(1)

    def write(self, o_BHTV: Tensor) -> Tensor:
        return project(join_heads(o_BHTV), self.w_ov, self.b_ov)

    @torch.no_grad()
    def init_(self, draw: Draw) -> None:
        if self.spec.init == "naive":
            super().init_(draw)
            return
        # Where standard starts: the product of the very tensors standard draws under these names.
        nothing = Uniform(self.spec)
        twin = SeparateOV(self.spec, nothing)
        twin.init_(draw)
        self.set_circuit_(twin.circuit(nothing))
        if self.b_ov is not None and twin.b_o is not None and twin.b_v is not None:
            self.b_ov.copy_(twin.b_o + twin.b_v @ twin.w_o)

    @torch.no_grad()
    def set_circuit_(self, m_HDD: Tensor) -> None:
        """Every d × d matrix can be held."""
        self.w_ov.copy_(m_HDD.flatten(0, 1))
        zero_(self.b_ov)

    @torch.no_grad()
    def set_offset_(self, c_D: Tensor) -> None:
        if self.b_ov is not None:
            self.b_ov.copy_(c_D)

    def circuit(self, qk: QK) -> Tensor:
        return self.w_ov.unflatten(0, (self.spec.heads, -1))

    def thin(self, qk: QK) -> None:
        return None

    def lr_multiplier(self) -> float:
        return self.speed / self.spec.heads

    def bias_lr_multiplier(self) -> float:
        return 1 + self.written
