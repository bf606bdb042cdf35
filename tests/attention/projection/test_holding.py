"""Forms that hold a part of a layer, without a layer of them: the errors of `project_layer`."""

from pathlib import Path

import pytest
import torch

from qkablate.attention.projection.holding import LayerMeasure
from qkablate.attention.projection.moments import with_bias
from qkablate.attention.projection.project import (
    compute_moments,
    find_obstacle,
    project_layer,
    scaled_circuit,
)
from qkablate.config import VariantConfig, resolve_variant, variants
from qkablate.models.catalogue import make_attention
from tests.pretrained.random_runs import random_run

SIZES = {"d_model": 48, "heads": 6, "layers": 1}
# They mix queries and keys, so that the directions they are fitted in matter.
SYMMETRIC = ("shared_qk", "sym_diag", "sym_pairwise", "symmetric_w")
EXACT = ("merged_w", "merged_ov", "wide_qk", "four_matrix", "four_ov", "six_matrix")


def layer_and_moments(name, **changes):
    run = random_run(Path("unused"), name, **SIZES | changes)
    tokens = torch.randint(61, (40, 16), generator=torch.Generator().manual_seed(0))
    ((layer, streams),) = run.model.attention_inputs(tokens)
    return run, layer.module, compute_moments(layer.module, streams, causal=True)


def targets_of(run, layer):
    """Yield an empty layer of each form that can hold a part of a layer."""
    for name in variants():
        variant = resolve_variant(VariantConfig(**variants()[name]), run.config.model)
        target = make_attention(run.config.model, variant)
        if not find_obstacle(layer, target):
            yield name, target


@pytest.mark.exhaustive
@pytest.mark.parametrize("source", ["standard", "merged_w", "no_o", "gqa"])
@pytest.mark.parametrize("bias", [True, False])
def test_errors_are_those_of_the_projection(source, bias):
    run, layer, moments = layer_and_moments(source, bias=bias)
    measure = LayerMeasure(layer, moments)
    found = dict(targets_of(run, layer))
    assert {*SYMMETRIC, *EXACT, "no_q", "no_k", "no_v", "no_o", "gqa", "mqa"} <= {*found}
    for name, target in found.items():
        held = measure.measure(target.to("meta"))
        loss = project_layer(layer, target.to_empty(device="cpu"), moments)
        tolerance = 0.03 if name in SYMMETRIC else 1e-5
        assert held.scores == pytest.approx(loss.qk_scores, rel=tolerance, abs=1e-7), name
        assert held.output == pytest.approx(loss.ov_output, rel=1e-5, abs=1e-7), name


def test_errors_of_the_heads_make_that_of_the_layer():
    run, layer, moments = layer_and_moments("standard")
    measure, targets = LayerMeasure(layer, moments), dict(targets_of(run, layer))
    power_H = moments.score_power(with_bias(*scaled_circuit(measure.source.qk)))
    for name in ("low_rank_w", "no_q"):
        held = measure.measure(targets[name])
        squares_H = torch.tensor(held.scores_H, dtype=torch.float64).square()
        whole = (squares_H * power_H).sum() / power_H.sum()
        assert held.scores == pytest.approx(float(whole.sqrt()), rel=1e-6)
        assert held.output_H == [0.0] * 6


def test_form_of_the_layer_and_forms_that_hold_it_lose_nothing():
    run, layer, moments = layer_and_moments("standard")
    measure, targets = LayerMeasure(layer, moments), dict(targets_of(run, layer))
    own = measure.measure(targets["standard"])
    assert (own.scores, own.output, own.scores_H) == (0.0, 0.0, [0.0] * 6)
    for name in EXACT:
        held = measure.measure(targets[name])
        assert max(held.scores, held.output) < 1e-12, name


@pytest.mark.parametrize("site", ["encoder", "cross"])
def test_layers_of_streams_of_other_widths_are_measured(site):
    changes = {"form": "encoder_decoder", "encoder_d_model": 24, "source": 12, "layers": 1}
    run = random_run(Path("unused"), "standard", d_model=48, heads=6, **changes)
    draw = torch.Generator().manual_seed(0)
    inputs = [torch.randint(1, 61, (40, n), generator=draw) for n in run.model.input_lengths()]
    streams = {
        layer.site: (layer.module, read) for layer, read in run.model.attention_inputs(*inputs)
    }
    layer, read = streams[site]
    moments = compute_moments(layer, read, causal=False)
    measure = LayerMeasure(layer, moments)
    for name in ("low_rank_w", "merged_w", "no_k", "no_v", "gqa", "mqa"):
        variant = resolve_variant(VariantConfig(**variants()[name]), run.config.model)
        target = make_attention(run.config.model, variant, site)
        held, loss = measure.measure(target), project_layer(layer, target, moments)
        assert held.scores == pytest.approx(loss.qk_scores, rel=1e-5, abs=1e-7), name
        assert held.output == pytest.approx(loss.ov_output, rel=1e-5, abs=1e-7), name
