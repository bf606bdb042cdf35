"""The blocked loss equals the cross-entropy of all logits."""

import pytest
import torch
from torch.nn import functional as F

from qkablate.models import blocked_loss


def random_inputs(count=7, width=5, vocabulary=11, dtype=torch.float64):
    torch.manual_seed(0)
    x = torch.randn(count, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, width, dtype=dtype, requires_grad=True)
    return x, weight, torch.randint(vocabulary, (count,))


@pytest.mark.parametrize("rows", [1, 2, 7, 100])
@pytest.mark.parametrize("ignored", [[], [0], [1, 2, 6]], ids=str)
def test_results_do_not_depend_on_the_block_size(monkeypatch, rows, ignored):
    monkeypatch.setattr(blocked_loss, "LOGITS_PER_BLOCK", 11 * rows)
    x, weight, targets = random_inputs()
    targets[ignored] = blocked_loss.IGNORE_INDEX
    results = []
    for loss in (
        F.cross_entropy(x @ weight.T, targets),
        blocked_loss.blocked_loss(x, weight, targets),
    ):
        results.append([loss, *torch.autograd.grad(3 * loss, (x, weight))])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_blocks_are_as_accurate_as_a_single_pass(monkeypatch, dtype):
    """Small gradients do not underflow, since the number of answers divides at the end."""
    monkeypatch.setattr(blocked_loss, "LOGITS_PER_BLOCK", 64 * 100)
    x, weight, targets = random_inputs(3000, 32, 64, torch.float32)
    exact = F.cross_entropy(x @ weight.T, targets)
    with torch.autocast("cpu", dtype):
        found = blocked_loss.blocked_loss(x, weight, targets)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, exact, rtol=0.01, atol=0.01)
    expected = torch.autograd.grad(exact, (x, weight))
    for one, other in zip(torch.autograd.grad(found, (x, weight)), expected, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).norm() < 0.02 * other.norm()
