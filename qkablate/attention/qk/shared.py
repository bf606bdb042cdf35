"""One projection for queries and keys, perhaps a matrix between them. Suffixes as in base.py."""

import math

import torch
from torch import Tensor, nn

from qkablate.attention.linalg import solve_bias
from qkablate.attention.qk.base import QK
from qkablate.attention.spec import Spec
from qkablate.attention.tensors import concat_heads, empty_bias, empty_matrix, map_to_heads


class SharedQK(QK):
    """Q = K: B_h = W_h W_hᵀ, symmetric and positive semidefinite. W is standard's W_k.

    Initially the score of a token with itself has mean √k σ²d; no scale of W makes it standard's
    zero while keeping the spread, so the match is `none`. A self mask removes these scores; those
    of two tokens then have √(1 + 1/h) of standard's spread, as W Wᵀ correlates with their cosine.
    In cross-attention no token meets itself, and the scale divides by that factor.
    """

    match = "none"
    only_diagonal_differs = True
    lr_multiplier = math.sqrt(2)  # one matrix in place of two independent ones
    equation = "B_h = W_k W_kᵀ, Q = K"
    params = "d²"
    removes = "W_q"
    source = "Kitaev et al. 2020"
    one_width_reason = "one projection makes queries and keys"

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.w_k = empty_matrix(spec.d_model, spec.heads * spec.d_head)
        self.b_k = empty_bias(spec, spec.heads * spec.d_head)
        if spec.is_cross and spec.init == "matched" and type(self) is SharedQK:
            self.match, self.spread = "spread", math.sqrt(1 + 1 / spec.heads)
            self.scale /= self.spread
            self.lr_multiplier *= self.spread
            self.bias_lr_multiplier = self.spread

    def queries(self, x_BTD: Tensor) -> Tensor:
        return self.between(self.keys(x_BTD))

    def keys(self, y_BSD: Tensor) -> Tensor:
        return map_to_heads(y_BSD, self.w_k, self.b_k, self.spec.heads)

    def forward(self, x_BTD: Tensor, y_BSD: Tensor) -> tuple[Tensor, Tensor]:
        k_BHTE = self.keys(x_BTD)
        return self.between(k_BHTE), k_BHTE if y_BSD is x_BTD else self.keys(y_BSD)

    def between(self, k_BHTE: Tensor) -> Tensor:
        """Return the queries of these keys."""
        return k_BHTE

    def flops_per_query(self) -> int:
        return self.flops_per_token()  # in self-attention the keys cost nothing more

    def set_circuit_(self, b_HDD: Tensor, u_HD: Tensor | None = None) -> None:
        """Set the nearest symmetric positive semidefinite matrix of rank d_head."""
        value_HD, vector_HDD = torch.linalg.eigh((b_HDD + b_HDD.mT) / 2)
        top_HK = value_HD[:, -self.spec.d_head :].clamp(min=0)
        w_HDK = vector_HDD[..., -self.spec.d_head :] * top_HK.sqrt().unsqueeze(1)
        self._set_(w_HDK, w_HDK, u_HD)

    def _set_(self, w_HDK: Tensor, right_HDK: Tensor, u_HD: Tensor | None) -> None:
        """Set W and the least-squares solution b of u_h = right_h b_h."""
        self.w_k.copy_(concat_heads(w_HDK))
        if self.b_k is not None:
            self.b_k.copy_(solve_bias(right_HDK, u_HD))


class SymDiag(SharedQK):
    """B_h = W_h D_h W_hᵀ with a learned diagonal: symmetric and indefinite.

    After Kowsher et al. (2025), who share one W for everything. D is initialized as +1, −1, +1, …:
    the score of a token with itself then has mean zero, as in standard, and those of two tokens
    have standard's spread. `naive` starts at D = 1, which is shared_qk. D has k entries and W d·k,
    so it adds a negligible σ/√d to the speed. With rope the scores are not symmetric, since D does
    not commute with the rotations.
    """

    equation = "B_h = W_k diag(D) W_kᵀ"
    params = "d² + d"
    source = "Kowsher et al. 2025"

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.diagonal = nn.Parameter(torch.empty(spec.heads * spec.d_head))
        # Signs cancel only in pairs, but no token of another stream meets itself.
        balanced = spec.init == "matched" and (spec.d_head % 2 == 0 or spec.is_cross)
        self.match = "spread" if balanced else "none"

    def between(self, k_BHTE: Tensor) -> Tensor:
        return k_BHTE * torch.unflatten(self.diagonal, 0, (self.spec.heads, 1, -1))

    def adjust_init_(self) -> None:
        self.diagonal.fill_(1)
        if self.spec.init == "matched":
            self.diagonal.view(self.spec.heads, -1)[:, 1::2] = -1

    def set_circuit_(self, b_HDD: Tensor, u_HD: Tensor | None = None) -> None:
        """Set the nearest symmetric matrix of rank d_head."""
        value_HD, vector_HDD = torch.linalg.eigh((b_HDD + b_HDD.mT) / 2)
        top_HK = value_HD.abs().topk(self.spec.d_head).indices
        value_HK = value_HD.gather(1, top_HK)
        w_HDK = vector_HDD.gather(2, top_HK.unsqueeze(1).expand(-1, len(b_HDD[0]), -1))
        w_HDK = w_HDK * value_HK.abs().sqrt().unsqueeze(1)
        self.diagonal.copy_(value_HK.sign().flatten())
        self._set_(w_HDK, w_HDK * value_HK.sign().unsqueeze(1), u_HD)


class SymPairwise(SharedQK):
    """B_h = W_h U_h W_hᵀ with a free k × k matrix (Courtois et al., 2024).

    It is not symmetric, for h k² parameters. U = 1 is shared_qk; a skew U makes the scores
    antisymmetric. U is initialized with entries of 1/√k: it maps a key to a query of the same
    length, so the spread is standard's and the score of a token with itself has mean zero. U adds
    k σ/(2√d) to the speed of W.
    """

    factors = 3
    equation = "B_h = W_k U W_kᵀ"
    params = "d² + d k"
    source = "Courtois et al. 2024"
    match = "spread"
    naive_match = "none"

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.u = nn.Parameter(torch.empty(spec.heads, spec.d_head, spec.d_head))
        mixing = spec.d_head * spec.sigma / (2 * math.sqrt(spec.d_model))
        self.lr_multiplier = 1 / (1 / math.sqrt(2) + mixing)

    def between(self, k_BHTE: Tensor) -> Tensor:
        return k_BHTE @ self.u

    def adjust_init_(self) -> None:
        if self.spec.init == "matched":
            self.u.div_(self.spec.sigma * math.sqrt(self.spec.d_head))
        else:
            self.u.copy_(torch.eye(self.spec.d_head))

    def set_circuit_(self, b_HDD: Tensor, u_HD: Tensor | None = None) -> None:
        """Set W to the k leading directions of rows and columns, and U to B_h within them.

        Exact if the rows and columns of B_h together span at most k dimensions.
        """
        left_HDD, _, _ = torch.linalg.svd(torch.cat([b_HDD, b_HDD.mT], -1))
        w_HDK = left_HDD[..., : self.spec.d_head]
        self.u.copy_(w_HDK.mT @ b_HDD @ w_HDK)
        self._set_(w_HDK, w_HDK @ self.u.mT, u_HD)

    def flops_per_token(self) -> int:
        return super().flops_per_token() + 2 * self.u.numel()
