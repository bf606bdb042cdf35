"""Initialization and training speed of the variants, measured against what the classes claim."""

import functools
import math
from itertools import product

import pytest
import torch

from qkablate.attention import OV_CIRCUITS, QK_CIRCUITS, Attention, Spec, UnsupportedCombination
from qkablate.config import Config, ModelConfig, VariantConfig, resolve_variant
from qkablate.models.build import build_model
from qkablate.models.gpt import GPT
from qkablate.training.optim import make_optimizer
from tests.attention.random_layers import qk_for

D, HEADS, K, SIGMA, RESIDUAL, T = 128, 4, 32, 0.02, 0.35, 96
STANDARD = SIGMA**2 * D  # the spread of its scores
LENGTH = SIGMA * math.sqrt(D)  # of an entry of x W
RANK = {"low_rank": 16, "collaborative": 32, "latent": 32}
LEARNED = [name for name in QK_CIRCUITS if name not in ("no_qk", "uniform")]
NORMABLE = [name for name in QK_CIRCUITS if name not in ("static", "uniform")]
INITS = ("matched", "naive")
SOURCE = 80  # tokens
SITES = {
    "decoder": {},
    "encoder": {"causal": False},
    "cross": {"causal": False, "source": SOURCE},
}


def initialized(
    qk="separate", ov="separate", init="matched", *, seed=1, norm="none", mask_self=False, **other
) -> Attention:
    """Return an initialized layer, with draws like those of a model."""
    qk = qk if qk != "separate" else qk_for(ov)
    position = "rope" if "rope_dims" in other else "none"
    generator = torch.Generator().manual_seed(seed)

    def draw(name, shape, *, residual=False, fan_in=None):
        std = SIGMA * (RESIDUAL if residual else 1)
        # Vectors are zero, like the biases of GPT-2.
        return torch.randn(shape, generator=generator) * (std if len(shape) > 1 else 0)

    sizes = {"rank": RANK.get(qk, 16), "groups": 2, "context": T} | other
    spec = Spec(D, **{"heads": HEADS} | sizes, sigma=SIGMA, residual=RESIDUAL, init=init)
    layer = Attention(
        spec, QK_CIRCUITS[qk], OV_CIRCUITS[ov], norm=norm, mask_self=mask_self, position=position
    )
    for part in layer.parts:
        part.init_(draw)
    return layer


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


X = torch.nn.functional.layer_norm(noise(0, 1, T, D), (D,))
Y = torch.nn.functional.layer_norm(noise(4, 1, SOURCE, D), (D,))
OWN = torch.eye(T).bool()


def scores(layer: Attention) -> torch.Tensor:
    """Return the scaled scores_BHTS without a mask."""
    return layer.scores(X, Y if layer.qk.spec.is_cross else X, causal=False)


def spread(layer: Attention) -> float:
    """Return the standard deviation of scores between different tokens."""
    s_BHTS = scores(layer).detach()
    return float(s_BHTS.std() if layer.qk.spec.is_cross else s_BHTS[..., ~OWN].std())


