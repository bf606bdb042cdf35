"""The kernel's name is chosen from shapes, and what is named is what runs."""

import pytest
import torch

from qkablate.attention.kernels import attend, choose_kernel


def choose(**other):
    base = {"heads": 4, "key_heads": 4, "width": 32, "value_width": 32}
    base |= {"device": "cpu", "half": False, "dropout": 0.0}
    return choose_kernel(**(base | other))


def test_choice():
    assert choose() == "flash"
    assert choose(dropout=0.1) == "math"
    assert choose(key_heads=1, width=128) == "folded"
    assert choose(key_heads=1, heads=1, width=128, value_width=128) == "flash"
    assert choose(device="cuda", half=True) == "flash"
    assert choose(device="cuda", half=False) == "efficient"
    assert choose(device="cuda", half=True, width=16) == "efficient"
    assert choose(device="cuda", half=True, width=12, value_width=12) == "math"
    assert choose(device="mps") == "math"


@pytest.mark.parametrize("causal", [True, False])
def test_all_kernels_agree(causal):
    torch.manual_seed(0)
    q, v = (torch.randn(2, 3, 9, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    k = torch.randn(2, 1, 9, 8, dtype=torch.float64, requires_grad=True)
    results = {}
    for kernel in ("math", "flash", "folded"):
        out, name = attend(q, k, v, scale=0.3, causal=causal, kernel=kernel)
        assert name == kernel
        results[kernel] = [out, *torch.autograd.grad(out.square().sum(), (q, k, v))]
    for kernel in ("flash", "folded"):
        for ours, reference in zip(results[kernel], results["math"], strict=True):
            torch.testing.assert_close(ours, reference, rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore:Flash attention")
def test_a_kernel_that_cannot_run_is_no_silent_fall_back():
    q, k, v = (torch.randn(1, 2, 4, width) for width in (8, 8, 4))
    with pytest.raises(RuntimeError):
        attend(q, k, v, scale=1.0, causal=True, kernel="flash")


def test_dropout_of_the_folded_kernel_keeps_the_mean():
    torch.manual_seed(0)
    q, k, v = torch.zeros(1, 2, 64, 4), torch.zeros(1, 1, 64, 4), torch.ones(1, 2, 64, 3)
    out, _ = attend(q, k, v, scale=1.0, causal=False, kernel="folded", dropout=0.5)
    assert out.std() > 0.01
    assert abs(out.mean() - 1) < 0.1
