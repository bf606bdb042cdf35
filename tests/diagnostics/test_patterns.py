"""Measures of attention: against their definitions, and on attention with known results."""

import math
from contextlib import nullcontext

import pytest
import torch

from qkablate.config import ModelConfig, VariantConfig, resolve_variant, variants
from qkablate.diagnostics import attention_weights
from qkablate.diagnostics.panel import DiagnosticPanel
from qkablate.diagnostics.patterns import (
    ROUNDING_MEASURES,
    compute_patterns,
    compute_repeat_patterns,
    compute_rounding,
)
from qkablate.models.gpt import GPT
from tests.models.test_gpt import gpt, tokens_of

MODEL = ModelConfig(layers=2, d_model=16, heads=4, context=12, init="linear")
BOTH_ORDERS = ["standard", "shared_qk", "low_rank_w", "wide_qk", "no_q", "four_matrix", "gqa"]


def causal(s):
    return s + torch.full(s.shape[-2:], -torch.inf).triu(1).to(s)


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def attending(targets, length, strength=60.0):
    """Return scores by which query i attends only to targets(i)."""
    s = torch.zeros(1, 1, length, length, dtype=torch.float64)
    for i in range(length):
        s[0, 0, i, targets(i)] = strength
    return causal(s)


def slow(s):
    """Return the measures of one head, s_BTS, by their definitions."""
    spread = freedom = 0.0
    entropies, own, first, previous, sinks, largest = [], [], [], [], [], -math.inf
    length = s.shape[-1]
    for rows in s.tolist():
        weights = []
        for i, row in enumerate(rows):
            visible = [j for j in range(length) if row[j] != -math.inf]
            mean = sum(row[j] for j in visible) / len(visible)
            spread += sum((row[j] - mean) ** 2 for j in visible)
            freedom += len(visible) - 1
            largest = max(largest, *(row[j] for j in visible))
            total = sum(math.exp(row[j]) for j in visible)
            a = [math.exp(x) / total if x != -math.inf else 0.0 for x in row]
            weights.append((a, len(visible)))
            if len(visible) > 1:
                entropies.append(-sum(p * math.log(p) for p in a if p))
                own.append(a[i])
                first.append(a[0])
                previous.append(a[i - 1])
        late = weights[length // 2 :]
        received = [sum(a[j] - 1 / n for a, n in late) / len(late) for j in range(length // 2)]
        sinks.append(max(received))
    means = [sum(x) / len(x) for x in (entropies, own, first, previous, sinks)]
    names = ("entropy", "self", "first", "previous", "sink")
    return {
        "score_std": math.sqrt(spread / freedom),
        "score_max": largest,
        **dict(zip(names, means, strict=True)),
    }


@pytest.mark.parametrize("length", [2, 3, 8, 9])
@pytest.mark.parametrize("mask_self", [False, True])
def test_measures_follow_the_definitions(length, mask_self):
    if mask_self and length == 2:
        pytest.skip("no query sees two positions")
    s = causal(3 * normal(2, 3, length, length))
    if mask_self:
        own = torch.arange(1, length)
        s[:, :, own, own] = -torch.inf
    found = compute_patterns(s)
    for head in range(3):
        expected = slow(s[:, head])
        assert {name: value[head].item() for name, value in found.items()} == pytest.approx(
            expected
        )


def test_uniform_attention():
    length = 16
    found = {
        k: v.item() for k, v in compute_patterns(causal(torch.zeros(3, 1, length, length))).items()
    }
    counts = range(2, length + 1)
    share = sum(1 / n for n in counts) / len(counts)
    assert found["score_std"] == found["score_max"] == 0
    assert found["entropy"] == pytest.approx(sum(map(math.log, counts)) / len(counts))
    for name in ("self", "first", "previous"):
        assert found[name] == pytest.approx(share)
    assert found["sink"] == pytest.approx(0, abs=1e-6)


def test_heads_that_attend_to_one_position():
    length = 16
    for name, targets in {
        "self": lambda i: i,
        "first": lambda i: 0,
        "previous": lambda i: max(0, i - 1),
    }.items():
        found = {k: v.item() for k, v in compute_patterns(attending(targets, length)).items()}
        assert found[name] == pytest.approx(1)
        assert found["entropy"] == pytest.approx(0, abs=1e-12)
        assert found["score_max"] == 60
        # Attention to one position is a sink; attention to oneself gives less than uniform.
        assert (found["sink"] > 0.9) == (name == "first")
        assert (found["sink"] < 0) == (name == "self")
    # The sink may be any position.
    assert compute_patterns(attending(lambda i: min(i, 5), length))["sink"].item() > 0.9


def test_row_shift_changes_only_the_maximum():
    s, shift = causal(normal(2, 3, 8, 8)), 5 * normal(2, 3, 8, 1, seed=1)
    one, other = compute_patterns(s), compute_patterns(s + shift)
    for name in one.keys() - {"score_max"}:
        torch.testing.assert_close(one[name], other[name])


def test_induction_and_previous_token_heads():
    block = 8
    found = compute_repeat_patterns(attending(lambda i: max(0, i - block + 1), 2 * block))
    assert found["induction"].item() == pytest.approx(1)
    assert found["repeat_previous"].item() < 0.2
    found = compute_repeat_patterns(attending(lambda i: max(0, i - 1), 2 * block))
    assert found["repeat_previous"].item() == pytest.approx(1)
    assert found["induction"].item() == pytest.approx(0, abs=1e-12)
    # A head that attends to the same token instead of its successor.
    found = compute_repeat_patterns(attending(lambda i: max(0, i - block), 2 * block))
    assert found["induction"].item() == pytest.approx(0, abs=1e-12)


def test_measures_without_queries_are_nan():
    assert all(
        v.isnan().all()
        for k, v in compute_patterns(torch.zeros(1, 2, 1, 1)).items()
        if "_" not in k
    )
    assert all(
        v.isnan().all() for v in compute_repeat_patterns(causal(torch.zeros(1, 2, 3, 3))).values()
    )


@pytest.mark.parametrize("position", ["learned", "alibi", "rope", "none"])
@pytest.mark.parametrize("name", variants())
def test_scores_and_weights_reproduce_the_output(name, position):
    """The softmax of the scores times the values gives the output of the layer."""
    from dataclasses import replace

    from qkablate.errors import UserError

    config = replace(MODEL, position=position)
    try:
        variant = resolve_variant(VariantConfig(**variants()[name]), config)
        model = GPT(config, variant, 20)
    except UserError:
        pytest.skip("not supported")
    model.init_(1).double().eval()
    tokens_T = torch.arange(12) % 7
    a_LHTS = torch.stack(attention_weights(model, tokens_T)).double()
    assert a_LHTS.shape == (2, 4, 12, 12)
    torch.testing.assert_close(a_LHTS.sum(-1), torch.ones(2, 4, 12).double())
    assert not a_LHTS.triu(1).any()
    with torch.no_grad():
        layers = model.attention_inputs(tokens_T[None])
        for number, ((_, _, layer), (x_BTD,)) in enumerate(layers):
            v_BGTV = layer.ov.values(x_BTD, layer.qk.keys(x_BTD))
            v_BHTV = v_BGTV.repeat_interleave(4 // v_BGTV.shape[1], 1)
            written = layer.ov.write(a_LHTS[number][None] @ v_BHTV)
            torch.testing.assert_close(written, layer(x_BTD), rtol=1e-5, atol=1e-6)


def test_attention_inputs_are_what_the_layers_read():
    model = GPT(MODEL, resolve_variant(VariantConfig(), MODEL), 20).init_(1).eval()
    seen = []
    for _, _, layer in model.attention_layers():
        layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    tokens_BT = torch.arange(24).view(2, 12) % 20
    model(tokens_BT)
    read, seen[:] = list(seen), []
    inputs = model.attention_inputs(tokens_BT)
    for (layer, (x_BTD,)), expected, x in zip(inputs, model.attention_layers(), read, strict=True):
        assert layer == expected
        assert torch.equal(x_BTD, x)


def bf16():
    return torch.autocast("cpu", torch.bfloat16)


def layer_and_stream(name, **model):
    made = gpt(name, **model)
    return made.attention_layers()[0].module, torch.randn(3, 16, 32)


@pytest.mark.parametrize("name", BOTH_ORDERS)
def test_orders_are_equal_up_to_the_precision(name):
    layer, x_BTD = layer_and_stream(name)
    with torch.no_grad():
        single, half = (compute_rounding(layer, x_BTD, cast) for cast in (nullcontext, bf16))
    assert [*single] == [*ROUNDING_MEASURES]
    for head in range(4):
        assert single["rounding_fp64"][head] < 1e-13
        assert 1e-9 < single["rounding"][head] < 1e-5
        assert 1e-4 < half["rounding"][head] < 0.1


def test_difference_equals_that_of_the_scores():
    layer, x_BTD = layer_and_stream("standard")
    with torch.no_grad():
        found = compute_rounding(layer, x_BTD, nullcontext)["rounding"]
        w_q, w_k = layer.qk.w_q[:, 8:16], layer.qk.w_k[:, 8:16]  # of the second head
        separate = (x_BTD @ w_q) @ (x_BTD @ w_k).mT
        merged = (x_BTD @ (w_q @ w_k.T)) @ x_BTD.mT
    expected = float((merged - separate).norm() / separate.norm())
    assert found[1] == pytest.approx(expected, rel=0.3)  # rounding of rounding


@pytest.mark.parametrize(
    ("name", "model"),
    [("merged_w", {}), ("uniform", {}), ("qk_norm", {}), ("standard", {"position": "rope"})],
)
def test_forms_without_both_orders_have_none(name, model):
    layer, x_BTD = layer_and_stream(name, **model)
    assert compute_rounding(layer, x_BTD, nullcontext) == dict.fromkeys(ROUNDING_MEASURES)


def test_padding_changes_no_rounding():
    layer, x_BTD = layer_and_stream("standard")
    mask_BT = torch.arange(40) < torch.tensor([[9], [16], [5]])
    padded_BTD = torch.full((3, 40, 32), 100.0)
    padded_BTD[:, :16] = x_BTD
    expected = compute_rounding(layer, x_BTD, nullcontext, mask_BT[:, :16])
    found = compute_rounding(layer, padded_BTD, nullcontext, mask_BT)
    whole = compute_rounding(layer, x_BTD, nullcontext)
    # In fp64 some CPUs multiply matrices of other shapes in another order.
    for name, rtol in zip(ROUNDING_MEASURES, (1e-3, 0.1), strict=True):
        torch.testing.assert_close(found[name], expected[name], rtol=rtol, atol=0)
        assert not torch.equal(expected[name], whole[name])


def test_panel_has_a_value_for_each_head_or_none():
    rows = {}
    for name in ("standard", "merged_w"):
        rows[name] = DiagnosticPanel(gpt(name), tokens_of(4, 16), starts=()).row()["attention"]
    for measure in ROUNDING_MEASURES:
        assert [len(layer) for layer in rows["standard"][measure]] == [4, 4]
        assert rows["merged_w"][measure] == [None, None]


def test_padding_changes_no_measure():
    s_BHTS = normal(1, 3, 6, 6)
    mask_BT = torch.arange(6)[None] < 4
    padded_BHTS = s_BHTS.masked_fill(~mask_BT[:, None, None], -torch.inf)
    measures = compute_patterns(padded_BHTS, query_mask_BT=mask_BT)
    cut = compute_patterns(s_BHTS[..., :4, :4])
    for name, value in measures.items():
        torch.testing.assert_close(value, cut[name])
