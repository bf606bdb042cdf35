"""What the circuits' matrices are like: spectrum, symmetry, direction, the way from their start.

B_h and M_h alike, many heads at once and in fp64: through their thin factors where a form has them,
so that no d × d matrix is made or decomposed where a k × k one says the same.

Shape suffixes: N heads, of one layer or of many, D d_model, E width of the product.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qkablate.attention import OV, QK

# A norm stands out of those of its kind if it is so many standard deviations above their mean.
STANDS_OUT = 2.0

MEASURES = (
    *("singular", "stable_rank", "effective_rank", "nuclear", "frobenius", "symmetry"),
    *("directionality", "moved", "off_rank", "balance"),
)


@dataclass(frozen=True)
class Thin:
    """left rightᵀ, by its factors."""

    left_NDE: Tensor
    right_NDE: Tensor

    def singular(self) -> Tensor:
        """All that can be more than zero, the largest first: of the E × E core between the two
        factors' orthogonal parts, to 1e-8 of the largest.
        """
        value_NE, vector_NEE = torch.linalg.eigh(self.left_NDE.mT @ self.left_NDE)
        root_NEE = vector_NEE * value_NE.clamp(min=0).sqrt().unsqueeze(-2)
        core_NEE = root_NEE.mT @ (self.right_NDE.mT @ self.right_NDE) @ root_NEE
        return _roots(core_NEE)

    def square(self) -> Tensor:
        """‖B‖²."""
        return _inner(self.left_NDE, self.right_NDE, self.left_NDE, self.right_NDE)

    def turned(self) -> Tensor:
        """⟨B, Bᵀ⟩: the square of the symmetric part less that of the antisymmetric one."""
        return _inner(self.left_NDE, self.right_NDE, self.right_NDE, self.left_NDE)

    def row_norms(self) -> Tensor:
        left, right = self.left_NDE, self.right_NDE
        return ((left @ (right.mT @ right)) * left).sum(-1).clamp(min=0).sqrt()

    def column_norms(self) -> Tensor:
        return Thin(self.right_NDE, self.left_NDE).row_norms()

    def apart(self, other: "Thin") -> Tensor:
        """‖B − C‖, from the factors' own differences: what is small stays exact."""
        left, right = other.left_NDE, self.right_NDE
        by_left, by_right = self.left_NDE - left, right - other.right_NDE
        square_N = (
            _inner(by_left, right, by_left, right)
            + 2 * _inner(by_left, right, left, by_right)
            + _inner(left, by_right, left, by_right)
        )
        return square_N.clamp(min=0).sqrt()

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "Thin":
        return Thin(self.left_NDE.to(device, dtype), self.right_NDE.to(device, dtype))


@dataclass(frozen=True)
class Dense:
    """The matrix itself."""

    b_NDD: Tensor

    def singular(self) -> Tensor:
        return _roots(self.b_NDD.mT @ self.b_NDD)

    def square(self) -> Tensor:
        return self.b_NDD.square().sum((-2, -1))

    def turned(self) -> Tensor:
        return (self.b_NDD * self.b_NDD.mT).sum((-2, -1))

    def row_norms(self) -> Tensor:
        return self.b_NDD.norm(dim=-1)

    def column_norms(self) -> Tensor:
        return self.b_NDD.norm(dim=-2)

    def apart(self, other: "Dense") -> Tensor:
        return (self.b_NDD - other.b_NDD).square().sum((-2, -1)).sqrt()

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "Dense":
        return Dense(self.b_NDD.to(device, dtype))


Matrix = Thin | Dense


def stacked(matrices: list[Any]) -> Any:
    """Those of several layers, of one form, as one."""
    first = matrices[0]
    parts = [torch.cat([getattr(m, name) for m in matrices]) for name in vars(first)]
    return type(first)(*parts)


@torch.no_grad()
def qk_matrix(qk: QK) -> Matrix | None:
    """B_h of every head, in the scale that standard's scores have, so that forms compare; None
    where there is none. (A norm or a rotation that stands between it and the scores is left aside:
    this is what the weights are.)
    """
    if qk.no_circuit:
        return None
    scale, thin = qk.scale * math.sqrt(qk.spec.d_head), qk.thin()
    if thin is None:
        return Dense(qk.circuit()[0].detach() * scale)
    return Thin(*(factor.detach() * math.sqrt(scale) for factor in thin))  # no factor outweighs


