"""Keys that are values, too: the choice of their directions, and what is predicted from them."""

import pytest
import torch
from torch.testing import assert_close

from qkablate.attention.projection.holding import LayerMeasure
from qkablate.attention.projection.moments import Moments, with_bias
from qkablate.attention.projection.project import (
    find_obstacle,
    project_layer,
    scaled_circuit,
    set_output_,
    set_scores_,
)
from qkablate.attention.projection.shared_keys import find_keys, fit_outputs, fit_queries
from tests.attention.projection.test_project import anisotropic_stream, moments_of
from tests.attention.random_layers import random_layer

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


def error_of(w_GDR, goals, moments, rank=12):
    """Return the sum of both squared relative errors of what the keys y w predict."""
    goal_HLD, m_HDD = goals
    w_HDR = w_GDR.repeat_interleave(len(m_HDD) // len(w_GDR), 0)
    scores_HLD = fit_queries(goal_HLD, w_GDR, moments, rank) @ w_HDR.mT
    outputs_HDD = w_HDR @ fit_outputs(m_HDD, w_HDR, moments, rank)
    shares = (
        power(found - goal).sum() / power(goal).sum()
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
        error = error_of(w_GDR, goals, moments)
        error.backward()
        w_GDR.grad = w_GDR.grad.contiguous()
        return error

    optimizer.step(loss)
    return float(error_of(w_GDR.detach(), goals, moments))


@pytest.mark.parametrize(("groups", "width"), [(3, 4), (1, 6)])
@pytest.mark.parametrize("is_common", [True, False], ids=["common moments", "own moments"])
def test_no_search_finds_much_better_keys(groups, width, is_common):
    """With one moment for both sides none are better, otherwise they are by a tenth at most."""
    layer = random_layer("separate", bias=True)
    goals = goals_of(layer)
    moments = Moments(**COMMON) if is_common else moments_of(layer)
    # Key covariances leave out the mean, which these moments do not have.
    if is_common:
        moments.y_LL = torch.eye(13).double()
    w_GDR = find_keys(*goals, moments, groups, width)
    found = float(error_of(w_GDR, goals, moments))
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
    expected = float(error_of(w_GDR, goals, moments))
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


@pytest.mark.parametrize(("qk", "ov", "more"), FORMS[:2] + FORMS[3:4], ids=str)
def test_layer_without_scores_leaves_the_keys_to_the_outputs(qk, ov, more):
    source, target = random_layer("separate"), random_layer(qk, ov, **more)
    torch.nn.init.zeros_(source.qk.w_q)
    loss = project_layer(source, target, moments_of(source))
    assert (loss.qk_scores, loss.ov_output) == (0, pytest.approx(0, abs=1e-9))
    x = anisotropic_stream()
    assert_close(target(x), source(x), rtol=1e-9, atol=1e-9)


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
    """Where queries are keys, the scores are set as without shared values."""
    source = random_layer("separate")
    tied, alone = random_layer("shared", "tied"), random_layer("shared")
    moments = moments_of(source)
    loss = project_layer(source, tied, moments)
    with torch.no_grad():
        _, error_H = set_scores_(source, alone, [0, 1, 2], moments)
    assert loss.qk_scores == pytest.approx(float(error_H.sum().sqrt()))
    assert torch.equal(tied.qk.w_k, alone.qk.w_k)
