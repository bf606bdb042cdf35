"""Moments of padded sources and targets: those of the sequences without their padding."""

import pytest
import torch
from torch.testing import assert_close

from qkablate.attention.projection.project import MomentSums
from qkablate.data.batches import IGNORE, Batch
from tests.models.test_padding import LENGTHS, draw, make

TARGETS = torch.tensor([2, 7, 5])


def padded_batch(form):
    """Return sequences of three lengths in one batch, whose targets have lengths of their own."""
    inputs, targets_BT = draw(form)
    if form == "encoder_decoder":
        targets_BT = targets_BT.masked_fill(torch.arange(7) >= TARGETS[:, None], IGNORE)
    return Batch(inputs, targets_BT)


def sums_of(model, batches):
    layers = model.attention_layers()
    sums = {layer.name: MomentSums(layer.module, causal=layer.causal) for layer in layers}
    with torch.no_grad():
        for inputs in batches:
            for layer, streams in model.attention_inputs(*inputs):
                sums[layer.name].add(streams, *model.padding_masks(layer, *inputs))
    return sums


@pytest.mark.parametrize("form", ["encoder", "encoder_decoder"])
@pytest.mark.parametrize("name", ["standard", "merged_w", "shared_qk_reformer", "static_scores"])
def test_moments_of_a_padded_batch_are_those_of_its_sequences(form, name):
    batch = padded_batch(form)
    padded = sums_of(make(form, name), [batch.marked_inputs])
    lengths = zip(LENGTHS.tolist(), TARGETS.tolist(), strict=True)
    sequences = [
        tuple(
            tokens[n : n + 1, :length] for tokens, length in zip(batch.inputs, pair, strict=False)
        )
        for n, pair in enumerate(lengths)
    ]
    cut = sums_of(make(form, name, padding=False), sequences)
    for layer, sums in padded.items():
        assert sums.tokens_per_dimension == cut[layer].tokens_per_dimension
        for part, moment in vars(cut[layer].mean()).items():
            assert_close(getattr(sums.mean(), part), moment, rtol=1e-9, atol=1e-9)


def test_targets_are_marked_where_their_predictions_do_not_count():
    batch = padded_batch("encoder_decoder")
    source, target = batch.marked_inputs
    assert torch.equal(source, batch.inputs[0])
    assert torch.equal(target != -1, batch.targets_NA != IGNORE)
    assert torch.equal(target[target != -1], batch.tokens_NT[target != -1])


def test_encoder_reads_positions_without_a_target():
    """Only some words of a sentence have a tag."""
    batch = padded_batch("encoder")
    untagged = batch._replace(targets_NA=torch.full_like(batch.targets_NA, IGNORE))
    assert untagged.marked_inputs is batch.inputs
