"""OV circuits with free matrices: two factors, grouped or tied ones, or one merged matrix."""

import math
from typing import ClassVar

import torch
from torch import Tensor

from qkablate.attention.linalg import truncated_svd
from qkablate.attention.ov.base import OV, join_heads, zero_
from qkablate.attention.projection.moments import Moments
from qkablate.attention.projection.shared_keys import fit_outputs
from qkablate.attention.qk import QK
from qkablate.attention.qk.shared import SharedQK
from qkablate.attention.qk.unprojected import Uniform
from qkablate.attention.spec import Draw, Spec, UnsupportedCombination
from qkablate.attention.tensors import (
    apply_matrix,
    concat_heads,
    empty_bias,
    empty_matrix,
    map_to_heads,
)


class SeparateOV(OV):
    """Standard attention: M_h = W_v,h W_o,h."""

    equation = "M_h = W_v W_o"
    params = "d e + d²"

    def __init__(self, spec: Spec, qk: QK, value_heads: int | None = None) -> None:
        super().__init__(spec, qk)
        self.value_heads = spec.heads if value_heads is None else value_heads
        self.w_v = empty_matrix(spec.d_keys, self.value_heads * spec.d_head)
        self.w_o = empty_matrix(spec.heads * spec.d_head, spec.d_model)
        self.b_v = empty_bias(spec, self.value_heads * spec.d_head)
        self.b_o = empty_bias(spec, spec.d_model)

    def head_count(self, name: str) -> int:
        return self.value_heads if name == "w_v" else self.spec.heads

    def values(self, y_BSD: Tensor, k_BGSE: Tensor) -> Tensor:
        return map_to_heads(y_BSD, self.w_v, self.b_v, self.value_heads)

    def write(self, o_BHTV: Tensor) -> Tensor:
        return apply_matrix(join_heads(o_BHTV), self.w_o, self.b_o)

    def set_circuit_(self, m_HDD: Tensor) -> None:
        """Set the nearest product of rank d_head; heads that share values share the left factor."""
        per_group = self.spec.heads // self.value_heads
        side_GDC = torch.stack([concat_heads(m) for m in m_HDD.split(per_group)])
        w_v_GDV, w_o_GCV = truncated_svd(side_GDC, self.width)
        self.w_v.copy_(concat_heads(w_v_GDV))
        self.w_o.copy_(w_o_GCV.unflatten(1, (per_group, -1)).mT.flatten(0, 2))
        zero_(self.b_v, self.b_o)


class FourOV(SeparateOV):
    """Two factors before the heads: v = y A_v W_v, with A as wide as y and shared by all heads.

    The companion of `FourMatrixQK`, for the values: the same functions as standard, other training.
    The gradient of A sums over all heads, so that Σ|gradient| of the first two factors is (1 + σ√d)
    times that of standard's W_v.
    """

    factors = 3
    equation = "M_h = A_v W_v W_o"
    params = "e² + d e + d²"
    source = "Vaswani et al. 2017, read literally"
    naive_match = "none"

    def __init__(self, spec: Spec, qk: QK) -> None:
        super().__init__(spec, qk)
        self.a_v = empty_matrix(spec.d_keys, spec.d_keys)
        w_o, w_v, root = self.w_o_speed, self.w_v_speed, math.sqrt(self.width_ratio)
        if spec.init == "matched":
            self.match = "spread"
            moved = w_o + w_v * (1 + spec.key_std * root)
        else:  # y A is σ√d times as long as y, and so are the values
            self.match = "none"
            moved = spec.key_std * (w_o + w_v * (1 + root))
            self.bias_lr_multiplier = 1.0
        self.lr_multiplier = (w_o + w_v) / moved

    def values(self, y_BSD: Tensor, k_BGSE: Tensor) -> Tensor:
        return super().values(apply_matrix(y_BSD, self.a_v), k_BGSE)

    def adjust_init_(self) -> None:
        if self.spec.init == "matched":
            self.a_v.div_(self.spec.key_std)

    def set_circuit_(self, m_HDD: Tensor) -> None:
        super().set_circuit_(m_HDD)
        self.a_v.copy_(torch.eye(len(self.a_v)))


class GroupedOV(SeparateOV):
    """Values shared by the heads of a group; the gradient of a W_v sums over h/g heads."""

    equation = "M_h = W_v,g W_o, g values"
    params = "d² + e g k"
    removes = "part of W_v"
    uses: ClassVar[tuple[str, ...]] = ("groups",)

    def __init__(self, spec: Spec, qk: QK) -> None:
        # Heads with the same keys and queries would be copies of one head.
        if type(qk) is SharedQK:
            raise UnsupportedCombination(
                "shared keys are also the queries: the heads of a group would be identical"
            )
        super().__init__(spec, qk, value_heads=spec.groups)
        self.match = "exact" if spec.groups == spec.heads else "spread"
        root, gain = math.sqrt(self.value_heads / spec.heads), self.value_bias_gain
        w_o, w_v = self.w_o_speed, self.w_v_speed
        self.lr_multiplier = (w_o + w_v) / (w_o + w_v * root)
        self.bias_lr_multiplier = (1 + gain) / (1 + gain * root)


