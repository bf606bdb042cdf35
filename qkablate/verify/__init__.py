"""The exact checks: identities that a variant must fulfil, on fresh weights or a run's own.

fp64 decides, at a relative residual of 1e-10; fp32 is shown beside it, with the tolerance that its
rounding allows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qkablate.attention import Attention
from qkablate.model import GPT
from qkablate.randomness import key

# Importing them enters their checks in the list.
from qkablate.verify import factors, gauge, layers, symmetry, theorems, twins
from qkablate.verify.check import CHECKS, Found

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
    for check in sorted(CHECKS, key=lambda check: _number(check.name)):
        if not check.applies(attentions[0]) or (theorems.fresh_only(check.name) and not fresh):
            continue
        worst = {
            dtype: max(
                (
                    check.find(layer.to(dtype), x_BTD.to(dtype))
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


def _number(name: str) -> tuple[int, str]:
    """B_h and M_h, then E1, E2, …"""
    digits = name.partition(" ")[0].removeprefix("E")
    return (int(digits) if digits.isdecimal() else 0, name)


def _badness(found: Found) -> float:
    return found.residual if found.residual == found.residual else float("inf")


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
