"""Projection of trained layers: exact cases, losses, and their optimality."""

import itertools
import re

import pytest
import torch
from torch.testing import assert_close

from qkablate.attention import OV_CIRCUITS, QK_CIRCUITS, UnsupportedCombination
from qkablate.attention.projection.holding import LayerMeasure
from qkablate.attention.projection.moments import Moments
from qkablate.attention.projection.project import (
    MomentSums,
    assign_heads,
    compute_moments,
    find_obstacle,
    needs_averages,
    project_layer,
    scaled_circuit,
    set_output_,
    set_scores_,
)
from tests.attention.random_layers import qk_for, random_layer, stream

EXACT = {"rtol": 1e-9, "atol": 1e-9}
COMMON = torch.randn(12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def anisotropic_stream():
    """Return a stream with a mean and very different variances, like a trained one."""
    sizes = torch.linspace(0.1, 3, 12, dtype=torch.float64)
    mixed = torch.linalg.qr(torch.outer(COMMON, COMMON) + torch.eye(12, dtype=torch.float64))[0]
    return (stream(8, batch=40) * sizes) @ mixed + 0.5 * COMMON


def moments_of(layer, x=None):
    return compute_moments(layer, (anisotropic_stream() if x is None else x,), causal=True)


def isotropic_moments():
    """Return isotropic moments, for which losses are those of the entries."""
    return Moments(
        torch.eye(13, dtype=torch.float64), torch.eye(12, dtype=torch.float64).expand(3, 12, 12)
    )


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(
    ("qk", "ov", "more"),
    [
        ("merged", "separate", {}),
        ("merged", "merged", {}),
        ("low_rank", "separate", {"rank": 4}),
        ("wide", "merged", {}),
        ("four_matrix", "separate", {}),
        ("collaborative", "separate", {"rank": 12}),
        ("grouped", "grouped", {"groups": 3}),
        ("wide", "tied", {}),
        ("latent", "latent", {"rank": 12}),
    ],
    ids=str,
)
def test_supersets_of_standard_lose_nothing(qk, ov, more, bias):
    """The weights differ, the outputs are equal and the loss is zero."""
    source, target = random_layer("separate", bias=bias), random_layer(qk, ov, bias=bias, **more)
    loss = project_layer(source, target, moments_of(source))
    assert max(loss.qk, loss.qk_scores, loss.ov, loss.ov_output) < 1e-9
    x = stream(7)
    assert_close(target(x), source(x), **EXACT)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("qk", QK_CIRCUITS)
@pytest.mark.parametrize("position", ["none", "rope"])
def test_projection_onto_the_same_form_is_exact(qk, bias, position):
    """The parameters are copied with any norm and position."""
    try:
        source = random_layer(qk, bias=bias, position=position, dtype=torch.float32)
        target = random_layer(qk, bias=bias, position=position, dtype=torch.float32)
    except UnsupportedCombination:
        pytest.skip("no such layer")
    for parameter in target.parameters():
        torch.nn.init.constant_(parameter, 0.1)
    loss = project_layer(source, target, isotropic_moments())
    assert (loss.qk, loss.ov, loss.heads) == (0, 0, (0, 1, 2))
    for name, value in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], value)


@pytest.mark.parametrize("ov", ["no_v", "no_o", "merged"])
def test_unchanged_circuit_is_copied(ov):
    """With rope there is no B_h, and none is needed if only the other circuit changes."""
    source, target = (random_layer("separate", own, position="rope") for own in ("separate", ov))
    assert find_obstacle(source, target) == ""
    loss = project_layer(source, target, moments_of(source))
    assert (loss.qk, loss.heads) == (0, (0, 1, 2))
    assert torch.equal(source.qk.w_q, target.qk.w_q)
    assert (loss.ov < 1e-9) == (ov == "merged")


@pytest.mark.parametrize(
    ("qk", "ov", "more", "why"),
    [
        ("static", "separate", {}, "do not depend on x"),
        ("no_qk", "separate", {}, "its scores cannot be set"),
        ("merged", "separate", {"norm": "qk"}, "the queries or keys are normalized"),
        ("separate", "separate", {"norm": "unit_keys"}, "the queries or keys are normalized"),
    ],
    ids=str,
)
def test_unsupported_projection_leaves_the_target_unchanged(qk, ov, more, why):
    source, target = random_layer("separate"), random_layer(qk, ov, **more)
    before = {name: value.clone() for name, value in target.state_dict().items()}
    assert why in find_obstacle(source, target)
    assert all(torch.equal(before[name], value) for name, value in target.state_dict().items())
    with pytest.raises(UnsupportedCombination, match=why):
        project_layer(source, target, moments_of(source))


