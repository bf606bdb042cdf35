"""Linear algebra of circuits: nearest products, least squares."""

import torch
from torch import Tensor, nn


def solve_bias(right_HDE: Tensor, u_HD: Tensor | None) -> Tensor:
    """Return the least-squares solution b_F of u_h = right_h b_h; zeros without u."""
    u_HD = torch.zeros_like(right_HDE[..., 0]) if u_HD is None else u_HD
    b_HE1: Tensor = torch.linalg.pinv(right_HDE) @ u_HD.unsqueeze(-1)
    return b_HE1.flatten()


def truncated_svd(m_HDC: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the best m ≈ left_HDR right_HCRᵀ, balanced: leftᵀ left = rightᵀ right."""
    u, s, vh = torch.linalg.svd(m_HDC, full_matrices=False)
    root = s[..., :rank].sqrt().unsqueeze(-2)
    left, right = u[..., :rank] * root, vh.mT[..., :rank] * root
    missing = max(0, rank - s.shape[-1])
    return nn.functional.pad(left, (0, missing)), nn.functional.pad(right, (0, missing))


def head_slices(m_HDC: Tensor) -> Tensor:
    """(H, H·K, C) → (H, K, C): the rows of each head's slice of the stream."""
    m_HHKC = torch.unflatten(m_HDC, 1, (len(m_HDC), -1))
    return m_HHKC.diagonal(dim1=0, dim2=1).movedim(-1, 0)


def fit_slices(moment_HLL: Tensor, target_HLC: Tensor, width: int) -> Tensor:
    """Return the least-squares prediction of x @ target from each head's slice of x, as HKC.

    The second moments of x are given for each head, or as LL for all.
    """
    solutions, moment_HLL = [], moment_HLL.expand(len(target_HLC), -1, -1)
    for head, (moment_LL, target_LC) in enumerate(zip(moment_HLL, target_HLC, strict=True)):
        rows = slice(head * width, (head + 1) * width)
        solutions.append(torch.linalg.solve(moment_LL[rows, rows], moment_LL[rows] @ target_LC))
    return torch.stack(solutions)


def affine_basis(like: Tensor, width: int) -> Tensor:
    """Return 0 and the unit vectors as one sequence x_1ND; their images define an affine map."""
    return torch.cat([like.new_zeros(1, width), torch.eye(width).to(like)]).unsqueeze(0)
