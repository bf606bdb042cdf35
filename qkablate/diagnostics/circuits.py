"""Measures of the circuit matrices: spectrum, symmetry, direction, distance from initialization.

For B_h and M_h alike, many heads at once and in fp64. Where a form has low-rank factors, k × k
matrices are decomposed instead of d × d ones.

Shape suffixes: N heads, of one layer or of many, D d_model, E width of the product.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qkablate.attention import OV, QK

# A row or column norm is an outlier this many standard deviations above the mean.
OUTLIER_STDS = 2.0

MEASURES = (
    *("singular", "stable_rank", "effective_rank", "nuclear", "frobenius", "symmetry"),
    *("directionality", "moved", "off_rank", "balance"),
)


@dataclass(frozen=True)
class Factored:
    """Matrices left rightᵀ given by their factors."""

    left_NDE: Tensor
    right_NDE: Tensor

    @property
    def transposed(self) -> "Factored":
        return Factored(self.right_NDE, self.left_NDE)

    def singular_values(self) -> Tensor:
        """Return the singular values in descending order, accurate to 1e-8 of the largest.

        They are those of the E × E core between the orthogonal parts of the factors.
        """
        value_NE, vector_NEE = torch.linalg.eigh(self.left_NDE.mT @ self.left_NDE)
        root_NEE = vector_NEE * value_NE.clamp(min=0).sqrt().unsqueeze(-2)
        return _singular_values(root_NEE.mT @ (self.right_NDE.mT @ self.right_NDE) @ root_NEE)

    def inner(self, other: "Factored") -> Tensor:
        """Return ⟨B, C⟩ of every head."""
        left_NEE = self.left_NDE.mT @ other.left_NDE
        return (left_NEE * (self.right_NDE.mT @ other.right_NDE)).sum((-2, -1))

    @property
    def is_square(self) -> bool:
        return self.left_NDE.shape[1] == self.right_NDE.shape[1]

    def row_norms(self) -> Tensor:
        left, right = self.left_NDE, self.right_NDE
        return ((left @ (right.mT @ right)) * left).sum(-1).clamp(min=0).sqrt()

    def distance(self, other: "Factored") -> Tensor:
        """Return ‖B − C‖ from the differences of the factors, which is exact for small ones."""
        left = Factored(self.left_NDE - other.left_NDE, self.right_NDE)
        right = Factored(other.left_NDE, self.right_NDE - other.right_NDE)
        square_N = left.inner(left) + 2 * left.inner(right) + right.inner(right)
        return square_N.clamp(min=0).sqrt()


@dataclass(frozen=True)
class Full:
    """Matrices given by their entries."""

    b_NDD: Tensor

    @property
    def transposed(self) -> "Full":
        return Full(self.b_NDD.mT)

    def singular_values(self) -> Tensor:
        return _singular_values(self.b_NDD.mT @ self.b_NDD)

    @property
    def is_square(self) -> bool:
        return self.b_NDD.shape[1] == self.b_NDD.shape[2]

    def inner(self, other: "Full") -> Tensor:
        return (self.b_NDD * other.b_NDD).sum((-2, -1))

    def row_norms(self) -> Tensor:
        return _norm(self.b_NDD, -1)

    def distance(self, other: "Full") -> Tensor:
        return (self.b_NDD - other.b_NDD).square().sum((-2, -1)).sqrt()


Matrix = Factored | Full


def move(matrix: Any, device: torch.device | str) -> Any:
    """Move matrices of either form to a device."""
    return type(matrix)(*(part.to(device) for part in vars(matrix).values()))


def stack(matrices: list[Any], device: torch.device | str) -> Any:
    """Concatenate the matrices of several layers, all of one form, in fp64 on a device."""
    parts = zip(*(vars(matrix).values() for matrix in matrices), strict=True)
    return type(matrices[0])(*(torch.cat(part).to(device, torch.float64) for part in parts))


@torch.no_grad()
def qk_matrix(qk: QK) -> Matrix | None:
    """Return B_h of every head in the scale of standard's scores; None where there is none.

    A norm or rotation between the matrix and the scores is ignored: this describes the weights.
    """
    if qk.no_circuit_reason:
        return None
    scale, factors = qk.scale * math.sqrt(qk.spec.d_head), qk.low_rank_factors()
    if factors is None:
        return Full(qk.circuit()[0].detach() * scale)
    return Factored(*(factor.detach() * math.sqrt(scale) for factor in factors))  # split evenly


@torch.no_grad()
def ov_matrix(ov: OV, qk: QK) -> Matrix | None:
    """Return M_h of every head; None where there is none."""
    if ov.no_circuit_reason:
        return None
    factors = ov.low_rank_factors(qk)
    if factors is None:
        return Full(ov.circuit(qk).detach())
    return Factored(*(factor.detach() for factor in factors))


def compute_measures(
    matrix: Any, start: Any, *, rank: int, two_factors: bool
) -> dict[str, Tensor | None]:
    """Return every measure of every head in fp64; None for measures undefined for this form.

    `rank` is the rank of standard, d_head.

    singular        the `rank` largest singular values σ
    stable_rank     ‖B‖² / σ_1²
    effective_rank  exp of the entropy of σ / Σσ (Roy & Vetterli, 2007)
    nuclear         Σσ
    frobenius       ‖B‖
    symmetry        (‖S‖² − ‖A‖²) / ‖B‖²: 1 is symmetric, −1 antisymmetric; of square matrices
    directionality  see `directionality`
    moved           ‖B − start‖ / ‖start‖
    off_rank        distance to the nearest matrix of that rank, relative to ‖B‖; for forms that can
                    have a higher rank
    balance         ‖LᵀL − RᵀR‖ / (‖LᵀL‖ + ‖RᵀR‖) of a product of two factors: 0 is balanced
    """
    s_NE, square_N = matrix.singular_values(), matrix.inner(matrix)
    share_NE = s_NE / s_NE.sum(-1, keepdim=True)
    tail_N = s_NE[:, rank:].square().sum(-1).sqrt()
    return {
        "singular": s_NE[:, :rank],
        "stable_rank": square_N / s_NE[:, 0].square(),
        "effective_rank": torch.special.entr(share_NE).sum(-1).exp(),
        "nuclear": s_NE.sum(-1),
        "frobenius": square_N.sqrt(),
        "symmetry": matrix.inner(matrix.transposed) / square_N if matrix.is_square else None,
        "directionality": directionality(matrix),
        "moved": None if start is None else matrix.distance(start) / start.inner(start).sqrt(),
        "off_rank": tail_N / square_N.sqrt() if s_NE.shape[-1] > rank else None,
        "balance": balance(matrix) if two_factors and isinstance(matrix, Factored) else None,
    }


def directionality(matrix: Any) -> Tensor:
    """Return (C − R) / (C + R) after Saponati et al. (2025).

    C sums the norms of outlier columns, R those of outlier rows. 1: outlier columns only (in B_h,
    selective keys), −1: rows only (selective queries), 0: equal amounts, or none.
    """
    columns_N = _outlier_sum(matrix.transposed.row_norms())
    rows_N = _outlier_sum(matrix.row_norms())
    both_N = columns_N + rows_N
    return torch.where(both_N == 0, 0.0, (columns_N - rows_N) / both_N)


def balance(matrix: Factored) -> Tensor:
    """Return how unbalanced two factors are; gradient flow without decay conserves LᵀL − RᵀR."""
    left_NEE = matrix.left_NDE.mT @ matrix.left_NDE
    right_NEE = matrix.right_NDE.mT @ matrix.right_NDE
    sizes_N = _norm(left_NEE, (-2, -1)) + _norm(right_NEE, (-2, -1))
    return _norm(left_NEE - right_NEE, (-2, -1)) / sizes_N


def _norm(x: Tensor, dim: int | tuple[int, int]) -> Tensor:
    norms: Tensor = x.norm(dim=dim)
    return norms


def _outlier_sum(norms_ND: Tensor) -> Tensor:
    mean_N1 = norms_ND.mean(-1, keepdim=True)
    spread_N1 = (norms_ND - mean_N1).square().mean(-1, keepdim=True).sqrt()
    # Equal norms differ by rounding; none of them is an outlier.
    is_outlier_ND = norms_ND - mean_N1 > OUTLIER_STDS * spread_N1 + 1e-6 * mean_N1
    return (norms_ND * is_outlier_ND).sum(-1)


def _singular_values(gram_NEE: Tensor) -> Tensor:
    value_NE: Tensor = torch.linalg.eigvalsh(gram_NEE)
    return value_NE.clamp(min=0).sqrt().flip(-1)
