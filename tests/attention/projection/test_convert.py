"""B_h and M_h as matrices: what they compute, and what one form preserves of another."""

import math

import pytest
import torch
from torch.testing import assert_close

from qkablate.attention import OV_CIRCUITS, QK_CIRCUITS, UnsupportedCombination
from qkablate.attention.projection.project import convert, distance, scaled_circuit
from qkablate.attention.qk.unprojected import Uniform
from qkablate.attention.tensors import by_head
from tests.attention.random_layers import (
    PAIRS,
    qk_for,
    random_layer,
    random_qk,
    randomized,
    stream,
)

CONTENT = [name for name in QK_CIRCUITS if name not in ("static", "uniform")]
SETTABLE = [name for name in CONTENT if name not in ("no_qk", "reassociated")]
UNSETTABLE_OV = ("tied", "latent")  # without the keys
EXACT = {"rtol": 1e-10, "atol": 1e-10}


def per_head(k_BGSE, heads):
    """Repeat keys or values that heads share."""
    return k_BGSE.repeat_interleave(heads // k_BGSE.shape[1], 1)


def scores(qk, x, y):
    q, k = qk(x, y)
    return qk.scale * q @ per_head(k, q.shape[1]).mT


def weights(qk, x, y):
    """Return the softmax of the scores."""
    return scores(qk, x, y).softmax(-1)


@torch.no_grad()
def convert_ov(source, source_qk, target, target_qk):
    """Set `target` to what `source` writes, and return the relative loss."""
    m_HDD = source.circuit(source_qk)
    target.set_circuit_(m_HDD)
    error = target.circuit(target_qk) - m_HDD
    return float(error.norm() / m_HDD.norm().clamp(min=1e-300))


def skew_and_eigenvalues(b_HDD):
    return (b_HDD - b_HDD.mT) / 2, torch.linalg.eigvalsh((b_HDD + b_HDD.mT) / 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTENT)
@pytest.mark.parametrize("heads", [1, 4])
def test_circuit_gives_the_scores(name, heads):
    x, y = stream(5), stream(4)
    for init in ("matched", "naive"):
        qk = random_qk(name, heads=heads, groups=max(1, heads // 2), init=init)
        b_HDD, u_HD = scaled_circuit(qk)
        assert u_HD is None
        expected = torch.einsum("btd,hde,bse->bhts", x, b_HDD, y)
        assert_close(scores(qk, x, y), expected, **EXACT)


@pytest.mark.parametrize("name", CONTENT)
def test_circuit_with_biases_gives_the_attention_weights(name):
    qk = random_qk(name, bias=True, heads=4, groups=2)
    x, y = stream(5), stream(4)
    b_HDD, u_HD = scaled_circuit(qk)
    expected = torch.einsum("btd,hde,bse->bhts", x, b_HDD, y)
    expected = expected + torch.einsum("hd,bsd->bhs", u_HD, y).unsqueeze(2)
    assert_close(weights(qk, x, y), expected.softmax(-1), **EXACT)


@pytest.mark.parametrize("name", ["static", "uniform"])
def test_scores_without_content_have_no_circuit(name):
    with pytest.raises(UnsupportedCombination, match="do not depend on x"):
        random_qk(name).circuit()
    with pytest.raises(UnsupportedCombination, match="do not depend on x"):
        convert(random_qk(name), random_qk("merged"))


@pytest.mark.parametrize("name", sorted(set(QK_CIRCUITS) - {*SETTABLE}))
def test_forms_that_cannot_be_set_are_rejected(name):
    with pytest.raises(
        UnsupportedCombination,
        match=r"its scores cannot be set|another order of multiplication",
    ):
        convert(random_qk("separate"), random_qk(name))


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_ov_circuit_gives_the_output(pair, bias):
    """The output is Σ_h A_h X M_h, plus a constant vector with biases."""
    layer = random_layer(*pair, heads=4, groups=2, bias=bias)
    x = stream(7)
    m_HDD = layer.ov.circuit(layer.qk)
    read = torch.einsum("bhts,bsd,hde->bte", layer.weights(x), x, m_HDD)
    rest = layer(x) - read
    assert_close(rest, rest[:1, :1].expand_as(rest), **EXACT)
    assert (float(rest.detach().abs().max()) > 1e-3) == bias


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_weights_reproduce_the_output(pair):
    """Rows sum to 1, future weights are 0, and with the values they give the output."""
    for norm, position in (("none", "alibi"), ("qk", "rope"), ("unit_keys", "none")):
        try:
            layer = random_layer(*pair, norm=norm, position=position, mask_self=True, bias=True)
        except UnsupportedCombination:
            continue
        x = stream(6)
        for causal in (True, False):
            a_BHTS = layer.weights(x, causal=causal).detach()
            assert_close(a_BHTS.sum(-1), torch.ones(2, 3, 6, dtype=x.dtype), **EXACT)
            assert float(a_BHTS.triu(1).abs().max()) == 0 or not causal
            v = per_head(layer.ov.values(x, layer.qk.keys(x)), 3)
            assert_close(layer.ov.write(a_BHTS @ v), layer(x, causal=causal), **EXACT)


@pytest.mark.parametrize("name", CONTENT)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("init", ["matched", "naive"])
def test_merging_a_circuit_preserves_outputs_and_gradients(name, bias, init):
    """merged_w with this B_h and u_h gives the same outputs and input gradients."""
    layer = random_layer(name, bias=bias, heads=4, groups=2, init=init)
    merged = random_layer("merged", bias=bias, heads=4, groups=2, init=init)
    assert convert(layer.qk, merged.qk) < 1e-12
    merged.ov.load_state_dict(layer.ov.state_dict())
    x = stream(7).requires_grad_()
    outputs = [form(x) for form in (layer, merged)]
    assert_close(*outputs, **EXACT)
    assert_close(*(torch.autograd.grad(out.square().sum(), x)[0] for out in outputs), **EXACT)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_standard_survives_conversion_through_other_forms(bias):
    """The attention is the same at every step."""
    x = stream(6)
    start = random_qk("separate", bias=bias)
    expected = weights(start, x, x)
    # Rank d for collaborative, so that every head gets d_head dimensions.
    way = [
        ("merged", {}),
        ("low_rank", {"rank": 4}),
        ("wide", {}),
        ("four_matrix", {}),
        ("collaborative", {"rank": 12}),
        ("grouped", {"groups": 3}),
        ("low_rank", {"rank": 7, "init": "naive"}),
        ("separate", {}),
    ]
    here = start
    for name, other in way:
        there = random_qk(name, bias=bias, **other)
        assert convert(here, there) < 1e-10, name
        assert_close(weights(there, x, x), expected, **EXACT)
        here = there
    assert float(distance(start, here)) < 1e-10


@pytest.mark.parametrize("rank", [1, 3, 5])
def test_lower_rank_loses_the_discarded_singular_values(rank):
    merged, low = random_qk("merged"), random_qk("low_rank", rank=rank)
    lost = convert(merged, low)
    values_HD = torch.linalg.svdvals(merged.circuit()[0].detach())
    assert lost == pytest.approx(float(values_HD[:, rank:].norm() / values_HD.norm()), rel=1e-10)
    assert int(torch.linalg.matrix_rank(low.circuit()[0]).max()) == rank
    w_q, w_k = (by_head(w.detach(), 3) for w in (low.w_q, low.w_k))
    assert_close(w_q.mT @ w_q, w_k.mT @ w_k, **EXACT)  # balanced


def test_grouped_keys_get_the_best_shared_factor():
    merged, grouped = (random_qk(name, heads=4, groups=2) for name in ("merged", "grouped"))
    lost = convert(merged, grouped)
    b_HDD = merged.circuit()[0].detach()
    stacked = torch.stack([torch.cat([b_HDD[0], b_HDD[1]]), torch.cat([b_HDD[2], b_HDD[3]])])
    left = torch.linalg.svdvals(stacked)[:, 3:].norm()
    assert lost == pytest.approx(float(left / b_HDD.norm()), rel=1e-10)


@pytest.mark.parametrize("name", ["no_q", "no_k"])
@pytest.mark.parametrize("init", ["matched", "naive"])
def test_unprojected_forms_against_merged(name, init):
    """They are equal with one head; with more, the rows (or columns) of each slice are kept."""
    for bias in (False, name == "no_k"):  # without W_q no bias can hold u
        one_head = {"heads": 1, "init": init, "bias": bias}
        merged, there = random_qk("merged", **one_head), random_qk(name, **one_head)
        back = random_qk("merged", **one_head)
        assert convert(merged, there) < 1e-12
        assert convert(there, back) < 1e-12
        assert float(distance(merged, back)) < 1e-10
    merged, there = (random_qk(n, init=init) for n in ("merged", name))
    lost = convert(merged, there)
    mask = torch.block_diag(*torch.ones(3, 1, 4)).unsqueeze(-1 if name == "no_q" else 1)
    b_HDD = merged.circuit()[0].detach()
    assert lost == pytest.approx(float((b_HDD * (1 - mask)).norm() / b_HDD.norm()), rel=1e-10)


def test_symmetric_keeps_the_symmetric_part():
    merged, symmetric = random_qk("merged", bias=True), random_qk("symmetric", bias=True)
    lost = convert(merged, symmetric)
    (b_HDD, u_HD), (kept_HDD, kept_HD) = merged.circuit(), symmetric.circuit()
    assert_close(kept_HDD, (b_HDD + b_HDD.mT) / 2, **EXACT)
    assert_close(kept_HD, u_HD, **EXACT)
    skew, _ = skew_and_eigenvalues(b_HDD.detach())
    assert lost == pytest.approx(float(skew.norm() / b_HDD.detach().norm()), rel=1e-10)


def test_shared_keeps_the_largest_positive_eigenvalues():
    merged, shared = random_qk("merged", heads=2), random_qk("shared", heads=2)
    lost = convert(merged, shared)
    b_HDD = merged.circuit()[0].detach()
    skew, values_HD = skew_and_eigenvalues(b_HDD)
    kept_HK = values_HD.clamp(min=0)[:, -6:]
    rest = skew.norm() ** 2 + values_HD.norm() ** 2 - kept_HK.norm() ** 2
    assert lost == pytest.approx(float(rest.sqrt() / b_HDD.norm()), rel=1e-10)
    # No small perturbation is closer.
    best = distance(merged, shared)
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        other = random_qk("shared", heads=2)
        step = 1e-3 * torch.randn(12, 12, generator=generator, dtype=torch.float64)
        other.w_k.data.copy_(shared.w_k.data + step)
        assert distance(merged, other) > best


def test_sym_diag_keeps_the_largest_eigenvalues_of_either_sign():
    merged, sym_diag = random_qk("merged"), random_qk("sym_diag")
    lost = convert(merged, sym_diag)
    b_HDD = merged.circuit()[0].detach()
    skew, values_HD = skew_and_eigenvalues(b_HDD)
    dropped = values_HD.abs().sort().values[:, :-4]
    rest = (skew.norm() ** 2 + dropped.norm() ** 2).sqrt()
    assert lost == pytest.approx(float(rest / b_HDD.norm()), rel=1e-10)
    assert set(sym_diag.diagonal.tolist()) == {1.0, -1.0}


def test_sym_pairwise_keeps_the_leading_directions():
    """It is exact if rows and columns span k directions, else the k leading ones are kept."""
    merged, pairwise = random_qk("merged", heads=2), random_qk("sym_pairwise", heads=2)
    lost = convert(merged, pairwise)
    b_HDD = merged.circuit()[0].detach()
    _, vectors = torch.linalg.eigh(b_HDD @ b_HDD.mT + b_HDD.mT @ b_HDD)
    onto = vectors[..., -6:] @ vectors[..., -6:].mT
    left = (b_HDD - onto @ b_HDD @ onto).norm() / b_HDD.norm()
    assert lost == pytest.approx(float(left), rel=1e-8)
    low_rank_factors = random_qk(
        "low_rank", heads=2, rank=3
    )  # rows and columns span three directions each
    assert convert(low_rank_factors, pairwise) < 1e-10


@pytest.mark.parametrize("name", SETTABLE)
@pytest.mark.parametrize("heads", [1, 4])
def test_every_form_holds_itself(name, heads):
    for bias in (False, True):
        # Mixing that is not block-diagonal uses more dimensions than one head has.
        more = {"rank": heads * 12} if name == "collaborative" else {"groups": max(1, heads // 2)}
        source = random_qk(name, heads=heads, bias=bias, **more)
        target = random_qk(name, heads=heads, bias=bias, **more)
        for parameter in target.parameters():
            torch.nn.init.constant_(parameter, 0.1)
        lost = convert(source, target)
        assert lost < 1e-10
        assert float(distance(source, target)) < 1e-10


def test_circuit_without_biases_rejects_u():
    biased = random_qk("separate", bias=True)
    b_HDD, u_HD = (part.detach() for part in biased.circuit())
    for name in ("separate", "merged", "four_matrix"):
        lost = convert(biased, random_qk(name))
        assert lost == pytest.approx(float(u_HD.norm() / b_HDD.norm()))
    with torch.no_grad(), pytest.raises(UnsupportedCombination, match="no bias to hold u"):
        random_qk("merged").set_circuit_(b_HDD, u_HD)


def test_relative_loss_of_a_zero_circuit_is_zero():
    nothing = random_qk("merged")
    torch.nn.init.zeros_(nothing.w_qk)
    assert convert(nothing, random_qk("merged")) == 0


def test_fewer_shared_dimensions_than_heads_are_rejected():
    with pytest.raises(
        UnsupportedCombination, match="2 shared dimensions are fewer than the heads"
    ):
        convert(random_qk("separate"), random_qk("collaborative", rank=2))


def test_lost_bias_counts_as_loss():
    """no_q has no bias that can hold u_h, which counts as loss."""
    source = random_qk("no_k", heads=1, bias=True)
    target = random_qk("no_q", heads=1, bias=True)
    lost = convert(source, target)
    b_HDD, u_HD = (part.detach() for part in source.circuit())
    assert lost == pytest.approx(float(u_HD.norm() / b_HDD.norm()), rel=1e-10)


def test_gradient_of_the_merged_matrix():
    """dL/dW_q = (dL/dW) W_k and dL/dW_k = (dL/dW)ᵀ W_q, head by head."""
    standard, merged = random_qk("separate"), random_qk("merged")
    convert(standard, merged)
    x = stream(6, batch=1)
    for qk in (standard, merged):
        weights(qk, x, x).square().sum().backward()
    w_q, w_k = (by_head(w.detach(), 3) for w in (standard.w_q, standard.w_k))
    grad_HDD = by_head(merged.w_qk.grad, 3)
    for parameter, expected in ((standard.w_q, grad_HDD @ w_k), (standard.w_k, grad_HDD.mT @ w_q)):
        assert_close(by_head(parameter.grad, 3), expected, rtol=1e-10, atol=1e-12)


def test_ranks_and_symmetries():
    """Rank and symmetry of B_h follow from the form."""
    ranks = {"separate": 4, "reassociated": 4, "low_rank": 6, "wide": 12, "merged": 12}
    ranks |= {"no_q": 4, "no_k": 4, "no_qk": 4, "shared": 4, "sym_pairwise": 4, "four_matrix": 4}
    ranks |= {"collaborative": 6, "grouped": 4, "sym_diag": 4, "symmetric": 12}
    circuits = {name: random_qk(name).circuit()[0].detach() for name in ranks}
    assert {n: int(torch.linalg.matrix_rank(b).max()) for n, b in circuits.items()} == ranks
    symmetric = {n for n, b in circuits.items() if torch.allclose(b, b.mT)}
    assert symmetric == {"shared", "sym_diag", "symmetric", "no_qk"}
    assert float(torch.linalg.eigvalsh(circuits["shared"]).min()) > -1e-12
    assert float(torch.linalg.eigvalsh(circuits["sym_diag"]).min()) < -1e-2


def test_skew_matrix_gives_antisymmetric_scores():
    """sym_pairwise with U = 1 is shared_qk, with a skew U its scores are antisymmetric."""
    pairwise, shared = random_qk("sym_pairwise"), random_qk("shared")
    shared.w_k.data.copy_(pairwise.w_k.data)
    pairwise.u.data.copy_(torch.eye(4))
    assert float(distance(pairwise, shared)) < 1e-12
    pairwise.u.data.copy_(torch.tensor([[0, 1], [-1, 0]]).kron(torch.eye(2)))
    s_BHTS = scores(pairwise, stream(5), stream(5))
    assert_close(s_BHTS, -s_BHTS.mT, **EXACT)


def test_low_rank_at_d_head_is_standard_bit_for_bit():
    low, standard = random_layer("low_rank", rank=4), random_layer("separate")
    low.load_state_dict(standard.state_dict())
    assert torch.equal(low(stream(7)), standard(stream(7)))
    assert (low.match, low.qk.lr_multiplier) == (standard.match, 1.0)


def some_ov(name, **other):
    """Return an OV circuit with a QK circuit."""
    qk = random_qk(qk_for(name), **other)
    return randomized(OV_CIRCUITS[name](qk.spec, qk)), qk


@pytest.mark.parametrize("name", OV_CIRCUITS)
def test_merged_holds_every_ov_circuit(name):
    source, qk = some_ov(name, heads=4, groups=2)
    target, _ = some_ov("merged", heads=4, groups=2)
    assert convert_ov(source, qk, target, Uniform(qk.spec).double()) < 1e-12


@pytest.mark.parametrize("name", [name for name in OV_CIRCUITS if name not in UNSETTABLE_OV])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_every_ov_form_holds_itself(name, bias):
    source, qk = some_ov(name, heads=4, groups=2, bias=bias)
    merged, _ = some_ov("merged", heads=4, groups=2, bias=bias)
    back, _ = some_ov(name, heads=4, groups=2, bias=bias)
    for parameter in back.parameters():
        torch.nn.init.constant_(parameter, 0.1)
    assert convert_ov(source, qk, merged, qk) < 1e-12
    assert convert_ov(merged, qk, back, qk) < 1e-10
    assert_close(back.circuit(qk), source.circuit(qk), **EXACT)
    nothing = torch.zeros(1, 1, 12, dtype=torch.float64)  # biases are not part of M_h
    written = back.write(per_head(back.values(nothing, nothing), 4))
    assert not written.any()


@pytest.mark.parametrize("name", UNSETTABLE_OV)
def test_ov_forms_that_cannot_be_set_are_rejected(name):
    (source, qk), (target, _) = some_ov("separate"), some_ov(name)
    with pytest.raises(UnsupportedCombination, match="its outputs cannot be set"):
        convert_ov(source, qk, target, qk)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        *((name, "separate") for name in OV_CIRCUITS if name != "merged"),
        *(("no_vo", name) for name in ("no_v", "no_o")),
    ],
)
def test_ov_forms_contained_in_others(source, target):
    (one, qk), (other, _) = some_ov(source), some_ov(target)
    assert convert_ov(one, qk, other, qk) < 1e-10


def test_as_many_value_groups_as_heads_equal_standard():
    grouped, separate = (random_layer("grouped", "grouped", groups=3), random_layer("separate"))
    assert convert(separate.qk, grouped.qk) < 1e-10
    assert convert_ov(separate.ov, separate.qk, grouped.ov, grouped.qk) < 1e-10
    assert_close(grouped(stream(5)), separate(stream(5)), **EXACT)
    grouped.load_state_dict(separate.state_dict())
    assert torch.equal(grouped(stream(5)), separate(stream(5)))


def test_losses_of_ov_forms():
    """A product of width d_head loses the smaller singular values, slices the rest."""
    merged, qk = some_ov("merged")
    m_HDD = merged.circuit(qk).detach()
    values_HD = torch.linalg.svdvals(m_HDD)
    own = torch.block_diag(*torch.ones(3, 1, 4))
    expected = {
        "separate": values_HD[:, 4:].norm(),
        "grouped": torch.linalg.svdvals(torch.cat(list(m_HDD), 1))[4:].norm(),
        "no_v": (m_HDD * (1 - own.unsqueeze(2))).norm(),
        "no_o": (m_HDD * (1 - own.unsqueeze(1))).norm(),
    }
    for name, left in expected.items():
        lost = convert_ov(merged, qk, some_ov(name)[0], qk)
        assert lost == pytest.approx(float(left / m_HDD.norm()), rel=1e-10), name


@pytest.mark.parametrize("name", ["shared", "no_qk", "merged"])
def test_one_head_reads_the_full_stream(name):
    """With one head, no W_o (or a single W) is equivalent to W_v W_o."""
    layer = random_layer(name, heads=1)
    for ov in ("no_o", "merged", "no_v"):
        other = random_layer(name, ov, heads=1)
        other.qk.load_state_dict(layer.qk.state_dict())
        assert convert_ov(layer.ov, layer.qk, other.ov, other.qk) < 1e-12
        assert_close(other(stream(5)), layer(stream(5)), **EXACT)


def test_distance_counts_scale_and_biases():
    one, other = random_qk("merged", bias=True), random_qk("merged", bias=True)
    assert float(distance(one, other)) == 0
    other.u.data[0] += 3
    assert float(distance(one, other)) == pytest.approx(3 / math.sqrt(4))
    plain = random_qk("merged")
    plain.w_qk.data.copy_(one.w_qk.data)
    assert float(distance(one, plain)) == pytest.approx(float(one.u.detach().norm()) / 2)