@torch.no_grad()
def ov_matrix(ov: OV, qk: QK) -> Matrix | None:
    """M_h of every head."""
    if ov.no_circuit:
        return None
    thin = ov.thin(qk)
    return Dense(ov.circuit(qk).detach()) if thin is None else Thin(*(t.detach() for t in thin))


def measures(matrix: Any, start: Any, *, rank: int, two_factors: bool) -> dict[str, Tensor | None]:
    """Every measure of every head, in fp64; None for what has no meaning for this form. `rank` is
    standard's, d_head.

    singular        the `rank` largest singular values σ
    stable_rank     ‖B‖² / σ_1²
    effective_rank  exp of the entropy of σ / Σσ (Roy & Vetterli, 2007)
    nuclear         Σσ
    frobenius       ‖B‖
    symmetry        (‖S‖² − ‖A‖²) / ‖B‖² of the symmetric and the antisymmetric part: 1, or −1
    directionality  see there
    moved           ‖B − start‖ / ‖start‖
    off_rank        what the nearest matrix of that rank leaves, as a part of ‖B‖; of forms that can
                    have more
    balance         ‖LᵀL − RᵀR‖ / (‖LᵀL‖ + ‖RᵀR‖) of the factors of a product of two: 0 is even
    """
    s_NE, square_N = matrix.singular(), matrix.square()
    share_NE = s_NE / s_NE.sum(-1, keepdim=True)
    tail_N = s_NE[:, rank:].square().sum(-1).sqrt()
    return {
        "singular": s_NE[:, :rank],
        "stable_rank": square_N / s_NE[:, 0].square(),
        "effective_rank": torch.special.entr(share_NE).sum(-1).exp(),
        "nuclear": s_NE.sum(-1),
        "frobenius": square_N.sqrt(),
        "symmetry": matrix.turned() / square_N,
        "directionality": directionality(matrix),
        "moved": None if start is None else matrix.apart(start) / start.square().sqrt(),
        "off_rank": tail_N / square_N.sqrt() if s_NE.shape[-1] > rank else None,
        "balance": balance(matrix) if two_factors and isinstance(matrix, Thin) else None,
    }


def directionality(matrix: Any) -> Tensor:
    """(C − R) / (C + R), after Saponati et al. (2025): C sums the norms of the columns that stand
    out of all columns', R those of the rows. 1: the matrix has strong columns alone (in B_h, what a
    key must be like), −1: rows alone (a query), 0: as much of both, or of neither.
    """
    columns_N, rows_N = _outstanding(matrix.column_norms()), _outstanding(matrix.row_norms())
    both_N = columns_N + rows_N
    return torch.where(both_N == 0, 0.0, (columns_N - rows_N) / both_N)


def balance(matrix: Thin) -> Tensor:
    """How uneven the two factors are; gradient flow without decay keeps LᵀL − RᵀR as it is."""
    left_NEE = matrix.left_NDE.mT @ matrix.left_NDE
    right_NEE = matrix.right_NDE.mT @ matrix.right_NDE
    sizes_N = left_NEE.norm(dim=(-2, -1)) + right_NEE.norm(dim=(-2, -1))
    return (left_NEE - right_NEE).norm(dim=(-2, -1)) / sizes_N


def _outstanding(norms_ND: Tensor) -> Tensor:
    """The sum of the norms that stand out."""
    mean_N1 = norms_ND.mean(-1, keepdim=True)
    spread_N1 = (norms_ND - mean_N1).square().mean(-1, keepdim=True).sqrt()
    # Equal norms differ by rounding, and none of them stands out.
    out_ND = norms_ND - mean_N1 > STANDS_OUT * spread_N1 + 1e-6 * mean_N1
    return (norms_ND * out_ND).sum(-1)


def _inner(left: Tensor, right: Tensor, other_left: Tensor, other_right: Tensor) -> Tensor:
    """⟨L Rᵀ, L' R'ᵀ⟩ of every head."""
    return ((left.mT @ other_left) * (right.mT @ other_right)).sum((-2, -1))


def _roots(gram_NEE: Tensor) -> Tensor:
    """Singular values of what has this product with itself, the largest first."""
    return torch.linalg.eigvalsh(gram_NEE).clamp(min=0).sqrt().flip(-1)
