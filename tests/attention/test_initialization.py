"""Where variants start and how fast they move, measured against what the classes claim."""

import functools
import math
from itertools import product

import pytest
import torch

from qkablate.attention import OV_CIRCUITS, QK_CIRCUITS, Attention, Meaningless, Spec
from qkablate.config import Config, ModelConfig, VariantConfig, resolve_variant
from qkablate.models.gpt import GPT
from qkablate.training.optimizer import make_optimizer

D, HEADS, K, SIGMA, RESIDUAL, T = 128, 4, 32, 0.02, 0.35, 96
STANDARD = SIGMA**2 * D  # the spread of its scores
LENGTH = SIGMA * math.sqrt(D)  # of an entry of x W
RANK = {"low_rank": 16, "collaborative": 32}
LEARNED = [name for name in QK_CIRCUITS if name not in ("no_qk", "uniform")]
NORMABLE = [name for name in QK_CIRCUITS if name not in ("static", "uniform")]
INITS = ("matched", "naive")


def started(
    qk="separate", ov="separate", init="matched", *, seed=1, norm="none", mask_self=False, **other
) -> Attention:
    """A layer at its start, from draws as the model's."""
    generator = torch.Generator().manual_seed(seed)

    def draw(name, shape, *, residual=False, fan_in=None):
        std = SIGMA * (RESIDUAL if residual else 1)
        # Vectors start at zero, as GPT-2's biases do.
        return torch.randn(shape, generator=generator) * (std if len(shape) > 1 else 0)

    sizes = {"rank": RANK.get(qk, 16), "groups": 2, "context": T} | other
    spec = Spec(D, **{"heads": HEADS} | sizes, sigma=SIGMA, residual=RESIDUAL, init=init)
    layer = Attention(spec, QK_CIRCUITS[qk], OV_CIRCUITS[ov], norm=norm, mask_self=mask_self)
    for part in (layer.qk, layer.ov, layer.norm):
        if part is not None:
            part.init_(draw)
    return layer


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


X = torch.nn.functional.layer_norm(noise(0, 1, T, D), (D,))
OWN = torch.eye(T).bool()


