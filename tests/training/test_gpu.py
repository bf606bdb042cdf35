"""Training on a GPU; skipped where there is none."""

import json

import pytest
import torch

from qkablate.training.checkpoint import Checkpoint, TrainProgress
from qkablate.training.recorders.checkpoint_writer import snapshot
from tests.conftest import TINY
from tests.training.helpers import assert_identical, interrupt_after, read_rows, run_folder

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


def test_translator_of_padded_pairs_trains_as_on_a_cpu(qkablate, tmp_path):
    """In bf16 as in fp32; without a mask the losses differ by half a percent."""
    words = [*TINY, "model=nano_translator", "model.d_model=32", "data=add", "model.source=13"]
    words += ["model.init=linear", "compile=false", "train.batch_size=32", "optim.lr=3e-3"]
    words += ["data.val_tokens=2048", "data.test_tokens=2048"]
    losses = []
    for device, precision in (("cpu", "fp32"), ("cuda", "bf16")):
        given = [f"device={device}", f"precision={precision}", f"out={device}"]
        assert qkablate("train", *words, *given).code == 0
        rows = read_rows(run_folder(tmp_path, device))
        losses.append([row["val/loss"] for row in rows if "val/loss" in row])
    result = json.loads((run_folder(tmp_path, "cuda") / "result.json").read_text())
    assert "efficient" in result["kernel"]
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)
    assert losses[0][-1] < 0.95 * losses[0][0]  # the steps change more than the tolerance


def test_losses_of_graphs_are_those_of_compiled_steps(qkablate, tiny, tmp_path, monkeypatch):
    """Validation has several batches: the losses of earlier replays must outlive later ones."""
    monkeypatch.setattr("qkablate.training.recorders.evaluation.eval_tokens", lambda config: 64)
    losses = []
    for compiled in ("true", "graphs"):
        words = ["device=cuda", "precision=fp32", f"compile={compiled}", f"out={compiled}"]
        assert qkablate("train", *tiny, *words).code == 0
        (file,) = (tmp_path / compiled).glob("runs/*/result.json")
        losses.append(json.loads(file.read_text())["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_deterministic_training_repeats_itself(qkablate, tiny, tmp_path):
    words = [*tiny, "device=cuda", "deterministic=true", "model.dropout=0.1"]
    results = []
    for out in ("one", "two"):
        assert qkablate("train", *words, f"out={out}").code == 0
        (file,) = (tmp_path / out).glob("runs/*/result.json")
        results.append(json.loads(file.read_text())["loss"])
    assert results[0] == results[1]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("variant", ["standard", "merged_w"])
def test_gpu_diagnostics_equal_cpus_and_change_nothing(
    qkablate, tiny, tmp_path, variant, precision
):
    words = [*tiny, f"variant={variant}", "compile=false", "deterministic=true"]
    gpu = [*words, "device=cuda", f"precision={precision}"]
    assert qkablate("train", *gpu, "diagnostics.every=0", "out=without").code == 0
    assert qkablate("train", *gpu, "out=cuda").code == 0
    assert qkablate("train", *words, "device=cpu", "precision=fp32", "out=cpu").code == 0
    rows = {}
    for out in ("without", "cuda", "cpu"):
        (file,) = tmp_path.glob(f"{out}/runs/*/metrics.jsonl")
        rows[out] = [json.loads(line) for line in file.read_text().splitlines()]
    losses = [[row["val/loss"] for row in rows[out] if "val/loss" in row] for out in rows]
    assert losses[0] == losses[1]
    # At the start the weights are the same.
    one, other = (
        next(r["diagnostics"] for r in rows[o] if "diagnostics" in r) for o in ("cuda", "cpu")
    )
    assert one["qk"]["moved"] == [[0.0, 0.0]] * 2
    for part, measure in (("qk", "nuclear"), ("ov", "symmetry"), ("attention", "entropy")):
        for first, second in zip(one[part][measure], other[part][measure], strict=True):
            assert first == pytest.approx(second, rel=1e-2 if part == "attention" else 1e-3)


def test_a_snapshot_is_of_its_moment():
    """Copies are queued before what changes the tensors, and may end after it is."""
    weight = torch.arange(2**24, dtype=torch.float32, device="cuda")
    state = {"optimizer": {"state": {0: {"step": torch.ones((), device="cuda")}}}}
    taken, wait = snapshot(Checkpoint(TrainProgress(3), {"w": weight}, state))
    weight.zero_()
    state["optimizer"]["state"][0]["step"].zero_()
    wait()
    assert torch.equal(taken.weights["w"], torch.arange(2**24, dtype=torch.float32))
    assert taken.state["optimizer"]["state"][0]["step"] == 1


def test_deterministic_training_resumes_bit_identically(qkablate, tiny, tmp_path, monkeypatch):
    words = [*tiny, "device=cuda", "compile=false", "deterministic=true", "model.dropout=0.1"]
    assert qkablate("train", *words, "out=whole").code == 0
    with monkeypatch.context() as patch:
        interrupt_after(patch, 7)
        assert qkablate("train", *words, "out=stopped").code == 143
    assert qkablate("train", *words, "out=stopped").code == 0
    assert_identical(run_folder(tmp_path, "whole"), run_folder(tmp_path, "stopped"))
