"""Muon by rows: each run takes the steps of its own optimizer, and that can go on."""

import copy

import pytest
import torch

from qkablate.training.vmapped.row_adamw import ParameterSlice
from qkablate.training.vmapped.row_muon import RowMuon
from qkablate.training.vmapped.stack import StackedStep
from tests.training.vmapped.helpers import make_plans
from tests.training.vmapped.test_stack import FORMS, make_steps

ROWS = 4  # one more than there are runs


def make_runs(folder, variant, **more):
    """Return models and optimizers of three runs, of which the last trains its matrices faster."""
    plans = make_plans(folder, 3, variant=variant, optim={"optimizer": "muon"}, **more)
    steps = make_steps(plans, StackedStep)
    for group in steps[2].optimizer.param_groups:
        group["lr_multiplier"] *= 2 if "momentum" in group else 1
    return [(step.model, step.optimizer) for step in steps]


def stack(runs):
    """Return the optimizer of all, and the rows of their gradients."""
    begin, parts = 0, []
    for name, parameter in runs[0][0].named_parameters():
        parts.append(ParameterSlice(name, begin, parameter.shape))
        begin += parameter.numel()
    weights_KP, grads_KP = torch.empty(len(runs), begin), torch.empty(len(runs), begin)
    for row, (model, _) in enumerate(runs):
        for parameter, part in zip(model.parameters(), parts, strict=True):
            place = part.of(weights_KP[row])
            place.copy_(parameter.data)
            parameter.data, parameter.grad = place, part.of(grads_KP[row])
    places = [dict(zip(model.parameters(), parts, strict=True)) for model, _ in runs]
    return RowMuon([one for _, one in runs], places, weights_KP, grads_KP, ROWS), grads_KP


def draw(runs, number):
    """Return a gradient of every run, of very different sizes."""
    generator = torch.Generator().manual_seed(number)
    size = sum(parameter.numel() for parameter in runs[0][0].parameters())
    sizes_KP = 10 ** torch.empty(len(runs), size).uniform_(-4, 1, generator=generator)
    return sizes_KP * torch.randn(len(runs), size, generator=generator)


def step_alone(runs, grads_KP, rates):
    """Take the steps of the runs' own optimizers."""
    for (model, optimizer), grads_P, rate in zip(runs, grads_KP, rates, strict=True):
        begin = 0
        for parameter in model.parameters():
            numbers = grads_P[begin : begin + parameter.numel()]
            parameter.grad = numbers.view_as(parameter).clone()
            begin += parameter.numel()
        for group in optimizer.param_groups:
            group["lr"] = rate * group["lr_multiplier"]
        optimizer.step()


def assert_same(ours, theirs):
    """Compare weights and all that optimizers save."""
    for (model, optimizer), (other, reference) in zip(ours, theirs, strict=True):
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
            state, expected = optimizer.state[one], reference.state[two]
            torch.testing.assert_close(dict(state), dict(expected), rtol=1e-5, atol=1e-6)


TRANSLATOR = {"model": FORMS["translator"][0], "data": FORMS["translator"][1]}


@pytest.mark.parametrize(
    ("variant", "more"),
    [
        *((name, {}) for name in ("standard", "merged_w", "no_q", "symmetric_w", "gqa", "mla")),
        ("shared_qk", TRANSLATOR),
    ],
    ids=str,
)
def test_steps_are_those_of_each_optimizer(tmp_path, variant, more):
    ours, theirs = (make_runs(tmp_path, variant, **more) for _ in range(2))
    optimizer, rows_KP = stack(ours)
    for number in range(6):
        grads_KP, rates = draw(ours, number), [1e-2 / (1 + number), 3e-3, 2e-2]
        step_alone(theirs, grads_KP, rates)
        rows_KP.copy_(grads_KP)
        optimizer.step(torch.tensor(rates))
        assert_same(ours, theirs)


def test_a_run_goes_on_alone_and_among_others(tmp_path):
    """From the state of its own optimizer, whichever took the steps before."""
    ours, theirs = make_runs(tmp_path, "standard"), make_runs(tmp_path, "standard")
    rates = [1e-2, 3e-3, 2e-2]
    for number in range(6):
        grads_KP = draw(ours, number)
        step_alone(theirs, grads_KP, rates)
        if number in (2, 3):  # alone, with what a checkpoint would hold
            for _, own in ours:
                own.load_state_dict(copy.deepcopy(own.state_dict()))
            step_alone(ours, grads_KP, rates)
        else:
            optimizer, rows_KP = stack(ours)
            rows_KP.copy_(grads_KP)
            optimizer.step(torch.tensor(rates))
    assert_same(ours, theirs)
