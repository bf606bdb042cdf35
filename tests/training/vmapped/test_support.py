"""Obstacles to vmapping, and what `auto` chooses."""

from dataclasses import replace

import pytest

from qkablate.config import Config, ModelConfig, TrainConfig
from qkablate.training.vmapped.support import MANY, PAYS, resolve_vmap
from tests.training.vmapped.helpers import make_plans


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"model": {"dropout": 0.1}}, "model.dropout"),
        ({"train": {"checkpoint_activations": True, "vmap": 2}}, "train.checkpoint_activations"),
        ({"train": {"fsdp": True, "vmap": 2}}, "train.fsdp"),
        ({"model": {"context": 512}, "variant": "merged_w"}, "blocked"),
    ],
)
def test_unsupported_run_is_trained_alone_with_a_note(tmp_path, settings, reason):
    (plan,) = make_plans(tmp_path, 1, **settings)
    assert plan.config.train.vmap == 1
    assert "vmap" not in plan.identity
    (note,) = plan.notes
    assert reason in note
    assert plan.run.label in note


def test_supported_run_has_no_note(tmp_path):
    (plan,) = make_plans(tmp_path, 1)
    assert plan.config.train.vmap == 2
    assert plan.notes == ()


def config(vmap, d_model, device="cpu"):
    model = ModelConfig(d_model=d_model, context=16)
    return Config(model=model, train=TrainConfig(batch_size=16, vmap=vmap), device=device)


def test_auto_is_many_where_it_pays_and_one_elsewhere():
    small = PAYS["cpu"] // 256
    assert resolve_vmap(config("auto", small), "", 1000).train.vmap == MANY
    assert resolve_vmap(config("auto", small + 1), "", 1000).train.vmap == 1
    assert resolve_vmap(config("auto", small, "cuda"), "", 1000).train.vmap == MANY
    assert resolve_vmap(config("auto", small, "mps"), "", 1000).train.vmap == 1
    assert resolve_vmap(config("auto", small), "").train.vmap == 1  # of no sweep
    assert resolve_vmap(config("auto", small), "a reason", 1000).train.vmap == 1


def test_auto_is_as_many_as_fit_and_two_at_least(monkeypatch):
    memory = "qkablate.training.hardware.free_memory"
    params = 10**9  # beside them activations are nothing
    # Gradients are there twice, and 20 % of the memory stays free.
    monkeypatch.setattr(memory, lambda: (16 + 4) * params * 10.01 / 0.8)
    assert resolve_vmap(config("auto", 16), "", params).train.vmap == 10
    accumulating = config("auto", 16)
    accumulating.train.grad_accum = 2
    assert resolve_vmap(accumulating, "", params).train.vmap == 8
    monkeypatch.setattr(memory, lambda: 1.0)  # whether it is vmapped depends on no free memory
    assert resolve_vmap(config("auto", 16), "", params).train.vmap == 2


def test_number_is_kept():
    assert resolve_vmap(config(5, 4096), "").train.vmap == 5
    assert resolve_vmap(replace(config(5, 64)), "a reason").train.vmap == 1
