"""Attention layers against a reference implementation; decoding; unsupported combinations."""

from itertools import product

import pytest
import torch

from qkablate.attention import OV_CIRCUITS, QK_CIRCUITS, Attention, Cache, UnsupportedCombination
from tests.attention import naive
from tests.attention.random_layers import CROSSED, PAIRS, random_layer, some_spec, stream

CIRCUITS = [pair for pair in PAIRS if pair not in CROSSED]
BY_NAME = "+".join  # ids
# Queries and keys that can be normalized, and those that can be rotated.
NORMABLE = [qk for qk in QK_CIRCUITS if qk not in ("static", "uniform")]
ROTATABLE = [qk for qk in NORMABLE if qk not in ("merged", "symmetric", "reassociated", "latent")]
ROPE_DIMS = {"position": "rope", "rope_dims": 4}


def check(layer, x, y=None, causal=True):
    """Compare outputs and gradients of the streams and of every parameter with the reference."""
    streams = [x.requires_grad_()] if y is None else [x.requires_grad_(), y.requires_grad_()]
    tolerance = 1e-10 if x.dtype == torch.float64 else 1e-4
    inputs = [*streams, *layer.parameters()]
    results = []
    for out in (layer(x, y, causal=causal), naive.attention(layer, x, y, causal)):
        weight = torch.linspace(-1, 1, out.numel(), dtype=x.dtype).view_as(out)
        results.append([out, *torch.autograd.grad((out * weight).sum(), inputs, allow_unused=True)])
    for ours, theirs in zip(*results, strict=True):
        # Parameters that do not affect the output have no gradient or a zero one.
        ours, theirs = (torch.zeros(()) if t is None else t for t in (ours, theirs))
        if not ours.dim() or not theirs.dim():
            assert float(ours.abs().max()) < tolerance
            assert float(theirs.abs().max()) < tolerance
            continue
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("pair", CIRCUITS, ids=BY_NAME)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("heads", [1, 3])
def test_circuits_match_the_reference(pair, bias, heads):
    layer = random_layer(*pair, heads=heads, bias=bias)
    for length, causal in product((1, 7), (True, False)):
        check(layer, stream(length), causal=causal)


@pytest.mark.parametrize("pair", PAIRS, ids=BY_NAME)
def test_circuits_match_the_reference_in_fp32(pair):
    layer = random_layer(*pair, bias=True, dtype=torch.float32)
    check(layer, stream(7, batch=1, dtype=torch.float32))
    check(layer, stream(1, batch=1, dtype=torch.float32), causal=False)


@pytest.mark.parametrize("pair", PAIRS, ids=BY_NAME)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_cross_attention_matches_the_reference(pair, bias):
    layer = random_layer(*pair, bias=bias)
    for queries, keys in ((5, 3), (3, 5), (1, 4)):
        check(layer, stream(queries), stream(keys), causal=False)


@pytest.mark.parametrize("pair", CROSSED, ids=BY_NAME)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_crossed_circuits_match_the_reference(pair, bias):
    for heads, d, groups in ((1, 12, 1), (4, 12, 2), (5, 15, 5)):
        layer = random_layer(*pair, d=d, heads=heads, groups=groups, bias=bias)
        check(layer, stream(6, batch=1, d=d))


@pytest.mark.parametrize("qk", QK_CIRCUITS)
def test_every_pair_matches_the_reference(qk):
    met = 0
    for ov in OV_CIRCUITS:
        try:
            layer = random_layer(qk, ov, heads=2, groups=1, bias=True)
        except UnsupportedCombination:
            continue
        check(layer, stream(4, batch=1))
        met += 1
    assert met >= 6


@pytest.mark.parametrize("pair", CIRCUITS, ids=BY_NAME)
def test_odd_shapes_and_naive_initialization_match_the_reference(pair):
    """d_head is 5 and the rank 7; there are one group, as many as heads, and numbers in between."""
    layer = random_layer(*pair, d=15, rank=7, init="naive")
    check(layer, stream(5, batch=1, d=15))
    for groups in (1, 2, 4):
        layer = random_layer(*pair, d=20, heads=4, groups=groups, rank=3, init="naive")
        check(layer, stream(3, batch=1, d=20))


