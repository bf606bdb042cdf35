"""AdamW by rows: each run takes torch's steps, and its own optimizer can go on."""

import copy

import pytest
import torch

from qkablate.training.optim.adamw import AdamW
from qkablate.training.vmapped.row_adamw import ParameterSlice, RowAdamW

SHAPES = {"w": (3, 4), "b": (4,), "v": (2, 3)}
RATES = [1e-2, 3e-3, 5e-2]


def make_runs(multipliers, betas=(0.9, 0.95)):
    """Return parameters and optimizers of runs, which differ in the rate of one matrix."""
    runs = []
    for seed, multiplier in enumerate(multipliers):
        torch.manual_seed(seed)
        weights = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES.values()]
        groups = [
            {"params": weights[:1], "lr_multiplier": multiplier, "weight_decay": 0.3},
            {"params": weights[1:], "lr_multiplier": 1.0, "weight_decay": 0.0},
        ]
        runs.append((weights, AdamW(groups, lr=1.0, betas=betas, fused=True)))
    return runs


def stack(runs):
    """Return the optimizer of all, with the weights in rows."""
    count, begin, parts = len(runs), 0, []
    for name, shape in SHAPES.items():
        parts.append(ParameterSlice(name, begin, torch.Size(shape)))
        begin += parts[-1].shape.numel()
    weights_KP, grads_KP = torch.empty(count, begin), torch.empty(count, begin)
    for row, (weights, _) in enumerate(runs):
        for weight, part in zip(weights, parts, strict=True):
            place = part.of(weights_KP[row])
            place.copy_(weight.data)
            weight.data, weight.grad = place, part.of(grads_KP[row])
    places = [dict(zip(weights, parts, strict=True)) for weights, _ in runs]
    return RowAdamW([optimizer for _, optimizer in runs], places, weights_KP, grads_KP), grads_KP


def draw(grads_KP, number):
    """Return gradients of very different sizes."""
    generator = torch.Generator().manual_seed(number)
    sizes = 10 ** torch.empty(grads_KP.shape).uniform_(-4, 1, generator=generator)
    return sizes * torch.randn(grads_KP.shape, generator=generator)


def step_by_torch(weights, optimizer, grads_P, rate):
    begin = 0
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_multiplier"]
    for weight in weights:
        weight.grad = grads_P[begin : begin + weight.numel()].view(weight.shape).clone()
        begin += weight.numel()
    optimizer.step()


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.0, 0.999), (0.9, 0.0)])
@pytest.mark.parametrize("multipliers", [(1.0, 1.0, 1.0), (0.5, 2.0, 1.0)])
def test_steps_are_those_of_torch(multipliers, betas):
    ours, theirs = make_runs(multipliers, betas), make_runs(multipliers, betas)
    optimizer, grads_KP = stack(ours)
    for number in range(30):
        grads_KP.copy_(draw(grads_KP, number))
        rates = [rate / (1 + number) for rate in RATES]
        for (weights, own), grads_P, rate in zip(theirs, grads_KP, rates, strict=True):
            step_by_torch(weights, own, grads_P, rate)
        optimizer.step(torch.tensor(rates))
        for (weights, _), (expected, _) in zip(ours, theirs, strict=True):
            torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


def test_a_run_goes_on_alone_and_among_others():
    """From the state of its own optimizer, whichever took the steps before."""
    ours, theirs = make_runs((0.5, 2.0, 1.0)), make_runs((0.5, 2.0, 1.0))
    grads_KP = torch.empty(3, 22)
    for number in range(9):
        draws_KP = draw(grads_KP, number)
        for (weights, own), grads_P, rate in zip(theirs, draws_KP, RATES, strict=True):
            step_by_torch(weights, own, grads_P, rate)
        if number in (3, 4, 5):  # each alone, with what a checkpoint would hold
            for (weights, own), grads_P, rate in zip(ours, draws_KP, RATES, strict=True):
                own.load_state_dict(copy.deepcopy(own.state_dict()))
                step_by_torch(weights, own, grads_P, rate)
        else:
            optimizer, rows_KP = stack(ours)
            rows_KP.copy_(draws_KP)
            optimizer.step(torch.tensor(RATES))
    for (weights, own), (expected, other) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
        for weight, reference in zip(weights, expected, strict=True):
            torch.testing.assert_close(
                own.state[weight], other.state[reference], rtol=1e-5, atol=1e-6
            )


def test_runs_need_not_have_taken_the_same_number_of_steps():
    """And one that is not finite changes nothing of the others."""
    ours, theirs = make_runs((1.0, 1.0, 1.0)), make_runs((1.0, 1.0, 1.0))
    for number in range(6):
        draws_KP = draw(torch.empty(3, 22), number)
        draws_KP[1, 0] = torch.nan if number > 2 else 1.0
        some = (0, 1) if number < 3 else (0, 1, 2)  # the last one begins later
        optimizer, rows_KP = stack([ours[i] for i in some])
        rows_KP.copy_(draws_KP[list(some)])
        optimizer.step(torch.tensor([RATES[i] for i in some]))
        for i in some:
            step_by_torch(*theirs[i], draws_KP[i], RATES[i])
    for i in (0, 2):
        torch.testing.assert_close(ours[i][0], theirs[i][0], rtol=1e-5, atol=1e-6)
