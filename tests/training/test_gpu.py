"""What only a GPU can show. Skipped, by name, where there is none."""

import json

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("variant", ["standard", "merged_w", "shared_qk", "no_q"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_variant_trains(qkablate, tiny, tmp_path, variant, precision):
    words = [f"variant={variant}", f"precision={precision}", "device=cuda", "compile=false"]
    assert qkablate("train", *tiny, *words).code == 0
    (file,) = tmp_path.glob("outputs/runs/*/result.json")
    result = json.loads(file.read_text())
    assert (result["device"], result["precision"]) == ("cuda", precision)


def test_gpu_and_cpu_agree(qkablate, tiny, tmp_path):
    losses = []
    for device in ("cpu", "cuda"):
        words = [f"device={device}", "precision=fp32", "compile=false", f"out={device}"]
        assert qkablate("train", *tiny, *words).code == 0
        (file,) = (tmp_path / device).glob("runs/*/result.json")
        losses.append(json.loads(file.read_text())["loss"]["val"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_deterministic_training_repeats_itself(qkablate, tiny, tmp_path):
    words = [*tiny, "device=cuda", "deterministic=true", "model.dropout=0.1"]
    results = []
    for out in ("one", "two"):
        assert qkablate("train", *words, f"out={out}").code == 0
        (file,) = (tmp_path / out).glob("runs/*/result.json")
        results.append(json.loads(file.read_text())["loss"])
    assert results[0] == results[1]
