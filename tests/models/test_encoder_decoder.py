"""Encoder and decoder: parameters, reference, what sees what, initialization, losses."""

from collections import Counter

import pytest
import torch

from qkablate.compose.configs import make_config, open_hydra
from qkablate.config import ModelConfig, VariantConfig, resolve_variant, variants
from qkablate.config.variant import SITES, check_variant, layer_names
from qkablate.errors import UserError
from qkablate.models.build import build_model
from qkablate.models.encoder_decoder import EncoderDecoder
from tests.attention.random_layers import randomized
from tests.models import reference

VOCABULARY = 11
WHERE = ("encoder", "decoder", "cross", "all")


def translator(name="standard", sites="all", *, seed=0, variant=None, **model) -> EncoderDecoder:
    """Return a small initialized model; `variant` overrides keys of the variant `name`."""
    sizes = {"layers": 1, "d_model": 16, "heads": 4, "context": 5, "source": 6} | model
    config = ModelConfig("encoder_decoder", **sizes)
    given = VariantConfig(**variants()[name] | {"sites": sites} | (variant or {}))
    check_variant(given, config)
    built = build_model(config, resolve_variant(given, config), VOCABULARY).init_(seed)
    assert isinstance(built, EncoderDecoder)
    return built.eval()


def tokens(length: int, batch: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(VOCABULARY, (batch, length), generator=generator)


def logits_and_gradients(model, logits):
    weight = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(
        (logits * weight).sum(), list(parameters.values()), allow_unused=True
    )
    zeros = map(torch.zeros_like, parameters.values())
    pairs = zip(parameters, gradients, zeros, strict=True)
    return logits, {name: zero if grad is None else grad for name, grad, zero in pairs}


def test_transformer_base_has_the_sizes_of_the_paper():
    """Those of Vaswani et al. (2017), Table 3, are the defaults of torch's own Transformer."""
    with open_hydra():
        config = make_config({"model": "transformer_base"})
    with torch.device("meta"):
        model = build_model(config.model, config.variant, 37_000)
        theirs = torch.nn.Transformer(batch_first=True)  # 6 + 6 layers, d 512, 8 heads, MLP 2048
    layers = model.attention_layers()
    sites = Counter(layer.site for layer in layers)
    assert sites == {"encoder": 6, "decoder": 6, "cross": 6}
    assert {layer.module.qk.spec.heads for layer in layers} == {8}
    d, mlp = 512, 2048
    attention = 4 * (d * d + d)
    feed_forward = d * mlp + mlp + mlp * d + d
    encoder = attention + feed_forward + 2 * 2 * d
    decoder = 2 * attention + feed_forward + 3 * 2 * d
    expected = 6 * encoder + 6 * decoder + 2 * 2 * d  # and a norm after each stack
    counts = model.parameter_counts()
    assert counts["total"] - counts["embedding"] == expected
    assert expected == sum(parameter.numel() for parameter in theirs.parameters())
    assert counts["embedding"] == (37_000 + 2 * 128) * d  # shared by source, target and output
    assert counts["attention"] == 18 * attention
    assert config.model.dropout == 0.1


def test_embeddings_of_both_stacks_start_with_the_given_deviations():
    sizes = {"d_model": 128, "encoder_d_model": 64, "source": 40, "context": 40}
    model = translator(**sizes, embedding_std=0.2, position_std=1.0)
    for name, expected in (("token", 0.2), ("position", 1.0)):
        for prefix in ("", "source_"):
            table = getattr(model, f"{prefix}{name}_embedding").weight
            assert table.std().item() == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("sites", WHERE)
@pytest.mark.parametrize("name", variants())
def test_every_variant_matches_the_reference_at_every_site(name, sites):
    """Logits and the gradients of all parameters, in fp64."""
    if (name, sites) == ("shared_qk_reformer", "cross"):
        with pytest.raises(UserError, match="has no self to mask"):
            translator(name, sites)
        return
    model = randomized(translator(name, sites))
    source, target = tokens(6), tokens(5)
    ours = logits_and_gradients(model, model(source, target))
    theirs = logits_and_gradients(model, reference.encoder_decoder(model, source, target))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", variants())
def test_unused_parameters_are_those_without_a_gradient(name, bias):
    model = translator(name, "cross" if name != "shared_qk_reformer" else "encoder", bias=bias)
    loss = model.loss(tokens(6), tokens(5), tokens(5))
    gradients = torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)
    found = [p for p, g in zip(model.parameters(), gradients, strict=True) if g is None]
    assert {*map(id, found)} == {*map(id, model.unused_parameters())}
    has_unused = name in ("uniform", "static_scores") or (name == "standard_reassociated" and bias)
    assert bool(found) == has_unused


