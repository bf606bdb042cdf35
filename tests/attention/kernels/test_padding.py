"""Keys that are padding: every kernel ignores them, forwards and backwards."""

import pytest
import torch

from qkablate.attention.kernels import dispatch
from qkablate.attention.kernels.dispatch import attend

KERNELS = ["math", "flash", "efficient", "folded", "blocked", "static"]
GROUPS = [(2, 2), (1, 2), (2, 1)]
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}


def naive(q, k, v, *, causal, bias, key_mask):
    """Return softmax(0.3 · q kᵀ + bias) v, one sequence, head and query at a time."""
    out = q.new_zeros(*q.shape[:3], v.shape[-1])
    for b, h, t in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        key_head, value_head = (h * len(x[b]) // q.shape[1] for x in (k, v))
        exists = key_mask[b] if key_mask[b].any() else ~key_mask[b]
        seen = [s for s in range(k.shape[2]) if exists[s] and (s <= t or not causal)]
        added = 0 if bias is None else bias.expand(*q.shape[:3], k.shape[2])[b, h, t, seen]
        weights = (0.3 * k[b, key_head, seen] @ q[b, h, t] + added).softmax(0)
        out[b, h, t] = weights @ v[b, value_head, seen]
    return out


@pytest.fixture(autouse=True)
def efficient_runs_on_a_cpu(monkeypatch):
    """Compute what `efficient` is given, its aligned mask too, by torch's math kernel."""
    force = dispatch.force_backend

    def force_available(kernel):
        return force("math" if kernel == "efficient" else kernel)

    monkeypatch.setattr(dispatch, "force_backend", force_available)


def draw(kernel, groups, value_groups, dtype, queries=4, keys=5):
    torch.manual_seed(0)
    width = 0 if kernel == "static" else 16
    shapes = ((2, queries, width), (groups, keys, width), (value_groups, keys, 8))
    return [torch.randn(3, *shape).to(dtype).requires_grad_() for shape in shapes]


def gradients(out, inputs, upstream=None):
    upstream = torch.ones_like(out) if upstream is None else upstream
    return torch.autograd.grad(out, inputs, upstream, materialize_grads=True)


def make_mask(keys=5):
    """Return a mask of three sources: the last has no key at all, and the first no padding."""
    return torch.arange(keys) < torch.tensor([keys, 2, 0])[:, None]


MASK_BS = make_mask()


def check(kernel, groups, value_groups, bias, dtype, queries=4, keys=5):
    """Compare outputs and gradients with the definition, causal and not."""
    q, k, v = draw(kernel, groups, value_groups, dtype, queries, keys)
    mask_BS = make_mask(keys)
    added = None if bias is None else torch.randn(bias).to(dtype)
    for causal in (False, True):
        out = attend(
            q, k, v, scale=0.3, causal=causal, kernel=kernel, bias=added, key_mask_BS=mask_BS
        )
        reference = naive(
            *(x.double() for x in (q, k, v)),
            causal=causal,
            bias=None if added is None else added.double(),
            key_mask=mask_BS,
        )
        upstream = torch.randn(out.shape).to(dtype)
        results = [
            [value.double(), *gradients(value, (q, k, v), upstream.to(value.dtype))]
            for value in (out, reference)
        ]
        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)
        for gradient_BGSE in results[0][2:]:
            assert not gradient_BGSE[1, :, 2:].any()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("groups", "value_groups"), GROUPS)
@pytest.mark.parametrize("bias", [None, (4, 5), (2, 4, 5), (3, 1, 4, 5)], ids=str)
def test_padding_changes_neither_outputs_nor_gradients(kernel, groups, value_groups, bias, dtype):
    check(kernel, groups, value_groups, bias, dtype)


def check_left_padding(kernel):
    """Check that a query that sees only padding gets finite numbers."""
    q, k, v = draw(kernel, 2, 2, torch.float32)
    mask_BS = (torch.arange(5) > 2).expand(3, -1)
    out = attend(q, k, v, scale=0.3, causal=True, kernel=kernel, key_mask_BS=mask_BS)
    assert out.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients(out, (q, k, v)))


@pytest.mark.parametrize("kernel", KERNELS)
def test_query_that_sees_only_padding_gets_finite_numbers(kernel):
    check_left_padding(kernel)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_padding_gets_no_weight_under_autocast(kernel, dtype):
    """The kernels round fp32 tensors to 16 bits."""
    q, k, v = draw(kernel, 2, 2, torch.float32)
    with torch.autocast("cpu", dtype):
        out, other = (
            attend(q, k, values, scale=0.3, causal=False, kernel=kernel, key_mask_BS=MASK_BS)
            for values in (v, torch.where(MASK_BS[:, None, :, None], v, 1e4))
        )
    assert out.isfinite().all()
    assert torch.equal(out[:2], other[:2])