def scores(layer: Attention) -> torch.Tensor:
    """scores_BHTS, scaled, before any mask."""
    q, k = layer.modified(*layer.qk(X, X))
    found = layer.scale * q @ k.repeat_interleave(HEADS // k.shape[1], 1).mT
    table = layer.qk.addend(0, T, T)
    return found if table is None else found + table


def spread(layer: Attention) -> float:
    """Between two tokens; a token's own score is another matter."""
    return float(scores(layer).detach()[..., ~OWN].std())


def written(layer: Attention) -> torch.Tensor:
    """What is written where every token attends to itself."""
    v = layer.ov.values(X, layer.qk.keys(X))
    return layer.ov.write(v.repeat_interleave(HEADS // v.shape[1], 1)).detach()


# How well the starts meet standard's, matched and naive.
QK_MATCH = {
    "separate": ("exact", "exact"),
    "reassociated": ("exact", "exact"),
    "merged": ("exact", "none"),
    "grouped": ("spread", "spread"),
    "shared": ("none", "none"),
    "no_qk": ("none", "none"),
    "uniform": ("none", "none"),
}
OV_MATCH = {
    "separate": ("exact", "exact"),
    "merged": ("exact", "none"),
    "grouped": ("spread", "spread"),
    "tied": ("spread", "spread"),
}


@pytest.mark.parametrize("qk", QK_CIRCUITS)
def test_what_qk_circuits_say_of_their_start(qk):
    said = tuple(started(qk, init=init).match for init in INITS)
    assert said == QK_MATCH.get(qk, ("spread", "none"))


@pytest.mark.parametrize("ov", OV_CIRCUITS)
def test_what_ov_circuits_say_of_their_start(ov):
    said = tuple(started(ov=ov, init=init).match for init in INITS)
    assert said == OV_MATCH.get(ov, ("spread", "none"))


@pytest.mark.parametrize(
    ("qk", "other", "match"),
    [
        ("low_rank", {"rank": K}, "exact"),
        ("low_rank", {"rank": K, "init": "naive"}, "exact"),
        ("wide", {"heads": 1}, "exact"),
        ("grouped", {"groups": HEADS}, "exact"),
        ("grouped", {"groups": 1}, "spread"),
        ("sym_diag", {"heads": D}, "none"),  # signs cancel in pairs, and there is but one
        ("separate", {"mask_self": True}, "spread"),
        ("uniform", {"mask_self": True}, "none"),
        # What keeps these from standard's start is a token's own score, which the mask takes away.
        ("shared", {"mask_self": True}, "spread"),
        ("no_qk", {"mask_self": True}, "spread"),
        ("no_qk", {"mask_self": True, "init": "naive"}, "none"),
        ("separate", {"norm": "qk"}, "spread"),
        ("separate", {"norm": "qk", "init": "naive"}, "none"),
        ("separate", {"norm": "unit_keys", "init": "naive"}, "none"),
        ("shared", {"norm": "qk"}, "none"),
        ("shared", {"norm": "unit_keys"}, "none"),
        ("shared", {"norm": "unit_keys", "mask_self": True}, "spread"),
        ("shared", {"ov": "tied"}, "none"),
        ("merged", {"ov": "no_o"}, "spread"),
    ],
    ids=str,
)
def test_what_layers_say_of_their_start(qk, other, match):
    assert started(qk, **other).match == match


@pytest.mark.parametrize("norm", ["none", "qk", "unit_keys"])
@pytest.mark.parametrize("qk", QK_CIRCUITS)
def test_matched_spread_of_scores(qk, norm):
    """σ²d for every start that says so, however it is normed."""
    if norm != "none" and qk not in NORMABLE:
        with pytest.raises(Meaningless):
            started(qk, norm=norm)
        return
    layer = started(qk, norm=norm)
    if layer.match != "none":
        assert spread(layer) == pytest.approx(STANDARD, rel=0.05)
        own = scores(layer).detach()[..., OWN]
        assert abs(float(own.mean())) < 0.25 * STANDARD
    else:
        assert qk in ("shared", "no_qk", "uniform")


@pytest.mark.parametrize("name", ["merged", "separate"])
def test_a_start_that_is_exact_draws_what_standard_draws(name):
    for layer in (started(name), started(ov=name)):
        torch.testing.assert_close(scores(layer), scores(started()), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(written(layer), written(started()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("qk", "norm", "expected"),
    [
        ("merged", "none", SIGMA * D / math.sqrt(K)),
        ("symmetric", "none", SIGMA * D / math.sqrt(K)),
        ("no_q", "none", LENGTH),
        ("no_k", "none", LENGTH),
        ("no_qk", "none", 1.0),
        ("low_rank", "none", STANDARD * math.sqrt(16 / K)),
        ("wide", "none", STANDARD * math.sqrt(D / K)),
        ("collaborative", "none", STANDARD * 0.2 * math.sqrt(HEADS)),
        ("four_matrix", "none", STANDARD * LENGTH**2),
        ("static", "none", SIGMA),
        ("separate", "qk", 1.0),
        ("merged", "qk", 1.0),
        ("separate", "unit_keys", LENGTH / math.sqrt(K)),
        ("uniform", "none", 0.0),
    ],
)
def test_naive_spread_of_scores(qk, norm, expected):
    """What the forms come to as one writes them at first."""
    assert spread(started(qk, init="naive", norm=norm)) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("qk", ["shared", "no_qk"])
def test_equal_queries_and_keys_score_themselves(qk):
    """√k σ²d on average, where standard's own scores have mean zero; no start mends it."""
    own = float(scores(started(qk)).detach()[..., OWN].mean())
    assert own == pytest.approx(math.sqrt(K) * STANDARD, rel=0.05)
    assert abs(float(scores(started()).detach()[..., OWN].mean())) < 0.25 * STANDARD


@pytest.mark.parametrize("qk", ["sym_diag", "sym_pairwise"])
def test_naive_middles_are_shared_qk(qk):
    naive, shared = started(qk, init="naive"), started("shared")
    naive.qk.w_k.data.copy_(shared.qk.w_k.data)
    torch.testing.assert_close(scores(naive), scores(shared))


def test_a_symmetric_start_has_own_scores_of_root_two():
    own = scores(started("symmetric")).detach()[..., OWN]
    assert float(own.std()) == pytest.approx(math.sqrt(2) * STANDARD, rel=0.08)


@pytest.mark.parametrize("ov", OV_CIRCUITS)
def test_matched_size_of_what_is_written(ov):
    expected = float(written(started()).std())
    assert expected == pytest.approx(STANDARD * RESIDUAL, rel=0.05)
    assert float(written(started(ov=ov)).std()) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    ("ov", "factor"),
    [
        ("no_v", 1 / LENGTH),
        ("no_o", 1 / (LENGTH * RESIDUAL)),
        ("no_vo", 1 / (STANDARD * RESIDUAL)),
        ("merged", math.sqrt(D * HEADS) * SIGMA * RESIDUAL / (STANDARD * RESIDUAL)),
        ("tied", 1.0),
        ("grouped", 1.0),
    ],
)
def test_naive_size_of_what_is_written(ov, factor):
    found = float(written(started(ov=ov, init="naive")).std() / written(started()).std())
    assert found == pytest.approx(factor, rel=0.05)


def descent(layer: Attention, loss: torch.Tensor, parameters) -> float:
    """What Adam's first step takes off a loss, in units of η: Σ rate · |gradient|."""
    rates = {id(parameter): rate for parameter, rate, _ in layer.rates()}
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    pairs = zip(parameters, gradients, strict=True)
    return sum(float(rates[id(p)] * g.abs().sum()) for p, g in pairs if g is not None)


SEEDS = (1, 2, 3)


@functools.cache
def qk_descent(qk: str, init: str, norm: str = "none") -> float:
    """Of random pulls at the causal scores, over a few starts."""
    pull = noise(2, 1, HEADS, T, T).tril()
    total = 0.0
    for seed in SEEDS:
        layer = started(qk, init=init, norm=norm, seed=seed)
        parameters = list(layer.qk.parameters())
        parameters += [] if layer.norm is None else list(layer.norm.parameters())
        total += descent(layer, (scores(layer) * pull).sum(), parameters)
    return total


@functools.cache
def ov_descent(ov: str, init: str, groups: int = 2) -> float:
    """Of random pulls at what the layer writes."""
    pull = noise(3, 1, T, D)
    layers = [started(ov=ov, init=init, seed=seed, groups=groups) for seed in SEEDS]
    return sum(descent(a, (a(X) * pull).sum(), list(a.ov.parameters())) for a in layers)


@pytest.mark.parametrize("norm", ["none", "qk", "unit_keys"])
@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("qk", LEARNED)
def test_first_step_is_as_long_as_standards(qk, init, norm):
    """Adam's first step lowers the loss by η Σ|gradient|, for any gradient of the scores."""
    if norm == "none" or qk in NORMABLE:
        ratio = qk_descent(qk, init, norm) / qk_descent("separate", "matched")
        assert ratio == pytest.approx(1, rel=0.07)


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("ov", [ov for ov in OV_CIRCUITS if ov not in ("no_vo", "tied")])
def test_first_step_of_the_values_is_as_long_as_standards(ov, init):
    ratio = ov_descent(ov, init) / ov_descent("separate", "matched")
    assert ratio == pytest.approx(1, rel=0.08)


def test_first_step_of_values_that_all_heads_share():
    """Without its multiplier of 1.15 it would be well below."""
    ratio = ov_descent("grouped", "matched", groups=1) / ov_descent("separate", "matched")
    assert ratio == pytest.approx(1, rel=0.08)
    assert started(ov="grouped", groups=1).ov.lr_multiplier() == pytest.approx(1.35 / 1.175)


@pytest.mark.parametrize("rank", [16, 64, 128])
@pytest.mark.parametrize("qk", ["low_rank", "collaborative"])
def test_first_step_at_other_ranks(qk, rank):
    pull = noise(2, 1, HEADS, T, T).tril()
    total = 0.0
    for seed in SEEDS:
        layer = started(qk, seed=seed, rank=rank)
        total += descent(layer, (scores(layer) * pull).sum(), list(layer.qk.parameters()))
    assert total / qk_descent("separate", "matched") == pytest.approx(1, rel=0.07)


@pytest.mark.parametrize(
    ("qk", "other"),
    [
        ("separate", {}),
        ("wide", {}),
        ("low_rank", {"rank": 8}),
        ("collaborative", {"rank": 96}),
        ("no_q", {}),
    ],
)
def test_tied_values_start_and_move_as_w_o_does(qk, other):
    """W_k is the QK circuit's, as is its rate; W_o has standard's share, however wide the keys."""
    written_, pull = 0.0, noise(3, 1, T, D)
    total = 0.0
    for seed in SEEDS:
        layer = started(qk, "tied", seed=seed, **other)
        written_ += float(written(layer).square().mean()) / len(SEEDS)
        total += descent(layer, (layer(X) * pull).sum(), [layer.ov.w_o])
    assert math.sqrt(written_) == pytest.approx(STANDARD * RESIDUAL, rel=0.08)
    share = total / ov_descent("separate", "matched")
    assert share == pytest.approx(1 / (1 + RESIDUAL), rel=0.08)


def test_a_gain_alone_is_not_matched_and_says_so():
    assert "its rate is not matched" in " ".join(OV_CIRCUITS["no_vo"].__doc__.split())
    assert started(ov="no_vo").lr_multipliers()["ov"] == 1.0
    assert ov_descent("no_vo", "matched") < 0.05 * ov_descent("separate", "matched")


@pytest.mark.parametrize(
    ("qk", "init", "ratio"),
    [
        ("merged", "matched", math.sqrt(D) / (2 * K * SIGMA)),
        ("merged", "naive", math.sqrt(D) / (2 * K * SIGMA)),
        ("symmetric", "matched", math.sqrt(D) / (2 * K * SIGMA) / math.sqrt(2)),
        ("no_q", "naive", 1 / (2 * LENGTH)),
        ("no_k", "naive", 1 / (2 * LENGTH)),
        ("no_q", "matched", 1 / 2),
        ("no_k", "matched", 1 / 2),
        ("shared", "matched", 1 / math.sqrt(2)),
        ("sym_diag", "matched", 1 / math.sqrt(2)),
        ("low_rank", "matched", math.sqrt(16 / K)),
        ("wide", "matched", math.sqrt(D / K)),
        ("grouped", "matched", (1 + math.sqrt(1 / 2)) / 2),
    ],
)
def test_multipliers_undo_the_known_ratios(qk, init, ratio):
    """How far one step moves the scores at standard's rate, from the papers' side."""
    assert started(qk, init=init).qk.lr_multiplier() == pytest.approx(1 / ratio)


@functools.cache
def bias_descent(qk: str, init: str) -> float:
    """What b_q does in standard: to add u_h · x_j to the scores."""
    pull = noise(2, 1, HEADS, T, T)
    pull = pull - pull.mean(-1, keepdim=True)  # softmax cannot see what a row has in common
    total = 0.0
    for seed in range(1, 9):
        layer = started(qk, init=init, seed=seed, bias=True)
        biases = [p for n, p in layer.qk.named_parameters() if n in ("b_q", "b_k", "u")]
        biases = [p for p in biases if p.dim() == 1]  # sym_pairwise has another u
        total += descent(layer, (scores(layer) * pull).sum(), biases)
    return total


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("qk", [name for name in NORMABLE if name not in ("no_q", "no_qk")])
def test_first_step_of_the_biases(qk, init):
    ratio = bias_descent(qk, init) / bias_descent("separate", "matched")
    assert ratio == pytest.approx(1, rel=0.12)


@functools.cache
def value_bias_descent(ov: str, init: str, qk: str = "separate") -> float:
    """What b_v and b_o (and b_k, where keys are values) do to what is written."""
    pull = noise(3, 1, T, D)
    total = 0.0
    for seed in range(1, 5):
        layer = started(qk, ov, init=init, seed=seed, bias=True)
        biases = [p for n, p in layer.ov.named_parameters() if p.dim() == 1]
        biases += [layer.qk.b_k] if ov == "tied" else []
        total += descent(layer, (layer(X) * pull).sum(), biases)
    return total


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("ov", [ov for ov in OV_CIRCUITS if ov != "no_vo"])
def test_first_step_of_the_value_biases(ov, init):
    ratio = value_bias_descent(ov, init) / value_bias_descent("separate", "matched")
    assert ratio == pytest.approx(1, rel=0.08)


def decayed(lr: str, **variant):
    """A layer in double precision before and after one step without a gradient."""
    model_config = ModelConfig(layers=1, d_model=32, heads=4, context=8, bias=True)
    named = resolve_variant(VariantConfig(lr=lr, **variant), model_config)
    config = Config(model=model_config, variant=named, device="cpu")
    model = GPT(config.model, config.variant, 16).init_(0).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("b_q", "b_k", "b_v", "b_o", ".u")):
                parameter.add_(1)  # so that a decay of it would show
    optimizer = make_optimizer(model, config)
    layer = model.attentions()[0]
    vectors = {n: p.detach().clone() for n, p in layer.named_parameters() if p.dim() < 2}

    def measure():
        table = getattr(layer.qk, "table", None)
        b_HDD = layer.qk.circuit()[0].detach().clone() if table is None else table.detach().clone()
        return b_HDD, layer.ov.circuit(layer.qk).detach().clone()

    before = measure()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    after = dict(layer.named_parameters())
    assert all(torch.equal(after[name], vector) for name, vector in vectors.items())
    part = config.optim.lr * config.optim.weight_decay
    return [
        float((old - new).norm() / old.norm()) / part
        for old, new in zip(before, measure(), strict=True)
    ]


@pytest.mark.parametrize("lr", ["matched", "same"])
@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("qk", LEARNED)
def test_decay_shrinks_the_scores_as_standards(qk, init, lr):
    """Per step B_h shrinks by 2 η λ, whatever the factors and the multiplier; vectors stay."""
    norms = ("none", "qk", "unit_keys") if qk in NORMABLE else ("none",)
    for norm in norms:
        b, m = decayed(lr, qk=qk, init=init, norm=norm)
        assert (b, m) == (pytest.approx(2, rel=1e-3), pytest.approx(2, rel=1e-3))


@pytest.mark.parametrize("lr", ["matched", "same"])
@pytest.mark.parametrize("ov", OV_CIRCUITS)
def test_decay_shrinks_what_is_written_as_standards(ov, lr):
    for init in INITS:
        b, m = decayed(lr, ov=ov, init=init)
        assert b == pytest.approx(2, rel=1e-3)
        assert m == pytest.approx(0 if ov == "no_vo" else 2, rel=1e-3, abs=1e-9)


@pytest.mark.parametrize(
    "qk", ["separate", "no_q", "collaborative", "sym_pairwise", "four_matrix", "shared", "wide"]
)
def test_decay_shrinks_both_circuits_where_keys_are_values(qk):
    """W_k's decay is what its QK circuit takes, W_o's what is left."""
    for init in INITS:
        b, m = decayed("matched", qk=qk, ov="tied", init=init)
        assert (b, m) == (pytest.approx(2, rel=1e-3), pytest.approx(2, rel=1e-3))


@pytest.mark.parametrize("qk", ["separate", "wide", "low_rank", "collaborative", "no_q", "shared"])
@pytest.mark.parametrize("draws", ["gpt2", "linear"])
def test_tied_values_are_written_at_standards_size_from_any_draws(qk, draws):
    """Draws that depend on a matrix' rows must not see how wide the keys are."""
    model = ModelConfig(layers=1, d_model=128, heads=4, context=8, init=draws)
    sizes = []
    for sides in ({}, {"qk": qk, "ov": "tied"}):
        variant = resolve_variant(VariantConfig(**sides), model)
        (layer,) = GPT(model, variant, 16).init_(0).attentions()
        sizes.append(float(written(layer).std()))
    assert sizes[1] == pytest.approx(sizes[0], rel=0.15)


@pytest.mark.parametrize("draws", ["gpt2", "linear"])
def test_a_naive_triangle_is_drawn_as_the_square_is(draws):
    model = ModelConfig(layers=1, d_model=128, heads=4, context=8, init=draws)
    spreads = []
    for qk in ("merged", "symmetric"):
        variant = resolve_variant(VariantConfig(qk=qk, init="naive"), model)
        (layer,) = GPT(model, variant, 16).init_(0).attentions()
        spreads.append(spread(layer))
    # torch's default draws a matrix that writes h·d columns by its d rows, as for one head.
    assert spreads[1] == pytest.approx(spreads[0], rel=0.1)


@pytest.mark.parametrize("lr", ["matched", "same"])
def test_rates_reach_the_optimizer(lr):
    model_config = ModelConfig(layers=2, d_model=32, heads=4, context=8, bias=True)
    variant = resolve_variant(VariantConfig(qk="merged", ov="no_v", lr=lr), model_config)
    config = Config(model=model_config, variant=variant, device="cpu")
    model = GPT(config.model, config.variant, 16).init_(0)
    optimizer = make_optimizer(model, config)
    rate = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    assert len(rate) == len(list(model.parameters()))
    for layer in model.attentions():
        for parameter, multiplier, decay in layer.rates():
            group = rate[id(parameter)]
            expected = multiplier if lr == "matched" else 1.0
            assert group["lr_multiplier"] == pytest.approx(expected)
            assert group["lr"] == pytest.approx(config.optim.lr * expected)
            assert group["lr"] * group["weight_decay"] == pytest.approx(
                config.optim.lr * config.optim.weight_decay * decay
            )


def test_norms_slow_the_circuit_down_by_their_hotter_start():
    for norm, qk in product(("qk", "unit_keys"), ("separate", "merged")):
        matched, naive = (started(qk, init=init, norm=norm) for init in INITS)
        hotter = spread(naive) / spread(matched)
        found = naive.lr_multipliers()["qk"] / matched.lr_multipliers()["qk"]
        assert found == pytest.approx(1 / hotter, rel=0.05)
