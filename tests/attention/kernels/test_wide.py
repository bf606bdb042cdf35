"""The Triton kernel for wide keys agrees with the definition, in Triton's interpreter."""

import importlib.util
import os
import sys

import pytest
import torch

from qkablate.attention.kernels.dispatch import attend
from tests.attention.kernels import test_padding

NAME = "qkablate.attention.kernels.wide"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None
        and not os.environ.get("QKABLATE_NEEDS_COMPILER"),
        reason="needs triton",
    ),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of rows that are not stored
]


@pytest.fixture(autouse=True, scope="module")
def interpreted():
    """Import the kernels as functions that run on a CPU."""
    patch = pytest.MonkeyPatch()
    patch.setenv("TRITON_INTERPRET", "1")
    # Triton's own functions, too: earlier tests may have imported them as compiled ones.
    for name in [*sys.modules]:
        if name == NAME or (name.split(".")[0] == "triton" and not name.startswith("triton._C")):
            patch.delitem(sys.modules, name)
    yield importlib.import_module(NAME)
    patch.undo()
    sys.modules.pop(NAME, None)


def naive(q_BHTE, k_BGSE, v_BYSV, scale, causal, bias):
    """Return the weighted mean of the values, from the definition."""
    heads, (queries, keys) = q_BHTE.shape[1], (q_BHTE.shape[2], k_BGSE.shape[2])
    k_BHSE, v_BHSV = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k_BGSE, v_BYSV))
    odds = torch.einsum("bhte,bhse->bhts", q_BHTE, k_BHSE) * scale
    odds = (odds if bias is None else odds + bias).exp()
    if causal:
        odds = odds * torch.ones(queries, keys).tril()
    return torch.einsum("bhts,bhsv->bhtv", odds / odds.sum(-1, keepdim=True), v_BHSV)


def results(function, inputs, dtype):
    inputs = [x.to(dtype).requires_grad_() for x in inputs]
    out = function(*inputs)
    weight = torch.linspace(-1, 1, out.numel()).view(out.shape)
    found = [out, *torch.autograd.grad((out * weight).sum(), inputs)]
    assert {x.dtype for x in found} == {dtype}
    return [x.detach() for x in found]


@pytest.mark.parametrize(
    ("key_heads", "value_heads", "queries", "keys", "causal"),
    [(1, 2, 40, 40, True), (1, 2, 40, 33, False), (2, 1, 33, 40, True), (1, 1, 20, 20, True)],
)
@pytest.mark.parametrize("bias_shape", [None, "TS", "HTS"])
def test_outputs_and_gradients_equal_the_definition(
    key_heads, value_heads, queries, keys, causal, bias_shape
):
    """Several tiles of queries, of keys and of the width, and remainders of all."""
    torch.manual_seed(0)
    shapes = [(2, queries, 72), (key_heads, keys, 72), (value_heads, keys, 20)]
    inputs = [torch.randn(2, n, length, width) for n, length, width in shapes]
    bias = {
        None: None,
        "TS": torch.randn(queries, keys),
        "HTS": torch.randn(2, queries, keys),
    }[bias_shape]

    def wide(q, k, v):
        return attend(q, k, v, scale=0.1, causal=causal, kernel="wide", bias=bias)

    def reference(q, k, v):
        return naive(q, k, v, 0.1, causal, None if bias is None else bias.double())

    found, expected = (
        results(wide, inputs, torch.float32),
        results(reference, inputs, torch.float64),
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("key_heads", "value_heads", "bias"), [(2, 2, None), (1, 2, (2, 36, 70)), (2, 1, (36, 70))]
)
def test_padding_changes_neither_outputs_nor_gradients(key_heads, value_heads, bias, dtype):
    """Some tiles are padding in part, some all, and of one sequence all; 16 bits as below."""
    test_padding.check("wide", key_heads, value_heads, bias, dtype, queries=36, keys=70)


def test_query_that_sees_only_padding_gets_finite_numbers():
    test_padding.check_left_padding("wide")


def test_views_and_autocast_give_what_dense_tensors_give():
    torch.manual_seed(0)
    q, k = torch.randn(1, 20, 2, 40).transpose(1, 2), torch.randn(1, 1, 40, 20).mT
    v = torch.randn(1, 2, 20, 8)
    results_by = []
    for inputs in ((q, k, v), tuple(x.contiguous() for x in (q, k, v))):
        with torch.autocast("cpu", torch.float16):
            out = attend(*inputs, scale=0.1, causal=True, kernel="wide")
        assert out.dtype == torch.float16  # the interpreter has no bf16
        results_by.append(out)
    torch.testing.assert_close(*results_by, rtol=0, atol=0)
    expected = attend(q, k, v, scale=0.1, causal=True, kernel="math")
    torch.testing.assert_close(results_by[0].float(), expected, rtol=0.02, atol=0.02)
