"""Exact checks: identities that a variant must satisfy, with random weights or those of a run.

The result in fp64 decides, at a relative tolerance of 1e-10; fp32 is shown with the tolerance that
its rounding allows.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, isnan, nan

import torch
from torch import Tensor

from qkablate.attention import Attention
from qkablate.config import ModelConfig, stream_width
from qkablate.models.base import Model
from qkablate.randomness import derive_key

# Importing these modules registers their checks, in this order.
from qkablate.verify import layers  # isort: skip
from qkablate.verify import twins, factors, gauge, theorems, sites  # isort: skip
from qkablate.verify.check import CHECKS, Check, Deviation

__all__ = [
    "CheckResult",
    "factors",
    "gauge",
    "layers",
    "random_stream",
    "random_streams",
    "randomize_layer",
    "record_inputs",
    "sites",
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
    site: str
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
    variant: str,
    attentions: list[Attention],
    streams: list[tuple[Tensor, ...]],
    *,
    fresh: bool,
    site: str = "decoder",
) -> Iterator[CheckResult]:
    """Run every applicable check on each layer of a site and its streams; yield the worst result.

    A layer of cross-attention has two streams, the queries' and the keys'.
    """
    numbers = [t for layer in attentions for t in layer.parameters()]
    if not all(t.isfinite().all() for t in [*numbers, *itertools.chain(*streams)]):
        says = "the weights and the inputs of the layers are finite"
        yield CheckResult(variant, site, "finite", says, nan, 0.0, nan, 0.0)
        return
    d_model = streams[0][0].shape[-1]
    for check in CHECKS:
        if site not in check.sites or not check.applies(attentions[0]):
            continue
        if check.name in FRESH_ONLY and not fresh:
            continue
        numbers_of = {}
        for dtype in (torch.float32, torch.float64):  # ends in fp64
            deviations = [
                _run(check, layer.to(dtype), [stream.to(dtype) for stream in read])
                for layer, read in zip(attentions, streams, strict=True)
            ]
            worst = max(deviations, key=lambda d: inf if isnan(d.residual) else d.residual)
            numbers_of[dtype] = worst.residual, worst.tolerance_at(dtype, d_model)
        double, single = numbers_of[torch.float64], numbers_of[torch.float32]
        yield CheckResult(variant, site, check.name, check.says, *double, *single)


def _run(check: Check, layer: Attention, streams: list[Tensor]) -> Deviation:
    try:
        return check.find(layer, *streams)
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


Recorded = dict[str, tuple[list[Attention], list[tuple[Tensor, ...]]]]


def record_inputs(model: Model, length: int, seed: int) -> Recorded:
    """Return the layers of each site of a model, and the streams they read for random tokens."""
    names = ("source", "tokens")[-len(model.input_lengths()) :]
    inputs = [
        torch.randint(model.vocabulary, (2, min(length, most)), generator=_generator(seed, name))
        for name, most in zip(names, model.input_lengths(), strict=True)
    ]
    recorded: Recorded = {}
    with torch.no_grad():
        for layer, streams in model.attention_inputs(*inputs):
            layers, read = recorded.setdefault(layer.site, ([], []))
            layers.append(layer.module)
            read.append(streams)
    return recorded


def random_streams(model: ModelConfig, site: str, length: int, seed: int) -> tuple[Tensor, ...]:
    """Return normalized random streams of two sequences, as a layer of this site reads them.

    The two of cross-attention differ in length, too.
    """
    context, source = (min(length, most) for most in (model.context, model.source or model.context))
    width = stream_width(model, "encoder")
    if site == "encoder":
        return (random_stream(width, source, seed),)
    stream = random_stream(model.d_model, context, seed)
    if site != "cross":
        return (stream,)
    source -= source == context
    return stream, random_stream(width, source, seed, "source")


def random_stream(d_model: int, length: int, seed: int, name: str = "stream") -> Tensor:
    """Return a normalized random stream of two sequences."""
    generator = _generator(seed, name)
    x_BTD = torch.randn(2, length, d_model, generator=generator, dtype=torch.float64)
    return torch.nn.functional.layer_norm(x_BTD, (d_model,))