def test_keys_of_length_1_with_another_scale_are_not_copied():
    """`init=naive` and `matched` multiply the same keys by other numbers."""
    source, target = (
        random_layer("shared", norm="unit_keys", init=init) for init in ("naive", "matched")
    )
    assert source.scale != target.scale
    assert find_obstacle(source, target).startswith("the queries or keys are normalized")


def test_uniform_attention_keeps_nothing_of_the_scores_and_all_of_the_outputs():
    source, target = random_layer("separate", bias=True), random_layer("uniform", bias=True)
    loss = project_layer(source, target, moments_of(source))
    assert (loss.qk, loss.qk_scores, loss.ov) == (pytest.approx(1), pytest.approx(1), 0)
    assert_close(target.ov.circuit(target.qk), source.ov.circuit(source.qk), rtol=0, atol=1e-12)


@pytest.mark.parametrize("other", [{"position": "rope"}, {"norm": "qk"}], ids=str)
def test_uniform_attention_is_a_target_of_layers_without_a_matrix(other):
    """Nothing is left of their scores, whatever they are; the outputs are theirs."""
    source = random_layer("separate", **other)
    target = random_layer("uniform", **{k: v for k, v in other.items() if k == "position"})
    assert find_obstacle(source, target) == ""
    loss = project_layer(source, target, moments_of(source))
    assert (loss.qk, loss.qk_scores, loss.ov) == (
        pytest.approx(1),
        pytest.approx(1),
        pytest.approx(0, abs=1e-9),
    )
    assert_close(target.ov.circuit(target.qk), source.ov.circuit(source.qk), rtol=0, atol=1e-12)
    held = LayerMeasure(source, moments_of(source)).measure(target)
    assert (held.scores, held.output) == (pytest.approx(1), pytest.approx(0, abs=1e-9))


@pytest.mark.parametrize("qk", sorted(QK_CIRCUITS))
@pytest.mark.parametrize("ov", sorted(OV_CIRCUITS))
def test_find_obstacle_agrees_with_project_layer(qk, ov):
    source = random_layer("separate", bias=True)
    try:
        target = random_layer(qk, ov, bias=True)
    except UnsupportedCombination:
        pytest.skip("no such layer")
    reason = find_obstacle(source, target)
    if reason == "":
        project_layer(source, target, isotropic_moments())
    else:
        with pytest.raises(UnsupportedCombination, match="^" + re.escape(reason)):
            project_layer(source, target, isotropic_moments())


@pytest.mark.parametrize(
    ("qk", "ov"),
    [
        *(("no_q", "separate"), ("no_k", "separate"), ("separate", "no_v"), ("separate", "no_o")),
        *(("no_q", "no_v"), ("no_k", "no_o")),
    ],
    ids="+".join,
)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_assignment_of_heads_is_optimal(qk, ov, bias):
    """The assignment is as good as the best permutation found by brute force."""
    source, target = random_layer("separate", bias=bias), random_layer(qk, ov, bias=bias)
    moments = moments_of(source)
    costs = {}
    for order in itertools.permutations(range(3)):
        with torch.no_grad():
            parts = (
                form(source, target, [*order], moments)[1].sum()
                for form in (set_scores_, set_output_)
            )
            costs[order] = float(sum(parts))
    best = tuple(assign_heads(source, target, moments))
    assert costs[best] == pytest.approx(min(costs.values()))
    loss = project_layer(source, target, moments)
    assert loss.heads == best
    assert loss.qk_scores**2 + loss.ov_output**2 == pytest.approx(costs[best])
    assert costs[best] <= costs[0, 1, 2] * (1 + 1e-12)


