"""OV circuits that leave a matrix out: heads read or write their slice of the stream."""

import torch
from torch import Tensor, nn

from qkablate.attention.ov.base import OV, join_heads, zero_
from qkablate.attention.projection.moments import Seen
from qkablate.attention.qk import QK
from qkablate.attention.spec import (
    Draw,
    Spec,
    matrix,
    project,
    split_heads,
    vector,
)


class NoV(OV):
    """No W_v: head h's values are its slice of x, M_h = g E_h W_o,h.

    A slice of a normed x is 1/(σ√d) times as long as standard's values; g = σ√d takes that back
    (naive: g = 1). W_o alone moves.
    """

    factors = 1
    has_places = True
    match = "spread"
    equation = "M_h = g E_h W_o, v is a slice of x"
    params = "d²"
    removes = "W_v"
    source = "question: is W_v needed?"
    cached = "x"

    def __init__(self, spec: Spec, qk: QK) -> None:
        super().__init__(spec, qk)
        self.w_o = matrix(spec.heads * spec.d_head, spec.d_model)
        self.b_o = vector(spec, spec.d_model)
        self.gain = spec.length if spec.init == "matched" else 1.0
        if spec.init == "naive":
            self.match = "none"

    def values(self, y_BSD: Tensor, k_BGSE: Tensor) -> Tensor:
        return split_heads(y_BSD, self.spec.heads)

    def write(self, o_BHTV: Tensor) -> Tensor:
        return project(join_heads(o_BHTV) * self.gain, self.w_o, self.b_o)

    @torch.no_grad()
    def set_circuit_(self, m_HDD: Tensor) -> None:
        """Only the rows of the head's own slice can be held."""
        k = self.spec.d_head
        self.w_o.copy_(torch.cat([m[h * k : (h + 1) * k] for h, m in enumerate(m_HDD)]) / self.gain)
        zero_(self.b_o)

    @torch.no_grad()
    def set_nearest_(self, m_HDD: Tensor, seen: Seen) -> None:
        """The slice stands for the rest of what a head averages, too, as well as it can."""
        held_HDD = torch.zeros_like(m_HDD)
        for head, (m_DD, z_DD) in enumerate(zip(m_HDD, seen.z_HDD, strict=True)):
            own = slice(head * self.spec.d_head, (head + 1) * self.spec.d_head)
            held_HDD[head, own] = torch.linalg.solve(z_DD[own, own], z_DD[own] @ m_DD)
        self.set_circuit_(held_HDD)

    def lr_multiplier(self) -> float:
        return self.speed / self.gain

    def bias_lr_multiplier(self) -> float:
        return 1 + self.written


class NoO(OV):
    """No W_o: the heads' averages, side by side, are what the layer writes. M_h = W_v,h E_hᵀ.

    W_o multiplies by σ_o √d; a gain g of that size takes its place (naive: g = 1), and W_v is the
    very tensor that standard draws. W_v alone moves, straight into the stream.
    """

    factors = 1
    has_places = True
    match = "spread"
    equation = "M_h = g W_v E_hᵀ, heads write their slice"
    params = "d²"
    removes = "W_o"
    source = "question: who needs W_o?"

    def __init__(self, spec: Spec, qk: QK) -> None:
        super().__init__(spec, qk)
        self.w_v = matrix(spec.d_model, spec.heads * spec.d_head)
        self.b_v = vector(spec, spec.heads * spec.d_head)
        self.gain = self.written if spec.init == "matched" else 1.0
        if spec.init == "naive":
            self.match = "none"

    def values(self, y_BSD: Tensor, k_BGSE: Tensor) -> Tensor:
        return split_heads(project(y_BSD, self.w_v, self.b_v), self.spec.heads)

    def write(self, o_BHTV: Tensor) -> Tensor:
        return join_heads(o_BHTV) * self.gain

    @torch.no_grad()
    def set_circuit_(self, m_HDD: Tensor) -> None:
        """Only the columns of the head's own slice can be held."""
        k = self.spec.d_head
        columns = [m[:, h * k : (h + 1) * k] for h, m in enumerate(m_HDD)]
        self.w_v.copy_(torch.cat(columns, 1) / self.gain)
        zero_(self.b_v)

    @torch.no_grad()
    def set_offset_(self, c_D: Tensor) -> None:
        if self.b_v is not None:
            self.b_v.copy_(c_D / self.gain)

    def lr_multiplier(self) -> float:
        return self.speed / self.gain

    def bias_lr_multiplier(self) -> float:
        return (1 + self.written) / self.gain


class NoVO(OV):
    """Neither: M_h = g_h E_h E_hᵀ. A head moves its slice of x from one position to another.

    With no matrix left, nothing could set how much a head writes; so it has a learned gain
    (as He & Hofmann's skipless block has), which starts at what standard's product comes to,
    σ σ_o d (naive: 1). One number a head cannot move like two matrices: its rate is not matched.
    """

    factors = 1
    has_places = True
    match = "spread"
    equation = "M_h = g_h E_h E_hᵀ, slices in and out"
    params = "h"
    removes = "W_v, W_o"
    source = "He & Hofmann 2024"
    cached = "x"

    def __init__(self, spec: Spec, qk: QK) -> None:
        super().__init__(spec, qk)
        self.gain = nn.Parameter(torch.empty(spec.heads))
        self.b_o = vector(spec, spec.d_model)
        if spec.init == "naive":
            self.match = "none"

    def values(self, y_BSD: Tensor, k_BGSE: Tensor) -> Tensor:
        return split_heads(y_BSD, self.spec.heads)

    def write(self, o_BHTV: Tensor) -> Tensor:
        written_BTD = join_heads(o_BHTV * self.gain.view(-1, 1, 1))
        return written_BTD if self.b_o is None else written_BTD + self.b_o

    @torch.no_grad()
    def init_(self, draw: Draw) -> None:
        super().init_(draw)
        spec = self.spec
        self.gain.fill_(spec.score_std * spec.residual if spec.init == "matched" else 1.0)