@pytest.mark.parametrize("qk", NORMABLE)
@pytest.mark.parametrize("norm", ["qk", "unit_keys"])
def test_norms_match_the_reference(qk, norm):
    for init, mask_self in (("matched", False), ("naive", True)):
        layer = random_layer(qk, norm=norm, mask_self=mask_self, init=init, bias=True)
        check(layer, stream(5, batch=1))
    check(layer, stream(2, batch=1), stream(3, batch=1), causal=False)


@pytest.mark.parametrize("qk", QK_CIRCUITS)
def test_positions_and_self_mask_match_the_reference(qk):
    for position, mask_self in product(("none", "alibi", "rope"), (False, True)):
        if position == "rope" and qk not in (*ROTATABLE, "uniform"):
            continue
        layer = random_layer(qk, position=position, mask_self=mask_self, bias=True)
        for causal in (True, False):
            check(layer, stream(5, batch=1), causal=causal)
        check(layer, stream(1, batch=1), causal=False)  # a single token attends to itself
        check(layer, stream(4, batch=1), stream(4, batch=1), causal=False)


@pytest.mark.parametrize("norm", ["none", "qk", "unit_keys"])
@pytest.mark.parametrize("qk", ["separate", "shared", "grouped"])
def test_tied_values_are_keys_before_norm_and_rotation(qk, norm):
    layer = random_layer(qk, "tied", norm=norm, position="rope", bias=True)
    check(layer, stream(5, batch=1))


@pytest.mark.parametrize("norm", ["none", "qk", "unit_keys"])
@pytest.mark.parametrize("pair", [(qk, "separate") for qk in NORMABLE] + [("latent", "latent")])
def test_rotated_dimensions_match_the_reference(pair, norm):
    """They are beside those of any circuit; the layer decodes, and caches one key of them."""
    for init, mask_self in (("matched", False), ("naive", True)):
        more = ROPE_DIMS | {"norm": norm, "init": init, "mask_self": mask_self}
        layer = random_layer(*pair, bias=True, **more)
        check(layer, stream(5, batch=1))
        check_decoding(layer)
        without = random_layer(*pair, bias=True, norm=norm)
        assert layer.cached_per_token == without.cached_per_token + 4


def test_rotated_dimensions_depend_on_the_distance_alone():
    """With B_h = 0 the scores of equal tokens are a function of i − j, with no two equal."""
    layer = random_layer("merged", **ROPE_DIMS)
    layer.qk.w_qk.data.zero_()
    s_HTT = layer.scores(stream(1, batch=1).expand(1, 6, 12), causal=False)[0].detach()
    for distance in range(-5, 6):
        values_HN = s_HTT.diagonal(distance, 1, 2)
        torch.testing.assert_close(values_HN, values_HN[:, :1].expand_as(values_HN))
    assert len({round(float(s), 9) for s in [*s_HTT[0, 0], *s_HTT[0, 1:, 0]]}) == 11


def test_latent_keys_absorb_their_matrices():
    """A norm acts on c; without one, the queries by head and those that absorb W_k are equal."""
    layer = random_layer("latent", "latent", bias=True)
    x_BTD = stream(5)
    c_B1SR = layer.qk.keys(x_BTD)
    by_head = layer.qk.head_queries(x_BTD) @ layer.qk.head_keys(c_B1SR).mT
    torch.testing.assert_close(by_head, layer.qk.queries(x_BTD) @ c_B1SR.mT)
    assert (layer.width, layer.value_width, layer.qk.width, layer.ov.width) == (4, 4, 6, 6)
    normed = random_layer("latent", "latent", norm="qk")
    assert (normed.width, normed.value_width) == (6, 6)


def test_rope_needs_an_even_score_width_only():
    check(random_layer("low_rank", d=15, rank=8, position="rope"), stream(5, batch=1, d=15))


@pytest.mark.parametrize("pair", PAIRS, ids=BY_NAME)
def test_outputs_do_not_depend_on_later_tokens(pair):
    changed = stream(8, batch=1)
    changed[:, 5:] += 1
    for mask_self in (False, True):
        layer = random_layer(*pair, mask_self=mask_self)
        before, after = layer(stream(8, batch=1)), layer(changed)
        torch.testing.assert_close(before[:, :5], after[:, :5], rtol=0, atol=1e-12)
        assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_self_mask_excludes_every_token_but_the_first():
    """The value of a token affects later outputs, and its own output only for the first token."""
    x = stream(4, batch=1).requires_grad_()
    layer = random_layer("uniform", mask_self=True)
    reached = [torch.autograd.grad(out.sum(), x, retain_graph=True)[0][0] for out in layer(x)[0]]
    attends = torch.stack([(row.abs().sum(-1) > 0) for row in reached])
    expected = torch.ones(4, 4).tril(-1)
    expected[0, 0] = 1
    assert torch.equal(attends, expected.bool())


