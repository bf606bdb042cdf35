"""The joint step: parity with single runs, and independence of the runs from each other."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from qkablate.config import DataConfig, variants
from qkablate.training.checkpoint import TrainProgress
from qkablate.training.distributed.ranks import SINGLE_PROCESS
from qkablate.training.optim import learning_rate, make_optimizer
from qkablate.training.step import TrainStep
from qkablate.training.vmapped.replay import Replay
from qkablate.training.vmapped.stack import RunStack, StackedStep
from tests.training.vmapped.helpers import make_plans

_TOKENS = {"val_tokens": 512, "test_tokens": 512}
FORMS = {
    "encoder": (
        {"form": "encoder", "context": 4},
        DataConfig(source="sort", vocab_size=8, copy_length=4, **_TOKENS),
    ),
    "translator": (
        {"form": "encoder_decoder", "source": 24, "context": 52},
        DataConfig(source="commands", phrases=2, held_out=4, **_TOKENS),
    ),
}
TOLERANCE = 1e-5  # nats


def make_steps(plans, kind):
    models = [p.build().to_empty(device="cpu").init_(p.config.seeds.init).train() for p in plans]
    return [kind(*both, None, SINGLE_PROCESS) for both in zip(plans, models, strict=True)]


def read_losses(steps):
    losses = [float(step.loss_sum) for step in steps]
    for step in steps:
        step.loss_sum.zero_()
    return losses


def train_alone(plans, count):
    """Return the losses of runs, one list for each step."""
    steps, losses = make_steps(plans, TrainStep), []
    for number in range(count):
        for step in steps:
            step(number)
        losses.append(read_losses(steps))
    return losses, steps


def train_stacked(plans, count):
    steps, losses = make_steps(plans, StackedStep), []
    stack = RunStack(steps)
    for number in range(count):
        stack([number] * len(steps))
        losses.append(read_losses(steps))
    return losses, steps


def assert_parity(plans, count):
    alone, together = train_alone(plans, count)[0], train_stacked(plans, count)[0]
    assert torch.tensor(alone).isfinite().all()
    torch.testing.assert_close(together, alone, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("variant", [*variants()])
def test_losses_of_every_variant_are_those_of_single_runs(tmp_path, variant):
    assert_parity(make_plans(tmp_path, 2, variant=variant), 12)


@pytest.mark.parametrize("variant", ["uniform", "static_scores"])
def test_norm_of_queries_that_are_not_read_is_left_alone(tmp_path, variant):
    model, data = FORMS["translator"]
    assert_parity(make_plans(tmp_path, 2, variant=variant, model=model, data=data), 4)


def test_bias_that_is_left_out_is_left_alone(tmp_path):
    plans = make_plans(tmp_path, 2, variant="standard_reassociated", model={"bias": True})
    assert_parity(plans, 4)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["standard", "merged_w", "gqa", "no_q", "mla", "shared_qk"])
def test_losses_after_200_steps_are_those_of_single_runs(tmp_path, variant):
    assert_parity(
        make_plans(tmp_path, 2, variant=variant, train={"steps": 200}, optim={"lr": 1e-3}), 200
    )


@pytest.mark.parametrize("form", FORMS)
def test_losses_of_other_forms_are_those_of_single_runs(tmp_path, form):
    model, data = FORMS[form]
    assert_parity(make_plans(tmp_path, 3, model=model, data=data), 12)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_losses_of_other_forms_after_200_steps_are_those_of_single_runs(tmp_path, form):
    model, data = FORMS[form]
    assert_parity(
        make_plans(tmp_path, 3, model=model, data=data, train={"steps": 200}, optim={"lr": 1e-3}),
        200,
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"train": {"grad_accum": 3}},
        {"optim": {"schedule": "wsd", "clip": 0.0}},
        {"optim": {"clip": 0.05, "schedule": "constant", "weight_decay": 1.0}},
        {"model": {"position": "rope", "bias": True, "tied": False, "embedding_width": 8}},
        {"model": {"position": "alibi", "norm": "none"}},
        {"optim": {"optimizer": "muon"}},
    ],
)
def test_every_setting_is_that_of_single_runs(tmp_path, settings):
    assert_parity(make_plans(tmp_path, 2, variant="low_rank_w", **settings), 12)


def test_gradient_norms_are_those_of_single_runs(tmp_path):
    plans = make_plans(tmp_path, 3)
    (single, stacked) = make_steps(plans, TrainStep), make_steps(plans, StackedStep)
    RunStack(stacked)([0] * 3)
    norms = [step(0) for step in single]
    torch.testing.assert_close([step(0) for step in stacked], norms, rtol=1e-5, atol=0)


@pytest.mark.parametrize("chosen", [[0], [0, 2], [2, 0], [3, 1, 2, 0]])
@pytest.mark.parametrize("variant", ["standard", "merged_w"])
def test_other_runs_and_their_order_change_no_bit(tmp_path, variant, chosen):
    plans = make_plans(tmp_path, 4, variant=variant)
    expected, steps = train_stacked(plans, 6)
    losses, others = train_stacked([plans[i] for i in chosen], 6)
    assert [row[chosen.index(0)] for row in losses] == [row[0] for row in expected]
    one, other = steps[0].model.state_dict(), others[chosen.index(0)].model.state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_runs_need_not_be_at_the_same_step(tmp_path):
    plans = make_plans(tmp_path, 2)
    steps = make_steps(plans, StackedStep)
    for number in range(4):
        RunStack(steps[:1])([number])
    stack = RunStack(steps)
    for number in range(4):
        stack([number + 4, number])
    ends = [step.model.state_dict() for step in steps]
    for plan, count, end in zip(plans, (8, 4), ends, strict=True):
        expected = train_stacked([plan], count)[1][0].model.state_dict()
        assert all(torch.equal(end[name], expected[name]) for name in end)


def test_a_run_that_diverges_changes_no_bit_of_others(tmp_path):
    plans = make_plans(tmp_path, 2)
    expected = [row[1] for row in train_stacked(plans, 6)[0]]
    steps = make_steps(plans, StackedStep)
    stack, losses = RunStack(steps), []
    for number in range(6):
        if number == 2:
            next(steps[0].model.parameters()).data.fill_(torch.nan)
        stack([number] * 2)
        losses.append(read_losses(steps[1:])[0])
    assert losses == expected
    assert steps[0].first_nonfinite() == 3
    assert steps[1].first_nonfinite() is None


def test_checkpoint_is_one_of_a_single_run(tmp_path):
    plans = make_plans(tmp_path, 2, variant="merged_w")
    _, single = train_alone(plans, 5)
    _, stacked = train_stacked(plans, 5)
    for one, other in zip(single, stacked, strict=True):
        expected, state = (
            one.checkpoint(TrainProgress(step=5)),
            other.checkpoint(TrainProgress(step=5)),
        )
        torch.testing.assert_close(state.weights, expected.weights, rtol=0, atol=1e-5)
        torch.testing.assert_close(
            state.state["optimizer"], expected.state["optimizer"], rtol=1e-4, atol=1e-5
        )


def test_update_is_that_of_torch(tmp_path):
    """Given the same gradients, each run takes the very step of a run alone."""
    plans = make_plans(tmp_path, 2, variant="merged_w", optim={"clip": 0.0, "weight_decay": 0.5})
    steps, references = make_steps(plans, StackedStep), make_steps(plans, TrainStep)
    stack = RunStack(steps)
    for number in range(5):
        stack([number, number])
        for step, reference, plan in zip(steps, references, plans, strict=True):
            optimizer = make_optimizer(reference.model, plan.config)
            if number:
                optimizer.load_state_dict(reference.optimizer.state_dict())
            reference.optimizer = optimizer
            rate = learning_rate(plan.config.optim, number, plan.config.train.steps)
            for group in optimizer.param_groups:
                group["lr"] = rate * group["lr_multiplier"]
            parameters = zip(reference.model.parameters(), step.model.parameters(), strict=True)
            for parameter, stacked in parameters:
                parameter.grad = stacked.grad.clone()
            optimizer.step()
            ends = step.model.state_dict(), reference.model.state_dict()
            torch.testing.assert_close(*ends, rtol=0, atol=0)


def test_runs_with_other_rates_of_their_circuits_train_together(tmp_path):
    """All parameters of one have one rate; circuits of the other have their own."""
    plans = make_plans(tmp_path, 2, variant="merged_w")
    plans[1] = with_circuit_rate(plans[1], 1.0)
    groups = [step.optimizer.param_groups for step in make_steps(plans, TrainStep)]
    rates = [{group["lr_multiplier"] for group in of_run} for of_run in groups]
    assert len(rates[0]) > len(rates[1]) == 1
    assert_parity(plans, 12)


def with_circuit_rate(plan, rate):
    variant = replace(plan.config.variant, lr=rate)
    return replace(plan, config=replace(plan.config, variant=variant))


def test_memory_of_a_stack_is_freed_with_it(tmp_path):
    """Without waiting for the garbage collector: another takes its place on the same GPU."""
    steps = make_steps(make_plans(tmp_path, 2), StackedStep)
    stack = RunStack(steps)
    stack._replay = Replay("cpu")  # which launches its first calls
    stack([0, 0])
    left = weakref.ref(stack)
    gc.disable()
    try:
        del stack
        assert left() is None
    finally:
        gc.enable()
