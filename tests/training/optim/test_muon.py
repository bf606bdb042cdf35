"""Muon: torch's update, one matrix of a head at a time, and rates that match standard's speed."""

import dataclasses
import functools

import pytest
import torch
from first_steps import PARTS, first_step

from qkablate.attention import OV_CIRCUITS, QK_CIRCUITS
from qkablate.config import Config, ModelConfig, OptimConfig, VariantConfig, check, resolve_variant
from qkablate.config import variants as known_variants
from qkablate.errors import ImpossibleConfig, UserError
from qkablate.models.build import build_model
from qkablate.training.optim import check_optimizer, make_optimizer, muon
from qkablate.training.optim.muon import RMS, Muon, find_matrices, orthogonalize
from tests.attention import test_initialization as layers
from tests.attention.random_layers import qk_for

SIZE = ModelConfig(layers=1, d_model=16, heads=2, context=8, bias=True, tied=False)
LR, DECAY = 0.01, 0.1


def make_model(variant="standard", **changes):
    model = dataclasses.replace(SIZE, **changes)
    given = VariantConfig(**known_variants()[variant] | {"lr": "same"})
    named = resolve_variant(given, model)
    config = Config(model=model, variant=named, device="cpu")
    config.optim = OptimConfig(optimizer="muon", lr=LR, weight_decay=DECAY)
    built = build_model(config.model, config.variant, 11).init_(0)
    return built, make_optimizer(built, config)


def random_gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_update_is_torchs():
    """Torch computes it in bf16."""
    w = torch.randn(24, 16, generator=torch.Generator().manual_seed(0))
    ours, theirs = (torch.nn.Parameter(w.clone()) for _ in range(2))
    shared = {"lr": LR, "weight_decay": DECAY, "momentum": 0.95}
    model = torch.nn.Linear(16, 24, bias=False)
    model.weight = ours
    holder = type("Holder", (), {})()
    holder.sharding_units = lambda: [model]
    holder.attention_layers = list
    muon = Muon([{"params": [ours], **shared}], find_matrices(holder), fused=True)
    reference = torch.optim.Muon([theirs], adjust_lr_fn="match_rms_adamw", **shared)
    for step in range(6):
        ours.grad = torch.randn(24, 16, generator=torch.Generator().manual_seed(step + 1))
        theirs.grad = ours.grad.clone()
        muon.step()
        reference.step()
    moved = (theirs - w).norm()
    assert (ours - theirs).norm() < 0.01 * moved
    buffers = (muon.state[ours], reference.state[theirs])
    assert torch.equal(*[state["momentum_buffer"] for state in buffers])


def test_embeddings_head_and_vectors_are_adamws():
    model, optimizer = make_model(mlp="swiglu", position="learned")
    random_gradients(model, 1)
    optimizer.step()
    for name, parameter in model.named_parameters():
        expects = name.startswith("blocks") and parameter.dim() == 2
        assert ("momentum_buffer" in optimizer.state[parameter]) == expects, name
        assert ("exp_avg" in optimizer.state[parameter]) != expects, name


@pytest.mark.parametrize("variant", [*known_variants()])
def test_matrices_of_every_head_are_orthogonalized(variant):
    """The update of each has singular values near 0.2 η √(its larger side)."""
    model, optimizer = make_model(variant)
    before = {p: p.detach().clone() for p in model.parameters()}
    random_gradients(model, 2)
    optimizer.step()
    layer = model.attention_layers()[0].module
    blocks = find_matrices(model)
    for parameter in [*layer.qk.parameters(), *layer.ov.parameters()]:
        if parameter not in blocks:
            assert "exp_avg" in optimizer.state[parameter]
            continue
        moved = parameter.detach() - before[parameter] * (1 - LR * _decay(optimizer, parameter))
        if "triangle" in dict(layer.qk.named_parameters()) and parameter is layer.qk.triangle:
            matrices_NRC = layer.qk._full(moved)
        else:
            matrices_NRC = blocks[parameter].split(moved)
            assert torch.equal(blocks[parameter].join(matrices_NRC), moved)
        size = 0.2 * LR * max(matrices_NRC.shape[1:]) ** 0.5
        values = torch.linalg.svdvals(matrices_NRC) / size
        assert values.max() < 1.3
        assert values.median() > 0.6


