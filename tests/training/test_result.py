"""The header of a run on the terminal, and result.json."""

import json

from tests.training.helpers import run_folder

TRANSLATOR = ["model=nano_translator", "data=reverse", "model.layers=1", "model.encoder_layers=2"]
TRANSLATOR += ["model.d_model=32", "model.heads=2", "train.steps=2", "threads=1", "precision=fp32"]
TRANSLATOR += ["data.val_tokens=64", "data.test_tokens=64", "tracking.wandb=disabled"]


def test_sites_that_differ_are_shown(qkablate, tmp_path):
    """In cross-attention shared_qk starts otherwise, and with another learning rate."""
    words = (*TRANSLATOR, "variant=shared_qk", "variant.lr=matched")
    done = qkablate("train", *words)
    assert done.code == 0
    start = "matched to standard: none (encoder, decoder), spread (cross); learning rates of the"
    rates = "circuits: QK × 1.41, OV × 1 (encoder, decoder), QK × 1.73, OV × 1 (cross)"
    assert f"init     {start} {rates}\n" in done.err
    assert "model    2 encoder layers, 1 decoder layer, d 32" in done.err
    result = json.loads((run_folder(tmp_path) / "result.json").read_text())
    assert result["init"]["match"] == "none"  # the worst
    assert result["lr"]["multiplier"].keys() == {"encoder", "decoder", "cross"}
    shown = {site: round(found["qk"], 2) for site, found in result["lr"]["multiplier"].items()}
    assert shown == {"encoder": 1.41, "decoder": 1.41, "cross": 1.73}


def test_kernels_of_sites_are_shown(qkablate, tmp_path):
    done = qkablate("train", *TRANSLATOR, "variant=merged_w", "variant.sites=cross")
    assert done.code == 0
    kernels = "flash (encoder, decoder), folded (cross)"
    assert f"kernel {kernels}\n" in done.err
    result = json.loads((run_folder(tmp_path) / "result.json").read_text())
    assert result["kernel"] == kernels
    assert result["lr"]["multiplier"].keys() == {"qk", "ov"}  # of the only site
    assert "exact     val" in done.out
