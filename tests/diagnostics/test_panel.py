"""Rows of diagnostics: the same shape for every variant, deterministic, without side effects."""

import dataclasses
import json

import pytest
import torch

from qkablate.config import DataConfig, ModelConfig, VariantConfig, resolve_variant, variants
from qkablate.data import open_task
from qkablate.diagnostics import circuits, panel, patterns
from qkablate.diagnostics.panel import DiagnosticPanel, repeat_blocks, round_digits
from qkablate.models.build import build_model
from qkablate.models.gpt import GPT
from qkablate.training.recorders.diagnostics import validation_inputs

MODEL = ModelConfig(layers=3, d_model=16, heads=4, context=12)
TOKENS = torch.arange(36).view(3, 12) * 5 % 23


def model_of(name="standard", config=MODEL, seed=1):
    variant = resolve_variant(VariantConfig(**variants()[name]), config)
    return GPT(config, variant, 30).init_(seed)


def moved(model):
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(number)
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def test_layers_of_other_sites_are_measured_in_their_own_form():
    shape = {"form": "encoder_decoder", "source": 9}
    config = dataclasses.replace(MODEL, layers=1, **shape)
    inputs = torch.arange(18).view(2, 9) % 23, TOKENS[:2]
    rows = {}
    for sites in ("cross", "all"):
        wanted = VariantConfig(**variants()["merged_w"], sites=sites)
        model = build_model(config, resolve_variant(wanted, config), 30).init_(1)
        starts = model.initial_attention_layers(1)
        rows[sites] = moved_row = DiagnosticPanel(model, *inputs, starts=starts).row()
        assert all(len(layers) == 3 for layers in moved_row["qk"].values())
    # Only a full matrix has a part beyond the rank of standard's.
    assert [x is None for x in rows["cross"]["qk"]["off_rank"]] == [True, True, False]
    assert rows["cross"]["qk"]["stable_rank"][2] == rows["all"]["qk"]["stable_rank"][2]
    assert [x is None for x in rows["cross"]["qk"]["balance"]] == [False, False, True]


NO_MATRIX = ("static_scores", "uniform")
FULL = ("merged_w", "symmetric_w", "wide_qk")


@pytest.mark.parametrize("name", variants())
def test_every_variant_has_a_row(name):
    model = model_of(name)
    found = DiagnosticPanel(model, TOKENS, starts=model.initial_attention_layers(1))
    start, row = found.row(), None
    moved(model)
    row = found.row()
    assert list(row) == ["qk", "ov", "attention"]
    assert tuple(row["qk"]) == tuple(row["ov"]) == circuits.MEASURES
    assert tuple(row["attention"]) == panel.ATTENTION_MEASURES
    assert json.loads(json.dumps(row, allow_nan=False)) == row
    for part, measures in row.items():
        for measure, layers in measures.items():
            assert len(layers) == 3
            if part == "qk" and name in NO_MATRIX:
                assert layers == [None] * 3
            elif measure not in ("balance", "off_rank", *patterns.ROUNDING_MEASURES):
                assert all(len(heads) == 4 for heads in layers), (part, measure)
    assert all(len(s) == 4 for s in row["ov"]["singular"][0])
    assert (row["qk"]["off_rank"][0] is not None) == (name in FULL)
    assert (row["qk"]["balance"][0] is None) == (
        model.attention_layers()[0].module.qk.factors != 2 or name in NO_MATRIX
    )
    for part in ("qk", "ov"):
        if row[part]["moved"][0] is not None:
            assert start[part]["moved"] == [[0.0] * 4] * 3
            still = part == "qk" and name == "no_qk"
            assert all((x > 0) != still for heads in row[part]["moved"] for x in heads)


@pytest.mark.parametrize("name", ["merged_w", "static_scores", "merged_ov"])
def test_layers_of_other_sites_are_measured_as_in_standard(name):
    """Each in its own form, in the order of computation: encoder, decoder, cross."""
    config = ModelConfig("encoder_decoder", layers=1, d_model=16, heads=4, context=12)
    rows = {}
    for word, sites in (("standard", "all"), (name, "encoder"), (name, "cross")):
        variant = resolve_variant(VariantConfig(**variants()[word] | {"sites": sites}), config)
        model = build_model(config, variant, 30).init_(1)
        starts = model.initial_attention_layers(1)
        rows[sites] = DiagnosticPanel(model, TOKENS, TOKENS, starts=starts).row()
    side = "ov" if name == "merged_ov" else "qk"
    for measure, (encoder, decoder, cross) in rows["all"][side].items():
        assert (encoder is None) == (measure == "off_rank")
        kept = {"encoder": [None, decoder, cross], "cross": [encoder, decoder, None]}
        for sites, expected in kept.items():
            found = rows[sites][side][measure]
            for layer, values in enumerate(expected):
                if values is not None:
                    assert found[layer] == values, (sites, measure)


