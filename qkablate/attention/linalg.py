"""Linear algebra of circuits: nearest products, least squares."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

_RANK: ContextVar[int | None] = ContextVar("_RANK", default=None)
_MORE = 8  # random directions beyond the expected rank


@contextmanager
def expect_rank(rank: int | None) -> Iterator[None]:
    """Decompose matrices of at most this rank within their range: faster, rounded differently."""
    token = _RANK.set(rank)
    try:
        yield
    finally:
        _RANK.reset(token)


def _find_range(m_HDC: Tensor) -> Tensor | None:
    """Return an orthonormal basis of the columns if they have the expected rank (Halko, 2011)."""
    rank = _RANK.get()
    if rank is None or m_HDC.is_meta or 2 * (rank + _MORE) > min(m_HDC.shape[-2:]):
        return None
    generator = torch.Generator().manual_seed(0)
    random_CR = torch.randn(m_HDC.shape[-1], rank + _MORE, generator=generator).to(m_HDC)
    basis_HDR: Tensor = torch.linalg.qr(m_HDC @ random_CR).Q
    lost_HDC = m_HDC - basis_HDR @ (basis_HDR.mT @ m_HDC)
    is_held = lost_HDC.norm() <= 1e-12 * m_HDC.norm()
    return basis_HDR if is_held else None


def find_basis(factor_HDE: Tensor, shared: int = 1) -> Tensor | None:
    """Return an orthonormal basis of the columns of each head or group; None if it is the space."""
    _, width, size = factor_HDE.shape
    if size * shared >= width:
        return None
    groups_GDE = factor_HDE.unflatten(0, (-1, shared)).transpose(1, 2).flatten(2)
    basis_GDP: Tensor = torch.linalg.qr(groups_GDE).Q
    return basis_GDP.repeat_interleave(shared, 0)


def solve_bias(right_HDE: Tensor, u_HD: Tensor | None) -> Tensor:
    """Return the least-squares solution b_F of u_h = right_h b_h; zeros without u."""
    u_HD = torch.zeros_like(right_HDE[..., 0]) if u_HD is None else u_HD
    b_HE1: Tensor = torch.linalg.pinv(right_HDE) @ u_HD.unsqueeze(-1)
    return b_HE1.flatten()


def truncated_svd(m_HDC: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the best m ≈ left_HDR right_HCRᵀ, balanced: leftᵀ left = rightᵀ right."""
    if (basis_HDR := _find_range(m_HDC)) is None:
        u, s, vh = torch.linalg.svd(m_HDC, full_matrices=False)
    else:
        u, s, vh = torch.linalg.svd(basis_HDR.mT @ m_HDC, full_matrices=False)
        u = basis_HDR @ u
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
