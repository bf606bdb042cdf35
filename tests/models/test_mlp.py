"""The feed-forward sublayer, and the block that Llama makes of it."""

import math

import pytest
import torch
from torch.nn import functional as F

from qkablate.config import ModelConfig, VariantConfig, resolve_variant
from qkablate.models.gpt import GPT
from qkablate.models.mlp import count_matrix_elements, make_mlp
from tests.attention import naive

KINDS = {
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "relu2": lambda x: torch.where(x > 0, x * x, 0 * x),
}


def model_of(variant="standard", vocabulary=50, **changes):
    shape = {"layers": 2, "d_model": 24, "heads": 2, "context": 12} | changes
    config = ModelConfig(**shape)
    return GPT(config, resolve_variant(VariantConfig(name=variant), config), vocabulary).init_(0)


def mlp_of(kind, d_model=24, **changes):
    torch.manual_seed(0)
    mlp = make_mlp(ModelConfig(d_model=d_model, mlp=kind, **changes)).double()
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return mlp


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_two_matrices_around_an_activation(kind, bias):
    mlp, x_BTD = mlp_of(kind, bias=bias), torch.randn(3, 5, 24, dtype=torch.float64)
    b_up, b_down = (mlp.up.bias, mlp.down.bias) if bias else (0, 0)
    expected = KINDS[kind](x_BTD @ mlp.up.weight.T + b_up) @ mlp.down.weight.T + b_down
    torch.testing.assert_close(mlp(x_BTD), expected, rtol=1e-12, atol=1e-12)


def test_gate_scales_the_units():
    mlp, x_BTD = mlp_of("swiglu", bias=True), torch.randn(3, 5, 24, dtype=torch.float64)
    gate = x_BTD @ mlp.gate.weight.T + mlp.gate.bias
    units = gate / (1 + torch.exp(-gate)) * (x_BTD @ mlp.up.weight.T + mlp.up.bias)
    expected = units @ mlp.down.weight.T + mlp.down.bias
    torch.testing.assert_close(mlp(x_BTD), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("d_model", [24, 128, 768])
def test_all_kinds_have_as_many_weights(d_model):
    with torch.device("meta"):
        counts = {
            kind: count_matrix_elements(make_mlp(ModelConfig(d_model=d_model, mlp=kind)))
            for kind in (*KINDS, "swiglu")
        }
    assert counts["gelu"] == counts["gelu_tanh"] == counts["relu2"] == 8 * d_model**2
    assert counts["swiglu"] == pytest.approx(8 * d_model**2, abs=1.5 * d_model)  # a rounded width


def rms(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def llama(model, tokens_BT):
    """Return the logits of a Llama, written out."""
    x = model.token_embedding.weight[tokens_BT]
    for block in model.blocks:
        normed = rms(x, block.norm_1.weight)
        x = x + naive.attention(block.attention, normed, None, causal=True)
        normed, mlp = rms(x, block.norm_2.weight), block.mlp
        units = F.silu(normed @ mlp.gate.weight.T) * (normed @ mlp.up.weight.T)
        x = x + units @ mlp.down.weight.T
    return rms(x, model.norm.weight) @ model.output_weight.T


@pytest.mark.parametrize("variant", ["standard", "no_q", "shared_qk"])
def test_block_of_llama_agrees_with_its_equations(variant):
    """Logits and gradients in fp64, with weights far from their start."""
    kind = {"position": "rope", "norm_kind": "rms", "mlp": "swiglu", "tied": False}
    model = model_of(variant, **kind).double()
    torch.manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    tokens_BT = torch.randint(50, (2, 12))
    found = []
    for logits in (model(tokens_BT), llama(model, tokens_BT)):
        gradients = torch.autograd.grad(logits.square().mean(), [*model.parameters()])
        found.append([logits, *gradients])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


def test_count_of_a_published_model():
    """SmolLM-135M has 134,515,008 parameters: 30 layers, 9 heads on 3 keys, 8/3 d, tied."""
    config = ModelConfig(
        **{"layers": 30, "d_model": 576, "heads": 9, "context": 2048, "mlp": "swiglu"},
        **{"norm_kind": "rms", "position": "rope"},
    )
    variant = resolve_variant(VariantConfig(qk="grouped", ov="grouped", groups=3), config)
    with torch.device("meta"):
        model = GPT(config, variant, 49_152)
    assert model.parameter_counts()["total"] == 134_515_008


def test_rms_norm_starts_at_one_and_has_no_bias():
    model = model_of(norm_kind="rms", bias=True)
    norms = {n: p for n, p in model.named_parameters() if n.startswith("blocks.0.norm")}
    assert {*norms} == {"blocks.0.norm_1.weight", "blocks.0.norm_2.weight"}
    assert all(torch.equal(weight, torch.ones(24)) for weight in norms.values())


def test_other_weights_start_as_in_the_other_block():
    """Draws are by name, so that blocks are compared from one start."""
    layer, gated = (dict(model_of(mlp=kind).named_parameters()) for kind in ("gelu", "swiglu"))
    equal = [n for n in layer if n in gated and layer[n].shape == gated[n].shape]
    assert len(equal) >= 10
    assert all(torch.equal(layer[n], gated[n]) for n in equal)
