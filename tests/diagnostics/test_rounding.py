"""The difference of the two orders of multiplication."""

from contextlib import nullcontext

import pytest
import torch

from qkablate.diagnostics.panel import DiagnosticPanel
from qkablate.diagnostics.patterns import ROUNDING_MEASURES, compute_rounding
from tests.models.test_gpt import gpt, tokens_of

BOTH_ORDERS = ["standard", "shared_qk", "low_rank_w", "wide_qk", "no_q", "four_matrix", "gqa"]


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


def test_panel_has_a_value_for_each_head_or_none():
    rows = {}
    for name in ("standard", "merged_w"):
        rows[name] = DiagnosticPanel(gpt(name), tokens_of(4, 16), starts=()).row()["attention"]
    for measure in ROUNDING_MEASURES:
        assert [len(layer) for layer in rows["standard"][measure]] == [4, 4]
        assert rows["merged_w"][measure] == [None, None]
