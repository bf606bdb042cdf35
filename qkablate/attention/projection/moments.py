"""What a layer sees, as moments: of the stream, and of what its heads make of it. A form that holds
only a part of a circuit is to hold the part that such a stream would miss most.

Shape suffixes: H heads, D d_model, L = D + 1: the stream, and a one beside it (what multiplies a
bias).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

LEAST = 1e-6  # of the mean of its diagonal: what a moment has in every direction


@dataclass
class Seen:
    """Second moments, in fp64."""

    x_LL: Tensor  # of the stream and a one
    z_HDD: Tensor  # of each head's averages of the stream

    def stream(self) -> Tensor:
        """Without the one."""
        return self.x_LL[:-1, :-1]

    def keys(self) -> Tensor:
        """The covariance: what all keys share adds the same to all scores of a query, and softmax
        cannot see it.
        """
        mean_D = self.x_LL[-1, :-1]
        return firm(self.stream() - mean_D.outer(mean_D))

    def scores(self, b_HLD: Tensor) -> Tensor:
        """Of each head, how large the scores of such a stream are: mean squares."""
        return ((self.x_LL @ b_HLD @ self.keys()) * b_HLD).sum((1, 2))

    def writing(self, m_HDD: Tensor) -> Tensor:
        """The same of what the heads write."""
        return ((self.z_HDD @ m_HDD) * m_HDD).sum((1, 2))


def firm(moment_DD: Tensor) -> Tensor:
    """With a little of every direction, so that it has an inverse."""
    diagonal = moment_DD.diagonal(dim1=-2, dim2=-1)
    size = LEAST * diagonal.mean(-1, keepdim=True) + torch.finfo(moment_DD.dtype).tiny
    return moment_DD + torch.diag_embed(size.expand_as(diagonal))


def roots(moment_DD: Tensor) -> tuple[Tensor, Tensor]:
    """The square root, and its inverse."""
    value_D, vector_DD = torch.linalg.eigh(moment_DD)
    root_D = value_D.clamp(min=LEAST**2 * float(value_D[-1])).sqrt()
    return (vector_DD * root_D) @ vector_DD.mT, (vector_DD / root_D) @ vector_DD.mT


def with_bias(b_HDD: Tensor, u_HD: Tensor | None) -> Tensor:
    """u as one more row of B: what the one beside x_i is multiplied with."""
    u_HD = torch.zeros_like(b_HDD[..., 0]) if u_HD is None else u_HD
    return torch.cat([b_HDD, u_HD.unsqueeze(1)], 1)
