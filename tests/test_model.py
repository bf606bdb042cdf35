"""The GPT: names, pairing, the ledger, and the price of a token."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from qkablate.attention import QK_CIRCUITS
from qkablate.config import ModelConfig, VariantConfig
from qkablate.model import GPT, forward_flops_per_token


def gpt(qk="separate", *, seed=0, init="matched", **model):
    config = ModelConfig(**({"layers": 2, "d_model": 32, "heads": 4, "context": 16} | model))
    return GPT(config, VariantConfig(qk=qk, init=init), 50).init_(seed)


@pytest.mark.parametrize("qk", QK_CIRCUITS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("init", ["gpt2", "linear"])
def test_every_parameter_is_set(qk, bias, init):
    config = ModelConfig(layers=2, d_model=32, heads=4, context=16, bias=bias, init=init)
    with torch.device("meta"):
        model = GPT(config, VariantConfig(qk=qk), 50)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    assert all(p.isfinite().all() for p in model.init_(0).parameters())


@pytest.mark.parametrize("qk", QK_CIRCUITS)
@pytest.mark.parametrize("init", ["gpt2", "linear"])
def test_variants_share_what_they_share(qk, init):
    """E19: tensors of the same name and shape are bit-equal at the start, across variants."""
    standard = dict(_with_init("separate", init).named_parameters())
    ours = dict(_with_init(qk, init).named_parameters())
    shared = [n for n in ours if n in standard and ours[n].shape == standard[n].shape]
    assert len(shared) >= 10
    assert all(torch.equal(ours[name], standard[name]) for name in shared)


def _with_init(qk, init):
    config = ModelConfig(layers=2, d_model=32, heads=4, context=16, bias=True, init=init)
    return GPT(config, VariantConfig(qk=qk), 50).init_(3)


def test_layers_and_context_do_not_shift_the_draws():
    """A tensor's start depends on its name alone, not on what else the model holds."""
    small, deep = (dict(gpt(layers=n).named_parameters()) for n in (2, 3))
    for name in small:
        if not name.endswith(("w_o", "down.weight")):  # scaled by the depth, as GPT-2 does
            assert torch.equal(small[name], deep[name]), name
    assert not torch.equal(
        dict(gpt(seed=1).named_parameters())["blocks.0.mlp.up.weight"],
        small["blocks.0.mlp.up.weight"],
    )


@pytest.mark.parametrize("init", ["gpt2", "linear"])
@pytest.mark.parametrize("bias", [False, True])
def test_merged_w_starts_as_standard(init, bias):
    """E19: the matched start is W_q W_kᵀ of the very tensors that standard draws."""
    config = ModelConfig(layers=2, d_model=32, heads=4, context=16, bias=bias, init=init)
    tokens = torch.randint(50, (3, 16), generator=torch.Generator().manual_seed(0))
    logits = [
        GPT(config, VariantConfig(qk=qk), 50).init_(0).double()(tokens)
        for qk in ("separate", "merged")
    ]
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("qk", QK_CIRCUITS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("norm", ["pre", "none"])
@pytest.mark.parametrize("position", ["learned", "none"])
def test_ledger_sums_to_numel(qk, bias, norm, position):
    model = gpt(qk, bias=bias, norm=norm, position=position)
    ledger = model.ledger()
    assert ledger["total"] == sum(p.numel() for p in model.parameters())
    assert ledger["total"] == sum(ledger[p] for p in ("embedding", "attention", "mlp", "norm"))
    assert (ledger["norm"] == 0) == (norm == "none")


@pytest.mark.parametrize(
    ("qk", "per_layer"),
    [("separate", 4), ("merged", 4 + 2), ("shared", 3), ("no_q", 3)],
)
def test_attention_parameters(qk, per_layer):
    """The closed forms: 4 d², (h + 2) d², 3 d², 3 d²."""
    assert gpt(qk).ledger()["attention"] == 2 * per_layer * 32**2


@pytest.mark.parametrize("qk", QK_CIRCUITS)
def test_flops_against_torchs_counter(qk):
    """E16: our sum of terms is what torch counts (which knows no causal saving)."""
    model, context = gpt(qk, dropout=0.1), 16  # dropout: the kernel the counter sees into
    tokens = torch.zeros(2, context, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(tokens)
    assert counter.get_total_flops() == forward_flops_per_token(model, context) * tokens.numel()


def test_attention_skip_and_norm():
    """Without skip the attention's output replaces the stream, without norm nothing rescales it."""
    tokens = torch.randint(50, (2, 16))
    base, no_skip, no_norm = gpt(), gpt(attention_skip=False), gpt(norm="none")
    assert not torch.allclose(base(tokens), no_skip(tokens))
    assert not any(isinstance(m, torch.nn.LayerNorm) for m in no_norm.modules())
    block, x = no_skip.blocks[0], torch.randn(1, 16, 32)
    written = block.attention(block.norm_1(x))
    torch.testing.assert_close(block(x), written + block.mlp(block.norm_2(written)))


def test_no_position_means_no_order():
    """Without positions the last token's logits ignore the order of those before it."""
    model = gpt(position="none", layers=1)
    tokens = torch.tensor([[1, 2, 3, 4], [3, 1, 2, 4]])
    logits = model(tokens)
    torch.testing.assert_close(logits[0, -1], logits[1, -1])
    assert not torch.allclose(*gpt(layers=1)(tokens)[:, -1])


def test_loss_ignores_padding():
    model = gpt()
    tokens, targets = torch.randint(50, (2, 16)), torch.randint(50, (2, 16))
    padded = targets.clone()
    padded[1] = -100
    one = model.loss(tokens[:1], targets[:1], reduction="sum")
    torch.testing.assert_close(model.loss(tokens, padded, reduction="sum"), one)
