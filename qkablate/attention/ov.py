"""The OV circuit: ways to parametrise what a key position writes,  write_h(j) = x_jᵀ M_h.

Shape suffixes as in qk/base.py, V for the width of a head's value and G for value heads. In the
first-step ratios, standard's speed is √d (σ + σ_o): W_v hears W_o's entries (σ_o), W_o hears values
(σ√d).
"""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from qkablate.attention.qk import QK
from qkablate.attention.qk.shared import SharedQK
from qkablate.attention.spec import (
    Circuit,
    Draw,
    Meaningless,
    Spec,
    matrix,
    project,
    side_by_side,
    split_heads,
    truncated_svd,
    vector,
)


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
        raise NotImplementedError

    def write(self, o_BHTV: Tensor) -> Tensor:
        """From the heads' averages to what the layer adds to the residual stream."""
        raise NotImplementedError

    def circuit(self, qk: QK) -> Tensor:
        """M_HDD."""
        d, heads = self.spec.d_model, self.spec.heads
        # Values are affine and writing is, so the images of 0 and of the unit vectors say all.
        x_1ND = torch.cat([self.like.new_zeros(1, d), torch.eye(d).to(self.like)]).unsqueeze(0)
        v_GNV = self.values(x_1ND, qk.keys(x_1ND))[0]
        v_HDV = (v_GNV[:, 1:] - v_GNV[:, :1]).repeat_interleave(heads // v_GNV.shape[0], 0)
        one_head_HHDV = torch.diag_embed(v_HDV.movedim(0, -1)).permute(2, 3, 0, 1)
        nothing_HHDV = torch.zeros_like(one_head_HHDV[:1])
        return self.write(one_head_HHDV) - self.write(nothing_HHDV)

    def set_circuit_(self, m_HDD: Tensor) -> None:
        """Take over M_h, or what of it this form can hold."""
        raise Meaningless(f"{type(self).__name__} cannot be set from a given M_h")

    @property
    def speed(self) -> float:
        """Σ|gradient| of standard's W_v and W_o at the start, in units of d² entries of size 1."""
        spec = self.spec
        return math.sqrt(spec.d_model) * spec.sigma * (1 + spec.residual)


class SeparateOV(OV):
    """Standard attention: M_h = W_v,h W_o,h."""

    equation = "M_h = W_v W_o"
    params = "2 d²"
    source = ""

    def __init__(self, spec: Spec, qk: QK, value_heads: int | None = None) -> None:
        super().__init__(spec, qk)
        self.value_heads = spec.heads if value_heads is None else value_heads
        self.w_v = matrix(spec.d_model, self.value_heads * spec.d_head)
        self.w_o = matrix(spec.heads * spec.d_head, spec.d_model)
        self.b_v = vector(spec, self.value_heads * spec.d_head)
        self.b_o = vector(spec, spec.d_model)

    def values(self, y_BSD: Tensor, k_BGSE: Tensor) -> Tensor:
        return split_heads(project(y_BSD, self.w_v, self.b_v), self.value_heads)

    def write(self, o_BHTV: Tensor) -> Tensor:
        return project(join_heads(o_BHTV), self.w_o, self.b_o)

    @torch.no_grad()
    def init_(self, draw: Draw) -> None:
        for name, parameter in self.named_parameters():
            parameter.copy_(draw(name, tuple(parameter.shape), residual=name == "w_o"))

    @torch.no_grad()
    def set_circuit_(self, m_HDD: Tensor) -> None:
        """The nearest product of rank d_head; heads that share values share the left factor."""
        per_group = self.spec.heads // self.value_heads
        side_GDC = torch.stack([side_by_side(m) for m in m_HDD.split(per_group)])
        w_v_GDV, w_o_GCV = truncated_svd(side_GDC, self.width)
        self.w_v.copy_(side_by_side(w_v_GDV))
        w_o_HDV = w_o_GCV.unflatten(1, (per_group, -1)).flatten(0, 1)
        self.w_o.copy_(w_o_HDV.mT.flatten(0, 1))
        _zero_(self.b_v, self.b_o)


class GroupedOV(SeparateOV):
    """Values shared by the heads of a group, as the keys of `grouped`. A W_v hears h/g heads."""

    equation = "M_h = W_v,g W_o, g values"
    params = "d² + d g k"
    removes = "part of W_v"
    uses: ClassVar[tuple[str, ...]] = ("groups",)

    def __init__(self, spec: Spec, qk: QK) -> None:
        # Heads that share key and query scores alike would be one head, several times.
        if type(qk) is SharedQK:
            raise Meaningless(
                "shared keys are the queries, too: heads that shared them in a group would be one"
            )
        super().__init__(spec, qk, value_heads=spec.groups)
        self.match = "exact" if spec.groups == spec.heads else "spread"

    def lr_multiplier(self) -> float:
        residual, share = self.spec.residual, self.value_heads / self.spec.heads
        return (1 + residual) / (1 + residual * math.sqrt(share))


class NoV(OV):
    """No W_v: head h's values are its slice of x, M_h = g E_h W_o,h.

    A slice of a normed x is 1/(σ√d) times as long as standard's values; g = σ√d takes that back
    (naive: g = 1). W_o alone moves.
    """

    factors = 1
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
    def init_(self, draw: Draw) -> None:
        for name, parameter in self.named_parameters():
            parameter.copy_(draw(name, tuple(parameter.shape), residual=name == "w_o"))

    @torch.no_grad()
    def set_circuit_(self, m_HDD: Tensor) -> None:
        """Only the rows of the head's own slice can be held."""
        k = self.spec.d_head
        self.w_o.copy_(torch.cat([m[h * k : (h + 1) * k] for h, m in enumerate(m_HDD)]) / self.gain)
        _zero_(self.b_o)

    def lr_multiplier(self) -> float:
        return self.speed / self.gain


class NoO(OV):
    """No W_o: the heads' averages, side by side, are what the layer writes. M_h = W_v,h E_hᵀ.

    W_o multiplies by σ_o √d; a gain g of that size takes its place (naive: g = 1), and W_v is the
    very tensor that standard draws. W_v alone moves, straight into the stream.
    """

    factors = 1
    match = "spread"
    equation = "M_h = g W_v E_hᵀ, heads write their slice"
    params = "d²"
    removes = "W_o"
    source = "question: who needs W_o?"

    def __init__(self, spec: Spec, qk: QK) -> None:
        super().__init__(spec, qk)
        self.w_v = matrix(spec.d_model, spec.heads * spec.d_head)
        self.b_v = vector(spec, spec.heads * spec.d_head)
        self.gain = spec.length * spec.residual if spec.init == "matched" else 1.0
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
        _zero_(self.b_v)

    def lr_multiplier(self) -> float:
        return self.speed / self.gain


class NoVO(OV):
    """Neither: M_h = g_h E_h E_hᵀ. A head moves its slice of x from one position to another.

    With no matrix left, nothing could set how much a head writes; so it has a learned gain
    (as He & Hofmann's skipless block has), which starts at what standard's product comes to,
    σ σ_o d (naive: 1). One number a head cannot move like two matrices: its rate is not matched.
    """

    factors = 1
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
            for name, parameter in self.named_parameters():
                parameter.copy_(draw(name, tuple(parameter.shape), residual=name == "w_ov"))
            return
        # Where standard starts: the product of the very tensors standard draws under these names.
        from qkablate.attention.qk.contentless import Uniform

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
        _zero_(self.b_ov)

    def lr_multiplier(self) -> float:
        return self.speed / self.spec.heads


class TiedOV(OV):
    """V = K: the keys as projected, before norm and rotation, are the values. M_h = W_k,h W_o,h.

    W_k starts as standard's and hears both circuits; its rate is the QK circuit's. Where keys are
    not k but E wide, W_o starts at √(k/E) of its size, and E/k times as many entries are heard.
    """

    equation = "M_h = W_k W_o, V = K"
    params = "d²"
    removes = "W_v"
    source = "Kayyam et al. 2026"
    match = "spread"
    cached = "k"

    def __init__(self, spec: Spec, qk: QK) -> None:
        if qk.cached != "k":
            what = {"x": "the keys are x itself: V = K would be no_v or merged_ov"}
            raise Meaningless(what.get(qk.cached, "there are no keys to be values"))
        super().__init__(spec, qk)
        self.width, self.value_heads = qk.width, qk.key_heads
        self.params = {spec.d_head: "d²", spec.d_model: "h d²"}.get(qk.width, "h d r")
        self.w_o = matrix(spec.heads * qk.width, spec.d_model)
        self.b_o = vector(spec, spec.d_model)
        if spec.init == "naive" and qk.width != spec.d_head:
            self.match = "none"

    def values(self, y_BSD: Tensor, k_BGSE: Tensor) -> Tensor:
        return k_BGSE

    def write(self, o_BHTV: Tensor) -> Tensor:
        return project(join_heads(o_BHTV), self.w_o, self.b_o)

    @torch.no_grad()
    def init_(self, draw: Draw) -> None:
        for name, parameter in self.named_parameters():
            parameter.copy_(draw(name, tuple(parameter.shape), residual=name == "w_o"))
        if self.spec.init == "matched":
            self.w_o.mul_(math.sqrt(self.spec.d_head / self.width))

    def lr_multiplier(self) -> float:
        return self.spec.d_head / self.width


OV_CIRCUITS: dict[str, type[OV]] = {
    "separate": SeparateOV,
    "no_v": NoV,
    "no_o": NoO,
    "no_vo": NoVO,
    "merged": MergedOV,
    "tied": TiedOV,
    "grouped": GroupedOV,
}


def join_heads(o_BHTV: Tensor) -> Tensor:
    """(B, H, T, V) → (B, T, H·V)."""
    return o_BHTV.transpose(1, 2).flatten(2)


@torch.no_grad()
def _zero_(*biases: nn.Parameter | None) -> None:
    for bias in biases:
        if bias is not None:
            bias.zero_()