@pytest.mark.parametrize("name", ["standard", "merged_w", "no_qk", "static_scores"])
def test_shorter_sequences_match_the_reference(name):
    model = randomized(translator(name, layers=2, encoder_layers=1))
    for lengths in ((1, 1), (3, 5), (6, 2)):
        source, target = map(tokens, lengths)
        expected = reference.encoder_decoder(model, source, target)
        torch.testing.assert_close(model(source, target), expected, rtol=1e-10, atol=1e-10)


def test_names_of_the_parameters():
    """They are part of the random draws and of checkpoints."""
    attention = ("qk.w_q", "qk.w_k", "ov.w_v", "ov.w_o")
    block = ("norm_1.weight", *(f"attention.{name}" for name in attention))
    mlp = ("norm_2.weight", "mlp.up.weight", "mlp.down.weight")
    cross = ("norm_cross.weight", *(f"cross_attention.{name}" for name in attention))
    assert {name for name, _ in translator(layers=1, encoder_layers=2).named_parameters()} == {
        *("token_embedding.weight", "position_embedding.weight"),
        *("source_position_embedding.weight", "encoder_norm.weight", "norm.weight"),
        *(f"encoder.{i}.{name}" for i in (0, 1) for name in (*block, *mlp)),
        *(f"blocks.0.{name}" for name in (*block, *cross, *mlp)),
    }


def test_layers_are_named_in_the_order_of_computation():
    model = translator(layers=2, encoder_layers=1)
    names = [f"{x.site}_L{x.name.split('.')[1]}" for x in model.attention_layers()]
    assert layer_names(model.config) == names
    assert layer_names(ModelConfig(layers=2)) == ["L0", "L1"]


def test_sites_carry_the_variant_and_others_are_standard():
    kinds = {layer.site: type(layer.module.qk).__name__ for layer in layers("cross")}
    assert kinds == {"encoder": "SeparateQK", "decoder": "SeparateQK", "cross": "MergedQK"}
    both = {layer.site: type(layer.module.qk).__name__ for layer in layers("encoder+decoder")}
    assert both == {"encoder": "MergedQK", "decoder": "MergedQK", "cross": "SeparateQK"}
    for sites in ("encoder", "decoder", "cross"):
        model = translator("merged_w", sites)
        assert model.variant_layer().site == sites
    assert translator("merged_w").sites == SITES["encoder_decoder"]


def layers(sites):
    return translator("merged_w", sites).attention_layers()


def test_layers_with_equal_tensors_start_equally_at_all_sites():
    """Only the tensors of the variant differ from standard's."""
    standard, merged = translator(layers=2), translator("merged_w", "cross", layers=2)
    ours, theirs = dict(merged.named_parameters()), dict(standard.named_parameters())
    shared = [name for name in ours if name in theirs]
    assert {*ours} - {*theirs} == {f"blocks.{i}.cross_attention.qk.w_qk" for i in (0, 1)}
    assert all(torch.equal(ours[name], theirs[name]) for name in shared)


@pytest.mark.parametrize("sites", WHERE)
@pytest.mark.parametrize("draws", ["gpt2", "linear"])
@pytest.mark.parametrize("name", ["merged_w", "merged_ov"])
def test_merged_forms_are_initialized_as_standard_at_every_site(name, sites, draws):
    source, target = tokens(6), tokens(5)
    expected = translator(init=draws)(source, target)
    found = translator(name, sites, init=draws)(source, target)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_symmetric_start_at_one_site():
    """The other sites start as standard does, with the same W_k everywhere."""
    usual, changed = translator(), translator(sites="encoder", variant={"init": "symmetric"})
    for ours, theirs in zip(changed.attention_layers(), usual.attention_layers(), strict=True):
        w_q, w_k = ours.module.qk.w_q, ours.module.qk.w_k
        assert torch.equal(w_q, w_k) == (ours.site == "encoder")
        assert torch.equal(w_q, theirs.module.qk.w_q) == (ours.site != "encoder")
        assert torch.equal(w_k, theirs.module.qk.w_k)


@pytest.mark.parametrize(("source", "rows"), [(6, 6), (None, 5)])
def test_each_stack_has_a_table_of_positions(source, rows):
    model = translator(source=source)
    assert model.source_position_embedding.weight.shape == (rows, 16)
    assert model.position_embedding.weight.shape == (5, 16)
    assert model.input_lengths() == (rows, 5)


