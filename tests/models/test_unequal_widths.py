"""Encoder–decoders whose encoder has another width: reference, padding, caches, cost, refusals."""

import pytest
import torch

from qkablate.attention import Cache
from qkablate.config import ModelConfig, VariantConfig, resolve_variant, variants
from qkablate.config.variant import check_variant
from qkablate.data.batches import PAD
from qkablate.diagnostics.panel import DiagnosticPanel
from qkablate.errors import ImpossibleConfig
from qkablate.models.build import build_model
from qkablate.models.cost import cached_by_site, forward_flops_per_token
from qkablate.verify import random_streams, randomize_layer, verify
from tests.attention.random_layers import randomized
from tests.models import reference
from tests.models.test_cost import count_flops
from tests.models.test_encoder_decoder import logits_and_gradients, tokens

D, HEADS, CONTEXT, SOURCE, VOCABULARY = 16, 4, 5, 6, 11
WIDTHS = (8, 24)
# Forms that need streams of one width in cross-attention.
ONE_WIDTH = {
    *("symmetric_w", "shared_qk", "shared_qk_reformer", "sym_diag", "sym_pairwise", "no_qk"),
    *("no_vo", "tied_qkv"),
}
ALLOWED = [name for name in variants() if name not in ONE_WIDTH]


def translator(name="standard", sites="all", width=24, *, variant=None, options=None, **model):
    """Return a small initialized model; `variant` overrides keys of the variant `name`."""
    sizes = {"layers": 1, "d_model": D, "heads": HEADS, "context": CONTEXT, "source": SOURCE}
    config = ModelConfig("encoder_decoder", encoder_d_model=width, **sizes | model)
    given = VariantConfig(**variants()[name] | {"sites": sites} | (variant or {}))
    check_variant(given, config)
    built = build_model(config, resolve_variant(given, config), VOCABULARY, **options or {})
    return built.init_(0).eval()


def sites_of(name):
    """Return where a variant works."""
    if name in ONE_WIDTH:
        return ("encoder", "decoder", "encoder+decoder")
    return ("encoder", "decoder", "cross", "all")


# Cross-attention reads a narrower and a wider source.
CASES = [
    (name, sites, width)
    for name in variants()
    for sites in sites_of(name)
    for width in (WIDTHS if sites == "cross" else WIDTHS[1:])
]


@pytest.mark.parametrize(("name", "sites", "width"), CASES)
def test_every_variant_matches_the_reference_at_every_site(name, sites, width):
    """Logits and the gradients of all parameters, in fp64."""
    model = randomized(translator(name, sites, width))
    source, target = tokens(SOURCE), tokens(CONTEXT)
    ours = logits_and_gradients(model, model(source, target))
    theirs = logits_and_gradients(model, reference.encoder_decoder(model, source, target))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("sites", ["cross", "all", "decoder+cross"])
@pytest.mark.parametrize("name", sorted(ONE_WIDTH))
def test_forms_of_one_width_are_refused_in_cross_attention(name, sites):
    reason = "has no self to mask" if (name, sites) == ("shared_qk_reformer", "cross") else "16 and"
    with pytest.raises(ImpossibleConfig, match=reason):
        translator(name, sites)


@pytest.mark.parametrize(("lr", "power"), [("matched", 1.0), ("between", 0.5), ("same", 0.0)])
def test_words_of_the_rate_hold_where_the_first_site_has_none_of_its_own(lr, power):
    """At rank d_head the encoder's rate is standard's, and that of the decoder is not."""
    model = translator("low_rank_w", width=8, variant={"rank": 2})
    rates = {site: layer.module.matched_lr for site, layer in model.variant_layers().items()}
    assert rates["encoder"] == 1
    assert rates["decoder"] != 1
    number = model.variant_layer().module.resolve_lr(lr)
    given = model.variant_layer().module.circuit_lr(number)
    for site, layer in model.variant_layers().items():
        multiplier = layer.module.lr_multipliers(given)["qk"]
        assert multiplier == pytest.approx(rates[site] ** power)


