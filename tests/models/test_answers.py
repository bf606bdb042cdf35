"""Answers at the positions of a window."""

import pytest
import torch

from qkablate.config import ModelConfig, VariantConfig, resolve_variant
from qkablate.data import IGNORE, Batch
from qkablate.models.answers import answer_window
from qkablate.models.build import build_model

SIZES = {"layers": 1, "d_model": 8, "heads": 2, "context": 6}


@pytest.mark.parametrize("has_positions", [False, True])
@pytest.mark.parametrize("form", ["encoder", "encoder_decoder"])
def test_answers_are_the_most_likely_tokens_of_the_targets(form, has_positions):
    """They and their loss agree with the losses and hits of an evaluation, window by window."""
    generator = torch.Generator().manual_seed(0)
    config = ModelConfig(form=form, **SIZES)
    variant = resolve_variant(VariantConfig(), config)
    model = build_model(config, variant, 7, device="cpu")
    model = model.to_empty(device="cpu").init_(0).double().eval()
    for parameter in model.parameters():
        parameter.data += torch.randn(parameter.shape, generator=generator).double() / 2
    inputs = torch.randint(7, (2 if form == "encoder_decoder" else 1, 3, 6), generator=generator)
    targets_NA, positions_NA = torch.randint(7, (3, 6), generator=generator), None
    if has_positions:
        targets_NA, positions_NA = targets_NA[:, :3], torch.tensor([[0, 2, 5]] * 3)
    targets_NA[:, 1] = IGNORE
    batch = Batch((*inputs,), targets_NA, positions_NA)
    with torch.no_grad():
        losses_NA, hits_NA = model.loss_and_hits(*batch.inputs, targets_NA, positions_NA)
    counts_NA = targets_NA != IGNORE
    for row in range(3):
        answers, loss = answer_window(model, batch, row)
        right = torch.tensor(answers) == targets_NA[row, counts_NA[row]]
        assert torch.equal(right, hits_NA[row, counts_NA[row]])
        assert loss == pytest.approx(float(losses_NA[row, counts_NA[row]].mean()), rel=1e-6)
