"""Parameters of circuits, and their tensors by head.

Shape suffixes: B batch, T positions, D and F input and output width, H heads, E width of a head.
"""

import torch
from torch import Tensor, nn

from qkablate.attention.kernels.matmul import linear
from qkablate.attention.spec import Spec


def split_heads(x_BTF: Tensor, heads: int) -> Tensor:
    """(B, T, H·E) → (B, H, T, E)."""
    return torch.unflatten(x_BTF, -1, (heads, -1)).transpose(1, 2)


def apply_matrix(x_BTD: Tensor, w_DF: Tensor, b_F: Tensor | None = None) -> Tensor:
    """Return x W (+ b), with W in the row-vector convention of the equations."""
    return linear(x_BTD, w_DF.T, b_F)


def map_to_heads(x_BTD: Tensor, w_DF: Tensor, b_F: Tensor | None, heads: int) -> Tensor:
    """Return x W (+ b) by head, as (B, H, T, E)."""
    return split_heads(apply_matrix(x_BTD, w_DF, b_F), heads)


def by_head(w_DF: Tensor, heads: int) -> Tensor:
    """(D, H·E) → (H, D, E): the matrix of each head."""
    return torch.unflatten(w_DF, 1, (heads, -1)).transpose(0, 1)


def concat_heads(w_HDE: Tensor) -> Tensor:
    """(H, D, E) → (D, H·E): the matrices of all heads beside each other, inverse of `by_head`."""
    return w_HDE.transpose(0, 1).flatten(1)


def empty_matrix(rows: int, columns: int) -> nn.Parameter:
    """Return an uninitialized matrix."""
    return nn.Parameter(torch.empty(rows, columns))


def empty_bias(spec: Spec, size: int) -> nn.Parameter | None:
    """Return an uninitialized bias, or None where the model has no biases."""
    return nn.Parameter(torch.empty(size)) if spec.bias else None