@pytest.mark.parametrize("embedding_width", [None, 6])
def test_parameters(embedding_width):
    """The streams have their widths; a factorized embedding is shared, other tables are not."""
    model = translator(embedding_width=embedding_width)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    equal = translator(width=None, embedding_width=embedding_width)
    added = {*shapes} - {name for name, _ in equal.named_parameters()}
    if embedding_width is None:
        assert added == {"source_token_embedding.weight"}
        assert shapes["source_token_embedding.weight"] == (VOCABULARY, 24)
        assert shapes["token_embedding.weight"] == (VOCABULARY, D)
    else:
        assert added == {"source_embedding_up.weight"}
        assert shapes["source_embedding_up.weight"] == (24, 6)
        assert shapes["token_embedding.weight"] == (VOCABULARY, 6)
    assert shapes["source_position_embedding.weight"] == (SOURCE, 24)
    assert shapes["encoder.0.attention.qk.w_q"] == (24, 24)
    assert shapes["encoder.0.mlp.up.weight"] == (96, 24)
    assert shapes["blocks.0.cross_attention.qk.w_q"] == (D, D)
    assert shapes["blocks.0.cross_attention.qk.w_k"] == (24, D)
    assert shapes["blocks.0.cross_attention.ov.w_v"] == (24, D)
    assert shapes["blocks.0.cross_attention.ov.w_o"] == (D, D)
    assert shapes["encoder_norm.weight"] == (24,)
    assert sum(model.parameter_counts().values()) == 2 * sum(p.numel() for p in model.parameters())
    merged = dict(translator("merged_w", "cross").named_parameters())
    assert merged["blocks.0.cross_attention.qk.w_qk"].shape == (D, HEADS * 24)


def test_equal_width_is_the_model_without_the_key():
    given, usual = (translator(width=width) for width in (D, None))
    ours, theirs = given.state_dict(), usual.state_dict()
    assert [*ours] == [*theirs]
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("draws", ["gpt2", "linear"])
@pytest.mark.parametrize("name", ["merged_w", "merged_ov"])
def test_merged_forms_are_initialized_as_standard(name, draws):
    source, target = tokens(SOURCE), tokens(CONTEXT)
    found, expected = (translator(n, init=draws)(source, target) for n in (name, "standard"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["standard", "sym_pairwise", "collaborative", "sym_diag"])
def test_an_encoder_is_initialized_as_in_a_model_of_its_width(name):
    """Also its biases, and the tensors that are no matrices."""
    options = {"variant": {"rank": 4}} if name == "collaborative" else {}
    model = {"init": "linear", "bias": True}
    found = translator(name, "encoder", **options, **model)
    expected = translator(name, "encoder", d_model=24, **options, **model).state_dict()
    encoder = {key: value for key, value in found.state_dict().items() if key.startswith("encoder")}
    assert len(encoder) > 9
    for key, value in encoder.items():
        assert torch.equal(value, expected[key]), key
    cross = found.blocks[0].cross_attention
    for bias, width in ((cross.qk.b_q, D), (cross.ov.b_v, 24), (cross.ov.b_o, D)):
        assert 0.5 < bias.abs().max() * width**0.5 <= 1


@pytest.mark.parametrize(
    ("name", "sites", "rank"),
    [
        ("low_rank_w", "encoder", 3),
        ("low_rank_w", "decoder", 2),
        ("low_rank_w", "cross", 2),
        ("collaborative", "encoder", 6),
        ("collaborative", "all", 4),
    ],
)
def test_rank_follows_the_narrowest_stream_that_the_variant_reads(name, sites, rank):
    layer = translator(name, sites).variant_layer()
    assert layer.module.qk.spec.rank == rank


def test_rank_above_the_narrowest_stream_is_refused():
    with pytest.raises(ImpossibleConfig, match=r"above model\.encoder_d_model=8"):
        translator("collaborative", "cross", 8, variant={"rank": 10})
    translator("collaborative", "decoder", 8, variant={"rank": 10})


@pytest.mark.parametrize("name", ALLOWED)
def test_padded_sources_equal_their_sequences_one_by_one(name):
    model = randomized(translator(name, options={"padding": True}))
    plain = translator(name)
    plain.double().load_state_dict(model.state_dict())
    source, target = tokens(SOURCE), tokens(CONTEXT)
    source[1, 3:] = PAD
    for n, length in enumerate((SOURCE, 3)):
        expected = plain(source[n : n + 1, :length], target[n : n + 1])
        found = model(source, target)[n : n + 1]
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ALLOWED)
def test_cached_decoding_equals_the_full_pass(name):
    model = randomized(translator(name, layers=2, bias=True))
    source, target = tokens(SOURCE), tokens(CONTEXT)
    y, caches = model.encode(source), model.make_caches()
    pieces = torch.cat([model.decode(y, piece, caches) for piece in target.split((2, 1, 2), 1)], 1)
    torch.testing.assert_close(pieces, model.decode(y, target), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("name", "sites", "width"), CASES)
