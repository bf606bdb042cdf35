"""The kernels agree, and the one that was chosen is the one that runs."""

import contextlib
from itertools import product

import pytest
import torch

from qkablate.attention.kernels.dispatch import align_rows, attend, force_backend
from qkablate.models.blocked_loss import blocked_loss


@pytest.mark.parametrize("kernel", ["flash", "folded", "blocked"])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("widths", [(8, 8), (6, 8), (8, 6)], ids=str)
def test_all_kernels_agree(kernel, groups, widths):
    """Outputs and gradients agree for all widths, shared heads and score biases."""
    torch.manual_seed(0)
    width, value_width = widths
    q = torch.randn(2, 4, 9, width, dtype=torch.float64, requires_grad=True)
    k = torch.randn(2, groups, 9, width, dtype=torch.float64, requires_grad=True)
    addends = [None, torch.randn(9, 9).double(), torch.randn(4, 9, 9).double()]
    learned = [t.requires_grad_() for t in addends[1:] if kernel == "folded"]
    for causal, bias, value_groups in product((True, False), addends, {groups, 4}):
        v = torch.randn(2, value_groups, 9, value_width, dtype=torch.float64, requires_grad=True)
        results = []
        for name in ("math", kernel):
            out = attend(q, k, v, scale=0.3, causal=causal, kernel=name, bias=bias)
            inputs = (q, k, v, *(t for t in learned if t is bias))
            results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
        assert results[0][0].shape == (2, 4, 9, value_width)
        torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("queries", [1, 4, 9, 64])
@pytest.mark.parametrize(("groups", "value_groups"), [(1, 4), (4, 1), (2, 1), (1, 1), (4, 4)])
def test_results_do_not_depend_on_the_block_size(monkeypatch, queries, groups, value_groups):
    """Outputs and gradients agree for blocks that divide the length and blocks that do not."""
    for size in ("BLOCK", "SHARED_BLOCK"):
        monkeypatch.setattr(f"qkablate.attention.kernels.blocked.{size}", queries)
    torch.manual_seed(0)
    shapes = ((4, 6), (groups, 6), (value_groups, 3))
    inputs = [torch.randn(2, n, 10, width).double().requires_grad_() for n, width in shapes]
    addends = [None, torch.randn(10, 10).double(), torch.randn(4, 10, 10).double()]
    for causal, bias in product((True, False), addends):
        results = []
        for name in ("math", "blocked"):
            out = attend(*inputs, scale=0.3, causal=causal, kernel=name, bias=bias)
            results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
        torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 4])
def test_recomputed_weights_equal_saved_ones(monkeypatch, groups, dtype):
    torch.manual_seed(0)
    shapes = ((4, 8), (groups, 8), (4, 8))
    inputs = [torch.randn(2, n, 200, width, dtype=dtype).requires_grad_() for n, width in shapes]
    results = []
    for most in (200, 199):
        monkeypatch.setattr("qkablate.attention.kernels.blocked.MAX_SAVED_QUERIES", most)
        out = attend(*inputs, scale=0.3, causal=True, kernel="blocked")
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("queries", "keys"), [(10, 4), (4, 10)])
def test_blocks_with_different_numbers_of_queries_and_keys(monkeypatch, queries, keys, causal):
    for size in ("BLOCK", "SHARED_BLOCK"):
        monkeypatch.setattr(f"qkablate.attention.kernels.blocked.{size}", 3)
    torch.manual_seed(0)
    q = torch.randn(2, 4, queries, 6).double()
    k, v = torch.randn(2, 1, keys, 6).double(), torch.randn(2, 4, keys, 3).double()
    one, other = (
        attend(q, k, v, scale=0.3, causal=causal, kernel=name) for name in ("folded", "blocked")
    )
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_blocks_can_be_compiled():
    """Blocked attention and loss compile into one graph."""
    torch.manual_seed(0)
    shapes = ((2, 8), (1, 8), (2, 4))
    q, k, v = (torch.randn(1, n, 70, width, requires_grad=True) for n, width in shapes)
    weight, targets = torch.randn(9, 4, requires_grad=True), torch.arange(140) % 9

    def loss(q, k, v, weight):
        o_BHTV = attend(q, k, v, scale=0.3, causal=True, kernel="blocked")
        return blocked_loss(o_BHTV.flatten(0, 2), weight, targets)

    results = []
    for function in (loss, torch.compile(loss, dynamic=False, backend="aot_eager", fullgraph=True)):
        found = function(q, k, v, weight)
        results.append([found, *torch.autograd.grad(found, (q, k, v, weight))])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(("kernel", "most"), [("folded", 1.0), ("blocked", 1 / 16)])