class TiedOV(OV):
    """V = K: the keys before norm and rotation are the values, M_h = W_k,h W_o,h.

    W_k is initialized as standard's and trained by both circuits, with the learning rate and the
    decay of the QK circuit; W_o takes the rest of the total decay. For keys of width E instead of k
    W_o is initialized at √(k/E) of its scale, and its gradient sums over E/k times as many entries.
    """

    equation = "M_h = W_k W_o, V = K"
    params = "d²"
    removes = "W_v"
    source = "Kayyam et al. 2026"
    match = "spread"
    cached = "k"

    def __init__(self, spec: Spec, qk: QK) -> None:
        if qk.cached != "k":
            reasons = {
                "x": "the keys are x itself, so V = K is the variant no_v or merged_ov",
                "c": "the keys are a latent stream, whose values are those of ov=latent",
            }
            no_keys = "there are no keys to use as values"
            raise UnsupportedCombination(reasons.get(qk.cached, no_keys))
        super().__init__(spec, qk)
        self.width, self.value_heads = qk.width, qk.key_heads
        self.key_decay = qk.decay * qk.key_factors
        self.params = {spec.d_head: "d²", spec.d_model: "h d²"}.get(qk.width, "h d r")
        self.w_o = empty_matrix(spec.heads * qk.width, spec.d_model)
        self.b_o = empty_bias(spec, spec.d_model)
        self.lr_multiplier = spec.d_head / self.width
        if spec.init == "naive" and qk.width != spec.d_head:
            self.match = "none"

    def values(self, y_BSD: Tensor, k_BGSE: Tensor) -> Tensor:
        return k_BGSE

    def write(self, o_BHTV: Tensor) -> Tensor:
        return apply_matrix(join_heads(o_BHTV), self.w_o, self.b_o)

    def set_given_scores_(self, m_HDD: Tensor, qk: QK, moments: Moments | None) -> None:
        """Predict the output from the keys, by least squares."""
        w_HVD = fit_outputs(m_HDD, self._unit_values(qk), moments, self.width)
        self.w_o.copy_(w_HVD.flatten(0, 1))
        zero_(self.b_o)

    @torch.no_grad()
    def init_(self, draw: Draw) -> None:
        super().init_(draw)
        if self.spec.init == "matched":
            w_o = draw("w_o", self.w_o.shape, residual=True, fan_in=self.spec.d_model)
            self.w_o.copy_(w_o * math.sqrt(self.spec.d_head / self.width))

    @property
    def decay(self) -> float:
        return 2 - self.key_decay


class MergedOV(OV):
    """One free matrix per head instead of W_v W_o.

    Computed as (A_h X) M_h: the heads average x, so a decoder caches only x, and no values of width
    h·d are stored. The FLOPs are those of A_h (X M_h).
    """

    factors = 1
    equation = "M_h = W, free d × d"
    params = "h d e"
    removes = "W_v, W_o for one W"
    source = "Elhage et al. 2021"
    cached = "x"
    naive_match = "none"

    def __init__(self, spec: Spec, qk: QK) -> None:
        super().__init__(spec, qk)
        self.width, self.value_heads = spec.d_keys, 1
        self.w_ov = empty_matrix(spec.heads * spec.d_keys, spec.d_model)
        self.b_ov = empty_bias(spec, spec.d_model)  # as expressive as b_v and b_o
        self.lr_multiplier = self.standard_speed / spec.heads / self.width_ratio
        self.bias_lr_multiplier = 1 + self.value_bias_gain

    def values(self, y_BSD: Tensor, k_BGSE: Tensor) -> Tensor:
        return y_BSD.unsqueeze(1)

    def write(self, o_BHTV: Tensor) -> Tensor:
        return apply_matrix(join_heads(o_BHTV), self.w_ov, self.b_ov)

    @torch.no_grad()
    def init_(self, draw: Draw) -> None:
        if self.spec.init == "naive":
            return super().init_(draw)
        # The product of the tensors that standard draws under these names.
        qk = Uniform(self.spec)
        standard = SeparateOV(self.spec, qk)
        standard.init_(draw)
        self.set_circuit_(standard.circuit(qk))
        if self.b_ov is not None and standard.b_o is not None and standard.b_v is not None:
            self.b_ov.copy_(standard.b_o + standard.b_v @ standard.w_o)

    def set_circuit_(self, m_HDD: Tensor) -> None:
        """Set any matrices."""
        self.w_ov.copy_(m_HDD.flatten(0, 1))
        zero_(self.b_ov)

    def set_output_bias_(self, c_D: Tensor) -> None:
        if self.b_ov is not None:
            self.b_ov.copy_(c_D)

    def circuit(self, qk: QK) -> Tensor:
        return torch.unflatten(self.w_ov, 0, (self.spec.heads, -1))

    def low_rank_factors(self, qk: QK) -> None:
        return None
