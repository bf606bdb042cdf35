"""Runs as folders of transformers: equal logits, or the reason why not; nothing overwritten."""

import json

import pytest
import torch

from qkablate.config import variants
from qkablate.errors import UserError
from qkablate.pretrained.export_run import export_run
from qkablate.pretrained.import_run import import_run
from qkablate.pretrained.repository import find_repository
from qkablate.training.warm_start.restore import restore
from tests.pretrained.published import TOKENS, logits_of, transformers
from tests.pretrained.random_runs import random_run

EXACT = "standard no_q no_k no_qk shared_qk tied_kv tied_qkv gqa mqa uniform no_v no_o no_vo"
EXACT += " four_matrix six_matrix four_ov sym_diag low_rank_w standard_reassociated collaborative"
EXACT += " mla sym_pairwise"
REFUSED = {
    "qk_norm": "normalized",
    "static_scores": "table of positions",
    "merged_w": "higher rank than d_head=4",
    "merged_ov": "higher rank than d_head=4",
    "shared_qk_reformer": "normalized",
    "symmetric_w": "higher rank than d_head=4",
    "wide_qk": "higher rank than d_head=4",
}
LLAMA = {"position": "rope", "norm_kind": "rms", "mlp": "swiglu", "bias": False}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", EXACT.split())
def test_function_is_kept(tmp_path, name, bias):
    run = random_run(tmp_path, name, bias=bias)
    with torch.no_grad():
        expected = run.model.double()(TOKENS)
    exported = export_run(run, tmp_path / "hf")
    assert exported.largest_difference < 1e-10
    back = restore(import_run(find_repository(str(tmp_path / "hf")), str(tmp_path / "out")).folder)
    with torch.no_grad():
        found = back.model.double()(TOKENS)
    assert (found - expected).abs().max() < 1e-5  # the weights are stored in fp32
    assert expected.std() > 0.1


@pytest.mark.parametrize("name", REFUSED)
def test_other_functions_are_refused_with_the_reason(tmp_path, name):
    with pytest.raises(UserError, match=REFUSED[name]):
        export_run(random_run(tmp_path, name), tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("name", ["standard", "gqa", "mqa"])
@pytest.mark.parametrize("changes", [LLAMA, {}], ids=["llama", "gpt2"])
def test_functions_that_transformers_does_not_have_are_refused(tmp_path, name, changes):
    keys = {"mask_self": True}
    with pytest.raises(UserError, match="no token attends to itself"):
        export_run(random_run(tmp_path, name, keys, **changes), tmp_path / "hf")
    if changes:
        with pytest.raises(UserError, match="only some dimensions"):
            export_run(random_run(tmp_path, name, {"rope_dims": 2}, **changes), tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_model_whose_logits_are_not_finite_is_refused(tmp_path):
    run = random_run(tmp_path, "standard")
    next(run.model.parameters()).data.fill_(torch.nan)
    with pytest.raises(UserError, match="the logits differ by nan"):
        export_run(run, tmp_path / "hf")


def test_every_variant_is_exported_or_refused_here():
    assert sorted([*EXACT.split(), *REFUSED]) == sorted(variants())


def test_merged_matrices_of_one_head_are_kept(tmp_path):
    for name in ("merged_w", "merged_ov"):
        run = random_run(tmp_path, name, heads=1)
        assert export_run(run, tmp_path / name).largest_difference < 1e-9


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("no_q", {}),
        ("tied_kv", {"mlp": "gelu_tanh", "tied": False, "norm_eps": 1e-3}),
        ("standard", {"position": "none", "mlp": "relu2"}),
        ("standard", {**LLAMA, "rope_theta": 50.0, "norm_eps": 1e-2}),
        ("gqa", {**LLAMA, "tied": False}),
        ("shared_qk", {**LLAMA}),
    ],
)
def test_transformers_computes_the_same_logits(tmp_path, monkeypatch, name, changes):
    library = transformers()
    run = random_run(tmp_path, name, **changes)
    export_run(run, tmp_path / "hf")
    theirs = library.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        expected = run.model.float()(TOKENS)
    found = logits_of(theirs, torch.float32, monkeypatch)
    assert (found - expected).abs().max() < 1e-5
    if name == "standard":  # the same numbers, so that fp64 tells more
        with torch.no_grad():
            expected = run.model.double()(TOKENS)
        assert (logits_of(theirs, torch.float64, monkeypatch) - expected).abs().max() < 1e-10


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"position": "alibi"}, "model.position: alibi"),
        ({"norm": "none"}, "model.norm: none"),
        ({"norm_kind": "rms"}, "neither GPT-2's block"),
        ({"mlp_ratio": 0.0}, "model.mlp_ratio"),
    ],
)
def test_other_parts_are_refused(tmp_path, changes, reason):
    with pytest.raises(UserError, match=reason):
        export_run(random_run(tmp_path, "standard", **changes), tmp_path / "hf")


def test_too_little_memory_is_one_line(tmp_path, monkeypatch):
    run = random_run(tmp_path, "standard")
    monkeypatch.setattr("qkablate.training.hardware.free_memory", lambda: 1000.0)
    with pytest.raises(UserError, match="the comparison in fp64 needs"):
        export_run(run, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_nothing_is_overwritten(tmp_path):
    run = random_run(tmp_path, "standard")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").touch()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("full", "file", "link"):
        with pytest.raises(UserError, match="give another"):
            export_run(run, tmp_path / name)
    (tmp_path / "empty").mkdir()
    export_run(run, tmp_path / "empty")
    config = json.loads((tmp_path / "empty" / "config.json").read_text())
    assert config["model_type"] == "gpt2"
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []
