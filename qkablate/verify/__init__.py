"""The exact checks: identities that a variant must fulfil, on fresh weights or a run's own.

fp64 decides, at a relative residual of 1e-10; fp32 is shown beside it, with the tolerance that its
rounding allows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, isnan, nan

import torch
from torch import Tensor

from qkablate.attention import Attention
from qkablate.models.gpt import GPT
from qkablate.randomness import key

# Importing them enters their checks in the list, in this order.
from qkablate.verify import layers  # isort: skip
from qkablate.verify import twins, factors, gauge, symmetry, theorems  # isort: skip
from qkablate.verify.check import CHECKS, Check, Found

__all__ = [
    "Line",
    "factors",
    "fresh_layer",
    "gauge",
    "layers",
    "stream",
    "streams_of",
    "symmetry",
    "theorems",
    "twins",
    "verify",
]


@dataclass(frozen=True)
class Line:
    """The outcome of one check of one variant."""

    variant: str
    check: str
    says: str
    residual: float
    tolerance: float
    residual_fp32: float
    tolerance_fp32: float

    @property
    def holds(self) -> bool:
        return self.residual <= self.tolerance  # false for NaN, too


def verify(
    variant: str, attentions: list[Attention], streams: list[Tensor], *, fresh: bool
) -> Iterator[Line]:
    """Every check that applies, at its worst over the layers; a stream of inputs for each."""
    numbers = [t for layer in attentions for t in layer.parameters()] + streams
    if not all(t.isfinite().all() for t in numbers):
        says = "weights, and what the layer reads, are numbers"
        yield Line(variant, "finite", says, nan, 0.0, nan, 0.0)
        return
    for check in CHECKS:
        if not check.applies(attentions[0]) or (theorems.fresh_only(check.name) and not fresh):
            continue
        worst = {
            dtype: max(
                (
                    _find(check, layer.to(dtype), x_BTD.to(dtype))
                    for layer, x_BTD in zip(attentions, streams, strict=True)
                ),
                key=_badness,
            )
            for dtype in (torch.float32, torch.float64)
        }
        double, single = worst[torch.float64], worst[torch.float32]
        yield Line(
            variant,
            check.name,
            check.says,
            double.residual,
            double.tolerance_at(torch.float64),
            single.residual,
            single.tolerance_at(torch.float32),
        )


def _find(check: Check, layer: Attention, x_BTD: Tensor) -> Found:
    try:
        return check.find(layer, x_BTD)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # too large to decompose
        return Found(nan)


def _badness(found: Found) -> float:
    return inf if isnan(found.residual) else found.residual


@torch.no_grad()
def fresh_layer(layer: Attention, seed: int) -> Attention:
    """Every tensor drawn anew, at a size that makes scores of order one."""
    for name, parameter in layer.named_parameters():
        generator = torch.Generator().manual_seed(key(seed, "verify", name) % 2**63)
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        wide = parameter.dim() >= 2 and not name.endswith("table")
        parameter.copy_(noise / layer.qk.spec.d_model**0.5 if wide else noise)
    return layer


def streams_of(model: GPT, length: int, seed: int) -> list[Tensor]:
    """What each attention layer of a model sees when it reads random tokens."""
    seen: list[Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
        for layer in model.attentions()
    ]
    generator = torch.Generator().manual_seed(key(seed, "verify", "tokens") % 2**63)
    vocabulary = model.token_embedding.num_embeddings
    with torch.no_grad():
        model(torch.randint(vocabulary, (2, length), generator=generator))
    for hook in hooks:
        hook.remove()
    return seen


def stream(d_model: int, length: int, seed: int) -> Tensor:
    """A normed stream of two sequences."""
    generator = torch.Generator().manual_seed(key(seed, "verify", "stream") % 2**63)
    x_BTD = torch.randn(2, length, d_model, generator=generator, dtype=torch.float64)
    return torch.nn.functional.layer_norm(x_BTD, (d_model,))