def test_batching_of_layers_does_not_matter(monkeypatch):
    for name in ("standard", "merged_w"):
        model = moved(model_of(name))
        one = DiagnosticPanel(model, TOKENS, starts=model.initial_attention_layers(1)).row()
        with monkeypatch.context() as patch:
            patch.setattr(panel, "_MAX_NUMEL", 1)
            other = DiagnosticPanel(model, TOKENS, starts=model.initial_attention_layers(1)).row()
        for part in one:
            for measure, layers in one[part].items():
                for a, b in zip(layers, other[part][measure], strict=True):
                    assert (a is None) == (b is None)
                    if a is not None:
                        flat = [torch.tensor(x).flatten().tolist() for x in (a, b)]
                        assert flat[0] == pytest.approx(flat[1], rel=1e-4, abs=1e-6)


def test_model_and_generators_are_unchanged():
    model = moved(model_of())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state, numpy_state = torch.get_rng_state(), __import__("numpy").random.get_state()[1].copy()
    model.train()
    found = DiagnosticPanel(model, TOKENS, starts=model.initial_attention_layers(1))
    assert found.row() == found.row()
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert (__import__("numpy").random.get_state()[1] == numpy_state).all()


def test_non_finite_values_become_none():
    model = model_of()
    found = DiagnosticPanel(model, TOKENS, starts=model.initial_attention_layers(1))
    with torch.no_grad():
        model.blocks[1].attention.qk.w_q[0, 0] = torch.nan
        model.blocks[2].attention.ov.w_o[0, 0] = torch.inf
    row = found.row()
    assert [heads is None for heads in row["qk"]["nuclear"]] == [False, True, False]
    assert [heads is None for heads in row["ov"]["nuclear"]] == [False, False, True]
    assert row["attention"]["entropy"][1][0] is None
    assert row["attention"]["entropy"][0][0] > 0
    json.dumps(row, allow_nan=False)


def test_context_of_one_position():
    config = ModelConfig(layers=1, d_model=16, heads=4, context=1)
    model = model_of(config=config)
    row = DiagnosticPanel(model, TOKENS[:, :1], starts=model.initial_attention_layers(1)).row()
    assert row["attention"]["entropy"] == row["attention"]["induction"] == [[None] * 4]


def test_repeated_blocks():
    repeats_BT = repeat_blocks(TOKENS)
    assert repeats_BT.shape == TOKENS.shape
    assert torch.equal(repeats_BT[:, :6], repeats_BT[:, 6:])
    assert set(repeats_BT.flatten().tolist()) <= set(TOKENS.flatten().tolist())
    assert all(len(set(block)) == 6 for block in repeats_BT[:, :6].tolist())
    assert torch.equal(repeats_BT, repeat_blocks(TOKENS))
    assert not torch.equal(repeats_BT[0], repeats_BT[1])
    few = repeat_blocks(torch.tensor([[0, 1, 0, 1, 1, 0, 1]]))
    assert few.shape == (1, 6)
    assert torch.equal(few[:, :3], few[:, 3:])


def test_values_have_five_digits():
    assert round_digits([1.23456789, [1e-9 / 3, 123456.0], float("nan"), float("inf")]) == [
        *(1.2346, [3.3333e-10, 123460.0]),
        *(None, None),
    ]


def test_initial_layers_follow_the_seed():
    for name in ("standard", "merged_w", "static_scores", "qk_norm"):
        model = model_of(name, seed=7)
        layers = zip(model.attention_layers(), model.initial_attention_layers(7), strict=True)
        for layer, initial in layers:
            for (key, a), (other, b) in zip(
                layer.module.state_dict().items(), initial.state_dict().items(), strict=True
            ):
                assert key == other
                assert torch.equal(a, b)
        first = next(model.initial_attention_layers(8))
        assert name != "standard" or not torch.equal(
            first.qk.w_q, model.attention_layers()[0].module.qk.w_q
        )


@pytest.mark.parametrize("form", ["encoder", "encoder_decoder"])
def test_padding_changes_no_measure_of_attention(form):
    """Measure the same sums, whose sources and targets are filled up to two lengths."""
    config = ModelConfig(form=form, layers=2, d_model=16, heads=4, context=50)
    model = build_model(config, resolve_variant(VariantConfig(), config), 13, padding=True)
    moved(model.init_(0))
    rows = []
    for length in (12, 50):
        sizes = dataclasses.replace(config, context=length, source=length)
        data = DataConfig(source="add", digits=5, extra_digits=0, val_tokens=9 * length)
        inputs = validation_inputs(open_task(data, sizes), length)
        assert {part.shape for part in inputs} == {(8, length)}
        rows.append(DiagnosticPanel(model, *inputs, starts=()).row()["attention"])
    layers = model.attention_layers()
    for name in panel.ATTENTION_MEASURES:
        for layer, short, long in zip(layers, *(row[name] for row in rows), strict=True):
            if name in patterns.ROUNDING_MEASURES and ".1." in layer.name:
                continue  # which is that of streams that are rounded differently
            assert (short is None) == (long is None)
            assert short is None or long == pytest.approx(short, rel=1e-4), (layer.name, name)
    for name in ("sink", "rounding"):
        assert [values is None for values in rows[0][name]] == [not one.is_self for one in layers]
