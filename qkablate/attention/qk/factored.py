"""B_h as a product of free factors. Shape suffixes as in base.py, and R for a rank."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter

from qkablate.attention.linalg import solve_bias, truncated_svd
from qkablate.attention.qk.base import QK
from qkablate.attention.spec import Spec, UnsupportedCombination
from qkablate.attention.tensors import (
    apply_matrix,
    by_head,
    concat_heads,
    empty_bias,
    empty_matrix,
    map_to_heads,
)


class SeparateQK(QK):
    """Standard attention (Vaswani et al., 2017): B_h = W_q,h W_k,hᵀ, of rank at most d_head.

    Where W_q starts as a copy of W_k, the scores start as those of shared_qk.
    """

    equation = "B_h = W_q W_kᵀ"
    params = "d² + d e"
    source = "Vaswani et al. 2017"
    can_start_symmetric: ClassVar[bool] = True
    keys_are_free: ClassVar[bool] = True

    def __init__(self, spec: Spec, width: int | None = None, key_heads: int | None = None) -> None:
        super().__init__(spec)
        self.width = spec.d_head if width is None else width
        self.key_heads = spec.heads if key_heads is None else key_heads
        self.scale = 1 / math.sqrt(self.width)
        self.w_q = empty_matrix(spec.d_model, spec.heads * self.width)
        self.w_k = empty_matrix(spec.d_keys, self.key_heads * self.width)
        # b_k only shifts rows of scores, which softmax is invariant to; GPT-2 has it.
        self.b_q = empty_bias(spec, spec.heads * self.width)
        self.b_k = empty_bias(spec, self.key_heads * self.width)
        self.only_diagonal_differs = spec.symmetric and self.width == spec.d_head

    def adjust_init_(self) -> None:
        if self.spec.symmetric:
            self.w_q.copy_(self.w_k)

    def head_count(self, name: str) -> int:
        return self.key_heads if name == "w_k" else self.spec.heads

    def queries(self, x_BTD: Tensor) -> Tensor:
        return map_to_heads(x_BTD, self.w_q, self.b_q, self.spec.heads)

    def keys(self, y_BSD: Tensor) -> Tensor:
        return map_to_heads(y_BSD, self.w_k, self.b_k, self.key_heads)

    def set_circuit_(self, b_HDD: Tensor, u_HD: Tensor | None = None) -> None:
        """Set the nearest product of this rank; heads that share keys share the right factor."""
        per_group = self.spec.heads // self.key_heads
        stacked_GCD = b_HDD.unflatten(0, (self.key_heads, per_group)).flatten(1, 2)
        w_q_GCE, w_k_GDE = truncated_svd(stacked_GCD, self.width)
        self.w_q.copy_(concat_heads(w_q_GCE.unflatten(1, (per_group, -1)).flatten(0, 1)))
        self.w_k.copy_(concat_heads(w_k_GDE))
        if self.b_q is not None and self.b_k is not None:
            self.b_q.copy_(solve_bias(w_k_GDE.repeat_interleave(per_group, 0), u_HD))
            self.b_k.zero_()
        elif u_HD is not None:
            raise UnsupportedCombination("this circuit has no bias to hold u")

    def set_factors_(self, left_HLE: Tensor, w_GDE: Tensor) -> None:
        """Set queries and keys of equal norm."""
        per_group = len(left_HLE) // len(w_GDE)
        ratio = left_HLE.norm() / (w_GDE.norm() * math.sqrt(per_group))
        gain = torch.where(ratio > 0, ratio, 1).sqrt()
        self.w_q.copy_(concat_heads(left_HLE[:, :-1]) / gain)
        self.w_k.copy_(concat_heads(w_GDE) * gain)
        if self.b_q is not None and self.b_k is not None:
            self.b_q.copy_(left_HLE[:, -1].flatten() / gain)
            self.b_k.zero_()


class LowRankQK(SeparateQK):
    """W_h = U_h V_hᵀ of any rank, below or above d_head.

    At rank d_head it equals standard bit for bit. With the scale 1/√r the initial scores have
    standard's spread. A step moves them √(r/k) times as far: r entries of each factor, each
    weighted by 1/√r.
    """

    equation = "B_h = U Vᵀ of rank r"
    params = "h d r + h e r"
    source = "Bhojanapalli et al. 2020"
    uses: ClassVar[tuple[str, ...]] = ("rank",)

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec, width=spec.rank)
        if spec.init == "naive":  # the usual 1/√d_head: the spread grows with the rank
            self.scale = 1 / math.sqrt(spec.d_head)
        same = self.width == spec.d_head
        self.match = "exact" if same else "spread" if spec.init == "matched" else "none"
        ratio = spec.d_head / self.width
        self.lr_multiplier = math.sqrt(ratio) if spec.init == "matched" else ratio
        self.bias_lr_multiplier = self.lr_multiplier


class WideQK(LowRankQK):
    """Queries and keys as wide as the stream: B_h has full rank but is still a product of two."""

    equation = "B_h = W_q W_kᵀ, d_model wide"
    params = "h d² + h d e"
    source = "Bhojanapalli et al. 2020"
    uses: ClassVar[tuple[str, ...]] = ()

    def __init__(self, spec: Spec) -> None:
        super().__init__(replace(spec, rank=spec.d_model))


class ReassociatedQK(SeparateQK):
    """Standard's parameters multiplied in another order: X (W_q W_kᵀ) Xᵀ.

    The same function as standard, rounded differently: the gap between the two is what rounding
    alone does to training, the noise floor of every gap.
    """

    keys_are_free = False  # they are the stream
    equation = "B_h = W_q W_kᵀ, multiplied first"
    cached = "x"
    no_rope_reason = "X (W_q W_kᵀ) Xᵀ leaves no queries and keys of d_head to rotate"

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.width, self.key_heads = spec.d_keys, 1

    def unused_parameters(self) -> list[Parameter]:
        return [] if self.b_k is None else [self.b_k]

    def queries(self, x_BTD: Tensor) -> Tensor:
        heads, (w_q_HDK, w_k_HDK) = self.spec.heads, self.low_rank_factors()
        u_F = None  # b_k is left out: softmax is invariant to it
        if self.b_q is not None:
            u_F = (w_k_HDK @ self.b_q.view(heads, -1, 1)).flatten()
        return map_to_heads(x_BTD, concat_heads(w_q_HDK @ w_k_HDK.mT), u_F, heads)

    def keys(self, y_BSD: Tensor) -> Tensor:
        return y_BSD.unsqueeze(1)

    def low_rank_factors(self) -> tuple[Tensor, Tensor]:
        return by_head(self.w_q, self.spec.heads), by_head(self.w_k, self.spec.heads)

    def set_circuit_(self, b_HDD: Tensor, u_HD: Tensor | None = None) -> None:
        raise UnsupportedCombination(
            "standard_reassociated is standard in another order of multiplication; use standard"
        )

    def head_count(self, name: str) -> int:
        return self.spec.heads

    def flops_per_token(self) -> int:
        return 2 * self.spec.heads * self.spec.d_model * self.spec.d_keys

    def flops_per_key(self) -> int:
        return 0

    def flops_per_pass(self) -> int:
        return 2 * self.w_k.numel() * (self.spec.d_model + self.spec.bias)


class GroupedQK(SeparateQK):
    """Keys shared by the heads of a group (Shazeer, 2019; Ainslie et al., 2023).

    The gradient of a shared W_k sums over h/g heads, so it is √(h/g) times as large, and there are
    g/h times as many matrices.
    """

    equation = "B_h = W_q W_k,gᵀ, g keys"
    params = "d² + e g k"
    removes = "part of W_k"
    can_start_symmetric: ClassVar[bool] = False
    source = "Ainslie et al. 2023"
    uses: ClassVar[tuple[str, ...]] = ("groups",)

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec, key_heads=spec.groups)
        self.match = "exact" if spec.groups == spec.heads else "spread"
        speed = spec.key_speed
        self.lr_multiplier = (1 + speed) / (1 + speed * math.sqrt(self.key_heads / spec.heads))


class FourMatrixQK(SeparateQK):
    """Two factors on each side: q = x A_q W_q and k = y A_k W_k, with A as wide as its stream.

    It represents the same functions as standard (the factors fold) but trains differently. A is
    shared by all heads and initialized with entries of 1/√d, so that x A is as long as x. The
    gradient of A sums over all heads, that of W over one: the sum of gradients is (1 + σ√d) times
    standard's.
    """

    factors, key_factors = 4, 2
    can_start_symmetric: ClassVar[bool] = False
    equation = "B_h = A_q W_q (A_k W_k)ᵀ"
    params = "2 d² + e² + d e"
    source = "question: why not four?"

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.a_q, self.a_k = (empty_matrix(d, d) for d in (spec.d_model, spec.d_keys))
        speed, length, ratio = spec.key_speed, spec.projection_std, spec.key_ratio
        root = math.sqrt(spec.d_keys / spec.d_model)
        if spec.init == "matched":
            self.match = "spread"
            moved = 1 + length + speed * (1 + length * ratio * root)
        else:
            # Unscaled, x A is σ√d times as long as x on both sides, so gradients are σ²d times as
            # large.
            self.match = "none"
            moved = length**2 * ratio * (2 + speed * (1 + root))
            self.bias_lr_multiplier = 1 / spec.key_std
        self.lr_multiplier = (1 + speed) / moved

    def queries(self, x_BTD: Tensor) -> Tensor:
        return super().queries(apply_matrix(x_BTD, self.a_q))

    def keys(self, y_BSD: Tensor) -> Tensor:
        return super().keys(apply_matrix(y_BSD, self.a_k))

    def adjust_init_(self) -> None:
        if self.spec.init == "matched":
            self.a_q.div_(self.spec.projection_std)
            self.a_k.div_(self.spec.key_std)

    def set_circuit_(self, b_HDD: Tensor, u_HD: Tensor | None = None) -> None:
        super().set_circuit_(b_HDD, u_HD)
        self._set_second_factors_()

    def set_factors_(self, left_HLE: Tensor, w_GDE: Tensor) -> None:
        super().set_factors_(left_HLE, w_GDE)
        self._set_second_factors_()

    def _set_second_factors_(self) -> None:
        for a in (self.a_q, self.a_k):
            a.copy_(torch.eye(len(a)))


class CollaborativeQK(QK):
    """Shared projections, and a mixing vector per head (Cordonnier et al., 2020).

    S_h = (X W_q ∘ m_h)(X W_k)ᵀ with D̃ = rank shared dimensions. The scale √(h/D̃) and mixing
    entries of 1/√h give standard's spread. A step moves the scores √(D̃/d) times as far as
    standard's, and the mixing adds h σ/(2√d) of that.
    """

    factors = 3
    equation = "B_h = W_q diag(m_h) W_kᵀ, W shared by heads"
    params = "d r + e r + h r"
    removes = "W_q, W_k per head"
    source = "Cordonnier et al. 2020"
    uses: ClassVar[tuple[str, ...]] = ("rank",)
    head_dims: ClassVar[Mapping[str, int]] = {}
    tables = ("mix",)

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        assert spec.rank is not None
        self.width, self.key_heads = spec.rank, 1
        self.scale = math.sqrt(spec.heads / spec.rank)
        self.w_q, self.w_k = (empty_matrix(d, spec.rank) for d in (spec.d_model, spec.d_keys))
        self.mix = torch.nn.Parameter(torch.empty(spec.heads, 1, spec.rank))
        self.b_q = empty_bias(spec, spec.rank)  # mixed per head, the content bias of the paper
        self.match = "spread" if spec.init == "matched" else "none"
        h, share = spec.heads, math.sqrt(spec.rank / spec.d_model)
        # Naive: 0.2 for any number of heads, as in the authors' code.
        self.mix_std = 1 / math.sqrt(h) if spec.init == "matched" else 0.2
        # The gradient of W is weighted by a column of mixing entries: its mean length.
        half = math.exp(math.lgamma((h + 1) / 2) - math.lgamma(h / 2))
        column = self.mix_std * math.sqrt(2) * half
        mixing = h * spec.sigma / ((1 + spec.key_speed) * math.sqrt(spec.d_model))
        self.lr_multiplier = 1 / (share * (column + mixing))
        mix_norm = self.mix_std * math.sqrt(h)
        self.bias_lr_multiplier = math.sqrt(spec.d_model / spec.rank) / mix_norm

    def queries(self, x_BTD: Tensor) -> Tensor:
        return apply_matrix(x_BTD, self.w_q, self.b_q).unsqueeze(1) * self.mix

    def keys(self, y_BSD: Tensor) -> Tensor:
        return apply_matrix(y_BSD, self.w_k).unsqueeze(1)

    def adjust_init_(self) -> None:
        self.mix.mul_(self.mix_std / self.spec.sigma)

    def set_circuit_(self, b_HDD: Tensor, u_HD: Tensor | None = None) -> None:
        """Assign D̃/h of the shared dimensions to each head; at D̃ = d this holds standard."""
        heads, share = self.spec.heads, self.width // self.spec.heads
        if not share:
            raise UnsupportedCombination(f"{self.width} shared dimensions are fewer than the heads")
        w_q_HDR, w_k_HDR = truncated_svd(b_HDD, share)
        used = share * heads
        for w, w_HDR in ((self.w_q, w_q_HDR), (self.w_k, w_k_HDR)):
            w.zero_()[:, :used] = concat_heads(w_HDR)
        self.mix.zero_()[:, 0, :used] = torch.eye(heads).repeat_interleave(share, 1)
        if self.b_q is not None:
            self.b_q.zero_()[:used] = solve_bias(w_k_HDR, u_HD)