def _decay(optimizer, parameter):
    (group,) = (g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    return group["weight_decay"]


@pytest.mark.parametrize(
    ("variant", "shapes"),
    [
        ("standard", {"w_q": (2, 16, 8), "w_k": (2, 16, 8), "w_v": (2, 16, 8), "w_o": (2, 8, 16)}),
        ("merged_w", {"w_qk": (2, 16, 16)}),
        ("merged_ov", {"w_ov": (2, 16, 16)}),
        ("mqa", {"w_k": (1, 16, 8), "w_v": (1, 16, 8), "w_q": (2, 16, 8)}),
        ("symmetric_w", {"triangle": (2, 16, 16)}),
        ("collaborative", {"w_q": (1, 16, 4)}),
    ],
)
def test_a_matrix_is_that_of_one_head(variant, shapes):
    model, _ = make_model(variant)
    names = {p: name.rpartition(".")[2] for name, p in model.named_parameters()}
    found = {names[p]: tuple(b.split(p.detach()).shape) for p, b in find_matrices(model).items()}
    assert found.items() >= shapes.items()


def test_other_heads_do_not_change_the_step_of_a_head():
    steps = []
    for seed in (3, 4):
        model, optimizer = make_model("merged_w")
        random_gradients(model, 2)
        w_qk = model.attention_layers()[0].module.qk.w_qk
        w_qk.grad[:, 16:] = torch.randn(16, 16, generator=torch.Generator().manual_seed(seed))
        optimizer.step()
        steps.append(w_qk.detach().clone())
    assert torch.equal(steps[0][:, :16], steps[1][:, :16])
    assert not torch.equal(steps[0], steps[1])


def test_orthogonalized_values_are_near_one():
    x_NRC = torch.randn(3, 20, 12, generator=torch.Generator().manual_seed(0))
    y_NRC = orthogonalize(x_NRC)
    values = torch.linalg.svdvals(y_NRC)
    assert 0.6 < values.min() < values.max() < 1.3
    u, _, vh = torch.linalg.svd(x_NRC, full_matrices=False)
    overlap = (y_NRC * (u @ vh)).sum((1, 2)) / 12
    assert (overlap - 1).abs().max() < 0.2
    torch.testing.assert_close(orthogonalize(x_NRC.mT), y_NRC.mT)
    assert torch.equal(orthogonalize(x_NRC * 0), x_NRC * 0)


def test_state_is_restored():
    ends = []
    for interrupted in (False, True):
        model, optimizer = make_model("merged_w")
        for step in range(4):
            if interrupted and step == 2:
                state, weights = optimizer.state_dict(), model.state_dict()
                model, optimizer = make_model("merged_w")
                model.load_state_dict(weights)
                optimizer.load_state_dict(state)
            random_gradients(model, step)
            optimizer.step()
        ends.append([p.detach() for p in model.parameters()])
    assert all(map(torch.equal, *ends))


# Measured at the rates that are matched for AdamW, with random gradients of 2,304 tokens. A square
# random matrix has 0.85 of the sum of singular values that equal ones would have, a narrow one
# nearly all, and Newton–Schulz leaves those of narrow ones nearer to 1. Where a latent stream is
# narrower than a head (32), the gradient of W_q has only r directions. Tables are AdamW's.
SPEEDS = {"merged": 0.94, "symmetric": 0.945, "four_matrix": 0.95, "wide": 0.825}
SPEEDS |= {"latent": 0.935, "low_rank": 1.13, "collaborative": 1.08, "static": 5.15}
OUTPUT_SPEEDS = {"merged": 0.8, "latent": 0.93}
# Nearly equal weights of all tokens leave the gradient of M_h few directions.
AVERAGED_SPEEDS = OUTPUT_SPEEDS | {"merged": 0.57}
LATENT_SPEEDS = {8: (0.67, 0.585), 16: (0.825, 0.81), 64: (0.985, 0.95), 128: (0.98, 0.97)}
LOW_RANK_SPEEDS = {8: 1.28, 32: 1.0, 64: 0.94, 128: 0.82}


SITES = [
    pytest.param(site, marks=() if site == "decoder" else pytest.mark.exhaustive)
    for site in layers.SITES
]


@functools.cache
def speed(part, name, site="decoder", rank=None, optimizer="muon"):
    """Return how far the first step moves the scores or outputs, relative to standard."""
    circuit = "qk" if part == "scores" else "ov"
    sizes = dict(layers.SITES[site]) | ({} if rank is None else {"rank": rank})
    streams = (
        layers.noise(0, 24, layers.T, layers.D),
        layers.noise(4, 24, layers.SOURCE, layers.D) if site == "cross" else None,
    )
    ours, standard = (
        sum(
            first_step(layers.initialized(**{circuit: one}, seed=seed, **sizes), part, streams, by)
            for seed in layers.SEEDS
        )
        for one, by in ((name, optimizer), ("separate", optimizer))
    )
    return ours / standard


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("qk", layers.LEARNED)
def test_matched_rates_match_the_speed_of_the_scores(qk, site):
    assert speed("scores", qk, site, optimizer="adamw") == pytest.approx(1, rel=0.03)
    assert speed("scores", qk, site) == pytest.approx(SPEEDS.get(qk, 1), rel=0.03)


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("ov", [name for name in OV_CIRCUITS if name != "no_vo"])
def test_matched_rates_match_the_speed_of_the_outputs(ov, site):
    expected = OUTPUT_SPEEDS if site == "decoder" else AVERAGED_SPEEDS
    assert speed("outputs", ov, site, optimizer="adamw") == pytest.approx(1, rel=0.03)
    assert speed("outputs", ov, site) == pytest.approx(expected.get(ov, 1), rel=0.05)


@pytest.mark.parametrize("rank", LATENT_SPEEDS)
def test_speed_of_a_latent_stream_depends_on_its_rank(rank):
    found = [speed(part, "latent", rank=rank) for part in PARTS]
    assert found == pytest.approx(LATENT_SPEEDS[rank], rel=0.03)


@pytest.mark.parametrize("rank", LOW_RANK_SPEEDS)
def test_speed_of_the_scores_depends_on_the_rank(rank):
    assert speed("scores", "low_rank", rank=rank) == pytest.approx(LOW_RANK_SPEEDS[rank], rel=0.03)


@pytest.mark.parametrize("variant", ["standard", "merged_w", "mla"])
def test_a_step_lowers_a_linear_loss_as_far_as_the_speeds_say(variant):
    model, optimizer = make_model(variant, d_model=64)
    random_gradients(model, 2)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    before = {p: p.detach().clone() for p in model.parameters()}
    optimizer.step()
    for parameter, matrices in find_matrices(model).items():
        g_NRC = matrices.split(parameter.grad)
        size = LR * RMS * max(g_NRC.shape[1:]) ** 0.5
        lowered = float((parameter.grad * (before[parameter] - parameter.detach())).sum())
        expected = size * float((g_NRC * orthogonalize(g_NRC)).sum())
        assert lowered == pytest.approx(expected, rel=1e-3)
        # An orthogonal matrix would lower it by the sum of the singular values.
        assert expected == pytest.approx(size * float(torch.linalg.svdvals(g_NRC).sum()), rel=0.25)


def test_every_output_circuit_names_its_matrices():
    for name in OV_CIRCUITS:
        circuit = layers.initialized(qk_for(name), name).ov
        matrices = {parameter for parameter, _, _ in circuit.matrices()}
        assert matrices == {n for n, p in circuit.named_parameters() if p.dim() == 2}


def test_matrices_without_gradients_stay():
    model, optimizer = make_model()
    random_gradients(model, 1)
    qk = model.attention_layers()[0].module.qk
    qk.w_k.grad = None
    before = qk.w_k.detach().clone()
    optimizer.step()
    assert torch.equal(qk.w_k, before)
    assert qk.w_k not in optimizer.state


def test_matrices_updated_in_parts_are_those_updated_together(monkeypatch):
    ends = []
    for at_once in (2**22, 1):
        monkeypatch.setattr(muon, "_AT_ONCE", at_once)
        model, optimizer = make_model()
        random_gradients(model, 1)
        optimizer.step()
        ends.append([p.detach() for p in model.parameters()])
    for together, apart in zip(*ends, strict=True):
        torch.testing.assert_close(together, apart)


def test_momentum_of_one_is_rejected():
    """Nothing would ever move."""
    config = dataclasses.replace(Config(), optim=OptimConfig(optimizer="muon", momentum=1.0))
    with pytest.raises(UserError, match=r"optim.momentum: 1.0 is not a number from 0 to below 1"):
        check(config)


def test_model_without_matrices_is_rejected():
    model, _ = make_model()
    config = dataclasses.replace(Config(), optim=OptimConfig(optimizer="muon"))
    check_optimizer(model, config)
    model.blocks = torch.nn.ModuleList()
    model.attention_layers = list
    with pytest.raises(ImpossibleConfig, match="the blocks have no matrices"):
        check_optimizer(model, config)


def test_keys_that_heads_share_are_one_matrix():
    layer = layers.initialized()
    shared = QK_CIRCUITS["separate"](layer.qk.spec, key_heads=1)  # as in a circuit of one's own
    shapes = {
        name: tuple(split(shared.get_parameter(name)).shape) for name, split, _ in shared.matrices()
    }
    assert shapes == {"w_q": (4, 128, 32), "w_k": (1, 128, 32)}