@pytest.mark.parametrize("pair", PAIRS, ids=BY_NAME)
def test_supported_kernels_agree(pair):
    for other in ({}, {"mask_self": True, "position": "alibi"}):
        auto = random_layer(*pair, bias=True, **other)
        x = stream(7).requires_grad_()
        for kernel in ("math", "flash", "folded", "blocked"):
            if auto.kernel == "static" and kernel in ("flash", "blocked"):
                continue
            forced = random_layer(*pair, bias=True, kernel=kernel, **other)
            assert forced.kernel == kernel
            for causal in (True, False):
                results = [[layer(x, causal=causal)] for layer in (auto, forced)]
                for result in results:
                    result += torch.autograd.grad(result[0].square().sum(), x)
                torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("pair", PAIRS, ids=BY_NAME)
def test_cached_decoding_equals_the_full_forward_pass(pair):
    """Pieces have 3, 1 and 3 positions; the size of the cache agrees with the formula."""
    for bias, mask_self in ((True, False), (False, True)):
        check_decoding(random_layer(*pair, bias=bias, mask_self=mask_self))
    check_decoding(random_layer(*pair, heads=4, groups=2, dtype=torch.float32))


@pytest.mark.parametrize("pair", PAIRS, ids=BY_NAME)
def test_cached_decoding_with_a_forced_kernel(pair):
    for kernel, mask_self in product(("math", "folded"), (False, True)):
        check_decoding(random_layer(*pair, bias=True, kernel=kernel, mask_self=mask_self))


@pytest.mark.parametrize("pair", PAIRS, ids=BY_NAME)
def test_cached_decoding_with_norms_and_positions(pair):
    for norm, position in product(("none", "qk", "unit_keys"), ("none", "alibi", "rope")):
        rotates = pair[0] in (*ROTATABLE, "uniform", "static")
        if (norm == "none" or pair[0] in NORMABLE) and (position != "rope" or rotates):
            for mask_self in (False, True):
                check_decoding(
                    random_layer(*pair, norm=norm, position=position, mask_self=mask_self)
                )


def check_decoding(layer):
    dtype = layer.qk.like.dtype
    x, cache = stream(7, dtype=dtype), Cache(7)
    with torch.no_grad():
        pieces = torch.cat([layer(piece, cache=cache) for piece in x.split((3, 1, 3), 1)], 1)
        tolerance = 1e-12 if dtype == torch.float64 else 1e-5
        torch.testing.assert_close(pieces, layer(x), rtol=tolerance, atol=tolerance)
    assert cache.bytes_per_token() == layer.cached_per_token * x.element_size()


def test_cached_tensors():
    """Keys and values, one that serves as both, or the stream that determines them are cached."""
    d, k = 12, 4
    expected = {
        ("separate", "separate"): 2 * d,
        ("grouped", "grouped"): 2 * k,
        ("separate", "tied"): d,
        ("grouped", "tied"): k,
        ("shared", "tied"): d,
        ("merged", "separate"): 2 * d,
        ("merged", "merged"): d,
        ("no_qk", "no_vo"): d,
        ("no_k", "no_v"): d,
        ("low_rank", "separate"): 3 * 6 + d,
        ("collaborative", "separate"): 6 + d,
        ("latent", "latent"): 6,
        ("latent", "separate"): 6 + d,
        ("uniform", "separate"): d,
        ("uniform", "merged"): d,
    }
    assert {pair: random_layer(*pair).cached_per_token for pair in expected} == expected


def test_full_cache_is_rejected():
    layer, cache = random_layer("separate"), Cache(4)
    layer(stream(3), cache=cache)
    with pytest.raises(ValueError, match="has 4 positions, 5 are needed"):
        layer(stream(2), cache=cache)


def test_static_scores_reject_longer_sequences():
    layer = random_layer("static", context=6)
    assert layer(stream(6)).shape == (2, 6, 12)
    with pytest.raises(ValueError, match="static_scores has 6 positions"):
        layer(stream(7))


