"""Every variant against attention written out, forward and backward."""

import importlib.util
from pathlib import Path

import pytest
import torch

from qkablate.attention import OV_CIRCUITS, QK_CIRCUITS, Attention, Spec

_spec = importlib.util.spec_from_file_location("naive", Path(__file__).with_name("naive.py"))
naive = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(naive)


def make(qk: str, *, d=12, heads=3, bias=False, dtype=torch.float64, init="matched") -> Attention:
    torch.manual_seed(0)
    spec = Spec(d, heads, bias=bias, sigma=0.3, init=init)
    layer = Attention(QK_CIRCUITS[qk](spec), OV_CIRCUITS["separate"](spec)).to(dtype)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer


@pytest.mark.parametrize("qk", QK_CIRCUITS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("length", [1, 7])
def test_parity(qk, bias, causal, heads, dtype, length):
    layer = make(qk, heads=heads, bias=bias, dtype=dtype)
    check(layer, torch.randn(2, length, 12, dtype=dtype), None, causal)


@pytest.mark.parametrize("qk", QK_CIRCUITS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(5, 3), (3, 5), (1, 4)])
def test_parity_across_two_streams(qk, bias, queries, keys):
    layer = make(qk, bias=bias)
    x = torch.randn(2, queries, 12, dtype=torch.float64)
    check(layer, x, torch.randn(2, keys, 12, dtype=torch.float64), causal=False)


@pytest.mark.parametrize("qk", QK_CIRCUITS)
def test_parity_without_matched_start(qk):
    check(make(qk, init="naive"), torch.randn(1, 5, 12, dtype=torch.float64), None, True)


def check(layer, x, y, causal):
    """Same outputs, same gradients of both streams and of every parameter."""
    x.requires_grad_()
    streams = [x] if y is None else [x, y.requires_grad_()]
    tolerance = 1e-10 if x.dtype == torch.float64 else 1e-4
    results = []
    for attend in (
        lambda: layer(x, y, causal=causal),
        lambda: naive.attention(layer, x, x if y is None else y, causal),
    ):
        out = attend()
        weight = torch.linspace(-1, 1, out.numel(), dtype=x.dtype).view_as(out)
        inputs = [*streams, *layer.parameters()]
        results.append([out, *torch.autograd.grad((out * weight).sum(), inputs, allow_unused=True)])
    for ours, theirs in zip(*results, strict=True):
        if ours is None or theirs is None:  # the bias of a single value: no way to the output
            assert ours is None or float(ours.abs().max()) < tolerance
            continue
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("qk", QK_CIRCUITS)
def test_causality(qk):
    """What comes later changes nothing."""
    layer = make(qk)
    x = torch.randn(1, 8, 12, dtype=torch.float64)
    changed = x.clone()
    changed[:, 5:] += 1
    torch.testing.assert_close(layer(x)[:, :5], layer(changed)[:, :5], rtol=0, atol=1e-12)
    assert not torch.allclose(layer(x)[:, 5:], layer(changed)[:, 5:])
