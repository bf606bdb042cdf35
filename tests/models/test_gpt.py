"""GPT: initialization by name, parameter counts, costs, decoding, loss, memory."""

import re
from itertools import product

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from qkablate.attention import OV_CIRCUITS, QK_CIRCUITS
from qkablate.attention.qk.factored import SeparateQK
from qkablate.config import ModelConfig, VariantConfig, resolve_variant, variants
from qkablate.errors import UserError
from qkablate.models import blocked_loss
from qkablate.models.catalogue import make_attention
from qkablate.models.cost import (
    compute_attention_cost,
    forward_flops_per_token,
    mean_causal_keys,
    training_flops_per_token,
)
from qkablate.models.gpt import GPT
from tests.attention.random_layers import randomized
from tests.models import reference

# The catalogue, and circuits without a variant of their own.
ALL = variants() | {
    "grouped+separate": {"qk": "grouped"},
    "separate+grouped": {"ov": "grouped"},
    "merged+merged": {"qk": "merged", "ov": "merged"},
    "low_rank+tied": {"qk": "low_rank", "ov": "tied"},
}
CONTENTLESS = ("static", "uniform")
ROTATABLE = {*QK_CIRCUITS} - {"merged", "symmetric", "reassociated", *CONTENTLESS}


def gpt(name="standard", *, seed=0, variant=None, kernel="auto", **model):
    """Return a small initialized model; `variant` overrides keys of the variant `name`."""
    config = ModelConfig(**({"layers": 2, "d_model": 32, "heads": 4, "context": 16} | model))
    given = resolve_variant(VariantConfig(**ALL[name] | (variant or {})), config)
    return GPT(config, given, 50, kernel=kernel).init_(seed)


def tokens_of(batch: int, length: int) -> torch.Tensor:
    return torch.randint(50, (batch, length), generator=torch.Generator().manual_seed(0))


def test_all_circuits_are_tested():
    assert {entry.get("qk", "separate") for entry in ALL.values()} == {*QK_CIRCUITS}
    assert {entry.get("ov", "separate") for entry in ALL.values()} == {*OV_CIRCUITS}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_every_parameter_is_set(name, bias):
    norms = ("none",) if ALL[name].get("qk") in CONTENTLESS else ("none", "qk", "unit_keys")
    for draws, init, norm in product(("gpt2", "linear"), ("matched", "naive"), norms):
        config = ModelConfig(layers=1, d_model=16, heads=4, context=8, bias=bias, init=draws)
        variant = resolve_variant(VariantConfig(**ALL[name] | {"init": init, "norm": norm}), config)
        with torch.device("meta"):
            model = GPT(config, variant, 50)
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, float("nan"))
        model.init_(0)
        assert not [n for n, p in model.named_parameters() if not p.isfinite().all()]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("draws", ["gpt2", "linear"])
def test_shared_tensors_are_equal_across_variants(name, draws):
    """Initial tensors of the same name and shape are bit-equal across variants."""
    for init in ("matched", "naive"):
        standard, ours = (
            dict(gpt(n, seed=3, bias=True, init=draws, variant={"init": init}).named_parameters())
            for n in ("standard", name)
        )
        shared = [n for n in ours if n in standard and ours[n].shape == standard[n].shape]
        assert len(shared) >= 10
        assert all(torch.equal(ours[n], standard[n]) for n in shared)


def test_draws_do_not_depend_on_layers_and_context():
    """The initial value of a tensor depends on its name alone."""
    small, deep, long = (
        dict(gpt(**more).named_parameters()) for more in ({}, {"layers": 3}, {"context": 8})
    )
    for name in small:
        if not name.endswith(("w_o", "down.weight")):  # scaled by the depth, as GPT-2 does
            assert torch.equal(small[name], deep[name]), name
        if name != "position_embedding.weight":
            assert torch.equal(small[name], long[name]), name
    other = dict(gpt(seed=1).named_parameters())
    assert not torch.equal(other["blocks.0.mlp.up.weight"], small["blocks.0.mlp.up.weight"])


