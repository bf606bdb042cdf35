"""Second moments of the residual stream, which weight the errors of a projection.

Shape suffixes: H heads, D width of a stream, L = D + 1: the stream with a constant 1 appended,
which multiplies a bias. The streams of queries and keys may differ in width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

RIDGE = 1e-6  # added to every direction of a moment, relative to its mean diagonal


@dataclass
class Moments:
    """Second moments of the inputs of a layer, in fp64.

    The streams may differ by head, in a basis of its own: then all of them are HLL.
    """

    x_LL: Tensor  # of the queries' stream with a 1
    z_HDD: Tensor | None  # of each head's averages of the keys' stream; None: outputs are kept
    y_LL: Tensor | None = None  # of the keys' stream with a 1; None: it is the queries'

    def key_covariance(self) -> Tensor:
        """Return the covariance of the keys' stream; softmax is invariant to the mean key."""
        y_LL = self.x_LL if self.y_LL is None else self.y_LL
        mean_D = y_LL[..., -1, :-1]
        return regularize(y_LL[..., :-1, :-1] - mean_D.unsqueeze(-1) * mean_D.unsqueeze(-2))

    def score_power(self, b_HLD: Tensor) -> Tensor:
        """Return the mean square of each head's scores."""
        return ((self.x_LL @ b_HLD @ self.key_covariance()) * b_HLD).sum((1, 2))

    def output_power(self, m_HDD: Tensor) -> Tensor:
        """Return the mean square of each head's output."""
        assert self.z_HDD is not None
        return ((self.z_HDD @ m_HDD) * m_HDD).sum((1, 2))


def isotropic_moments(heads: int, goal_LD: Tensor) -> Moments:
    """Return moments that weight all entries alike, for matrices of scores of this shape."""
    x_LL, y_LL = (torch.eye(size).to(goal_LD) for size in (len(goal_LD), goal_LD.shape[1] + 1))
    return Moments(x_LL, y_LL[:-1, :-1].expand(heads, -1, -1), y_LL)


def regularize(moment_DD: Tensor) -> Tensor:
    """Add a small ridge so that the moment is invertible."""
    diagonal = moment_DD.diagonal(dim1=-2, dim2=-1)
    size = RIDGE * diagonal.mean(-1, keepdim=True) + torch.finfo(moment_DD.dtype).tiny
    return moment_DD + torch.diag_embed(size.expand_as(diagonal))


def sqrt_and_inverse(moment_DD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the square root of a moment and its inverse."""
    value_D, vector_DD = torch.linalg.eigh(moment_DD)
    root_1D = value_D.clamp(min=RIDGE**2 * value_D[..., -1:]).sqrt().unsqueeze(-2)
    return (vector_DD * root_1D) @ vector_DD.mT, (vector_DD / root_1D) @ vector_DD.mT


def with_bias(b_HDD: Tensor, u_HD: Tensor | None) -> Tensor:
    """Append u to B as the row that multiplies the constant 1."""
    u_HD = torch.zeros_like(b_HDD[:, 0]) if u_HD is None else u_HD
    return torch.cat([b_HDD, u_HD.unsqueeze(1)], 1)
