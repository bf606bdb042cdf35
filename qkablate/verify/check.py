"""Checks: identities that a layer must satisfy, and the deviation from them.

Shape suffixes as in qkablate/attention/qk/base.py.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from qkablate.attention import Attention

EXACT = 1e-10  # relative tolerance in fp64, which decides
SLACK = 64  # in fp32, shown for information: SLACK · eps · √(length of the longest sum)


@dataclass(frozen=True)
class Deviation:
    """Relative deviation from an identity, and the length of the longest sum in it."""

    residual: float
    length: int | None = None  # None: d_model
    tolerance: float = EXACT  # 0 where bits or counts must be equal

    def tolerance_at(self, dtype: torch.dtype, d_model: int) -> float:
        if dtype == torch.float64 or self.tolerance == 0:
            return self.tolerance
        return SLACK * torch.finfo(dtype).eps * math.sqrt(self.length or d_model)


Applies = Callable[[Attention], bool]
Find = Callable[..., Deviation]  # from a layer and its streams


@dataclass(frozen=True)
class Check:
    """A named identity and the layers for which it must hold."""

    name: str
    says: str
    applies: Applies
    find: Find
    sites: tuple[str, ...] = ("decoder",)


CHECKS: list[Check] = []


def check(
    name: str,
    says: str,
    applies: Applies = lambda layer: True,
    *,
    sites: tuple[str, ...] = ("decoder", "encoder"),
) -> Callable[[Find], Find]:
    """Register a function of (layer, x_BTD) as a check."""

    def register(find: Find) -> Find:
        CHECKS.append(Check(name, says, applies, find, sites))
        return find

    return register


def rel_diff(actual: Tensor, expected: Tensor, size: Tensor | None = None) -> float:
    """Return the largest difference, relative to the largest entry (or to `size`)."""
    if not actual.numel():
        return 0.0
    actual, expected = actual.detach(), expected.detach()
    largest = expected.abs().max() if size is None else size.detach()
    smallest = torch.finfo(expected.dtype).tiny
    return float((actual - expected).abs().max() / largest.clamp(min=smallest))


def largest(*residuals: float) -> float:
    """Return the maximum, or NaN if any residual is NaN (unlike Python's max)."""
    return float(torch.tensor(residuals, dtype=torch.float64).max())


def max_violation(violation: Tensor) -> float:
    """Return the largest entry of a tensor that should be at most 0."""
    return largest(0.0, float(violation.detach().max()))


def probe_loss(out: Tensor) -> Tensor:
    """Return a fixed loss of an output whose gradient depends on every entry."""
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device)
    return (out * weight.view_as(out)).sum() + out.square().mean()


def has_circuit(layer: Attention) -> bool:
    """Return whether the scores are a bilinear form."""
    return not layer.no_circuit_reason


def scores(layer: Attention, x_BTD: Tensor, y_BSD: Tensor | None = None) -> Tensor:
    """Return the scaled content scores of the layer, without masks and biases."""
    q_BHTE, k_BGSE = layer.queries_and_keys(x_BTD, x_BTD if y_BSD is None else y_BSD)
    k_BHSE = k_BGSE.repeat_interleave(q_BHTE.shape[1] // k_BGSE.shape[1], 1)
    return layer.scale * q_BHTE @ k_BHSE.mT


def center_rows(s_BHTS: Tensor) -> Tensor:
    """Remove the row means, to which softmax is invariant."""
    return s_BHTS - s_BHTS.mean(-1, keepdim=True)