def test_memory_holds_the_scores_of_one_block(largest, kernel, most):
    heads, length = 4, 1024
    shapes = ((heads, 32), (1, 32), (heads, 8))
    inputs = [torch.randn(1, n, length, width, requires_grad=True) for n, width in shapes]
    with largest() as found:
        attend(*inputs, scale=0.1, causal=True, kernel=kernel).sum().backward()
    assert found.numbers == heads * length * length * most


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_blocked_equals_folded_under_autocast(dtype):
    torch.manual_seed(0)
    shapes = ((4, 16), (1, 16), (4, 4))
    results = []
    inputs = [torch.randn(2, n, 150, width, requires_grad=True) for n, width in shapes]
    for kernel in ("folded", "blocked"):
        with torch.autocast("cpu", dtype):
            out = attend(*inputs, scale=0.25, causal=True, kernel=kernel)
        assert out.dtype == dtype
        gradients = torch.autograd.grad(out.float().square().sum(), inputs)
        assert {one.dtype for one in gradients} == {torch.float32}
        results.append([out.float(), *gradients])
    torch.testing.assert_close(*results, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("value_groups", [1, 2, 4])
def test_static_kernel_is_the_softmax_of_the_bias(value_groups):
    torch.manual_seed(0)
    q = torch.empty(3, 4, 5, 0)
    k = torch.empty(3, 4, 5, 0)
    v = torch.randn(3, value_groups, 5, 6)
    table = torch.randn(4, 5, 5)
    visible = torch.ones(5, 5).tril()
    v_BHSV = v.repeat_interleave(4 // value_groups, 1)
    for bias, causal in product((table, None), (True, False)):
        odds = (torch.zeros(4, 5, 5) if bias is None else bias).exp() * (visible if causal else 1)
        weights_HTS = odds / odds.sum(-1, keepdim=True)
        out = attend(q, k, v, scale=1.0, causal=causal, kernel="static", bias=bias)
        torch.testing.assert_close(out, weights_HTS @ v_BHSV)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("what", ["dropout", "learned addend"])
def test_unavailable_kernel_raises(what):
    q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
    if what == "dropout":
        other = {"dropout": 0.5}
    else:
        other = {"bias": torch.zeros(4, 4, requires_grad=True)}
    with pytest.raises(RuntimeError):
        attend(q, k, v, scale=1.0, causal=False, kernel="flash", **other)


@pytest.mark.parametrize(("kernel", "width"), [("folded", 4), ("static", 0), ("math", 4)])
def test_dropout_preserves_the_mean(kernel, width):
    torch.manual_seed(0)
    q, k, v = torch.zeros(1, 2, 64, width), torch.zeros(1, 1, 64, width), torch.ones(1, 2, 64, 3)
    out = attend(q, k, v, scale=1.0, causal=False, kernel=kernel, dropout=0.5)
    assert out.std() > 0.01
    assert abs(out.mean() - 1) < 0.1


ENABLED = {
    "flash": torch.backends.cuda.flash_sdp_enabled,
    "cudnn": torch.backends.cuda.cudnn_sdp_enabled,
    "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
    "math": torch.backends.cuda.math_sdp_enabled,
}


def enabled_backends():
    return {name for name, is_enabled in ENABLED.items() if is_enabled()}


@pytest.mark.parametrize("kernel", ENABLED)
@pytest.mark.parametrize("flash", [True, False])
def test_forced_backend_is_the_only_one_until_the_context_ends(kernel, flash):
    torch.backends.cuda.enable_flash_sdp(flash)
    try:
        before = enabled_backends()
        assert ("flash" in before) == flash
        with contextlib.suppress(ZeroDivisionError), force_backend(kernel):
            assert enabled_backends() == {kernel}
            raise ZeroDivisionError
        assert enabled_backends() == before
    finally:
        torch.backends.cuda.enable_flash_sdp(True)


@pytest.mark.parametrize("keys", [1, 15, 16, 17, 50])
@pytest.mark.parametrize("shape", [(7,), (4, 7), (2, 1, 1), (2, 4, 7)], ids=str)
def test_bias_of_any_length_is_aligned_without_a_copy_for_every_head(shape, keys):
    """The rule of torch's memory-efficient kernel, which would otherwise pad all B · H · T rows."""
    bias = torch.randn(*shape, keys)
    aligned = align_rows(bias)
    torch.testing.assert_close(aligned, bias, rtol=0, atol=0)
    full = aligned.expand(2, 4, 7, keys)
    assert full.stride(-1) == 1
    assert all(stride % 16 == 0 for stride in full.stride()[:-1])
    assert full.untyped_storage().nbytes() <= bias.nbytes / keys * (keys + 15)
