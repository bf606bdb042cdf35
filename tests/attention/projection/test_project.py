"""A trained layer in another form: what is exact, what is lost, and that no other choice loses
less.
"""

import itertools
import re

import pytest
import torch
from torch.testing import assert_close

from qkablate.attention import OV_CIRCUITS, QK_CIRCUITS, Meaningless
from qkablate.attention.projection.convert import scaled_circuit
from qkablate.attention.projection.moments import Seen
from qkablate.attention.projection.project import (
    _set_scores_,
    _set_writing_,
    best_places,
    look,
    project_layer,
    why_not,
)
from tests.attention.random_layers import random_layer, stream

EXACT = {"rtol": 1e-9, "atol": 1e-9}
COMMON = torch.randn(12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def some_stream():
    """With a mean, and directions of very different size, as a trained one has."""
    sizes = torch.linspace(0.1, 3, 12, dtype=torch.float64)
    mixed = torch.linalg.qr(torch.outer(COMMON, COMMON) + torch.eye(12, dtype=torch.float64))[0]
    return (stream(8, batch=40) * sizes) @ mixed + 0.5 * COMMON


def seen_of(layer, x=None):
    x = some_stream() if x is None else x
    (seen,) = look([layer], lambda: layer(x))
    return seen


def plain_moments():
    """A stream without preference: what is seen is what stands in the matrices."""
    return Seen(
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
    ],
    ids=str,
)
def test_forms_that_hold_all_of_standard(qk, ov, more, bias):
    """Other weights, the same outputs: nothing is lost."""
    source, target = random_layer("separate", bias=bias), random_layer(qk, ov, bias=bias, **more)
    lost = project_layer(source, target, seen_of(source))
    assert max(lost.qk, lost.qk_seen, lost.ov, lost.ov_seen) < 1e-9
    x = stream(7)
    assert_close(target(x), source(x), **EXACT)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("qk", QK_CIRCUITS)
@pytest.mark.parametrize("position", ["none", "rope"])
def test_onto_its_own_form_bit_for_bit(qk, bias, position):
    """Whatever stands between the weights and the scores: nothing is computed."""
    try:
        source = random_layer(qk, bias=bias, position=position, dtype=torch.float32)
        target = random_layer(qk, bias=bias, position=position, dtype=torch.float32)
    except Meaningless:
        pytest.skip("no such layer")
    for parameter in target.parameters():
        torch.nn.init.constant_(parameter, 0.1)
    lost = project_layer(source, target, plain_moments())
    assert (lost.qk, lost.ov, lost.heads) == (0, 0, (0, 1, 2))
    for name, value in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], value)


@pytest.mark.parametrize("ov", ["no_v", "no_o", "merged"])
def test_a_circuit_that_stays_is_copied_whatever_it_is(ov):
    """With rope there is no B_h; where only the other circuit changes, none is needed."""
    source, target = (random_layer("separate", own, position="rope") for own in ("separate", ov))
    assert why_not(source, target) == ""
    lost = project_layer(source, target, seen_of(source))
    assert (lost.qk, lost.heads) == (0, (0, 1, 2))
    assert torch.equal(source.qk.w_q, target.qk.w_q)
    assert (lost.ov < 1e-9) == (ov == "merged")


@pytest.mark.parametrize(
    ("qk", "ov", "more", "why"),
    [
        ("static", "separate", {}, "do not depend on x"),
        ("no_qk", "separate", {}, "NoQK cannot be set"),
        ("separate", "tied", {}, "TiedOV cannot be set"),
        ("merged", "separate", {"norm": "qk"}, "a norm stands between"),
        ("separate", "separate", {"norm": "unit_keys"}, "a norm stands between"),
    ],
    ids=str,
)
def test_what_cannot_be_set_says_why_before_anything_is_touched(qk, ov, more, why):
    source, target = random_layer("separate"), random_layer(qk, ov, **more)
    before = {name: value.clone() for name, value in target.state_dict().items()}
    assert why in why_not(source, target)
    assert all(torch.equal(before[name], value) for name, value in target.state_dict().items())
    with pytest.raises(Meaningless, match=why):
        project_layer(source, target, seen_of(source))


@pytest.mark.parametrize("qk", sorted(QK_CIRCUITS))
@pytest.mark.parametrize("ov", sorted(OV_CIRCUITS))
def test_why_not_agrees_with_what_happens(qk, ov):
    source = random_layer("separate", bias=True)
    try:
        target = random_layer(qk, ov, bias=True)
    except Meaningless:
        pytest.skip("no such layer")
    reason = why_not(source, target)
    if reason == "":
        project_layer(source, target, plain_moments())
    else:
        with pytest.raises(Meaningless, match="^" + re.escape(reason)):
            project_layer(source, target, plain_moments())


@pytest.mark.parametrize(
    ("qk", "ov"),
    [
        *(("no_q", "separate"), ("no_k", "separate"), ("separate", "no_v"), ("separate", "no_o")),
        *(("no_q", "no_v"), ("no_k", "no_o")),
    ],
    ids="+".join,
)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_heads_stand_where_they_lose_least(qk, ov, bias):
    """As well as the best of all orders, and so never worse than staying."""
    source, target = random_layer("separate", bias=bias), random_layer(qk, ov, bias=bias)
    seen = seen_of(source)
    costs = {}
    for order in itertools.permutations(range(3)):
        with torch.no_grad():
            parts = (
                form(source, target, [*order], seen)[1].sum()
                for form in (_set_scores_, _set_writing_)
            )
            costs[order] = float(sum(parts))
    best = tuple(best_places(source, target, seen))
    assert costs[best] == pytest.approx(min(costs.values()))
    lost = project_layer(source, target, seen)
    assert lost.heads == best
    assert lost.qk_seen**2 + lost.ov_seen**2 == pytest.approx(costs[best])
    assert costs[best] <= costs[0, 1, 2] * (1 + 1e-12)


