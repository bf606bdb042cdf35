"""Cost of models with an encoder: FLOPs against torch's counter, caches against tensors."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from qkablate.attention import Cache
from qkablate.config import Config, ModelConfig, VariantConfig, resolve_variant, variants
from qkablate.config.variant import SITES, check_variant
from qkablate.errors import ImpossibleConfig
from qkablate.models.build import build_model
from qkablate.models.cost import cached_by_site, describe_cost, forward_flops_per_token

T, S, D, HEADS, VOCABULARY = 6, 10, 16, 4, 11
ALL = list(variants())


def build(name, sites="all", **changes):
    shape = {"form": "encoder_decoder", "encoder_layers": 3, "source": S} | changes
    model = ModelConfig(layers=2, d_model=D, heads=HEADS, context=T, **shape)
    variant = dataclasses.replace(VariantConfig(**variants()[name]), sites=sites)
    check_variant(variant, model)
    built = build_model(model, resolve_variant(variant, model), VOCABULARY, kernel="math")
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return built


def count_flops(model):
    inputs = [torch.randint(VOCABULARY, (3, length)) for length in model.input_lengths()]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(*inputs)
    return counter.get_total_flops(), inputs[-1].numel()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("sites", ["all", *SITES["encoder_decoder"]])
def test_flops_agree_with_torchs_counter_at_every_site(name, sites):
    try:
        model = build(name, sites, bias=name == "collaborative")
    except ImpossibleConfig:
        assert (sites, variants()[name]["mask_self"]) == ("cross", True)
        return
    counted, targets = count_flops(model)
    ours = forward_flops_per_token(model, targets, masked=True)
    assert counted == pytest.approx(ours * targets, rel=1e-12)


@pytest.mark.parametrize(
    "changes",
    [
        {"form": "encoder", "encoder_layers": None, "source": None},
        {"embedding_width": 8},
        {"embedding_width": 8, "tied": False},
        {"mlp_ratio": 0.0},
        {"mlp": "swiglu", "norm_kind": "rms"},
        {"mlp": "relu2"},
    ],
    ids=str,
)
def test_flops_of_other_shapes_agree_with_torchs_counter(changes):
    model = build("standard", **changes)
    counted, targets = count_flops(model)
    ours = forward_flops_per_token(model, targets, masked=True)
    assert counted == pytest.approx(ours * targets, rel=1e-12)


def rows_of(name, sites="all"):
    config = Config()
    variant = dataclasses.replace(VariantConfig(**variants()[name]), sites=sites)
    config = dataclasses.replace(config, model=build(name, sites).config, variant=variant)
    return {row["site"]: row for row in describe_cost(config, build(name, sites), VOCABULARY)}


def flops_of(row):
    names = ("projection", "score", "value")
    return T * sum(row[f"{name}_flops_per_token"] for name in names)


def test_flops_are_those_of_the_formulas():
    """Cost of Vaswani et al.'s layers, whose T target tokens attend to S source tokens."""
    standard, merged = rows_of("standard"), rows_of("merged_w")
    assert flops_of(standard["encoder"]) == pytest.approx(8 * D**2 * S + 4 * D * S**2)
    assert flops_of(standard["decoder"]) == pytest.approx(8 * D**2 * T + 2 * D * T * (T + 1))
    cross = 4 * D**2 * T + 4 * D**2 * S + 4 * D * T * S
    assert flops_of(standard["cross"]) == pytest.approx(cross)
    assert flops_of(rows_of("no_q")["cross"]) == pytest.approx(cross - 2 * D**2 * T)
    assert flops_of(rows_of("no_k")["cross"]) == pytest.approx(cross - 2 * D**2 * S)
    # Two streams share W: it is applied to both.
    assert flops_of(rows_of("shared_qk")["cross"]) == pytest.approx(cross)
    free = (2 * HEADS + 2) * D**2 * T + 2 * D**2 * S + 2 * HEADS * D * T * S + 2 * D * T * S
    assert flops_of(merged["cross"]) == pytest.approx(free)
    heights = {"encoder": S * S, "decoder": T * T, "cross": T * S}
    assert {site: row["score_matrix_bytes"] for site, row in standard.items()} == {
        site: 2 * HEADS * height for site, height in heights.items()
    }


def measure_cross_cache(model):
    """Return how many numbers the cross-attention keeps per token of a source, one copy of each."""
    x_BTD, y_BSD = torch.randn(1, T, D), torch.randn(1, S, D)
    tensors = {}
    for i, layer in enumerate(layer for layer in model.attention_layers() if not layer.is_self):
        cache = Cache(S)
        layer.module(x_BTD, y_BSD, causal=False, cache=cache)
        tensors |= {(name, i * (name != "x")): value for name, value in cache.tensors.items()}
    numbers = sum(value.numel() for value in tensors.values())
    assert all(torch.equal(tensors[key], y_BSD) for key in tensors if key[0] == "x")
    return numbers / S


@pytest.mark.parametrize("name", ALL)
def test_cache_of_a_source_is_that_of_real_tensors(name):
    model = build(name)
    assert cached_by_site(model)["cross"] == measure_cross_cache(model)


def test_layers_that_cache_the_source_itself_share_one_copy():
    layers = 2
    assert cached_by_site(build("standard")) == {
        "encoder": 0,
        "decoder": 2 * layers * D,
        "cross": 2 * layers * D,
    }
    assert cached_by_site(build("merged_w"))["cross"] == (layers + 1) * D
    model = build("merged_w").config
    for qk in ("merged", "no_k"):
        for ov in ("no_v", "merged"):
            variant = resolve_variant(VariantConfig(qk=qk, ov=ov), model)
            found = cached_by_site(build_model(model, variant, VOCABULARY))
            assert (found["cross"], found["decoder"]) == (D, layers * D)
