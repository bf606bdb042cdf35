"""Padding of the keys: a layer computes what it would without, whatever the padding holds."""

import functools

import pytest
import torch

from qkablate.attention import QK_CIRCUITS, Cache, SourceCache
from tests.attention import naive
from tests.attention.random_layers import PAIRS, random_layer, stream
from tests.attention.test_layer import BY_NAME, NORMABLE, ROTATABLE

LENGTHS = torch.tensor([6, 3, 1])
MASK_BS = torch.arange(6) < LENGTHS[:, None]
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4}


def padded_and_cut(layer, reference, dtype, *, is_self):
    """Return outputs, and gradients of streams and parameters, for padded and for cut streams.

    The padding holds NaN and inf. The reference computes each of the cut streams.
    """
    y_BSD = stream(6, batch=3, dtype=dtype)
    garbage_BSD = torch.full_like(y_BSD, torch.nan)
    garbage_BSD[..., 0] = torch.inf
    y_BSD = y_BSD.where(MASK_BS[..., None], garbage_BSD).requires_grad_()
    x_BTD = y_BSD if is_self else stream(4, batch=3, dtype=dtype).requires_grad_()
    out_BTD = layer(x_BTD, None if is_self else y_BSD, causal=False, key_mask_BS=MASK_BS)
    counts_BT = MASK_BS if is_self else torch.ones(3, 4, dtype=torch.bool)
    cut = []
    for n, length in enumerate(LENGTHS.tolist()):
        y_1SD = y_BSD[n : n + 1, :length]
        x_1TD = y_1SD if is_self else x_BTD[n : n + 1]
        cut.append(reference(x_1TD, None if is_self else y_1SD, causal=False)[0])
    inputs, results = [x_BTD, y_BSD, *layer.parameters()], []
    for out_ND in (out_BTD[counts_BT], torch.cat(cut)):
        upstream = torch.linspace(-1, 1, out_ND.numel(), dtype=dtype).view_as(out_ND)
        gradients = torch.autograd.grad(out_ND, inputs, upstream, materialize_grads=True)
        results.append([out_ND, *gradients])
    assert not results[0][2][~MASK_BS].any()
    return results


def check(layer, dtype=torch.float64, *, is_self):
    """Compare outputs and gradients with those of the definition."""
    reference = functools.partial(naive.attention, layer)
    results = padded_and_cut(layer, reference, dtype, is_self=is_self)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("pair", PAIRS, ids=BY_NAME)
@pytest.mark.parametrize("is_self", [True, False], ids=["self", "cross"])
def test_padding_changes_nothing(pair, is_self):
    for bias in (False, True):
        check(random_layer(*pair, bias=bias), is_self=is_self)
    check(random_layer(*pair, dtype=torch.float32), torch.float32, is_self=is_self)


@pytest.mark.slow
@pytest.mark.parametrize("qk", QK_CIRCUITS)
def test_padding_changes_nothing_with_norms_positions_and_self_mask(qk):
    for norm in ("none", *(("qk", "unit_keys") if qk in NORMABLE else ())):
        for position in ("none", "alibi", *(("rope",) if qk in (*ROTATABLE, "uniform") else ())):
            for mask_self in (False, True):
                options = {"norm": norm, "position": position, "mask_self": mask_self}
                check(random_layer(qk, **options), is_self=True)


@pytest.mark.parametrize("pair", [("separate", "separate"), ("merged", "separate")], ids=BY_NAME)
@pytest.mark.parametrize("kernel", ["math", "flash", "folded", "blocked"])
def test_padding_changes_nothing_in_any_kernel(pair, kernel):
    for is_self in (True, False):
        check(random_layer(*pair, kernel=kernel), is_self=is_self)


@pytest.mark.parametrize("pair", PAIRS, ids=BY_NAME)
@pytest.mark.parametrize("is_self", [True, False], ids=["self", "cross"])
def test_padding_changes_nothing_in_bf16(pair, is_self):
    """The layer computes the cut streams, too, since a reference would round elsewhere."""
    layer = random_layer(*pair, dtype=torch.bfloat16)
    for ours, theirs in zip(
        *padded_and_cut(layer, layer, torch.bfloat16, is_self=is_self), strict=True
    ):
        assert (ours - theirs).norm() <= 0.05 * theirs.norm() + 0.05


def test_sequence_that_is_all_padding_gives_finite_numbers():
    for pair in PAIRS:
        layer, x_BTD = random_layer(*pair, bias=True), stream(5).requires_grad_()
        mask_BS = torch.zeros(2, 5, dtype=torch.bool)
        out_BTD = layer(x_BTD, torch.full_like(x_BTD, torch.nan), causal=False, key_mask_BS=mask_BS)
        gradients = torch.autograd.grad(
            out_BTD.sum(), [x_BTD, *layer.parameters()], materialize_grads=True
        )
        assert all(part.isfinite().all() for part in (out_BTD, *gradients))


@pytest.mark.parametrize("pair", PAIRS, ids=BY_NAME)
def test_weights_and_scores_leave_padding_out(pair):
    layer, x_BTD = random_layer(*pair, mask_self=True), stream(6, batch=3)
    weights_BHTS = layer.weights(x_BTD, key_mask_BS=MASK_BS, causal=False)
    scores_BHTS = layer.scores(x_BTD, key_mask_BS=MASK_BS, causal=False)
    hidden_BHTS = ~MASK_BS[:, None, None].expand_as(scores_BHTS)
    assert not weights_BHTS[hidden_BHTS].any()
    assert (scores_BHTS[hidden_BHTS] == -torch.inf).all()
    torch.testing.assert_close(scores_BHTS.softmax(-1), weights_BHTS)


@pytest.mark.parametrize("pair", PAIRS, ids=BY_NAME)
def test_padding_changes_nothing_with_a_cache(pair):
    """Queries in pieces, of a padded source and of a padded stream of their own."""
    layer, x_BTD, padding_BS = random_layer(*pair), stream(6, batch=3), ~MASK_BS[..., None]
    y_BSD = stream(6, batch=3).masked_fill(padding_BS, torch.nan)
    cache, pieces = SourceCache(6), []
    for piece_BTD in x_BTD.split((4, 1, 1), 1):
        pieces.append(layer(piece_BTD, y_BSD, causal=False, cache=cache, key_mask_BS=MASK_BS))
    whole_BTD = layer(x_BTD, y_BSD, causal=False, key_mask_BS=MASK_BS)
    torch.testing.assert_close(torch.cat(pieces, 1), whole_BTD, rtol=1e-10, atol=1e-10)
    own_cache, pieces = Cache(6), []
    for piece_BTD in y_BSD.split((4, 1, 1), 1):
        mask_BS = MASK_BS[:, : own_cache.length + piece_BTD.shape[1]]
        pieces.append(layer(piece_BTD, cache=own_cache, key_mask_BS=mask_BS))
    whole_BTD = layer(y_BSD, key_mask_BS=MASK_BS)
    torch.testing.assert_close(
        torch.cat(pieces, 1)[MASK_BS], whole_BTD[MASK_BS], rtol=1e-10, atol=1e-10
    )
