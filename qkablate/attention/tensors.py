"""Functions of the tensors of circuits: heads, matmuls, least squares."""

import torch
from torch import Tensor, nn

from qkablate.attention.kernels.matmul import linear
from qkablate.attention.spec import Spec


def split_heads(x_BTF: Tensor, heads: int) -> Tensor:
    """(B, T, H·E) → (B, H, T, E)."""
    x_BTHE: Tensor = x_BTF.unflatten(-1, (heads, -1))
    return x_BTHE.transpose(1, 2)


def project(x_BTD: Tensor, w_DF: Tensor, b_F: Tensor | None = None) -> Tensor:
    """Return x W (+ b), with W in the row-vector convention of the equations."""
    return linear(x_BTD, w_DF.T, b_F)


def by_head(w_DF: Tensor, heads: int) -> Tensor:
    """(D, H·E) → (H, D, E): the matrix of each head."""
    w_DHE: Tensor = w_DF.unflatten(1, (heads, -1))
    return w_DHE.transpose(0, 1)


def side_by_side(w_HDE: Tensor) -> Tensor:
    """(H, D, E) → (D, H·E), the inverse of `by_head`."""
    return w_HDE.transpose(0, 1).flatten(1)


def matrix(rows: int, columns: int) -> nn.Parameter:
    """Return an uninitialized matrix."""
    return nn.Parameter(torch.empty(rows, columns))


def vector(spec: Spec, size: int) -> nn.Parameter | None:
    """Return an uninitialized bias, or None where the model has no biases."""
    return nn.Parameter(torch.empty(size)) if spec.bias else None


def truncated_svd(m_HDC: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the best m ≈ left_HDR right_HCRᵀ, balanced: leftᵀ left = rightᵀ right."""
    u, s, vh = torch.linalg.svd(m_HDC, full_matrices=False)
    root = s[..., :rank].sqrt().unsqueeze(-2)
    left, right = u[..., :rank] * root, vh.mT[..., :rank] * root
    missing = max(0, rank - s.shape[-1])
    return nn.functional.pad(left, (0, missing)), nn.functional.pad(right, (0, missing))


def head_slices(m_HDC: Tensor) -> Tensor:
    """(H, H·K, C) → (H, K, C): the rows of each head's slice of the stream."""
    m_HHKC: Tensor = m_HDC.unflatten(1, (len(m_HDC), -1))
    return m_HHKC.diagonal(dim1=0, dim2=1).movedim(-1, 0)


def fit_slices(moment_HLL: Tensor, target_HLC: Tensor, d_head: int) -> Tensor:
    """Return the least-squares prediction of x @ target from each head's slice of x, as HKC.

    The second moments of x are given for each head.
    """
    solutions = []
    for head, (moment_LL, target_LC) in enumerate(zip(moment_HLL, target_HLC, strict=True)):
        rows = slice(head * d_head, (head + 1) * d_head)
        solutions.append(torch.linalg.solve(moment_LL[rows, rows], moment_LL[rows] @ target_LC))
    return torch.stack(solutions)


def affine_basis(like: Tensor, d_model: int) -> Tensor:
    """Return 0 and the unit vectors as one sequence x_1ND; their images define an affine map."""
    return torch.cat([like.new_zeros(1, d_model), torch.eye(d_model).to(like)]).unsqueeze(0)
