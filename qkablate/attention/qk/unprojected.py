"""Queries or keys without a matrix: slices of the stream, or none at all.

Head h reads its slice x[h·k : (h + 1)·k], which the d × k matrix E_h selects. A slice of a
normalized x is 1/(σ√d) times as long as a projected query; the matched initialization puts that
factor into the scale. Shape suffixes as in base.py.
"""

import math

import torch
from torch import Tensor, nn

from qkablate.attention.linalg import fit_slices, head_slices
from qkablate.attention.projection.moments import Moments, with_bias
from qkablate.attention.qk.base import QK
from qkablate.attention.spec import Spec
from qkablate.attention.tensors import (
    concat_heads,
    empty_bias,
    empty_matrix,
    map_to_heads,
    split_heads,
)


class _SliceQK(QK):
    """Base of the circuits that read slices, on both sides unless a subclass projects one."""

    factors = 1
    has_head_slices = True
    source = "Karbevski & Mijoski"
    cached = "x"

    def queries(self, x_BTD: Tensor) -> Tensor:
        return split_heads(x_BTD, self.spec.heads)

    def keys(self, y_BSD: Tensor) -> Tensor:
        return split_heads(y_BSD, self.spec.heads)


class NoQK(_SliceQK):
    """Slices on both sides, B_h = E_h E_hᵀ, without parameters.

    The scale gives the scores of two different tokens standard's spread; a token scores √k times as
    much with itself, as in shared_qk, so the match is `none` except in cross-attention.
    """

    match = "none"
    equation = "B_h = E_h E_hᵀ, q = k = a slice of x"
    params = "0"
    removes = "W_q, W_k"
    one_width_reason = "a slice of one stream multiplies a slice of the other"

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.only_diagonal_differs = spec.init == "matched"
        if spec.init == "matched":
            self.match = "spread" if spec.is_cross else "none"
            self.scale = spec.score_std / math.sqrt(spec.d_head)


class _OneSidedQK(_SliceQK):
    """Base of the circuits with one projection and one slice."""

    match = "spread"
    naive_match = "none"
    params = "d e"

    def _match_(self, projection_std: float, matched_lr: float) -> None:
        """Set scale and rate, given the size of what standard has in place of the slice."""
        # Unscaled, a step moves the scores 1/(2 σ√d) times as far as standard's; matched, half.
        if self.spec.init == "matched":
            self.scale *= projection_std
            self.lr_multiplier = matched_lr
        else:
            self.lr_multiplier = matched_lr * projection_std


class NoQ(_OneSidedQK):
    """No W_q (Karbevski & Mijoski, 2025): B_h = E_h W_k,hᵀ; with one head it equals merged_w.

    Of the biases b_k remains, as in standard.
    """

    equation = "B_h = E_h W_kᵀ, q is a slice of x"
    removes = "W_q"
    cached = "k"

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.w_k = empty_matrix(spec.d_keys, spec.heads * spec.d_head)
        self.b_k = empty_bias(spec, spec.heads * spec.d_head)
        self._match_(spec.projection_std, 1 + 1 / spec.key_speed)

    def keys(self, y_BSD: Tensor) -> Tensor:
        return map_to_heads(y_BSD, self.w_k, self.b_k, self.spec.heads)

    def set_circuit_(self, b_HDD: Tensor, u_HD: Tensor | None = None) -> None:
        """Set the rows of each head's slice; the other rows and u are lost."""
        self._set_rows_(head_slices(b_HDD))

    def set_nearest_(self, b_HDD: Tensor, u_HD: Tensor | None, moments: Moments) -> None:
        """Predict the queries from the slice alone, by least squares."""
        self._set_rows_(fit_slices(moments.x_LL, with_bias(b_HDD, u_HD), self.spec.d_head))

    def _set_rows_(self, rows_HKD: Tensor) -> None:
        self.w_k.copy_(concat_heads(rows_HKD.mT))
        if self.b_k is not None:
            self.b_k.zero_()