def test_flops_agree_with_torchs_counter(name, sites, width):
    model = translator(name, sites, width, layers=2, encoder_layers=3, options={"kernel": "math"})
    counted, targets = count_flops(model)
    ours = forward_flops_per_token(model, targets, masked=True)
    assert counted == pytest.approx(ours * targets, rel=1e-12)


@pytest.mark.parametrize("tied", [True, False])
def test_flops_of_a_factorized_embedding_agree_with_torchs_counter(tied):
    model = translator(embedding_width=6, tied=tied, options={"kernel": "math"})
    counted, targets = count_flops(model)
    ours = forward_flops_per_token(model, targets, masked=True)
    assert counted == pytest.approx(ours * targets, rel=1e-12)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ALLOWED)
def test_cache_of_a_source_is_that_of_real_tensors(name, width):
    """Layers that cache the source itself share one copy."""
    model = translator(name, width=width, layers=2)
    x_BTD, y_BSD = torch.randn(1, CONTEXT, D), torch.randn(1, SOURCE, width)
    tensors = {}
    for i, layer in enumerate(layer for layer in model.attention_layers() if not layer.is_self):
        cache = Cache(SOURCE)
        layer.module(x_BTD, y_BSD, causal=False, cache=cache)
        tensors |= {(name, i * (name != "x")): value for name, value in cache.tensors.items()}
    assert cached_by_site(model)["cross"] == sum(t.numel() for t in tensors.values()) / SOURCE


@pytest.mark.exhaustive
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("name", "sites", "width"), CASES)
def test_identities_hold(name, sites, width, bias):
    model = translator(name, sites, width, bias=bias)
    for layer in model.attention_layers():
        if layer.site in model.sites:
            streams = random_streams(model.config, layer.site, 8, 0)
            module = randomize_layer(layer.module.double(), 0)
            for outcome in verify(name, [module], [streams], fresh=True, site=layer.site):
                assert outcome.holds, outcome


@pytest.mark.parametrize("name", ALLOWED)
def test_diagnostics_measure_every_layer(name):
    model = translator(name, layers=2)
    starts = [layer.module for layer in model.attention_layers()]
    inputs = tokens(SOURCE), tokens(CONTEXT)
    row = DiagnosticPanel(model, *inputs, starts=starts).row()
    sites = [layer.site for layer in model.attention_layers()]
    layers = dict(zip(sites, model.attention_layers(), strict=False))
    if not layers["cross"].module.no_circuit_reason:
        found = row["qk"]
        assert [values is None for values in found["symmetry"]] == [s == "cross" for s in sites]
        assert None not in found["frobenius"]
        lengths = {len(values) for values_H in found["singular"] for values in values_H}
        assert len(lengths) == 1
        b_HDD = layers["cross"].module.qk.circuit()[0].detach().double()
        scale = layers["cross"].module.qk.scale * (D // HEADS) ** 0.5
        norms = (scale * b_HDD).flatten(1).norm(dim=1).tolist()
        cross = [
            values
            for site, values in zip(sites, found["frobenius"], strict=True)
            if site == "cross"
        ]
        assert cross[-1] == pytest.approx(norms, rel=1e-4)
