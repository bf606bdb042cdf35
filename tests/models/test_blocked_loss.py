"""The loss in blocks is the loss, and needs the logits of one block."""

import pytest
import torch
from torch.nn import functional as F

from qkablate.models import blocked_loss as output


def drawn(count=7, width=5, vocabulary=11, dtype=torch.float64):
    torch.manual_seed(0)
    x = torch.randn(count, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, width, dtype=dtype, requires_grad=True)
    return x, weight, torch.randint(vocabulary, (count,))


@pytest.mark.parametrize("rows", [1, 2, 7, 100])
@pytest.mark.parametrize("ignored", [[], [0], [1, 2, 6]], ids=str)
def test_blocks_of_any_size_come_to_the_same(monkeypatch, rows, ignored):
    monkeypatch.setattr(output, "LOGITS", 11 * rows)
    x, weight, targets = drawn()
    targets[ignored] = output.IGNORE
    results = []
    for loss in (F.cross_entropy(x @ weight.T, targets), output.blocked_loss(x, weight, targets)):
        results.append([loss, *torch.autograd.grad(3 * loss, (x, weight))])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_it_is_as_near_as_all_at_once(monkeypatch, dtype):
    """Small gradients do not vanish: each is divided by the number of answers at the end."""
    monkeypatch.setattr(output, "LOGITS", 64 * 100)
    x, weight, targets = drawn(3000, 32, 64, torch.float32)
    exact = F.cross_entropy(x @ weight.T, targets)
    with torch.autocast("cpu", dtype):
        found = output.blocked_loss(x, weight, targets)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, exact, rtol=0.01, atol=0.01)
    expected = torch.autograd.grad(exact, (x, weight))
    for one, other in zip(torch.autograd.grad(found, (x, weight)), expected, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).norm() < 0.02 * other.norm()