class NoK(_OneSidedQK):
    """No W_k: head h's key is its slice of x, B_h = W_q,h E_hᵀ; initialized and scaled as NoQ.

    In cross-attention the slice is as wide as the source has dimensions per head, and so are the
    queries.
    """

    equation = "B_h = W_q E_hᵀ, k is a slice of x"
    removes = "W_k"

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.width = spec.d_keys // spec.heads
        self.scale = 1 / math.sqrt(self.width)
        self.w_q = empty_matrix(spec.d_model, spec.d_keys)
        self.b_q = empty_bias(spec, spec.d_keys)
        root = math.sqrt(spec.d_model / spec.d_keys)
        self._match_(spec.key_std, (1 + spec.key_speed) * root)
        self.bias_lr_multiplier = root if spec.init == "matched" else root * spec.key_std

    def queries(self, x_BTD: Tensor) -> Tensor:
        return map_to_heads(x_BTD, self.w_q, self.b_q, self.spec.heads)

    def set_circuit_(self, b_HDD: Tensor, u_HD: Tensor | None = None) -> None:
        """Set the columns (and entries of u) of each head's slice; the others are lost."""
        self._set_columns_(head_slices(with_bias(b_HDD, u_HD).mT).mT)

    def set_nearest_(self, b_HDD: Tensor, u_HD: Tensor | None, moments: Moments) -> None:
        """Predict the keys from the slice alone, by least squares."""
        keys_DD, target_HLD = moments.key_covariance(), with_bias(b_HDD, u_HD)
        self._set_columns_(fit_slices(keys_DD, target_HLD.mT, self.width).mT)

    def _set_columns_(self, columns_HLK: Tensor) -> None:
        self.w_q.copy_(concat_heads(columns_HLK[:, :-1]))
        if self.b_q is not None:
            self.b_q.copy_(columns_HLK[:, -1].flatten())


class Uniform(QK):
    """All scores are 0: every visible position has the same weight, the floor for baselines."""

    factors = 1
    match = "none"
    equation = "score = 0"
    params = "0"
    removes = "W_q, W_k, scores"
    source = "floor"
    cached = ""
    can_start_symmetric = True  # it has no W_q and W_k that could differ
    scores_are_zero = True  # with any position but alibi
    no_circuit_reason = "the scores do not depend on x"

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.width, self.scale = 0, 1.0

    def queries(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.new_empty(x_BTD.shape[0], self.spec.heads, x_BTD.shape[1], 0)

    def keys(self, y_BSD: Tensor) -> Tensor:
        return self.queries(y_BSD)


class StaticScores(Uniform):
    """A learned table of T × S scores per head (the random Synthesizer of Tay et al., 2020).

    Positions attend to positions regardless of content, up to the context of the model. The table
    is initialized with standard's spread. One Adam step lowers the loss over causal scores by
    η Σ|gradient| over its T²/2 entries; matching standard's 2 d² entries takes
    2√2 d² σ√d / (h T √k) of the learning rate. Without the causal mask all entries are used:
    2 d² σ√d / (h √(T S k)).
    """

    scores_are_zero = False
    match = "spread"
    naive_match = "none"
    can_start_symmetric = False
    equation = "score(i, j) = a learned table"
    tables = ("table",)
    params = "h T S"
    removes = "W_q, W_k, content"
    source = "Tay et al. 2020"

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        assert spec.context is not None
        keys = spec.source or spec.context
        self.table = nn.Parameter(torch.empty(spec.heads, spec.context, keys))
        moved = spec.heads * math.sqrt(spec.context * keys) * math.sqrt(spec.d_head)
        entries = math.sqrt(2 if spec.causal else 1) * spec.d_model**2
        speed = (1 + spec.key_speed) * entries * spec.key_std
        self.lr_multiplier = speed / moved

    def adjust_init_(self) -> None:
        if self.spec.init == "matched":
            self.table.mul_(self.spec.score_std / self.spec.sigma)

    def score_bias(self, first: int, queries: int, keys: int) -> Tensor | None:
        for needed, available in zip((first + queries, keys), self.table.shape[1:], strict=True):
            if needed > available:
                raise ValueError(f"static_scores has {available} positions, not {needed}")
        return self.table[:, first : first + queries, :keys]