@pytest.mark.parametrize("draws", ["gpt2", "linear"])
def test_embeddings_start_with_the_given_deviations(draws):
    """They scale the same draws, and an output head of its own keeps GPT-2's."""
    usual, scaled = (
        dict(gpt(init=draws, tied=False, **more).named_parameters())
        for more in ({}, {"embedding_std": 0.2, "position_std": 1.0})
    )
    assert usual["token_embedding.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    factors = {"token_embedding.weight": 10, "position_embedding.weight": 50}
    for name in usual:
        torch.testing.assert_close(scaled[name], usual[name] * factors.get(name, 1))
    at_zero = gpt(init=draws, position_std=0)
    assert not at_zero.position_embedding.weight.any()


@pytest.mark.parametrize("name", ["merged_w", "merged_ov", "merged+merged"])
@pytest.mark.parametrize("draws", ["gpt2", "linear"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_merged_forms_are_initialized_as_standard(name, draws, bias):
    """The matched initialization is the product of the tensors that standard draws."""
    logits = [gpt(n, init=draws, bias=bias).double()(tokens_of(3, 16)) for n in ("standard", name)]
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_parameter_counts_sum_to_numel(name):
    for bias, norm, position in product((False, True), ("pre", "none"), ("learned", "alibi")):
        model = gpt(name, bias=bias, norm=norm, position=position)
        counts = model.parameter_counts()
        assert counts["total"] == sum(p.numel() for p in model.parameters())
        assert counts["total"] == sum(counts[p] for p in ("embedding", "attention", "mlp", "norm"))
        assert counts["embedding"] == 32 * (50 + 16 * (position == "learned"))
        assert (counts["norm"] == 0) == (norm == "none")
        assert counts["attention"] == sum(
            p.numel() for layer in model.attention_layers() for p in layer.module.parameters()
        )


def evaluated(formula: str, **sizes: int) -> float:
    """Evaluate a formula like 'h d (d+1) / 2'; juxtaposition is multiplication."""
    formula = re.sub(r"(?<=[\w²)]) (?=[\w(])", " * ", formula).replace("²", " ** 2")
    return eval(formula, {}, sizes)


@pytest.mark.parametrize("qk", QK_CIRCUITS)
def test_parameter_formulas(qk):
    """The formulas hold for every pair of circuits, at pairwise different sizes."""
    model = ModelConfig(d_model=24, heads=4, context=17)
    sizes = {"d": 24, "e": 24, "h": 4, "k": 6, "r": 5, "g": 2, "T": 17, "S": 17}
    for ov, norm in product(OV_CIRCUITS, ("none", "qk", "unit_keys")):
        variant = VariantConfig(qk=qk, ov=ov, norm=norm, rank=5, groups=2)
        try:
            layer = make_attention(model, variant)
        except UserError:
            continue
        for part in (layer.qk, layer.ov, layer.norm):
            if part is not None:
                real = sum(p.numel() for p in part.parameters())
                assert evaluated(part.params, **sizes) == real, type(part).__name__
                assert part.count_params() == real
        assert evaluated(layer.params, **sizes) == sum(p.numel() for p in layer.parameters())
        cost = compute_attention_cost(layer, keys=1, context=17, tokens_per_pass=1)
        assert cost.params == sum(p.numel() for p in layer.parameters())


@pytest.mark.parametrize("name", ALL)
def test_flops_agree_with_torchs_counter(name):
    """The formulas agree with torch, which does not count causal savings."""
    for bias, batch in ((False, 2), (True, 3)):
        model = gpt(name, bias=bias, kernel="math")  # the counter supports this kernel
        tokens = tokens_of(batch, 16)
        with FlopCounterMode(display=False) as counter:
            model(tokens)
        ours = forward_flops_per_token(model, tokens.numel(), masked=True)
        assert counter.get_total_flops() == pytest.approx(ours * tokens.numel(), rel=1e-12)


def test_training_flops_count_causal_keys_and_the_backward_pass():
    model = gpt()
    assert mean_causal_keys(16) == sum(range(1, 17)) / 16
    forward = forward_flops_per_token(model, tokens_per_pass=32)
    assert training_flops_per_token(model, tokens_per_pass=32) == 3 * forward


@pytest.mark.parametrize(
    ("variant", "params", "projections", "scores", "values", "cached"),
    [
        ({}, 589_824, 1_179_648, 98_688, 98_688, 1536),
        ({"qk": "grouped", "ov": "grouped", "groups": 2}, 393_216, 786_432, 98_688, 98_688, 512),
        ({"qk": "grouped", "ov": "grouped", "groups": 1}, 344_064, 688_128, 98_688, 98_688, 256),
        ({"qk": "shared"}, 442_368, 884_736, 98_688, 98_688, 1536),
        ({"qk": "sym_pairwise"}, 466_944, 933_888, 98_688, 98_688, 1536),
        ({"ov": "tied"}, 442_368, 884_736, 98_688, 98_688, 768),
        ({"qk": "shared", "ov": "tied"}, 294_912, 589_824, 98_688, 98_688, 768),
        ({"qk": "merged"}, 1_179_648, 2_359_296, 592_128, 98_688, 1536),
        ({"qk": "low_rank", "rank": 16}, 368_640, 737_280, 24_672, 98_688, 960),
        # Without the 576 multiplications of the mixing, which are not a matmul.
        ({"qk": "collaborative", "rank": 96}, 369_216, 737_280, 148_032, 98_688, 960),
        ({"qk": "no_q"}, 442_368, 884_736, 98_688, 98_688, 1536),
        ({"ov": "no_v"}, 442_368, 884_736, 98_688, 98_688, 1536),
        ({"ov": "no_o"}, 442_368, 884_736, 98_688, 98_688, 1536),
        ({"qk": "static"}, 688_128, 589_824, 0, 98_688, 768),
        # The heads average x, and only x is cached.
        ({"qk": "merged", "ov": "merged"}, 1_769_472, 3_538_944, 592_128, 592_128, 768),
    ],
    ids=lambda value: "+".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_golden_costs(variant, params, projections, scores, values, cached):
    """The cost table of the variants at d=384, h=6, k=64, T=256; the cache in bytes of fp16."""
    model = ModelConfig(d_model=384, heads=6, context=256)
    layer = make_attention(model, resolve_variant(VariantConfig(**variant), model))
    cost = compute_attention_cost(
        layer, keys=mean_causal_keys(256), context=256, tokens_per_pass=1e9
    )
    assert (cost.params, cost.projections) == (params, projections)
    assert (cost.scores, cost.values) == (scores, values)
    assert cost.flops == projections + scores + values
    assert 2 * cost.cached == cached
    assert cost.score_numel == 6 * 256**2


def test_reassociation_costs_a_product_of_weights_per_pass():
    model = ModelConfig(d_model=384, heads=6, context=256)
    layer = make_attention(model, resolve_variant(VariantConfig(qk="reassociated"), model))
    few, many = (
        compute_attention_cost(layer, keys=128.5, context=256, tokens_per_pass=n) for n in (1, 256)
    )
    per_pass = 2 * 384 * 64 * 384 * 6
    assert few.projections - many.projections == pytest.approx(per_pass * (1 - 1 / 256))
    assert few.params == 589_824
    assert few.scores == 592_128


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("position", ["learned", "none", "alibi", "rope"])
def test_cached_decoding_equals_the_full_forward_pass(name, position):
    """Pieces have five, one and ten tokens."""
    if position == "rope" and ALL[name].get("qk", "separate") not in {*ROTATABLE, *CONTENTLESS}:
        with pytest.raises(UserError, match="rope"):
            gpt(name, position=position)
        return
    model, tokens = gpt(name, position=position, bias=True).double(), tokens_of(2, 16)
    caches = model.make_caches()
    pieces = torch.cat([model(piece, caches) for piece in tokens.split((5, 1, 10), 1)], 1)
    torch.testing.assert_close(pieces, model(tokens), rtol=1e-10, atol=1e-10)
    for cache, layer in zip(caches, model.attention_layers(), strict=True):
        assert cache.length == 16
        assert cache.bytes_per_token() == 8 * layer.module.cached_per_token


@pytest.mark.parametrize("name", ALL)
def test_dropout_is_inactive_in_eval_mode(name):
    model, tokens = gpt(name, dropout=0.5), tokens_of(2, 16)
    torch.manual_seed(0)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize("name", variants())
def test_an_encoder_matches_the_reference(name):
    """Every token sees all others; there is no other site."""
    model = randomized(gpt(name, form="encoder", layers=1, d_model=16, context=6)).eval()
    assert [layer.site for layer in model.attention_layers()] == ["encoder"]
    tokens_BT = tokens_of(2, 6)
    results = []
    for logits in (model(tokens_BT), reference.encoder(model, tokens_BT)):
        gradients = torch.autograd.grad(
            logits.square().sum(), list(model.parameters()), allow_unused=True
        )
        unused = map(torch.zeros_like, model.parameters())
        pairs = zip(gradients, unused, strict=True)
        results.append([logits, *(zero if grad is None else grad for grad, zero in pairs)])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)


def test_attention_skip_and_norm():
    """Without skip the output of the attention replaces the stream, without norm unscaled."""
    tokens = torch.randint(50, (2, 16))
    base, no_skip, no_norm = gpt(), gpt(attention_skip=False), gpt(norm="none")
    assert not torch.allclose(base(tokens), no_skip(tokens))
    assert not any(isinstance(m, torch.nn.LayerNorm) for m in no_norm.modules())
    block, x = no_skip.blocks[0], torch.randn(1, 16, 32)
    written = block.attention(block.norm_1(x))
    torch.testing.assert_close(block(x), written + block.mlp(block.norm_2(written)))


def test_without_positions_order_does_not_matter():
    """The logits of the last token do not depend on the order of the others."""
    model = gpt(position="none", layers=1)
    tokens = torch.tensor([[1, 2, 3, 4], [3, 1, 2, 4]])
    logits = model(tokens)
    torch.testing.assert_close(logits[0, -1], logits[1, -1])
    assert not torch.allclose(*gpt(layers=1)(tokens)[:, -1])


def test_loss_ignores_masked_targets():
    model = gpt()
    tokens, targets = torch.randint(50, (2, 16)), torch.randint(50, (2, 16))
    padded = targets.clone()
    padded[1] = -100
    one = model.loss(tokens[:1], targets[:1], reduction="sum")
    torch.testing.assert_close(model.loss(tokens, padded, reduction="sum"), one)


def test_circuits_initialize_their_own_submodules(monkeypatch):
    """The model initializes only its own layers."""

    class Made(QK_CIRCUITS["separate"]):
        def __init__(self, spec):
            super().__init__(spec)
            self.inner = torch.nn.Linear(spec.d_model, spec.d_model)

        @torch.no_grad()
        def init_(self, draw):
            self.w_q.fill_(1)
            self.inner.weight.fill_(2)
            self.inner.bias.fill_(3)

    monkeypatch.setitem(QK_CIRCUITS, "separate", Made)
    qk = gpt("standard").attention_layers()[0].module.qk
    started = (qk.w_q, qk.inner.weight, qk.inner.bias)
    assert {float(t.detach().unique()) for t in started} == {1, 2, 3}


def test_losses_at_selected_positions():
    """Selected positions have the same losses and gradients as in the full loss."""
    model, other = (gpt("standard") for _ in range(2))
    tokens_BT = torch.randint(31, (3, 8))
    where_BA = torch.tensor([[1, 7], [0, 3], [2, 0]])
    targets_BA = torch.tensor([[4, 5], [6, 7], [8, -100]])
    dense_BT = torch.full((3, 8), -100).scatter(1, where_BA, targets_BA)
    few = model.loss(tokens_BT, targets_BA, where_BA)
    all_ = other.loss(tokens_BT, dense_BT)
    torch.testing.assert_close(few, all_)
    few.backward()
    all_.backward()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    losses_BA, hits_BA = model.loss_and_hits(tokens_BT, targets_BA, where_BA)
    torch.testing.assert_close(losses_BA.sum() / 5, few)
    likeliest_BA = model(tokens_BT).argmax(-1).gather(1, where_BA)
    assert torch.equal(hits_BA, likeliest_BA == targets_BA)
    losses_BT, _ = model.loss_and_hits(tokens_BT, dense_BT)
    torch.testing.assert_close(losses_BT.sum(), losses_BA.sum())


def test_model_without_mlp():
    model = gpt("standard", mlp_ratio=0.0)
    assert model.parameter_counts()["mlp"] == 0
    assert not any("norm_2" in name for name, _ in model.named_parameters())
    x_BTD = torch.randn(2, 5, model.config.d_model)
    block = model.blocks[0]
    torch.testing.assert_close(block(x_BTD), x_BTD + block.attention(block.norm_1(x_BTD)))


def test_flops_depend_on_the_answer_fraction():
    model = gpt("standard")
    all_, half = (training_flops_per_token(model, 8, part) for part in (1.0, 0.5))
    assert all_ - half == pytest.approx(3 * 0.5 * 2 * model.output_weight.numel())


@pytest.mark.parametrize("answers", [None, 3])
def test_blocked_loss_never_stores_all_logits(monkeypatch, largest, answers):
    model, tokens = gpt(mlp_ratio=1.0, d_model=4, heads=1, context=12), tokens_of(8, 12)
    where = None if answers is None else torch.arange(answers).expand(8, -1)
    targets = tokens if answers is None else tokens[:, :answers]
    losses = []
    for most in (blocked_loss.LOGITS_PER_BLOCK, 50 * 10):
        monkeypatch.setattr(blocked_loss, "LOGITS_PER_BLOCK", most)
        model.zero_grad()
        with largest() as found:
            loss = model.loss(tokens, targets, where)
            loss.backward()
        assert (found.numbers < targets.numel() * 50) == (most == 500)
        losses.append([loss, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_recomputed_activations_are_identical(name, dropout):
    """They are bit-equal, and dropout drops the same units again."""
    found = []
    for again in (False, True):
        model = gpt(name, dropout=dropout)
        model.checkpoint_activations = again
        tokens_BT = tokens_of(2, 17)
        torch.manual_seed(1)
        loss = model.loss(tokens_BT[:, :-1], tokens_BT[:, 1:])
        loss.backward()
        found.append([loss, *(parameter.grad for parameter in model.parameters())])
    assert all(map(torch.equal, *found))


def test_recomputed_circuits_of_the_user_draw_the_same_numbers(monkeypatch):
    draw = type("Draw", (SeparateQK,), {})
    draw.queries = lambda self, x: (q := SeparateQK.queries(self, x)) * (1 + torch.rand_like(q))
    gradients = []
    for again in (False, True):
        model = gpt()
        for layer in model.attention_layers():
            layer.module.qk.__class__ = draw
        model.checkpoint_activations, model.has_external_circuits = again, True
        tokens_BT = tokens_of(2, 17)
        torch.manual_seed(1)
        model.loss(tokens_BT[:, :-1], tokens_BT[:, 1:]).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))


def test_recomputed_activations_are_not_stored():
    """Only the input of each block is stored."""
    stored = []
    for again in (False, True):
        model = gpt(layers=6)
        model.checkpoint_activations = again
        parameters = {parameter.data_ptr() for parameter in model.parameters()}
        saved: dict[int, int] = {}

        def keep(tensor, saved=saved, parameters=parameters):
            if tensor.data_ptr() not in parameters:
                saved[tensor.data_ptr()] = tensor.numel()
            return tensor

        tokens_BT = tokens_of(2, 17)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model.loss(tokens_BT[:, :-1], tokens_BT[:, 1:])
        stored.append(sum(saved.values()))
    stream = 2 * 16 * 32  # the numbers between blocks
    assert stored[0] > 6 * 10 * stream
    assert stored[1] < 6 * stream + 8 * stream  # plus those of embedding, norm and loss


# Embeddings


def test_untied_head_has_a_matrix_of_its_own():
    tied, untied = gpt(), gpt(tied=False)
    counts, more = tied.parameter_counts(), untied.parameter_counts()
    assert more["embedding"] - counts["embedding"] == 50 * 32
    assert more["total"] - counts["total"] == 50 * 32  # all of it counts as an embedding
    own = dict(untied.named_parameters())
    assert all(torch.equal(own[name], value) for name, value in tied.named_parameters())
    assert not torch.equal(untied.output_weight, untied.token_embedding.weight)
    assert float(untied.output_weight.std()) == pytest.approx(0.02, rel=0.1)
    untied.loss(tokens_of(2, 16), tokens_of(2, 16)).backward()
    assert untied.output_weight.grad is not None


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("width", [8, 64])
@pytest.mark.parametrize("draws", ["gpt2", "linear"])
def test_factorized_embedding_starts_with_streams_and_logits_of_the_usual_size(tied, width, draws):
    usual, ours = (
        gpt(d_model=256, tied=tied, init=draws, embedding_width=e) for e in (None, width)
    )
    with torch.no_grad():
        sizes = [
            (float(m._embed(tokens).std()), float(m(tokens).std()))
            for m in (usual, ours)
            for tokens in [tokens_of(8, 16)]
        ]
    assert sizes[1][0] == pytest.approx(sizes[0][0], rel=0.25)
    # A tied head answers its own narrow embedding more loudly.
    assert sizes[1][1] == pytest.approx(sizes[0][1], rel=1.0 if tied else 0.25)
    maps = 256 * width * (1 if tied else 2)
    tables = 50 * width * (1 if tied else 2)
    positions = 16 * 256
    assert ours.parameter_counts()["embedding"] == maps + tables + positions


@pytest.mark.parametrize("tied", [True, False])
def test_flops_of_a_factorized_embedding_are_those_counted(tied):
    model, tokens_BT = gpt(tied=tied, embedding_width=8), tokens_of(1, 16)
    plain = gpt(tied=tied)
    counted = []
    for one in (model, plain):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            one(tokens_BT)
        counted.append(counter.get_total_flops() / 16)
    expected = [forward_flops_per_token(m, tokens_per_pass=16) for m in (model, plain)]
    assert counted[0] - counted[1] == pytest.approx(expected[0] - expected[1])
