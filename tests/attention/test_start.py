"""Where variants start and how fast they move, measured against what the classes claim."""

from itertools import product

import pytest
import torch

from qkablate.attention import QK_CIRCUITS, Spec
from qkablate.config import Config, ModelConfig, VariantConfig
from qkablate.model import GPT
from qkablate.training.optimizer import make_optimizer

D, HEADS, SIGMA = 128, 4, 0.02


def drawn(name: str, init: str):
    generator = torch.Generator().manual_seed(1)

    def draw(name, shape, *, residual=False):
        return torch.randn(shape, generator=generator).mul_(SIGMA)

    qk = QK_CIRCUITS[name](Spec(D, HEADS, sigma=SIGMA, init=init))
    with torch.no_grad():
        qk.init_(draw)
    return qk


def normed(tokens: int) -> torch.Tensor:
    x = torch.randn(1, tokens, D, generator=torch.Generator().manual_seed(0))
    return torch.nn.functional.layer_norm(x, (D,))


def scaled_scores(qk, x):
    q, k = qk(x, x)
    return qk.scale * q @ k.mT


@pytest.mark.parametrize("name", ["separate", "merged", "no_q"])
def test_matched_spread_of_scores(name):
    """E13: σ²d, whatever the variant."""
    scores = scaled_scores(drawn(name, "matched"), normed(400))
    assert scores.std().item() == pytest.approx(SIGMA**2 * D, rel=0.08)


def test_what_the_classes_say_of_their_start():
    said = {
        (q, i): QK_CIRCUITS[q](Spec(D, HEADS, init=i)).match
        for q, i in product(QK_CIRCUITS, ("matched", "naive"))
    }
    matched = {"separate": "exact", "merged": "exact", "shared": "none", "no_q": "spread"}
    naive = {"separate": "exact", "merged": "none", "shared": "none", "no_q": "none"}
    for qk in matched:
        assert (said[qk, "matched"], said[qk, "naive"]) == (matched[qk], naive[qk])


def test_naive_spread_of_scores():
    """E13: merged α·σ·d with its own matrix, no_q unscaled σ√d times its slices."""
    assert scaled_scores(drawn("merged", "naive"), normed(400)).std().item() == pytest.approx(
        SIGMA * D / (D / HEADS) ** 0.5, rel=0.08
    )
    assert scaled_scores(drawn("no_q", "naive"), normed(400)).std().item() == pytest.approx(
        SIGMA * D**0.5, rel=0.08
    )


def test_shared_qk_cannot_be_matched():
    """E13: a token scores itself √k σ²d, where standard's mean is zero; the class says `none`."""
    scores = scaled_scores(drawn("shared", "matched"), normed(400))
    own = scores.diagonal(dim1=-2, dim2=-1).mean().item()
    assert own == pytest.approx((D / HEADS) ** 0.5 * SIGMA**2 * D, rel=0.08)
    assert QK_CIRCUITS["shared"].match == "none"


@pytest.mark.parametrize("init", ["matched", "naive"])
@pytest.mark.parametrize("name", QK_CIRCUITS)
def test_learning_rate_multiplier_makes_the_first_step_as_long_as_standards(name, init):
    """E13: Adam's first step lowers the loss by η Σ|gradient|, for any gradient of the scores."""
    x = normed(96)
    pull = torch.randn(1, HEADS, 96, 96, generator=torch.Generator().manual_seed(2))

    def descent(qk):
        loss = (scaled_scores(qk, x) * pull).sum()
        return sum(g.abs().sum() for g in torch.autograd.grad(loss, list(qk.parameters())))

    ours, standard = drawn(name, init), drawn("separate", "matched")
    ratio = float(ours.lr_multiplier() * descent(ours) / descent(standard))
    assert ratio == pytest.approx(1, rel=0.05)


def test_learning_rate_multiplier_of_the_biases():
    """The same for what b_q does in standard and u in merged: to add u_h·x_j to the scores."""
    x = normed(96)
    pull = torch.randn(1, HEADS, 96, 96, generator=torch.Generator().manual_seed(2))
    descent = {}
    for name, bias in (("separate", "b_q"), ("merged", "u"), ("shared", "b_k")):
        qk = QK_CIRCUITS[name](Spec(D, HEADS, bias=True, sigma=SIGMA))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in qk.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * SIGMA)
            getattr(qk, bias).zero_()
        # Softmax cannot see what is constant along a row: no such pull.
        loss = (scaled_scores(qk, x) * (pull - pull.mean(-1, keepdim=True))).sum()
        (gradient,) = torch.autograd.grad(loss, [getattr(qk, bias)])
        descent[name] = float(qk.bias_lr_multiplier() * gradient.abs().sum())
    assert descent["merged"] == pytest.approx(descent["separate"], rel=0.1)
    assert descent["shared"] == pytest.approx(descent["separate"], rel=0.1)


@pytest.mark.parametrize("lr", ["matched", "same"])
@pytest.mark.parametrize("qk", QK_CIRCUITS)
def test_decay_shrinks_the_circuit_as_standards(qk, lr):
    """Design: per step B_h shrinks by 2 η λ, whatever the factors and the multiplier."""
    config = Config(model=ModelConfig(layers=1), variant=VariantConfig(qk=qk, lr=lr), device="cpu")
    model = GPT(config.model, config.variant, 16).init_(0)
    optimizer = make_optimizer(model, config)
    layer = model.attentions()[0].qk.double()
    before = layer.circuit()[0].clone()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    shrink = 1 - (layer.circuit()[0].norm() / before.norm()).item()
    expected = 2 * config.optim.lr * config.optim.weight_decay
    assert shrink == pytest.approx(expected, rel=1e-3)