def test_permuted_heads_are_recovered():
    """A no_q layer is written as standard with permuted heads and recovered."""
    no_q = random_layer("no_q")
    b_HDD, _ = scaled_circuit(no_q.qk)
    source, back = random_layer("separate"), random_layer("no_q")
    with torch.no_grad():
        order = [2, 0, 1]
        source.qk.set_circuit_(b_HDD[order] / source.qk.scale)
        source.ov.set_circuit_(no_q.ov.circuit(no_q.qk)[order])
    loss = project_layer(source, back, moments_of(source))
    assert loss.heads == (1, 2, 0)
    assert max(loss.qk, loss.ov) < 1e-9
    x = stream(7)
    assert_close(back(x), source(x), **EXACT)


def test_alibi_heads_are_not_permuted():
    source, target = (random_layer(name, position="alibi") for name in ("separate", "no_q"))
    assert assign_heads(source, target, moments_of(source)) == [0, 1, 2]


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_slices_are_fitted_by_least_squares(bias):
    """Compare no_q with a regression of the true scores on the slices."""
    source, target = random_layer("separate", bias=bias), random_layer("no_q", bias=bias)
    x = anisotropic_stream()
    loss = project_layer(source, target, moments_of(source, x))
    (b_HDD, u_HD), (c_HDD, _) = scaled_circuit(source.qk), scaled_circuit(target.qk)
    x_ND = x.flatten(0, 1)
    error = whole = 0.0
    for place, head in enumerate(loss.heads):
        own = slice(4 * place, 4 * place + 4)
        wanted_ND = x_ND @ b_HDD[head] + (u_HD[head] if bias else 0)
        rows_KD = torch.linalg.lstsq(x_ND[:, own], wanted_ND).solution
        assert_close(c_HDD[place, own], rows_KD, rtol=1e-3, atol=1e-3)
        centered = x_ND - x_ND.mean(0)
        error += float(((wanted_ND - x_ND[:, own] @ rows_KD) @ centered.mT).square().sum())
        whole += float((wanted_ND @ centered.mT).square().sum())
    assert loss.qk_scores == pytest.approx((error / whole) ** 0.5, rel=1e-3)


@pytest.mark.parametrize("name", ["no_q", "no_k", "low_rank", "shared", "sym_diag", "symmetric"])
def test_weighted_loss_is_at_most_that_of_the_nearest_matrix(name):
    """The nearest matrix is optimal only for isotropic moments."""
    source, target = random_layer("separate", heads=2), random_layer(name, heads=2, rank=3)
    moments = moments_of(source)
    by_entries = project_layer(source, target, Moments(torch.eye(13).double(), moments.z_HDD)).qk
    with torch.no_grad():
        set_scores_(source, target, [0, 1])
        naive = moments.score_power(
            torch.nn.functional.pad(
                scaled_circuit(target.qk)[0] - scaled_circuit(source.qk)[0], (0, 0, 0, 1)
            )
        ).sum()
        whole = moments.score_power(
            torch.nn.functional.pad(scaled_circuit(source.qk)[0], (0, 0, 0, 1))
        ).sum()
    loss = project_layer(source, target, moments)
    assert loss.qk_scores <= float((naive / whole).sqrt()) * (1 + 1e-9)
    assert by_entries <= loss.qk * (1 + 1e-9)


