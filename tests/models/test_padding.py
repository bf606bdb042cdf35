"""Models of sources that are padded: padding reaches no output and no gradient."""

import pytest
import torch

from qkablate.config import ModelConfig, VariantConfig, resolve_variant, variants
from qkablate.data.batches import IGNORE, PAD
from qkablate.models.build import build_model

LENGTHS = torch.tensor([7, 4, 1])
VOCABULARY = 11


def make(form, name="standard", *, padding=True, **options):
    source = {"source": 7} if form == "encoder_decoder" else {}
    given = {"layers": 2, "d_model": 16, "heads": 4, "context": 7, "init": "linear"} | source
    config = ModelConfig(form=form, **given | options)
    variant = resolve_variant(VariantConfig(**variants()[name]), config)
    return build_model(config, variant, VOCABULARY, padding=padding).init_(0).double()


def draw(form):
    """Return padded inputs and targets of three sequences."""
    generator = torch.Generator().manual_seed(0)
    source_BS, tokens_BT, targets_BT = torch.randint(VOCABULARY, (3, 3, 7), generator=generator)
    padded_BS = torch.arange(7) >= LENGTHS[:, None]
    source_BS = source_BS.masked_fill(padded_BS, PAD)
    if form == "encoder":
        return (source_BS,), targets_BT.masked_fill(padded_BS, IGNORE)
    return (source_BS, tokens_BT), targets_BT


def results(model, inputs, targets_BT):
    """Return the total loss, whose logits are fp32, and the gradients by name."""
    loss = model.loss(*inputs, targets_BT, reduction="sum")
    named = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss, [*named.values()], materialize_grads=True)
    return {"loss": loss, **dict(zip(named, gradients, strict=True))}


@pytest.mark.parametrize("form", ["encoder", "encoder_decoder"])
@pytest.mark.parametrize("name", variants())
def test_padded_batch_equals_its_sequences_one_by_one(form, name):
    model, (inputs, targets_BT) = make(form, name), draw(form)
    expected: dict[str, torch.Tensor] = {}
    for n, length in enumerate(LENGTHS.tolist()):
        cut = (inputs[0][n : n + 1, :length], *(part[n : n + 1] for part in inputs[1:]))
        targets_1T = targets_BT[n : n + 1, : length if form == "encoder" else None]
        for key, value in results(make(form, name, padding=False), cut, targets_1T).items():
            expected[key] = expected.get(key, 0) + value
    torch.testing.assert_close(results(model, inputs, targets_BT), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["encoder", "encoder_decoder"])
@pytest.mark.parametrize("recompute", [False, True])
def test_nan_in_padded_positions_reaches_nothing(form, recompute):
    """The positions that only padding has are NaN."""
    model, (inputs, targets_BT) = make(form), draw(form)
    inputs, targets_BT = [part[1:] for part in inputs], targets_BT[1:]
    model.checkpoint_activations = recompute
    table = model.position_embedding if form == "encoder" else model.source_position_embedding
    before = results(model, inputs, targets_BT)
    with torch.no_grad():
        table.weight[4:] = torch.nan
    after = results(model, inputs, targets_BT)
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_model_without_padding_uses_no_mask():
    """Bit for bit what a source that is full gives, and the kernels that have no mask."""
    inputs, targets_BT = draw("encoder_decoder")
    full = (inputs[0][:1], inputs[1][:1])
    plain, padded = (make("encoder_decoder", padding=p) for p in (False, True))
    assert plain.source_mask(full[0]) is None
    assert padded.source_mask(full[0]).all()
    torch.testing.assert_close(*(m.loss(*full, targets_BT[:1]) for m in (plain, padded)))


def test_kernels_support_padding_at_the_sites_that_have_it():
    options = {"device": "cuda", "precision": "bf16"}
    config = ModelConfig(form="encoder_decoder", layers=1, d_model=64, heads=4, context=8)
    variant = resolve_variant(VariantConfig(), config)
    kernels = [
        [layer.module.kernel for layer in model.attention_layers()]
        for model in (
            build_model(config, variant, VOCABULARY, padding=padding, **options)
            for padding in (False, True)
        )
    ]
    assert kernels == [["flash"] * 3, ["efficient", "flash", "efficient"]]
