"""Shares of a model that the forms of the catalogue can hold."""

import json
import math
from pathlib import Path

import pytest
import torch

from qkablate.config import variants
from qkablate.data.batches import PAD
from qkablate.diagnostics.forms import EXACT, measure_forms
from qkablate.pretrained.import_run import import_run
from qkablate.pretrained.repository import find_repository
from qkablate.training.warm_start.restore import restore
from tests.pretrained.random_runs import random_run
from tests.pretrained.test_import_run import write_published

TOKENS = torch.randint(61, (8, 16), generator=torch.Generator().manual_seed(0))
HOLD_ALL = {"merged_w", "merged_ov", "wide_qk", "four_matrix", "four_ov", "six_matrix", "standard"}


def measure(run, **options):
    config = run.config
    return measure_forms(run.model, config.model, config.variant, (TOKENS,), **options)


def test_imported_model_is_held_by_merged_w_with_equal_logits(tmp_path):
    write_published(tmp_path / "published")
    imported = import_run(find_repository(str(tmp_path / "published")), str(tmp_path / "out"))
    found = measure(restore(imported.folder))
    exact = {form.variant: form for form in found.forms if form.is_exact}
    assert {*exact} == HOLD_ALL
    assert found.precision == "fp64"
    for form in exact.values():
        assert form.logits is not None
        assert form.logits <= 1e-10
    assert exact["standard"].share == 1
    # W of d × d per head in place of W_q and W_k: 4 heads of 16 × 16 and u, against 2 of 16 × 16.
    counts = 4 * (16 * 16 + 16) + 2 * (16 * 16 + 16)
    assert exact["merged_w"].params == 2 * counts


def test_every_variant_is_measured_or_has_a_reason():
    found = measure(random_run(Path("unused"), "standard"))
    names = [form.variant for form in found.forms]
    assert {*names} | {*found.obstacles} == {*variants()}
    assert not {*names} & {*found.obstacles}
    assert all(found.obstacles.values())
    assert "normalized" in found.obstacles["qk_norm"]


def test_best_forms_come_first():
    found = measure(random_run(Path("unused"), "standard"))
    worst = [max(form.scores, form.output) for form in found.forms]
    exact = [value < EXACT for value in worst]
    assert exact == sorted(exact, reverse=True)
    assert worst[sum(exact) :] == sorted(worst[sum(exact) :])
    assert [form.logits is None for form in found.forms] == [not value for value in exact]


def test_error_of_the_model_is_the_root_mean_square_of_its_layers():
    found = measure(random_run(Path("unused"), "standard"))
    for form in found.forms:
        squares = [layer.scores**2 for layer in form.layers]
        assert form.scores == pytest.approx(math.sqrt(sum(squares) / 2))


def test_model_without_matrices_of_scores_is_held_by_its_own_scores_alone():
    run = random_run(Path("unused"), "standard", position="rope")
    found = measure(run)
    names = {form.variant for form in found.forms}
    assert {"standard", "four_ov", "merged_ov", "no_v", "no_o"} <= names
    assert "rope" in found.obstacles["low_rank_w"]
    errors = {form.variant: form.scores for form in found.forms}
    assert errors.pop("uniform") == pytest.approx(1)  # it has no scores to set
    assert set(errors.values()) == {0}


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", ["encoder", "encoder_decoder"])
def test_padding_changes_no_form(form):
    run = random_run(Path("unused"), "standard", layers=1, form=form)
    run.model.padding = True
    sequences = TOKENS[:3, :5], TOKENS[3:6, :7]
    inputs = sequences[: len(run.model.input_lengths())]
    padded = tuple(torch.nn.functional.pad(tokens, (0, 6), value=PAD) for tokens in inputs)
    config = run.config
    expected, found = (
        measure_forms(run.model, config.model, config.variant, tokens)
        for tokens in (inputs, padded)
    )
    parts = {form.variant: form for form in found.forms}
    assert len(parts) == len(expected.forms)
    for form in expected.forms:
        for one, other in zip(form.layers, parts[form.variant].layers, strict=True):
            assert other.scores == pytest.approx(one.scores, rel=1e-3, abs=1e-6)
            assert other.output == pytest.approx(one.output, rel=1e-3, abs=1e-6)
        assert parts[form.variant].is_exact == form.is_exact
        assert not form.is_exact or parts[form.variant].logits < 1e-8


def test_precision_of_the_logits_is_that_asked_for():
    run = random_run(Path("unused"), "standard")
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    found = measure(run, precision="fp32")
    assert found.precision == "fp32"
    residuals = [form.logits for form in found.forms if form.variant == "merged_w"]
    assert 1e-9 < residuals[0] < 1e-4
    after = run.model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_progress_reaches_its_end():
    seen = []
    run = random_run(Path("unused"), "standard")
    found = measure(run, progress=lambda stage, done, total: seen.append((stage, done, total)))
    forms = [(done, total) for stage, done, total in seen if stage == "forms"]
    count = 2 * (1 + len(found.forms))
    assert forms == [(done, count) for done in range(count + 1)]


def test_content_is_json():
    content = measure(random_run(Path("unused"), "merged_w")).content()
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    assert len(content["forms"][0]["layers"]) == 2
    assert len(content["forms"][0]["layers"][0]["scores_H"]) == 4
