"""Linear layers through oneDNN agree with torch and use oneDNN."""

from functools import partial

import pytest
import torch
from torch.nn.functional import linear as plain

from qkablate.attention import apply_matrix
from qkablate.attention.kernels import matmul
from qkablate.attention.kernels.matmul import Linear, linear

ONEDNN = "aten::mkldnn_convolution"


@pytest.fixture
def onednn():
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without oneDNN")
    before = matmul.get_backend()
    matmul.set_backend("onednn")
    yield
    matmul.set_backend(before)


def called(function):
    """Return the names of the operators that a function calls."""
    with torch.profiler.profile() as profile:
        function()
    return {event.name for event in profile.events()}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(6, 50, 96), (500, 96)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_onednn_agrees_with_torch(onednn, shape, bias, threads):
    """Outputs and gradients agree for contiguous and transposed weights."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(0)
        x, upright, wide = torch.randn(shape), torch.randn(40, 96), torch.randn(96, 40)
        b = torch.randn(40) if bias else None
        for w in (upright, wide.T):
            inputs = [t.requires_grad_() for t in (x, w, b) if t is not None]
            found = []
            for one in (plain, linear):
                y = one(*inputs)
                found.append([y, *torch.autograd.grad(y.square().sum(), inputs)])
            assert found[0][0].shape == found[1][0].shape == (*shape[:-1], 40)
            torch.testing.assert_close(*found, rtol=1e-5, atol=1e-3)
            assert ONEDNN in called(partial(linear, *inputs))
    finally:
        torch.set_num_threads(before)


def test_projections_and_mlps_use_onednn(onednn):
    x, w = torch.randn(300, 96), torch.randn(96, 40)
    assert ONEDNN in called(lambda: apply_matrix(x, w))
    assert ONEDNN in called(lambda: Linear(96, 40)(x))
    matmul.set_backend("torch")
    assert ONEDNN not in called(lambda: apply_matrix(x, w))


def test_small_or_non_fp32_inputs_use_torch(onednn):
    w = torch.randn(40, 96)
    large, small = (
        torch.randn(matmul.MIN_ONEDNN_NUMEL // 96 + 1, 96),
        torch.randn(matmul.MIN_ONEDNN_NUMEL // 96, 96),
    )
    assert ONEDNN in called(lambda: linear(large, w))
    assert ONEDNN not in called(lambda: linear(small, w))
    assert ONEDNN not in called(lambda: linear(large.double(), w.double()))
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(large, w).dtype == torch.bfloat16
