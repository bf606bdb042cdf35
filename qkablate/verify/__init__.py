"""Exact checks: identities that a variant must satisfy, with random weights or those of a run.

The result in fp64 decides, at a relative tolerance of 1e-10; fp32 is shown with the tolerance that
its rounding allows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, isnan, nan

import torch
from torch import Tensor

from qkablate.attention import Attention
from qkablate.models.base import Model
from qkablate.randomness import derive_key

# Importing these modules registers their checks, in this order.
from qkablate.verify import layers  # isort: skip
from qkablate.verify import twins, factors, gauge, theorems  # isort: skip
from qkablate.verify.check import CHECKS, Check, Deviation

__all__ = [
    "CheckResult",
    "factors",
    "gauge",
    "layers",
    "random_stream",
    "randomize_layer",
    "record_inputs",
    "theorems",
    "twins",
    "verify",
]


# Theorems that do not concern the weights of a run.
FRESH_ONLY = {"any weights", "decay", "bare block"}


@dataclass(frozen=True)
class CheckResult:
    """The result of one check of one variant."""

    variant: str
    check: str
    says: str
    residual: float
    tolerance: float
    residual_fp32: float
    tolerance_fp32: float

    @property
    def holds(self) -> bool:
        return self.residual <= self.tolerance  # False for NaN, too


def verify(
    variant: str, attentions: list[Attention], streams: list[Tensor], *, fresh: bool
) -> Iterator[CheckResult]:
    """Run every applicable check on each layer and its stream; yield the worst result."""
    numbers = [t for layer in attentions for t in layer.parameters()] + streams
    if not all(t.isfinite().all() for t in numbers):
        says = "the weights and the inputs of the layers are finite"
        yield CheckResult(variant, "finite", says, nan, 0.0, nan, 0.0)
        return
    d_model = streams[0].shape[-1]
    for check in CHECKS:
        if not check.applies(attentions[0]) or (check.name in FRESH_ONLY and not fresh):
            continue
        numbers_of = {}
        for dtype in (torch.float32, torch.float64):  # ends in fp64
            deviations = [
                _run(check, layer.to(dtype), x_BTD.to(dtype))
                for layer, x_BTD in zip(attentions, streams, strict=True)
            ]
            worst = max(deviations, key=lambda d: inf if isnan(d.residual) else d.residual)
            numbers_of[dtype] = worst.residual, worst.tolerance_at(dtype, d_model)
        double, single = numbers_of[torch.float64], numbers_of[torch.float32]
        yield CheckResult(variant, check.name, check.says, *double, *single)


def _run(check: Check, layer: Attention, x_BTD: Tensor) -> Deviation:
    try:
        return check.find(layer, x_BTD)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # not converged
        return Deviation(nan, length=1)


def _generator(seed: int, name: str) -> torch.Generator:
    return torch.Generator().manual_seed(derive_key(seed, "verify", name) % 2**63)


@torch.no_grad()
def randomize_layer(layer: Attention, seed: int) -> Attention:
    """Draw every tensor anew at a scale that gives scores of order 1."""
    for name, parameter in layer.named_parameters():
        generator = _generator(seed, name)
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        wide = parameter.dim() >= 2 and not name.endswith("table")
        parameter.copy_(noise / layer.qk.spec.d_model**0.5 if wide else noise)
    return layer


def record_inputs(model: Model, length: int, seed: int) -> tuple[list[Attention], list[Tensor]]:
    """Return the self-attention layers of a model, and their inputs for random tokens."""
    tokens_BT = torch.randint(model.vocabulary, (2, length), generator=_generator(seed, "tokens"))
    with torch.no_grad():
        inputs = [item for item in model.attention_inputs(tokens_BT) if item[0].is_self]
    return [layer.module for layer, _ in inputs], [streams[0] for _, streams in inputs]


def random_stream(d_model: int, length: int, seed: int) -> Tensor:
    """Return a normalized random stream of two sequences."""
    generator = _generator(seed, "stream")
    x_BTD = torch.randn(2, length, d_model, generator=generator, dtype=torch.float64)
    return torch.nn.functional.layer_norm(x_BTD, (d_model,))
