"""One full matrix per head in place of W_q W_kᵀ. Shape suffixes as in base.py."""

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from qkablate.attention.qk.base import QK
from qkablate.attention.qk.factored import SeparateQK
from qkablate.attention.spec import Draw, Spec, TensorMap, UnsupportedCombination
from qkablate.attention.tensors import by_head, concat_heads, empty_bias, empty_matrix, map_to_heads


class _FullMatrixQK(QK):
    """Base of the circuits that learn a full matrix W_h, and u_h where the model has biases.

    u_h = W_k b_q is as expressive as b_q and b_k. The keys are the stream itself, shared by all
    heads, which the kernels exploit. The scale is standard's 1/√d_head.
    """

    factors = 1
    removes = "W_q, W_k for one W"
    cached = "x"
    naive_match = "none"
    init_gain = 1.0  # of the initial W, relative to standard's B_h
    # Relative positions enter between W_q and W_k: x_iᵀ W_q R(j − i) W_kᵀ x_j is another matrix at
    # every distance, so no single W represents it. (Rotating x itself would be another model.)
    no_rope_reason = (
        "one W cannot be W_q R(j − i) W_kᵀ at every distance; use learned or none (decoders: or"
        " alibi)"
    )

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.width, self.key_heads = spec.d_keys, 1
        self.u: nn.Parameter | None
        # u replaces b_q alone, because softmax is invariant to b_k.
        query = spec.d_head * spec.sigma / math.sqrt(spec.d_model)
        self.bias_lr_multiplier = query / spec.key_speed
        # One Adam step of W moves the scores √d / (2 k σ) times as far as one of W_q and W_k, or
        # 1 / (k σ (1/√d + 1/√e)) times where the stream of the keys is e wide.
        self.lr_multiplier = query + self.bias_lr_multiplier

    @torch.no_grad()
    def init_(self, draw: Draw) -> None:
        """Set W to the product of the tensors that standard draws under their names."""
        if self.spec.init == "naive":
            return super().init_(partial(draw, fan_in=self.spec.d_model))
        standard = SeparateQK(self.spec)
        standard.init_(draw)
        b_HDD, u_HD = standard.circuit()
        self.set_circuit_(self.init_gain * b_HDD, u_HD)

    def keys(self, y_BSD: Tensor) -> Tensor:
        return y_BSD.unsqueeze(1)

    def low_rank_factors(self) -> None:
        return None

    def _set_bias_(self, u_HD: Tensor | None) -> None:
        if self.u is not None:
            self.u.copy_(torch.zeros_like(self.u) if u_HD is None else u_HD.flatten())
        elif u_HD is not None:
            raise UnsupportedCombination("this circuit has no bias to hold u")


class MergedQK(_FullMatrixQK):
    """One free d × d matrix per head instead of W_q W_kᵀ: B_h = W_h, of any rank.

    With W_h = W_q W_kᵀ it equals standard exactly.
    """

    equation = "B_h = W, free d × d"
    params = "h d e"
    source = "question: is one W enough?"

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.w_qk = empty_matrix(spec.d_model, spec.heads * spec.d_keys)
        self.u = empty_bias(spec, spec.heads * spec.d_keys)

    def queries(self, x_BTD: Tensor) -> Tensor:
        return map_to_heads(x_BTD, self.w_qk, self.u, self.spec.heads)

    def set_circuit_(self, b_HDD: Tensor, u_HD: Tensor | None = None) -> None:
        """Set any matrices."""
        self.w_qk.copy_(concat_heads(b_HDD))
        self._set_bias_(u_HD)

    def circuit(self) -> tuple[Tensor, Tensor | None]:
        u_HD = None if self.u is None else self.u.unflatten(0, (self.spec.heads, -1))
        return by_head(self.w_qk, self.spec.heads), u_HD


class SymmetricQK(_FullMatrixQK):
    """Merged and symmetric: W_h = W_hᵀ, indefinite. The parameters are one triangle of it.

    The matched initialization is √2 times the symmetric part of standard's B_h: the same spread of
    scores between two tokens, √2 of it for a token with itself. A triangle has half the entries,
    each with √2 of the gradient, so the learning rate is √2 times that of merged_w.
    """

    equation = "B_h = W = Wᵀ, d × d"
    params = "h d (d+1) / 2"
    source = "Saponati et al. 2025"
    one_width_reason = "a symmetric W is square"
    match = "spread"
    init_gain = math.sqrt(2)

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        d = spec.d_model
        self.triangle = empty_matrix(spec.heads, d * (d + 1) // 2)
        self.u = empty_bias(spec, spec.heads * d)
        self.lr_multiplier = math.sqrt(2) * 2 * spec.d_head * spec.sigma / math.sqrt(d)

    def queries(self, x_BTD: Tensor) -> Tensor:
        return map_to_heads(x_BTD, concat_heads(self._full(self.triangle)), self.u, self.spec.heads)

    def _full(self, triangle_HE: Tensor) -> Tensor:
        """Return W_HDD from its triangle."""
        heads, d = self.spec.heads, self.spec.d_model
        row, column = _triangle_indices(d, triangle_HE.device)
        indices = (torch.arange(heads, device=row.device).unsqueeze(1), row, column)
        upper_HDD = triangle_HE.new_zeros(heads, d, d).index_put(indices, triangle_HE)
        return upper_HDD + upper_HDD.triu(1).mT

    def matrices(self) -> Iterator[tuple[str, TensorMap, TensorMap]]:
        """Yield the triangle, whose gradient off the diagonal is that of two entries."""
        yield "triangle", self._symmetric_gradient, self._take_triangle

    def _symmetric_gradient(self, triangle_HE: Tensor) -> Tensor:
        full_HDD = self._full(triangle_HE)
        return (full_HDD + full_HDD.diagonal(dim1=1, dim2=2).diag_embed()) / 2

    def _take_triangle(self, full_HDD: Tensor) -> Tensor:
        row, column = _triangle_indices(full_HDD.shape[-1], full_HDD.device)
        return full_HDD[:, row, column]

    def set_circuit_(self, b_HDD: Tensor, u_HD: Tensor | None = None) -> None:
        """Set the symmetric part."""
        self.triangle.copy_(self._take_triangle((b_HDD + b_HDD.mT) / 2))
        self._set_bias_(u_HD)

    def flops_per_token(self) -> int:
        return 2 * self.spec.heads * self.spec.d_model**2


def _triangle_indices(d: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return torch.triu_indices(d, d)."""
    if not torch.compiler.is_compiling():
        row_E, column_E = torch.triu_indices(d, d, device=device)
        return row_E, column_E
    # Inductor's takes a root in fp64 for each entry, at every step.
    rows_D = torch.arange(d, device=device)
    starts_D = rows_D * (2 * d + 1 - rows_D) // 2
    entries_E = torch.arange(d * (d + 1) // 2, device=device)
    row_E = torch.bucketize(entries_E, starts_D, right=True) - 1
    return row_E, entries_E - starts_D[row_E] + row_E
