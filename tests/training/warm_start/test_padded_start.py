"""Runs on padded pairs that begin from a trained one; and the variants that a parent can become."""

import dataclasses
from pathlib import Path

import pytest

from qkablate.config import Config, DataConfig, ModelConfig, VariantConfig, resolve, variants
from qkablate.data import open_task
from qkablate.data.batches import IGNORE, PAD
from qkablate.models.build import build_model
from qkablate.training.warm_start.start import (
    TOKENS,
    CannotProject,
    check_parent,
    project_parent,
)
from tests.diagnostics.test_panel import moved
from tests.pretrained.random_runs import random_run

WIDTHS = {"encoder": {}, "encoder_decoder": {"encoder_d_model": 24}}


def project(form, length, name="low_rank_w"):
    """Project a model of sums that are filled up to a length; return losses and batches read."""
    sizes = {"layers": 1, "d_model": 16, "heads": 4, "context": 40, "position": "none"}
    data = DataConfig(source="add", digits=5, extra_digits=0, val_tokens=40, test_tokens=40)
    model = ModelConfig(form=form, **sizes, **WIDTHS[form])
    variant = VariantConfig(**variants()[name])
    config = resolve(
        Config(model=model, data=data, variant=variant, device="cpu", threads=1, matmul="torch")
    )
    task = open_task(data, dataclasses.replace(config.model, context=length, source=length))
    standard = resolve(dataclasses.replace(config, variant=VariantConfig())).variant
    parent, child = (
        build_model(config.model, v, 13, padding=True).init_(0) for v in (standard, config.variant)
    )
    read, batches = [], task.batches

    class Recorded:
        def __init__(self, **options):
            self.batches = batches(**options)

        def step(self, step):
            read.extend(batch := self.batches.step(step))
            return batch

    task.batches = Recorded
    return project_parent(moved(parent).eval(), child, config, task), read


@pytest.mark.parametrize("form", ["encoder", "encoder_decoder"])
@pytest.mark.parametrize("name", ["low_rank_w", "no_v"])
def test_padding_changes_no_error_of_the_projection(form, name):
    (short, _), (long, _) = (project(form, length, name) for length in (12, 40))
    assert len(short) == (1 if form == "encoder" else 3)
    for one, other in zip(short, long, strict=True):
        assert other.heads == one.heads
        assert other.qk_scores == pytest.approx(one.qk_scores, rel=1e-4)
        assert other.ov_output == pytest.approx(one.ov_output, rel=1e-4)
        assert max(one.qk_scores, one.ov_output) > 0.01


def test_both_streams_are_read_until_their_moments_are_known():
    """Padding is not counted, and the encoder is wider than the decoder."""
    _, read = project("encoder_decoder", 40)

    def count(batches):
        sources = sum(int((batch.inputs[0] != PAD).sum()) for batch in batches)
        return sources, sum(int((batch.targets_NA != IGNORE).sum()) for batch in batches)

    sources, targets = count(read)
    assert sources >= TOKENS * 24
    assert targets >= TOKENS * 16
    sources, targets = count(read[:-1])
    assert sources < TOKENS * 24 or targets < TOKENS * 16


@pytest.mark.parametrize("sites", ["all", "cross", "decoder"])
def test_possible_variants_hold_the_layers_of_all_sites(sites):
    """A circuit of one width cannot be used by attention between streams of two."""
    sizes = {"form": "encoder_decoder", "source": 12, "encoder_d_model": 24}
    parent = random_run(Path("unused"), "standard", **sizes)
    parent = dataclasses.replace(parent, identity={"data_fingerprint": "f"})
    variant = VariantConfig(**variants()["static_scores"], sites=sites)
    config = resolve(dataclasses.replace(parent.config, variant=variant))
    model = build_model(config.model, config.variant, 61)
    with pytest.raises(CannotProject) as error:
        check_parent(parent, config, model, "f")
    possible = str(error.value).partition("possible: ")[2].rstrip(")").split(", ")
    assert {"merged_w", "no_q"} <= {*possible}
    assert ("shared_qk" in possible) == (sites == "decoder")