@pytest.mark.parametrize(
    ("qk", "ov", "other", "reason"),
    [
        ("shared", "grouped", {}, "shared keys are also the queries"),
        ("merged", "separate", {"position": "rope"}, "one W cannot be"),
        ("symmetric", "separate", {"position": "rope"}, "one W cannot be"),
        ("reassociated", "separate", {"position": "rope"}, "leaves no queries and keys of d_head"),
        ("separate", "separate", {"position": "rope", "d": 15}, "5 wide, an odd number"),
        ("low_rank", "separate", {"position": "rope", "rank": 3}, "3 wide, an odd number"),
        ("latent", "separate", {"position": "rope"}, "could not absorb W_k"),
        ("separate", "latent", {}, "ov=latent reads the latent stream of qk=latent"),
        ("latent", "tied", {}, "a latent stream, whose values are those of ov=latent"),
        ("uniform", "separate", ROPE_DIMS, "no queries and keys to add dimensions to"),
        ("merged", "tied", {}, "keys are x itself"),
        ("symmetric", "tied", {}, "keys are x itself"),
        ("reassociated", "tied", {}, "keys are x itself"),
        ("no_k", "tied", {}, "keys are x itself"),
        ("no_qk", "tied", {}, "keys are x itself"),
        ("static", "tied", {}, "no keys to use as values"),
        ("uniform", "tied", {}, "no keys to use as values"),
        ("static", "separate", {"norm": "qk"}, "no queries and keys to normalize"),
        ("uniform", "separate", {"norm": "qk"}, "no queries and keys to normalize"),
        ("static", "separate", {"norm": "unit_keys"}, "no keys to normalize"),
        ("uniform", "separate", {"norm": "unit_keys"}, "no keys to normalize"),
        ("static", "separate", {"kernel": "flash"}, "flash needs queries and keys"),
        ("uniform", "separate", {"kernel": "flash"}, "flash needs queries and keys"),
        ("uniform", "separate", {"kernel": "efficient"}, "efficient needs queries"),
    ],
)
def test_unsupported_combinations_are_explained(qk, ov, other, reason):
    with pytest.raises(UnsupportedCombination, match=reason):
        random_layer(qk, ov, **other)


def test_all_other_combinations_are_supported():
    """Every pair, norm and position is supported or rejected for one of the reasons above."""
    rejected = set()
    for qk, ov, norm, position in product(
        QK_CIRCUITS, OV_CIRCUITS, ("none", "qk", "unit_keys"), ("none", "alibi", "rope")
    ):
        try:
            Attention(some_spec(), QK_CIRCUITS[qk], OV_CIRCUITS[ov], norm=norm, position=position)
        except UnsupportedCombination:
            rejected.add((qk, ov, norm, position))
    expected = {
        (qk, ov, norm, position)
        for qk, ov, norm, position in product(
            QK_CIRCUITS, OV_CIRCUITS, ("none", "qk", "unit_keys"), ("none", "alibi", "rope")
        )
        if (qk, ov) == ("shared", "grouped")
        or (qk not in NORMABLE and norm != "none")
        or (qk not in (*ROTATABLE, "uniform", "static") and position == "rope")
        or (ov == "tied" and qk in (*(set(QK_CIRCUITS) - set(ROTATABLE)), "no_k", "no_qk"))
        or (ov == "latent" and qk != "latent")
    }
    assert rejected == expected


@pytest.mark.parametrize("qk", ["uniform", "static"])
def test_scores_without_queries_are_the_same_with_rope(qk):
    """They have nothing to rotate, so they are references in models with rope, too."""
    plain, rotated = random_layer(qk), random_layer(qk, position="rope")
    x = stream(7)
    assert rotated.rope is None
    assert torch.equal(plain(x), rotated(x))
    assert "do not depend on x" in rotated.no_circuit_reason


def test_no_circuit_reason_of_norms_and_rope():
    assert random_layer("separate").no_circuit_reason == ""
    assert "norm" in random_layer("separate", norm="qk").no_circuit_reason
    assert "distance" in random_layer("separate", position="rope").no_circuit_reason
    assert "do not depend on x" in random_layer("static").no_circuit_reason


def test_symmetric_w_is_the_same_where_it_is_compiled(monkeypatch):
    """The indices of its triangle are computed in another way there."""
    layer, x_BTD = random_layer("symmetric"), stream(5)
    eager = layer(x_BTD)
    monkeypatch.setattr("torch.compiler.is_compiling", lambda: True)
    assert torch.equal(layer(x_BTD), eager)
    check(layer, x_BTD)
