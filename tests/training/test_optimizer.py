"""AdamW is bit-identical to torch's and imports no compiler; rates of several lengths."""

import dataclasses
import itertools
import subprocess
import sys

import pytest
import torch

from qkablate.analysis.comparison.audit import is_annealed
from qkablate.config import Config, OptimConfig, TrainConfig
from qkablate.config.schedule import stable_steps
from qkablate.training.optimizer import AdamW, learning_rate


def stepped(kind, resumed=False):
    """Parameters after five steps, the state of the third taken over by another instance."""
    torch.manual_seed(0)
    parameters = [torch.randn(n, 3, requires_grad=True) for n in (2, 5)]

    def make():
        groups = [{"params": parameters[:1], "weight_decay": 0.1}, {"params": parameters[1:]}]
        return kind(groups, lr=0.01, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    optimizer = make()
    for step in range(5):
        if step == 3 and resumed:
            state = optimizer.state_dict()
            optimizer = make()
            optimizer.load_state_dict(state)
        loss = sum((p * (i + 1)).square().sum() for i, p in enumerate(parameters))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        assert all(p.grad is None for p in parameters)
    return parameters


def test_steps_equal_torchs_bit_for_bit():
    expected = stepped(torch.optim.AdamW)
    for resumed in (False, True):
        assert all(map(torch.equal, stepped(AdamW, resumed), expected))


@pytest.mark.slow
def test_training_imports_no_compiler(tmp_path):
    """Torch's own takes longer to import than everything else until the first step."""
    words = ["model.layers=1", "model.d_model=16", "model.heads=2", "model.context=16"]
    words += [
        "train.steps=2",
        "data.val_tokens=64",
        "data.test_tokens=64",
        "tracking.wandb=disabled",
    ]
    words += ["device=cpu", "compile=false"]
    code = (
        "import sys; from qkablate.cli import main\n"
        f"try: main({['train', *words, f'out={tmp_path}']!r})\n"
        "except SystemExit as end: assert not end.code\n"
        "print('imported', *({'torch._dynamo', 'torch._inductor', 'sympy'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "imported"


def test_constant_schedule_stays_at_its_peak_after_the_warm_up():
    optim = OptimConfig(lr=0.5, schedule="constant", warmup=4, cooldown=0.0)
    rates = [learning_rate(optim, step, 20) for step in range(20)]
    assert rates[:4] == [0.125, 0.25, 0.375, 0.5]
    assert rates[4:] == [0.5] * 16
    assert not is_annealed(optim)


@pytest.mark.parametrize("cooldown", [0.0, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("warmup", [0, 2, 7])
def test_lengths_of_wsd_have_equal_rates_until_the_shorter_cools_down(warmup, cooldown):
    optim = OptimConfig(lr=0.5, schedule="wsd", warmup=warmup, cooldown=cooldown, lr_final=0.3)
    base = dataclasses.replace(Config(), optim=optim)
    lengths = [8, 9, 10, 30, 100]
    for shorter, longer in itertools.combinations(lengths, 2):
        config = dataclasses.replace(base, train=TrainConfig(shorter))
        rates = [[learning_rate(optim, s, n) for s in range(shorter)] for n in (shorter, longer)]
        common = stable_steps(config)
        assert 1 <= common < shorter
        assert rates[0][:common] == rates[1][:common]
        if common < shorter - 1 and warmup < shorter - 1:  # no later step could be shared
            assert rates[0][common] < rates[0][common - 1]