def test_heads_in_the_wrong_places_are_found():
    """A layer of no_q's own form, written as standard with its heads in another order."""
    no_q = random_layer("no_q")
    b_HDD, _ = scaled_circuit(no_q.qk)
    source, back = random_layer("separate"), random_layer("no_q")
    with torch.no_grad():
        order = [2, 0, 1]
        source.qk.set_circuit_(b_HDD[order] / source.qk.scale)
        source.ov.set_circuit_(no_q.ov.circuit(no_q.qk)[order])
    lost = project_layer(source, back, seen_of(source))
    assert lost.heads == (1, 2, 0)
    assert max(lost.qk, lost.ov) < 1e-9
    x = stream(7)
    assert_close(back(x), source(x), **EXACT)


def test_a_bias_of_its_own_place_keeps_heads_at_home():
    source, target = (random_layer(name, position="alibi") for name in ("separate", "no_q"))
    assert best_places(source, target, seen_of(source)) == [0, 1, 2]


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_a_slice_stands_for_the_rest_as_least_squares_says(bias):
    """no_q's keys against a regression of the true scores on what the head reads."""
    source, target = random_layer("separate", bias=bias), random_layer("no_q", bias=bias)
    x = some_stream()
    lost = project_layer(source, target, seen_of(source, x))
    (b_HDD, u_HD), (c_HDD, _) = scaled_circuit(source.qk), scaled_circuit(target.qk)
    x_ND = x.flatten(0, 1)
    apart = whole = 0.0
    for place, head in enumerate(lost.heads):
        own = slice(4 * place, 4 * place + 4)
        wanted_ND = x_ND @ b_HDD[head] + (u_HD[head] if bias else 0)
        rows_KD = torch.linalg.lstsq(x_ND[:, own], wanted_ND).solution
        assert_close(c_HDD[place, own], rows_KD, rtol=1e-3, atol=1e-3)
        seen_by_softmax = x_ND - x_ND.mean(0)
        apart += float(((wanted_ND - x_ND[:, own] @ rows_KD) @ seen_by_softmax.mT).square().sum())
        whole += float((wanted_ND @ seen_by_softmax.mT).square().sum())
    assert lost.qk_seen == pytest.approx((apart / whole) ** 0.5, rel=1e-3)


@pytest.mark.parametrize("name", ["no_q", "no_k", "low_rank", "shared", "sym_diag", "symmetric"])
def test_what_is_seen_is_never_lost_more_than_by_entries(name):
    """The nearest matrix is what a stream without preference asks for."""
    source, target = random_layer("separate", heads=2), random_layer(name, heads=2, rank=3)
    seen = seen_of(source)
    by_entries = project_layer(source, target, Seen(torch.eye(13).double(), seen.z_HDD)).qk
    with torch.no_grad():
        _set_scores_(source, target, [0, 1])
        naive = seen.scores(
            torch.nn.functional.pad(
                scaled_circuit(target.qk)[0] - scaled_circuit(source.qk)[0], (0, 0, 0, 1)
            )
        ).sum()
        whole = seen.scores(
            torch.nn.functional.pad(scaled_circuit(source.qk)[0], (0, 0, 0, 1))
        ).sum()
    lost = project_layer(source, target, seen)
    assert lost.qk_seen <= float((naive / whole).sqrt()) * (1 + 1e-9)
    assert by_entries <= lost.qk * (1 + 1e-9)


def test_shared_is_the_nearest_symmetric_positive_matrix():
    """Against a slow reference: gradient descent on W from there finds nothing nearer."""
    source, target = random_layer("separate", heads=2), random_layer("shared", heads=2)
    moments = Seen(torch.eye(13).double(), torch.eye(12).double().expand(2, 12, 12))
    lost = project_layer(source, target, moments)
    b_HDD = scaled_circuit(source.qk)[0] / target.qk.scale
    w = torch.randn(2, 12, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    w.requires_grad_()
    optimizer = torch.optim.LBFGS([w], max_iter=500, line_search_fn="strong_wolfe")

    def apart():
        optimizer.zero_grad()
        value = (w @ w.mT - b_HDD).square().sum()
        value.backward()
        return value

    optimizer.step(apart)
    slow = float((w @ w.mT - b_HDD).detach().square().sum())
    assert lost.qk == pytest.approx((slow / float(b_HDD.square().sum())) ** 0.5, rel=1e-6)


def test_biases_of_values_are_held_by_biases():
    """Where a form has other biases, what is written of nothing is the same."""
    for ov in ("no_v", "no_o", "merged", "grouped"):
        source, target = (random_layer("separate", own, bias=True) for own in ("separate", ov))
        project_layer(source, target, seen_of(source))
        assert_close(target.ov.offset(target.qk), source.ov.offset(source.qk), **EXACT)


def test_looking_changes_nothing_and_adds_up():
    layer, x = random_layer("separate"), some_stream()
    seen = seen_of(layer, x)
    x_ND = x.flatten(0, 1)
    assert_close(seen.stream(), x_ND.mT @ x_ND / len(x_ND), rtol=1e-4, atol=1e-4)
    z_HND = (layer.weights(x) @ x.unsqueeze(1)).transpose(0, 1).flatten(1, 2)
    assert_close(seen.z_HDD, z_HND.mT @ z_HND / len(x_ND), rtol=1e-4, atol=1e-4)
    assert not layer._forward_pre_hooks
    (halves,) = look([layer], lambda: [layer(part) for part in x.split(7)])
    assert_close(halves.x_LL, seen.x_LL)
