"""Kernels that only a GPU has, and all variants with each kernel there; skipped where is none."""

import functools
import importlib.util

import pytest
import torch

from qkablate.attention import Attention
from qkablate.attention.kernels.choice import KERNELS, Gpu
from qkablate.config import ModelConfig, VariantConfig, resolve_variant, variants
from qkablate.errors import ImpossibleConfig
from qkablate.models.catalogue import make_attention
from tests.attention import naive
from tests.attention.kernels.test_padding import GROUPS, check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Of the norm of an output or a gradient; the weights are rounded to the precision, too.
TOLERANCES = {"fp32": 2e-5, "bf16": 6e-2, "fp16": 8e-3}
LENGTH = 40  # no multiple of the kernels' tiles


@pytest.mark.parametrize("kernel", ["efficient", "wide"])
@pytest.mark.parametrize(("groups", "value_groups"), GROUPS)
@pytest.mark.parametrize("bias", [None, (2, 36, 70)], ids=str)
def test_padding_changes_neither_outputs_nor_gradients(kernel, groups, value_groups, bias):
    if kernel == "wide" and importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton")
    with torch.device("cuda"):
        check(kernel, groups, value_groups, bias, torch.bfloat16, queries=36, keys=70)


def this_gpu() -> Gpu:
    """Return what the machine has."""
    return Gpu(
        torch.cuda.get_device_capability(),
        cudnn=torch.backends.cudnn.is_available(),
        triton=importlib.util.find_spec("triton") is not None,
    )


def make(variant: str, position: str, precision: str, kernel: str) -> Attention:
    """Return a layer with random numbers, the same for every kernel and precision."""
    model = ModelConfig(d_model=64, heads=4, context=LENGTH, bias=True, position=position)
    config = resolve_variant(VariantConfig(**variants()[variant]), model)
    layer = make_attention(
        model, config, device="cuda", precision=precision, gpu=this_gpu(), kernel=kernel
    )
    torch.manual_seed(0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    return layer


def gradients(layer: Attention, function, x_BTD: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the output, and the gradients of the stream and of the parameters."""
    x_BTD = x_BTD.clone().requires_grad_()
    out = function(x_BTD)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
    named = {"x": x_BTD, **dict(layer.named_parameters())}
    loss = (out.double() * weights.to(out.device)).sum()
    grads = torch.autograd.grad(loss, list(named.values()), materialize_grads=True)
    return {"output": out.detach(), **dict(zip(named, grads, strict=True))}


def draw() -> torch.Tensor:
    return torch.randn(2, LENGTH, 64, generator=torch.Generator().manual_seed(1))


@functools.cache
def reference(variant: str, position: str) -> dict[str, torch.Tensor]:
    """Return the numbers of the naive reference, in fp64."""
    layer = make(variant, position, "fp32", "math").double()
    return gradients(
        layer, lambda x_BTD: naive.attention(layer, x_BTD, None, True), draw().double()
    )


@pytest.mark.slow
@pytest.mark.parametrize("position", ["learned", "alibi", "rope"])
@pytest.mark.parametrize("variant", variants())
def test_every_kernel_matches_the_reference(variant, position):
    """In outputs and gradients; what a variant does not support is refused before."""
    met = set()
    for precision, dtype in DTYPES.items():
        for kernel in ("auto", *KERNELS):
            try:
                layer = make(variant, position, precision, kernel).to("cuda")
                expected = reference(variant, position)
            except ImpossibleConfig:
                continue
            met.add((precision, kernel))
            with torch.autocast("cuda", dtype, enabled=precision != "fp32"):
                found = gradients(layer, layer, draw().to("cuda"))
            for name, value in expected.items():
                ours = found[name].cpu().double()
                # What is zero in theory is as small as the others are exact.
                size = max(value.norm(), 0.1 * expected["x"].norm())
                error = float((ours - value).norm() / size)
                assert error < TOLERANCES[precision], (precision, kernel, layer.kernel, name, error)
    if position != "rope":
        assert {(precision, "auto") for precision in DTYPES} <= met
    if variant == "standard" and torch.cuda.get_device_capability() >= (8, 0):
        half = {*KERNELS} - ({"flash", "cudnn"} if position == "alibi" else set())
        assert {kernel for precision, kernel in met if precision == "bf16"} >= half