@pytest.mark.parametrize("position", ["rope", "none"])
def test_rope_rotates_within_a_stack_only(position):
    model = translator(position=position)
    assert model.source_position_embedding is model.position_embedding is None
    found = [layer.module.position for layer in model.attention_layers()]
    assert found == [position, position, "none"]
    with pytest.raises(UserError, match="rope"):
        translator("merged_w", "encoder", position="rope")
    translator("merged_w", "cross", position="rope")  # which has no positions


def test_all_layers_read_the_same_source():
    model, read = translator(layers=3), []
    for block in model.blocks:
        block.cross_attention.register_forward_pre_hook(lambda _, given: read.append(given[1]))
    model(tokens(6), tokens(5))
    assert len(read) == 3
    assert all(y_BSD is read[0] for y_BSD in read)
    torch.testing.assert_close(read[0], model.encode(tokens(6)))


@pytest.mark.parametrize("name", ["standard", "merged_w", "static_scores", "uniform"])
def test_every_target_position_sees_the_source_and_no_later_target(name):
    model = randomized(translator(name))
    for position in range(5):
        logits = model(tokens(6, 1), tokens(5, 1))[0, position].sum()
        source, target = torch.autograd.grad(
            logits,
            [model.source_position_embedding.weight, model.position_embedding.weight],
        )
        assert (source.abs().sum(-1) > 0).all()
        reached = (target.abs().sum(-1) > 0).tolist()
        assert reached == [i <= position for i in range(5)]


def test_every_source_position_sees_all_others():
    model = randomized(translator())
    for position in range(6):
        y_D = model.encode(tokens(6, 1))[0, position]
        (reached,) = torch.autograd.grad(
            y_D.square().sum(), [model.source_position_embedding.weight]
        )
        assert (reached.abs().sum(-1) > 0).all()


@pytest.mark.parametrize("name", ["standard", "no_v", "merged_w"])
def test_matrices_that_write_start_small(name):
    """Two sublayers of a block of the encoder write to its stream, three of the decoder's."""
    model = translator(name, layers=3, encoder_layers=2, d_model=64)
    sizes = {"encoder": 0.02 / 4**0.5, "blocks": 0.02 / 9**0.5}
    for name, parameter in model.named_parameters():
        if name.endswith(("w_o", "mlp.down.weight")):
            expected = sizes[name.partition(".")[0]]
            assert float(parameter.detach().std()) == pytest.approx(expected, rel=0.05), name


def test_loss_at_selected_positions():
    model = translator()
    source, target, next_ = tokens(6), tokens(5), tokens(5).flip(0)
    losses, hits = model.loss_and_hits(source, target, next_)
    logits = model(source, target)
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), next_.flatten(), reduction="none"
    )
    torch.testing.assert_close(losses.flatten(), expected)
    assert torch.equal(hits.view_as(next_), logits.argmax(-1) == next_)
    torch.testing.assert_close(model.loss(source, target, next_), expected.mean())
    where = torch.tensor([[1, 3], [0, 4]])
    few = model.loss(source, target, next_.gather(1, where), where)
    torch.testing.assert_close(few, expected.view(2, 5).gather(1, where).mean())
    found = model.log_probabilities(source, target, torch.tensor([1, 0]), torch.tensor([4, 2]))
    torch.testing.assert_close(found, logits[[1, 0], [4, 2]].log_softmax(-1))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recomputed_activations_are_identical(dropout):
    gradients = []
    for recompute in (False, True):
        model = translator(layers=2, dropout=dropout).train()
        model.checkpoint_activations = recompute
        torch.manual_seed(1)
        loss = model.loss(tokens(6), tokens(5), tokens(5))
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    assert all(map(torch.equal, *gradients))


def test_attention_inputs_are_what_the_layers_read():
    model, read = translator(layers=2, encoder_layers=1), []
    for _, _, layer in model.attention_layers():
        layer.register_forward_pre_hook(lambda _, given: read.append(given))
    inputs = tokens(6), tokens(5)
    model(*inputs)
    expected, read[:] = list(read), []
    found = list(model.attention_inputs(*inputs))
    assert [layer for layer, _ in found] == model.attention_layers()
    for (layer, streams), given in zip(found, expected, strict=True):
        assert len(streams) == (2 if layer.site == "cross" else 1)
        for stream, read_by_layer in zip(streams, given, strict=False):
            assert torch.equal(stream, read_by_layer), layer.name


def test_counts_cover_all_parameters():
    for name in variants():
        model = translator(name)
        counts = model.parameter_counts()
        assert counts["total"] == sum(p.numel() for p in model.parameters())
        assert counts["embedding"] == (VOCABULARY + 5 + 6) * 16
