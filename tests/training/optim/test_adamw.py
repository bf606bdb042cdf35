"""AdamW is bit-identical to torch's and imports no compiler."""

import subprocess
import sys

import pytest
import torch

from qkablate.training.optim.adamw import AdamW


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
