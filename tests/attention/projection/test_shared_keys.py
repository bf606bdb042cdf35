"""Keys that are values, too: the choice of their directions, and what is predicted from them."""

import pytest
import torch
from torch.testing import assert_close

from qkablate.attention.projection.holding import LayerMeasure
from qkablate.attention.projection.moments import Moments, with_bias
from qkablate.attention.projection.project import (
    compute_moments,
    find_obstacle,
    project_layer,
    scaled_circuit,
    set_output_,
    set_scores_,
)
from qkablate.attention.projection.shared_keys import find_keys, fit_outputs, fit_queries
from tests.attention.projection.test_project import anisotropic_stream, moments_of
from tests.attention.random_layers import random_layer, stream

FORMS = [
    ("separate", "tied", {}),
    ("low_rank", "tied", {"rank": 6}),
    ("grouped", "tied", {"groups": 1}),
    ("four_matrix", "tied", {}),
    ("latent", "latent", {"rank": 6}),
]
COMMON = {"x_LL": torch.eye(13).double(), "z_HDD": torch.eye(12).double().expand(3, 12, 12)}


def goals_of(layer):
    """Return the matrices of the scores, with the row of the biases, and of the outputs."""
    with torch.no_grad():
        return with_bias(*scaled_circuit(layer.qk)), layer.ov.circuit(layer.qk)