def test_shared_gets_the_nearest_positive_semidefinite_matrix():
    """Gradient descent on W from there finds no closer matrix."""
    source, target = random_layer("separate", heads=2), random_layer("shared", heads=2)
    moments = Moments(torch.eye(13).double(), torch.eye(12).double().expand(2, 12, 12))
    loss = project_layer(source, target, moments)
    b_HDD = scaled_circuit(source.qk)[0] / target.qk.scale
    w = torch.randn(2, 12, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    w.requires_grad_()
    optimizer = torch.optim.LBFGS([w], max_iter=500, line_search_fn="strong_wolfe")

    def loss_of_w():
        optimizer.zero_grad()
        value = (w @ w.mT - b_HDD).square().sum()
        value.backward()
        return value

    optimizer.step(loss_of_w)
    slow = float((w @ w.mT - b_HDD).detach().square().sum())
    assert loss.qk == pytest.approx((slow / float(b_HDD.square().sum())) ** 0.5, rel=1e-6)


def test_output_biases_are_preserved():
    """The output of a zero stream is the same where forms have different biases."""
    for ov in ("no_v", "no_o", "no_vo", "merged", "grouped", "tied", "latent"):
        source, target = (random_layer(qk_for(own), own, bias=True) for own in ("separate", ov))
        project_layer(source, target, moments_of(source))
        assert_close(target.ov.output_bias(target.qk), source.ov.output_bias(source.qk), **EXACT)


def test_moments_are_means_over_the_positions():
    layer, x = random_layer("separate"), anisotropic_stream()
    moments = moments_of(layer, x)
    x_ND = x.flatten(0, 1)
    assert_close(moments.x_LL[:-1, :-1], x_ND.mT @ x_ND / len(x_ND), rtol=1e-4, atol=1e-4)
    z_HND = (layer.weights(x) @ x.unsqueeze(1)).transpose(0, 1).flatten(1, 2)
    assert_close(moments.z_HDD, z_HND.mT @ z_HND / len(x_ND), rtol=1e-4, atol=1e-4)


def test_moments_of_several_batches_are_those_of_all():
    layer, x = random_layer("separate"), anisotropic_stream()
    moments, parts = moments_of(layer, x), MomentSums(layer, causal=True)
    for part in x.split(7):
        parts.add((part,))
    for name, value in vars(parts.mean()).items():
        assert_close(value, getattr(moments, name), rtol=1e-12, atol=1e-12)


@pytest.mark.exhaustive
@pytest.mark.parametrize("qk", sorted(QK_CIRCUITS))
@pytest.mark.parametrize("ov", sorted(OV_CIRCUITS))
def test_moments_without_averages_suffice_where_they_are_not_needed(qk, ov):
    """They are left out where the weights and the losses are the same bits without them."""
    source = random_layer("separate")
    try:
        target = random_layer(qk, ov)
    except UnsupportedCombination:
        pytest.skip("no such layer")
    if find_obstacle(source, target):
        pytest.skip("cannot be projected")
    x = anisotropic_stream()
    sums = MomentSums(source, causal=True, averages=False)
    sums.add((x,))
    without = sums.mean()
    if needs_averages(source, target):
        with pytest.raises(AssertionError):
            project_layer(source, target, without)
        return
    loss = project_layer(source, target, moments_of(source))
    weights = {name: value.clone() for name, value in target.state_dict().items()}
    assert project_layer(source, target, without) == loss
    assert all(torch.equal(weights[name], value) for name, value in target.state_dict().items())


def test_moments_of_cross_attention_are_those_of_two_streams():
    layer = random_layer("separate")
    x, y = stream(7, batch=5), anisotropic_stream()[:5]
    moments = compute_moments(layer, (x, y), causal=False)
    for found, flat in ((moments.x_LL, x.flatten(0, 1)), (moments.y_LL, y.flatten(0, 1))):
        assert_close(found[:-1, :-1], flat.mT @ flat / len(flat), rtol=1e-5, atol=1e-5)
    averages = (layer.weights(x, y, causal=False) @ y.unsqueeze(1)).transpose(0, 1).flatten(1, 2)
    expected = averages.mT @ averages / averages.shape[1]
    assert_close(moments.z_HDD, expected, rtol=1e-5, atol=1e-5)
    covariance = torch.cov(y.flatten(0, 1).mT, correction=0)
    assert_close(moments.key_covariance(), covariance, rtol=1e-4, atol=1e-4)


def test_projection_of_cross_attention_loses_least_on_its_own_two_streams():
    source = random_layer("separate")
    x, y = stream(7, batch=40), anisotropic_stream()
    own = compute_moments(source, (x, y), causal=False)
    other = compute_moments(source, (y, x), causal=False)
    losses = []
    for moments in (own, other):
        target = random_layer("no_k")
        heads = list(project_layer(source, target, moments).heads)
        wanted = source.scores(x, y, causal=False)[:, heads]
        difference = (target.scores(x, y, causal=False) - wanted).detach()
        centered = difference - difference.mean(-1, keepdim=True)
        losses.append(float(centered.square().mean()))
    assert losses[0] < losses[1]


def test_moments_of_an_encoder_see_all_positions():
    layer, x = random_layer("separate"), stream(7, batch=5)
    moments = compute_moments(layer, (x,), causal=False)
    averages = (layer.weights(x, causal=False) @ x.unsqueeze(1)).transpose(0, 1).flatten(1, 2)
    assert_close(moments.z_HDD, averages.mT @ averages / averages.shape[1], rtol=1e-5, atol=1e-5)
