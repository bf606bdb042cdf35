"""Tables of positions: exact, wherever a layer is moved, and in no checkpoint."""

import copy

import pytest
import torch

from qkablate.attention.modifiers import Alibi, Rope

CONTEXT = 16
# First query, queries and keys: whole, at the end of a cache, in its middle, beyond the context.
LENGTHS = [(0, 16, 16), (6, 1, 7), (6, 3, 9), (0, 5, 16), (30, 10, 40)]


def expected_biases(heads, first, queries, keys):
    query, key = torch.arange(first, first + queries)[:, None], torch.arange(keys)
    slope = 2.0 ** (-8 * torch.arange(1, heads + 1, dtype=torch.float64) / heads)
    return -(query - key).abs() * slope[:, None, None]


def expected_rotation(x, first):
    """Multiply by complex numbers."""
    width = x.shape[-1]
    plane = torch.arange(width // 2, dtype=torch.float64)
    position = torch.arange(first, first + x.shape[-2], dtype=torch.float64)[:, None]
    a, b = x.double().chunk(2, -1)
    turned = torch.complex(a, b) * torch.exp(1j * position * 10000 ** (-2 * plane / width))
    return torch.cat([turned.real, turned.imag], -1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("first", "queries", "keys"), LENGTHS)
@pytest.mark.parametrize("heads", [4, 3])
def test_biases_are_rounded_once(dtype, first, queries, keys, heads):
    layer = Alibi(heads, CONTEXT)
    layer = layer.double() if dtype == torch.float64 else layer
    found = layer(first, queries, keys, torch.zeros(1, dtype=dtype))
    assert torch.equal(found, expected_biases(heads, first, queries, keys).to(dtype))


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
@pytest.mark.parametrize("first", [0, 6, 30])
def test_rotation_is_that_of_complex_numbers(dtype, error, first):
    layer = Rope(8, CONTEXT)
    layer = layer.double() if dtype == torch.float64 else layer
    x = torch.randn(2, 3, 10, 8, dtype=dtype, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        layer(x, first).double(), expected_rotation(x, first), rtol=0, atol=error
    )


@pytest.mark.parametrize("make", [lambda: Rope(8, CONTEXT), lambda: Alibi(3, CONTEXT)])
def test_tables_are_whole_wherever_a_layer_is_moved(make):
    table = make().table
    with torch.device("meta"):
        unfilled = make()
    for moved in (unfilled.to_empty(device="cpu"), copy.deepcopy(make()), make().to(torch.float32)):
        assert torch.equal(moved.table, table)
    exact = make().double().table
    assert exact.dtype == torch.float64
    assert torch.equal(exact.float(), table)
    assert not torch.equal(exact, table.double())  # computed anew, not widened
    assert not make().state_dict()