def diagonal_output(layer: Attention) -> torch.Tensor:
    """Return the output if every token attends only to itself."""
    v = layer.ov.values(X, layer.qk.keys(X))
    return layer.ov.write(v.repeat_interleave(HEADS // v.shape[1], 1)).detach()


# How well the initializations match standard's, matched and naive.
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
def test_match_of_qk_circuits(qk):
    said = tuple(initialized(qk, init=init).match for init in INITS)
    assert said == QK_MATCH.get(qk, ("spread", "none"))


@pytest.mark.parametrize("ov", OV_CIRCUITS)
def test_match_of_ov_circuits(ov):
    said = tuple(initialized(ov=ov, init=init).match for init in INITS)
    assert said == OV_MATCH.get(ov, ("spread", "none"))


@pytest.mark.parametrize(
    ("qk", "other", "match"),
    [
        ("low_rank", {"rank": K}, "exact"),
        ("low_rank", {"rank": K, "init": "naive"}, "exact"),
        ("wide", {"heads": 1}, "exact"),
        ("grouped", {"groups": HEADS}, "exact"),
        ("grouped", {"groups": 1}, "spread"),
        ("sym_diag", {"heads": D}, "none"),  # signs cancel in pairs, and there is only one
        ("separate", {"mask_self": True}, "spread"),
        ("uniform", {"mask_self": True}, "none"),
        # These differ from standard only in the scores that the mask removes.
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
def test_match_of_layers(qk, other, match):
    assert initialized(qk, **other).match == match


@pytest.mark.parametrize("qk", QK_CIRCUITS)
def test_match_at_other_sites(qk):
    """Without a causal mask it is the same; no token of another stream meets itself."""
    for init in INITS:
        causal, encoder, cross = (
            initialized(qk, init=init, **site).match for site in SITES.values()
        )
        assert encoder == causal
        differs = qk in ("shared", "no_qk") and init == "matched"
        assert cross == ("spread" if differs else causal)


@pytest.mark.parametrize(("qk", "heads"), [("sym_diag", D), ("shared", 1), ("no_qk", 16)])
@pytest.mark.parametrize("norm", ["none", "qk", "unit_keys"])
def test_spread_in_cross_attention_with_other_heads(qk, norm, heads):
    layer = initialized(qk, norm=norm, heads=heads, **SITES["cross"])
    assert layer.match == "spread"
    if heads < D or norm == "none":  # in one dimension every unit vector is 1 or −1
        assert spread(layer) == pytest.approx(STANDARD, rel=0.07)


@pytest.mark.parametrize("norm", ["none", "qk", "unit_keys"])
@pytest.mark.parametrize("qk", NORMABLE)
def test_matched_spread_in_cross_attention(qk, norm):
    layer = initialized(qk, norm=norm, **SITES["cross"])
    assert layer.match != "none"
    assert spread(layer) == pytest.approx(STANDARD, rel=0.05)


@pytest.mark.parametrize("norm", ["none", "qk", "unit_keys"])
@pytest.mark.parametrize("qk", QK_CIRCUITS)
def test_matched_spread_of_scores(qk, norm):
    """The spread is σ²d for every initialization that claims so, with any norm."""
    if norm != "none" and qk not in NORMABLE:
        with pytest.raises(UnsupportedCombination):
            initialized(qk, norm=norm)
        return
    layer = initialized(qk, norm=norm)
    if layer.match != "none":
        assert spread(layer) == pytest.approx(STANDARD, rel=0.05)
        own = scores(layer).detach()[..., OWN]
        assert abs(float(own.mean())) < 0.25 * STANDARD
    else:
        assert qk in ("shared", "no_qk", "uniform")


@pytest.mark.parametrize("qk", QK_CIRCUITS)
def test_symmetric_start(qk):
    """W_q is a copy of W_k, so that B_h is exactly symmetric; other circuits have no such pair."""
    if qk == "uniform":  # has no such matrices, and is the floor of sweeps with this start
        assert not list(initialized(qk, symmetric=True).qk.parameters())
        return
    if qk not in ("separate", "low_rank", "wide", "reassociated"):
        with pytest.raises(UnsupportedCombination, match="needs both in one shape"):
            initialized(qk, symmetric=True)
        return
    layer, usual = initialized(qk, symmetric=True, bias=True), initialized(qk, bias=True)
    assert torch.equal(layer.qk.w_q, layer.qk.w_k)
    assert layer.qk.w_q is not layer.qk.w_k
    assert torch.equal(layer.qk.w_k, usual.qk.w_k)
    b_HDD, _ = layer.qk.circuit()
    assert torch.equal(b_HDD, b_HDD.mT)
    assert layer.match == "none"
    masked = initialized(qk, symmetric=True, mask_self=True).match
    assert masked == ("spread" if layer.qk.low_rank_factors()[0].shape[-1] == K else "none")
    weight = noise(2, 1, HEADS, T, T).tril()
    ours, standard = (
        descent(other, (scores(other) * weight).sum(), list(other.qk.parameters())[:2])
        for other in (layer, usual)
    )
    assert ours / standard == pytest.approx(1, rel=0.07)


def test_symmetric_start_has_the_scores_of_shared_qk():
    symmetric, shared = initialized(symmetric=True), initialized("shared")
    shared.qk.w_k.data.copy_(symmetric.qk.w_k.data)
    torch.testing.assert_close(scores(symmetric), scores(shared))


@pytest.mark.parametrize("ov", OV_CIRCUITS)
def test_symmetric_start_changes_no_output_circuit(ov):
    if ov not in ("tied", "latent"):
        symmetric, usual = initialized(ov=ov, symmetric=True), initialized(ov=ov)
        assert all(map(torch.equal, symmetric.ov.parameters(), usual.ov.parameters()))


@pytest.mark.parametrize("name", ["merged", "separate"])
def test_exact_match_draws_the_tensors_of_standard(name):
    for layer in (initialized(name), initialized(ov=name)):
        torch.testing.assert_close(scores(layer), scores(initialized()), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            diagonal_output(layer), diagonal_output(initialized()), rtol=1e-4, atol=1e-5
        )


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
    """The spread follows from the default initialization of each form."""
    assert spread(initialized(qk, init="naive", norm=norm)) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("qk", ["shared", "no_qk"])
def test_mean_score_of_a_token_with_itself_when_queries_are_keys(qk):
    """The mean is √k σ²d in every initialization, and zero for standard."""
    own = float(scores(initialized(qk)).detach()[..., OWN].mean())
    assert own == pytest.approx(math.sqrt(K) * STANDARD, rel=0.05)
    assert abs(float(scores(initialized()).detach()[..., OWN].mean())) < 0.25 * STANDARD


@pytest.mark.parametrize("qk", ["sym_diag", "sym_pairwise"])
def test_naive_sym_variants_start_as_shared_qk(qk):
    naive, shared = initialized(qk, init="naive"), initialized("shared")
    naive.qk.w_k.data.copy_(shared.qk.w_k.data)
    torch.testing.assert_close(scores(naive), scores(shared))


def test_symmetric_initialization_scales_diagonal_scores_by_root_two():
    own = scores(initialized("symmetric")).detach()[..., OWN]
    assert float(own.std()) == pytest.approx(math.sqrt(2) * STANDARD, rel=0.08)


@pytest.mark.parametrize("ov", OV_CIRCUITS)
def test_matched_scale_of_the_output(ov):
    expected = float(diagonal_output(initialized()).std())
    assert expected == pytest.approx(STANDARD * RESIDUAL, rel=0.05)
    assert float(diagonal_output(initialized(ov=ov)).std()) == pytest.approx(expected, rel=0.05)


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
def test_naive_scale_of_the_output(ov, factor):
    found = float(
        diagonal_output(initialized(ov=ov, init="naive")).std()
        / diagonal_output(initialized()).std()
    )
    assert found == pytest.approx(factor, rel=0.05)


def descent(layer: Attention, loss: torch.Tensor, parameters) -> float:
    """Return how much Adam's first step lowers a loss, in units of η: Σ rate · |gradient|."""
    rates = {id(parameter): rate for parameter, rate, _ in layer.rates()}
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    pairs = zip(parameters, gradients, strict=True)
    return sum(float(rates[id(p)] * g.abs().sum()) for p, g in pairs if g is not None)


SEEDS = (1, 2, 3)


@functools.cache
def qk_descent(qk: str, init: str, norm: str = "none", site: str = "decoder") -> float:
    """Return the descent of random losses of the visible scores, over several seeds."""
    weight = noise(2, 1, HEADS, T, SOURCE if site == "cross" else T)
    weight = weight.tril() if site == "decoder" else weight
    total = 0.0
    for seed in SEEDS:
        layer = initialized(qk, init=init, norm=norm, seed=seed, **SITES[site])
        parameters = list(layer.qk.parameters())
        parameters += [] if layer.norm is None else list(layer.norm.parameters())
        total += descent(layer, (scores(layer) * weight).sum(), parameters)
    return total


@functools.cache
def ov_descent(ov: str, init: str, groups: int = 2, site: str = "decoder") -> float:
    """Return the descent of random losses of the output."""
    weight, total, y_BSD = noise(3, 1, T, D), 0.0, Y if site == "cross" else None
    for seed in SEEDS:
        layer = initialized(ov=ov, init=init, seed=seed, groups=groups, **SITES[site])
        out_BTD = layer(X, y_BSD, causal=site == "decoder")
        own = [*layer.ov.parameters(), *([layer.qk.w_c] if ov == "latent" else [])]
        total += descent(layer, (out_BTD * weight).sum(), own)
    return total


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("norm", ["none", "qk", "unit_keys"])
@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("qk", LEARNED)
def test_first_step_of_the_scores_matches_standard(qk, init, norm, site):
    """Adam's first step lowers the loss by η Σ|gradient|, for any gradient of the scores."""
    if norm == "none" or qk in NORMABLE:
        standard = qk_descent("separate", "matched", site=site)
        assert qk_descent(qk, init, norm, site) / standard == pytest.approx(1, rel=0.07)


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("ov", [ov for ov in OV_CIRCUITS if ov not in ("no_vo", "tied")])
def test_first_step_of_the_output_matches_standard(ov, init, site):
    ratio = ov_descent(ov, init, site=site) / ov_descent("separate", "matched", site=site)
    assert ratio == pytest.approx(1, rel=0.08)


def test_first_step_of_shared_values_matches_standard():
    """The multiplier of 1.15 is needed for this."""
    ratio = ov_descent("grouped", "matched", groups=1) / ov_descent("separate", "matched")
    assert ratio == pytest.approx(1, rel=0.08)
    assert initialized(ov="grouped", groups=1).ov.lr_multiplier == pytest.approx(1.35 / 1.175)


@pytest.mark.parametrize("rank", [16, 64, 128])
@pytest.mark.parametrize("qk", ["low_rank", "collaborative", "latent"])
def test_first_step_at_other_ranks(qk, rank):
    weight = noise(2, 1, HEADS, T, T).tril()
    total = 0.0
    for seed in SEEDS:
        layer = initialized(qk, seed=seed, rank=rank)
        total += descent(layer, (scores(layer) * weight).sum(), list(layer.qk.parameters()))
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
def test_tied_values_are_initialized_and_trained_like_w_o(qk, other):
    """W_k has the rate of the QK circuit; W_o has standard's share for keys of any width."""
    written_, weight = 0.0, noise(3, 1, T, D)
    total = 0.0
    for seed in SEEDS:
        layer = initialized(qk, "tied", seed=seed, **other)
        written_ += float(diagonal_output(layer).square().mean()) / len(SEEDS)
        total += descent(layer, (layer(X) * weight).sum(), [layer.ov.w_o])
    assert math.sqrt(written_) == pytest.approx(STANDARD * RESIDUAL, rel=0.08)
    share = total / ov_descent("separate", "matched")
    assert share == pytest.approx(1 / (1 + RESIDUAL), rel=0.08)


@pytest.mark.parametrize("rank", [16, 64, 128])
@pytest.mark.parametrize("init", INITS)
def test_latent_values_move_as_those_of_standard(init, rank):
    weight, total = noise(3, 1, T, D), 0.0
    for seed in SEEDS:
        layer = initialized(ov="latent", init=init, seed=seed, rank=rank)
        own = [*layer.ov.parameters(), layer.qk.w_c]
        total += descent(layer, (layer(X) * weight).sum(), own)
    assert total / ov_descent("separate", "matched") == pytest.approx(1, rel=0.08)


@pytest.mark.parametrize("width", [4, 16, 32])
@pytest.mark.parametrize("norm", ["none", "qk", "unit_keys"])
@pytest.mark.parametrize("qk", [name for name in NORMABLE if name != "no_qk"])
def test_rotated_dimensions_start_and_move_as_standard(qk, norm, width):
    """The scores of both kinds of dimensions spread and move as those of standard do."""
    weight, total = noise(2, 1, HEADS, T, T).tril(), 0.0
    for seed in SEEDS:
        layer = initialized(qk, norm=norm, seed=seed, rope_dims=width)
        if qk != "shared":
            assert layer.match == "spread"
            assert spread(layer) == pytest.approx(STANDARD, rel=0.07)
        parameters = [p for part in layer.parts[:-1] for p in part.parameters()]
        total += descent(layer, (scores(layer) * weight).sum(), parameters)
    assert total / qk_descent("separate", "matched") == pytest.approx(1, rel=0.07)


@pytest.mark.parametrize("lr", [0.5, 2.0, "same", "matched", "between"])
def test_rotated_dimensions_have_one_rate_for_any_rate_of_the_circuit(lr):
    """Their factor is near 1, and takes no part in the power that makes `variant.lr`."""
    for pair in product(("separate", "merged", "low_rank", "latent"), ("separate", "merged")):
        if pair == ("separate", "separate"):
            continue  # it has no rate of its own
        with_them, without = (initialized(*pair, **more) for more in ({"rope_dims": 2}, {}))
        expected, found = (
            layer.lr_multipliers(layer.circuit_lr(lr)) for layer in (without, with_them)
        )
        scale = with_them.rope_dims.lr_scale
        assert found == pytest.approx({"qk": scale * expected["qk"], "ov": expected["ov"]})
        rates = {id(p): rate for p, rate, _ in with_them.rates(with_them.circuit_lr(lr))}
        assert {rates[id(p)] for p in with_them.rope_dims.parameters()} == {scale}


def test_speed_of_a_single_gain_is_not_matched():
    assert "its learning rate is not matched" in " ".join(OV_CIRCUITS["no_vo"].__doc__.split())
    assert initialized(ov="no_vo").lr_multipliers()["ov"] == 1.0
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
def test_multipliers_invert_the_known_speed_ratios(qk, init, ratio):
    """The ratios say how far a step at standard's rate moves the scores, after the papers."""
    assert initialized(qk, init=init).qk.lr_multiplier == pytest.approx(1 / ratio)


@functools.cache
def bias_descent(qk: str, init: str, site: str) -> float:
    """Return the descent of the biases that add u_h · x_j to the scores, as b_q in standard."""
    weight = noise(2, 1, HEADS, T, SOURCE if site == "cross" else T)
    weight = weight - weight.mean(-1, keepdim=True)  # softmax is invariant to row shifts
    total = 0.0
    for seed in range(1, 9):
        layer = initialized(qk, init=init, seed=seed, bias=True, **SITES[site])
        biases = [p for n, p in layer.qk.named_parameters() if n in ("b_q", "b_k", "u")]
        biases = [p for p in biases if p.dim() == 1]  # u of sym_pairwise is a matrix
        total += descent(layer, (scores(layer) * weight).sum(), biases)
    return total


@pytest.mark.parametrize("site", ["decoder", "cross"])
@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("qk", [name for name in NORMABLE if name not in ("no_q", "no_qk")])
def test_first_step_of_the_biases(qk, init, site):
    ratio = bias_descent(qk, init, site) / bias_descent("separate", "matched", site)
    assert ratio == pytest.approx(1, rel=0.12)


@functools.cache
def value_bias_descent(ov: str, init: str, qk: str = "separate") -> float:
    """Return the descent of the biases of the output (with b_k, where keys are values)."""
    weight = noise(3, 1, T, D)
    total = 0.0
    for seed in range(1, 5):
        layer = initialized(qk, ov, init=init, seed=seed, bias=True)
        biases = [p for n, p in layer.ov.named_parameters() if p.dim() == 1]
        biases += [layer.qk.b_k] if ov == "tied" else []
        total += descent(layer, (layer(X) * weight).sum(), biases)
    return total


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("ov", [ov for ov in OV_CIRCUITS if ov != "no_vo"])
def test_first_step_of_the_value_biases(ov, init):
    ratio = value_bias_descent(ov, init) / value_bias_descent("separate", "matched")
    assert ratio == pytest.approx(1, rel=0.08)


def decayed(lr: str, **variant):
    """Measure a layer in fp64 before and after one step without a gradient."""
    model_config = ModelConfig(layers=1, d_model=32, heads=4, context=8, bias=True)
    named = resolve_variant(VariantConfig(lr=lr, **variant), model_config)
    config = Config(model=model_config, variant=named, device="cpu")
    model = GPT(config.model, config.variant, 16).init_(0).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("b_q", "b_k", "b_v", "b_o", ".u")):
                parameter.add_(1)  # so that its decay would be visible
    optimizer = make_optimizer(model, config)
    layer = model.attention_layers()[0].module
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
def test_decay_shrinks_the_scores_as_in_standard(qk, init, lr):
    """B_h shrinks by 2 η λ per step for any factors and multiplier; vectors do not decay."""
    norms = ("none", "qk", "unit_keys") if qk in NORMABLE else ("none",)
    for norm in norms:
        b, m = decayed(lr, qk=qk, init=init, norm=norm)
        assert (b, m) == (pytest.approx(2, rel=1e-3), pytest.approx(2, rel=1e-3))


@pytest.mark.parametrize("lr", ["matched", "same"])
@pytest.mark.parametrize("ov", OV_CIRCUITS)
def test_decay_shrinks_the_output_as_in_standard(ov, lr):
    for init in INITS:
        b, m = decayed(lr, qk=qk_for(ov), ov=ov, init=init)
        assert b == pytest.approx(2, rel=1e-3)
        assert m == pytest.approx(0 if ov == "no_vo" else 2, rel=1e-3, abs=1e-9)


@pytest.mark.parametrize(
    "qk", ["separate", "no_q", "collaborative", "sym_pairwise", "four_matrix", "shared", "wide"]
)
def test_decay_of_tied_values_is_split_between_the_circuits(qk):
    """W_k decays like its QK circuit, W_o by the remainder."""
    for init in INITS:
        b, m = decayed("matched", qk=qk, ov="tied", init=init)
        assert (b, m) == (pytest.approx(2, rel=1e-3), pytest.approx(2, rel=1e-3))


@pytest.mark.parametrize("qk", ["separate", "wide", "low_rank", "collaborative", "no_q", "shared"])
@pytest.mark.parametrize("draws", ["gpt2", "linear"])
def test_scale_of_tied_values_does_not_depend_on_the_draws(qk, draws):
    """Draws that depend on the rows of a matrix do not depend on the width of the keys."""
    model = ModelConfig(layers=1, d_model=128, heads=4, context=8, init=draws)
    sizes = []
    for sides in ({}, {"qk": qk, "ov": "tied"}):
        variant = resolve_variant(VariantConfig(**sides), model)
        ((_, _, layer),) = GPT(model, variant, 16).init_(0).attention_layers()
        sizes.append(float(diagonal_output(layer).std()))
    assert sizes[1] == pytest.approx(sizes[0], rel=0.15)


@pytest.mark.parametrize("draws", ["gpt2", "linear"])
def test_naive_triangle_has_the_distribution_of_a_full_matrix(draws):
    model = ModelConfig(layers=1, d_model=128, heads=4, context=8, init=draws)
    spreads = []
    for qk in ("merged", "symmetric"):
        variant = resolve_variant(VariantConfig(qk=qk, init="naive"), model)
        ((_, _, layer),) = GPT(model, variant, 16).init_(0).attention_layers()
        spreads.append(spread(layer))
    # torch's default depends on the d rows of a matrix and not on its h·d columns.
    assert spreads[1] == pytest.approx(spreads[0], rel=0.1)


def test_every_site_has_its_own_matched_rate():
    """A number of variant.lr is that of the first site; the others follow in proportion."""
    config = ModelConfig("encoder_decoder", layers=1, d_model=32, heads=4, context=8, source=12)
    rates = {}
    for lr in ("matched", "same", "between", 0.3):
        variant = resolve_variant(VariantConfig(qk="static", lr=lr), config)
        model = build_model(config, variant, 16).init_(0)
        optimizer = make_optimizer(model, Config(model=config, variant=variant, device="cpu"))
        rate = {id(p): g["lr_multiplier"] for g in optimizer.param_groups for p in g["params"]}
        layers = model.attention_layers()
        assert [layer.site for layer in layers] == ["encoder", "decoder", "cross"]
        rates[lr] = [rate[id(layer.module.get_parameter("qk.table"))] for layer in layers]
    expected = 2 * 32**2 * 0.02 * 32**0.5 / (4 * 8**0.5)  # times 1/√N of N visible scores
    assert rates["matched"] == pytest.approx(
        [expected / n**0.5 for n in (12 * 12, 8 * 8 / 2, 8 * 12)]
    )
    assert rates["same"] == [1, 1, 1]
    assert rates["between"] == pytest.approx([rate**0.5 for rate in rates["matched"]])
    power = math.log(0.3) / math.log(rates["matched"][0])
    assert rates[0.3] == pytest.approx([rate**power for rate in rates["matched"]])


@pytest.mark.parametrize("lr", ["matched", "same", 0.3])
def test_rates_reach_the_optimizer(lr):
    model_config = ModelConfig(layers=2, d_model=32, heads=4, context=8, bias=True)
    variant = resolve_variant(VariantConfig(qk="merged", ov="no_v", lr=lr), model_config)
    config = Config(model=model_config, variant=variant, device="cpu")
    model = GPT(config.model, config.variant, 16).init_(0)
    optimizer = make_optimizer(model, config)
    rate = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    assert len(rate) == len(list(model.parameters()))
    for _, _, layer in model.attention_layers():
        power = {"matched": 1, "same": 0}.get(lr, math.log(0.3) / math.log(layer.matched_lr))
        for parameter, multiplier, decay in layer.rates():
            group = rate[id(parameter)]
            expected = multiplier**power
            assert group["lr_multiplier"] == pytest.approx(expected)
            assert group["lr"] == pytest.approx(config.optim.lr * expected)
            assert group["lr"] * group["weight_decay"] == pytest.approx(
                config.optim.lr * config.optim.weight_decay * decay
            )


def test_a_number_scales_the_changed_circuit_and_the_others_in_proportion():
    layer = initialized("merged", "no_v")
    matched = layer.lr_multipliers()
    assert layer.matched_lr == layer.resolve_lr("matched") == matched["qk"] != 1 != matched["ov"]

    def multipliers(lr):
        return layer.lr_multipliers(layer.circuit_lr(lr))

    assert multipliers("same") == multipliers(1.0) == {"qk": 1, "ov": 1}
    assert multipliers(layer.matched_lr) == matched  # exactly: the same run
    half_way = multipliers(math.sqrt(matched["qk"]))
    assert half_way == pytest.approx({k: math.sqrt(value) for k, value in matched.items()})
    assert initialized("separate", "no_v").matched_lr == matched["ov"]  # where QK is standard's


def test_a_number_is_the_rate_of_queries_and_keys_where_no_multiplier_differs_from_one():
    standard = initialized("separate", "separate", bias=True)
    assert (standard.matched_lr, standard.has_circuit_lr) == (1, True)
    for lr in ("matched", "same", "between", 1.0):
        assert standard.lr_multipliers(standard.circuit_lr(lr)) == {"qk": 1, "ov": 1}
    given = standard.circuit_lr(2.5)
    assert standard.lr_multipliers(given) == {"qk": 2.5, "ov": 1}
    of_scores = {*standard.qk.parameters()}
    for parameter, rate, _ in standard.rates(given):
        assert rate == (2.5 if parameter in of_scores else 1)
    assert not initialized("uniform", "separate").has_circuit_lr


def test_naive_norms_reduce_the_learning_rate():
    for norm, qk in product(("qk", "unit_keys"), ("separate", "merged")):
        matched, naive = (initialized(qk, init=init, norm=norm) for init in INITS)
        hotter = spread(naive) / spread(matched)
        found = naive.lr_multipliers()["qk"] / matched.lr_multipliers()["qk"]
        assert found == pytest.approx(1 / hotter, rel=0.05)