def errors_of(w_GDR, goals, moments, rank=12):
    """Return each group's sum of both squared relative errors of what the keys y w predict."""
    goal_HLD, m_HDD = goals
    w_HDR = w_GDR.repeat_interleave(len(m_HDD) // len(w_GDR), 0)
    scores_HLD = fit_queries(goal_HLD, w_GDR, moments, rank) @ w_HDR.mT
    outputs_HDD = w_HDR @ fit_outputs(m_HDD, w_HDR, moments, rank)
    shares = (
        power(found - goal).unflatten(0, (len(w_GDR), -1)).sum(1) / power(goal).sum()
        for power, found, goal in (
            (moments.score_power, scores_HLD, goal_HLD),
            (moments.output_power, outputs_HDD, m_HDD),
        )
    )
    return sum(shares)


def search(w_GDR, goals, moments):
    """Return the smallest error that gradient descent finds from these keys."""
    w_GDR = w_GDR.clone().contiguous().requires_grad_()
    optimizer = torch.optim.LBFGS([w_GDR], max_iter=200, line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        error = errors_of(w_GDR, goals, moments).sum()
        error.backward()
        w_GDR.grad = w_GDR.grad.contiguous()
        return error

    optimizer.step(loss)
    return float(errors_of(w_GDR.detach(), goals, moments).sum())


def leading_directions(goals, moments, basis_DD, width):
    """Return the best keys of one group where both sides weight the stream by one moment."""
    values, vectors = torch.linalg.eigh(basis_DD)
    root_DD = vectors @ values.sqrt().diag() @ vectors.mT
    powers = (moments.score_power(goals[0]).sum(), moments.output_power(goals[1]).sum())
    wanted = (goals[0].mT @ moments.x_LL @ goals[0], goals[1] @ goals[1].mT)
    squares_HDD = sum(part / power for part, power in zip(wanted, powers, strict=True))
    for square_DD in squares_HDD:
        leading_DR = torch.linalg.svd(root_DD @ square_DD @ root_DD).U[:, :width]
        yield torch.linalg.inv(root_DD) @ leading_DR


def unequal_moments(seed, d=12, heads=3):
    """Return moments of keys and of averages that have nothing in common."""
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-1, 1, d, dtype=torch.float64)
    random_NDD = torch.randn(heads + 2, d, d, generator=draw, dtype=torch.float64)
    rotations_NDD = torch.linalg.qr(random_NDD).Q
    x_DD, y_DD, *z_DD = rotations_NDD @ sizes.diag() @ rotations_NDD.mT
    one = torch.ones(1, 1, dtype=torch.float64)
    return Moments(torch.block_diag(x_DD, one), torch.stack(z_DD), torch.block_diag(y_DD, one))


def test_each_group_keeps_the_better_of_both_bases():
    goals, shares = goals_of(random_layer("separate")), []
    for seed in range(4):
        moments = unequal_moments(seed)
        errors = []
        for basis_HDD in (moments.key_covariance().expand(3, 12, 12), moments.z_HDD):
            w_DR = [[*leading_directions(goals, moments, basis_HDD[h], 4)][h] for h in range(3)]
            errors.append(errors_of(torch.stack(w_DR), goals, moments))
        found = errors_of(find_keys(*goals, moments, 3, 4), goals, moments)
        assert_close(found, torch.minimum(*errors), rtol=1e-4, atol=1e-9)
        shares.append(errors[0] / errors[1])
    assert torch.stack(shares).min() < 0.9
    assert torch.stack(shares).max() > 1.1


@pytest.mark.parametrize(("groups", "width"), [(6, 8), (3, 8), (3, 32), (2, 20)])
def test_keys_are_sought_where_the_heads_of_a_group_read(groups, width):
    """Two heads of width 8 read 32 of the 48 directions of the stream, three heads read all."""
    layer = random_layer("separate", d=48, heads=6, bias=True)
    goals, moments = goals_of(layer), unequal_moments(0, 48, 6)
    with torch.no_grad():
        factors = layer.qk.low_rank_factors()[1], layer.ov.low_rank_factors(layer.qk)[0]
    everywhere_GDR = find_keys(*goals, moments, groups, width)
    there_GDR = find_keys(*goals, moments, groups, width, torch.cat(factors, -1))
    assert_close(there_GDR @ there_GDR.mT, everywhere_GDR @ everywhere_GDR.mT)


@pytest.mark.parametrize(("groups", "width"), [(3, 4), (1, 6)])
@pytest.mark.parametrize("is_common", [True, False], ids=["common moments", "own moments"])
def test_no_search_finds_much_better_keys(groups, width, is_common):
    """None are better with one moment for both sides, and hardly any on this stream."""
    layer = random_layer("separate", bias=True)
    goals = goals_of(layer)
    moments = Moments(**COMMON) if is_common else moments_of(layer)
    w_GDR = find_keys(*goals, moments, groups, width)
    found = float(errors_of(w_GDR, goals, moments).sum())
    best = search(w_GDR, goals, moments)
    assert 0.01 < best <= found * (1 + 1e-9)
    assert found < best * (1 + 1e-5 if is_common else 1.1)


@pytest.mark.parametrize(("qk", "ov", "more"), FORMS, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_layer_gets_the_keys_found(qk, ov, more, bias):
    source, target = random_layer("separate", bias=bias), random_layer(qk, ov, bias=bias, **more)
    moments, goals = moments_of(source), goals_of(source)
    assert find_obstacle(source, target) == ""
    loss = project_layer(source, target, moments)
    w_GDR = find_keys(*goals, moments, target.qk.key_heads, target.qk.width)
    expected = float(errors_of(w_GDR, goals, moments).sum())
    assert loss.qk_scores**2 + loss.ov_output**2 == pytest.approx(expected, rel=1e-6)
    held = LayerMeasure(source, moments).measure(target)
    assert (held.scores, held.output) == pytest.approx((loss.qk_scores, loss.ov_output))


def test_both_circuits_lose_less_than_with_the_keys_of_the_scores():
    source, target = random_layer("separate"), random_layer("separate", "tied")
    moments, heads = moments_of(source), [0, 1, 2]
    loss = project_layer(source, target, moments)
    with torch.no_grad():
        target.qk.load_state_dict(source.qk.state_dict())
        alone = float(set_output_(source, target, heads, moments)[1].sum())
    assert loss.qk_scores**2 + loss.ov_output**2 < 0.5 * alone


def test_rotated_keys_are_kept_and_the_outputs_are_predicted_from_them():
    """With rope there is no B_h; the values are the keys before they are rotated."""
    source = random_layer("separate", position="rope", bias=True)
    target = random_layer("separate", "tied", position="rope", bias=True)
    x = anisotropic_stream()
    loss = project_layer(source, target, moments_of(source, x))
    assert (loss.qk, loss.qk_scores) == (0, 0)
    assert torch.equal(source.qk.w_k, target.qk.w_k)
    z_HND = (source.weights(x) @ x.unsqueeze(1)).transpose(0, 1).flatten(1, 2)
    w_k_HDK = source.qk.w_k.unflatten(1, (3, -1)).movedim(1, 0)
    wanted_HND = z_HND @ source.ov.circuit(source.qk)
    found_HKD = torch.linalg.lstsq(z_HND @ w_k_HDK, wanted_HND).solution
    assert_close(target.ov.w_o.unflatten(0, (3, -1)), found_HKD, rtol=1e-3, atol=1e-3)
    zero = torch.zeros(1, 1, 12, dtype=torch.float64)
    assert_close(target(zero), source(zero), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("qk", ["separate", "low_rank", "four_matrix"])
def test_layer_without_scores_leaves_the_keys_to_the_outputs(qk):
    source, target = random_layer("separate"), random_layer(qk, "tied")
    torch.nn.init.zeros_(source.qk.w_q)
    loss = project_layer(source, target, moments_of(source))
    assert (loss.qk_scores, loss.ov_output) == (0, pytest.approx(0, abs=1e-9))
    x = anisotropic_stream()
    assert_close(target(x), source(x), rtol=1e-9, atol=1e-9)


@pytest.mark.exhaustive
@pytest.mark.parametrize("source", ["merged", "separate"])
def test_latent_products_are_the_nearest_of_their_rank(source):
    """No other factors of width d_head on the same latent stream are nearer."""
    source, target = random_layer(source, "merged"), random_layer("latent", "latent", rank=8)
    moments = moments_of(source)
    loss = project_layer(source, target, moments)
    goal_HLD, m_HDD = goals_of(source)
    w_HDR = target.qk.w_c.detach().expand(3, -1, -1)
    for goal, power, is_score in (
        (goal_HLD, moments.score_power, True),
        (m_HDD, moments.output_power, False),
    ):
        generator = torch.Generator().manual_seed(0)
        left, right = (
            torch.randn(3, size, 4, generator=generator, dtype=torch.float64).requires_grad_()
            for size in (goal.shape[1] if is_score else 8, 8 if is_score else 12)
        )
        optimizer = torch.optim.LBFGS([left, right], max_iter=600, line_search_fn="strong_wolfe")

        def error(goal=goal, power=power, is_score=is_score, left=left, right=right):
            product = left @ right.mT
            found = product @ w_HDR.mT if is_score else w_HDR @ product
            return power(found - goal).sum() / power(goal).sum()

        def step(optimizer=optimizer, error=error):
            optimizer.zero_grad()
            value = error()
            value.backward()
            return value

        optimizer.step(step)
        best = float(error().detach()) ** 0.5
        found = loss.qk_scores if is_score else loss.ov_output
        assert found <= best * (1 + 1e-6) < 1.2 * found


def test_dead_heads_make_no_large_numbers():
    """A head without queries but for a bias has factors as large as those of the others."""
    source, target = (
        random_layer("separate", bias=True),
        random_layer("latent", "latent", bias=True),
    )
    with torch.no_grad():
        source.qk.w_q[:, :4] = 0
    project_layer(source, target, moments_of(source))
    assert max(float(p.detach().abs().max()) for p in target.parameters()) < 10


@pytest.mark.parametrize("d_source", [7, 20])
@pytest.mark.parametrize(
    ("qk", "ov", "more"), [*FORMS, ("latent", "latent", {"rank": 22})], ids=str
)
def test_errors_of_cross_attention_are_those_of_its_streams(qk, ov, more, d_source):
    wide = {"d_source": d_source, "source": 8, "heads": 3, "causal": False}
    source, target = random_layer("separate", **wide), random_layer(qk, ov, **wide, **more)
    x, (y, _) = stream(7, batch=20), torch.randn(2, 20, 9, d_source, dtype=torch.float64)
    moments = compute_moments(source, (x, y), causal=False)
    loss = project_layer(source, target, moments)
    z_HND = (source.weights(x, y, causal=False) @ y.unsqueeze(1)).transpose(0, 1).flatten(1, 2)
    ends = [z_HND @ layer.ov.circuit(layer.qk) for layer in (source, target)]
    lost = float(((ends[1] - ends[0]).norm() / ends[0].norm()).detach())
    assert loss.ov_output == pytest.approx(lost, rel=1e-3, abs=1e-5)
    held = LayerMeasure(source, moments).measure(target)
    assert (held.scores, held.output) == pytest.approx((loss.qk_scores, loss.ov_output), abs=1e-7)


def test_layer_without_outputs_is_measured():
    source, target = random_layer("separate"), random_layer("separate", "no_vo")
    torch.nn.init.zeros_(source.ov.w_o)
    held = LayerMeasure(source, moments_of(source)).measure(target)
    assert (held.scores, held.output) == (0, 0)


def test_queries_and_keys_are_as_large_as_each_other():
    source, target = (
        random_layer("separate", bias=True),
        random_layer("separate", "tied", bias=True),
    )
    project_layer(source, target, moments_of(source))
    w_q, w_k = (target.qk.get_parameter(name).norm() for name in ("w_q", "w_k"))
    assert 0.5 < w_q / w_k < 1.1  # the queries have a bias, too
    assert not target.qk.b_k.any()


def test_gains_of_copied_slices_are_fitted_by_least_squares():
    source, target = random_layer("separate"), random_layer("separate", "no_vo")
    x = anisotropic_stream()
    loss = project_layer(source, target, moments_of(source, x))
    z_HND = (source.weights(x) @ x.unsqueeze(1)).transpose(0, 1).flatten(1, 2)
    for place, head in enumerate(loss.heads):
        own = slice(4 * place, 4 * place + 4)
        wanted = (z_HND[head] @ source.ov.circuit(source.qk)[head])[:, own].flatten()
        copied = z_HND[head][:, own].flatten()
        gain = (copied @ wanted) / (copied @ copied)
        assert float(target.ov.gain[place]) == pytest.approx(float(gain), rel=1e-3)


def test_scores_that_cannot_be_chosen_freely_come_first():
    """The scores are set as without shared values where queries are keys."""
    source = random_layer("separate")
    tied, alone = random_layer("shared", "tied"), random_layer("shared")
    moments = moments_of(source)
    loss = project_layer(source, tied, moments)
    with torch.no_grad():
        _, error_H = set_scores_(source, alone, [0, 1, 2], moments)
    assert loss.qk_scores == pytest.approx(float(error_H.sum().sqrt()))
    assert torch.equal(tied.qk.w_k, alone.qk.w_k)
