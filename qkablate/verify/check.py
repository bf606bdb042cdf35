"""What a check is: an identity that a layer must fulfil, and how far it is from it.

Shape suffixes as in qkablate/attention/qk/base.py; C for a d_model seen as columns.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from qkablate.attention import Attention

EXACT = 1e-10  # relative, in fp64: what decides
SLACK = 64  # in fp32: SLACK · eps · √(length of the longest sum), for information beside it


@dataclass(frozen=True)
class Found:
    """How far from the identity, relative to its size, and the length of the longest sum in it."""

    residual: float
    length: int = 1
    tolerance: float = EXACT  # 0 where bits or counts must agree

    def tolerance_at(self, dtype: torch.dtype) -> float:
        if dtype == torch.float64 or self.tolerance == 0:
            return self.tolerance
        return SLACK * torch.finfo(dtype).eps * math.sqrt(self.length)


@dataclass(frozen=True)
class Check:
    """An identity, by its name, and for which layers it must hold."""

    name: str
    says: str
    applies: Callable[[Attention], bool]
    find: Callable[[Attention, Tensor], Found]


CHECKS: list[Check] = []


def check(
    name: str, says: str, applies: Callable[[Attention], bool] = lambda layer: True
) -> Callable[[Callable[[Attention, Tensor], Found]], Callable[[Attention, Tensor], Found]]:
    """Enter a function of (layer, x_BTD) in the list."""

    def enter(
        find: Callable[[Attention, Tensor], Found],
    ) -> Callable[[Attention, Tensor], Found]:
        CHECKS.append(Check(name, says, applies, find))
        return find

    return enter


def apart(one: Tensor, other: Tensor, size: Tensor | None = None) -> float:
    """Largest difference, relative to the largest entry (or to `size`)."""
    if not one.numel():
        return 0.0
    one, other = one.detach(), other.detach()
    largest = other.abs().max() if size is None else size.detach()
    return float((one - other).abs().max() / largest.clamp(min=torch.finfo(other.dtype).tiny))


def largest(*residuals: float) -> float:
    """NaN if one of them is: Python's max would lose it."""
    return float(torch.tensor(residuals, dtype=torch.float64).max())


def worst(violation: Tensor) -> float:
    """The largest entry, of what should be 0 or less."""
    return largest(0.0, float(violation.detach().max()))


def pull(out: Tensor) -> Tensor:
    """A fixed loss of some output: its gradient is not constant in anything."""
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device)
    return (out * weight.view_as(out)).sum() + out.square().mean()


def scores(layer: Attention, x_BTD: Tensor) -> Tensor:
    """The content scores of the layer, scaled, before anything is added."""
    q_BHTE, k_BGSE = layer.modified(*layer.qk(x_BTD, x_BTD))
    k_BHSE = k_BGSE.repeat_interleave(q_BHTE.shape[1] // k_BGSE.shape[1], 1)
    return layer.scale * q_BHTE @ k_BHSE.mT


def up_to_a_row_shift(s_BHTS: Tensor) -> Tensor:
    """What softmax sees."""
    return s_BHTS - s_BHTS.mean(-1, keepdim=True)
