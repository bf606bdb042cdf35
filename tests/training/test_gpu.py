"""Training on a GPU; skipped where there is none."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qkablate.attention.kernels.choice import Gpu
from qkablate.compose.configs import make_config, open_hydra
from qkablate.config import DataConfig, variants
from qkablate.models import blocked_loss
from qkablate.training import hardware, loop
from qkablate.training.checkpoint import Checkpoint, TrainProgress
from qkablate.training.loop import Trainer
from qkablate.training.recorders.checkpoint_writer import snapshot
from qkablate.training.resolve import plan_run
from qkablate.training.session import train_run
from qkablate.training.vmapped import replay
from qkablate.training.vmapped.program import Member, train_program
from qkablate.training.vmapped.stack import RunStack
from tests.conftest import TINY
from tests.pretended_cuda.cases import CASES, CHOSEN, FORMS, PRECISIONS, Case, run_words
from tests.pretended_cuda.kept import Kept
from tests.training.helpers import assert_identical, interrupt_after, read_rows, run_folder
from tests.training.vmapped.helpers import make_plans

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
        words = ["device=cuda", "precision=fp32", f"compile={compiled}", f"out=by_{compiled}"]
        assert qkablate("train", *tiny, *words).code == 0
        (file,) = (tmp_path / f"by_{compiled}").glob("runs/*/result.json")
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


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("variant", variants())
def test_all_variants_train_in_16_bits(qkablate, tiny, tmp_path, variant, optimizer):
    words = [*tiny, f"variant={variant}", f"optim={optimizer}", "device=cuda", "compile=false"]
    for precision in ("bf16", "fp16"):
        assert qkablate("train", *words, f"precision={precision}", f"out={precision}").code == 0
        result = json.loads((run_folder(tmp_path, precision) / "result.json").read_text())
        assert result["status"] == "done"
        assert result["loss"]["val"] < 8


def train_traced(case: Case, folder: Path) -> tuple[str, int, list[dict[str, Any]]]:
    """Take the steps of a traced run for real; return kernel, kept bytes and rows of metrics.

    Raises if a step waits for the device.
    """
    with open_hydra():
        plan = plan_run(make_config(run_words(case.settings, folder)))
    model = plan.build().to_empty(device="cpu").init_(0).to("cuda")
    rows: list[dict[str, Any]] = []
    trainer = Trainer(plan, model, None, loggers=[SimpleNamespace(log=rows.append)])
    take_step = trainer._step

    def strict(step: int) -> torch.Tensor:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return take_step(step)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    trainer._step = strict  # type: ignore[method-assign]
    kept = Kept(model)
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda saved: saved):
        for _ in trainer.fit():
            pass
    return model.kernel, kept.bytes, rows


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, *FORMS, *CHOSEN], ids=lambda case: case.name)
def test_traced_runs_take_their_steps_as_traced(case, tmp_path, monkeypatch):
    """With the kernel that was expected, without waiting for the device, in bounded memory."""
    gpu = Gpu(PRECISIONS[case.precision][1], cudnn=True, triton=True)
    if gpu.capability > torch.cuda.get_device_capability():
        pytest.skip(f"needs a GPU of capability {gpu.capability}")
    monkeypatch.setattr(hardware, "find_gpu", lambda config: gpu)
    monkeypatch.setattr(loop, "WARM_UP", 0)  # no step is waited for to measure the speed
    monkeypatch.setattr(blocked_loss, "LOGITS_PER_BLOCK", 2**15 if case.blocks else 2**25)
    kernel, kept, rows = train_traced(case, tmp_path)
    assert kernel == (CHOSEN.get(case) or (kernel if case.kernel == "auto" else case.kernel))
    if kernel != "math":  # of which the version of torch decides
        assert kept <= case.kept_bytes
    losses = [row[key] for row in rows for key in ("train/loss", "val/loss") if key in row]
    assert len(losses) == 3
    assert all(map(math.isfinite, losses))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "compiled"), [*((name, "graphs") for name in variants()), ("merged_w", "true")]
)
def test_compiled_losses_are_those_of_eager_steps(qkablate, tiny, tmp_path, variant, compiled):
    losses = []
    for mode in ("false", compiled):
        words = ["device=cuda", "precision=fp32", f"compile={mode}", f"out=by_{mode}"]
        assert qkablate("train", *tiny, f"variant={variant}", *words).code == 0
        file = run_folder(tmp_path, f"by_{mode}") / "result.json"
        losses.append(json.loads(file.read_text())["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("variant", "optimizer"),
    [
        *((name, "adamw") for name in ("standard", "merged_w", "uniform", "qk_norm")),
        *((name, "muon") for name in ("standard", "merged_w", "symmetric_w")),
    ],
)
def test_vmapped_runs_are_those_of_their_own_configs(tmp_path, variant, precision, optimizer):
    options = {"variant": variant, "device": "cuda", "precision": precision}
    options |= {"optim": {"optimizer": optimizer}}
    stacked = make_plans(tmp_path, 3, **options)
    singles = make_plans(tmp_path, 3, train={"vmap": 1}, **options)
    members = [Member(plan) for plan in stacked]
    train_program(members)
    for member, plan in zip(members, singles, strict=True):
        assert not isinstance(member.outcome, Exception), member.outcome
        train_run(plan)
        ours, alone = (
            json.loads((p.run.folder / "result.json").read_text())["loss"]
            for p in (member.plan, plan)
        )
        assert ours == pytest.approx(alone, rel=1e-3 if precision == "fp32" else 1e-2)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_vmapped_runs_do_not_depend_on_their_company(tmp_path, optimizer):
    """One of a full program, and alone in its rows."""
    losses, options = [], {"device": "cuda", "optim": {"optimizer": optimizer}}
    for out, count in (("three", 3), ("one", 1)):
        members = [Member(plan) for plan in make_plans(tmp_path, count, out=out, **options)]
        train_program(members)
        file = members[0].plan.run.folder / "result.json"
        losses.append(json.loads(file.read_text())["loss"])
    assert losses[0] == losses[1]


ADDITION = DataConfig(source="add", digits=4, extra_digits=2, val_tokens=512, test_tokens=512)
PROGRAMS = [
    *({"variant": name} for name in variants()),
    {"train": {"grad_accum": 3}},
    {"optim": {"clip": 0.0, "schedule": "wsd"}},
    {"data": ADDITION, "model": {"context": 21}},
    {"precision": "bf16", "model": {"position": "alibi"}},
    {"optim": {"optimizer": "muon"}},
    {"variant": "mla", "optim": {"optimizer": "muon"}, "precision": "bf16"},
]


@pytest.mark.slow
@pytest.mark.parametrize("settings", PROGRAMS, ids=str)
def test_replayed_steps_are_those_that_are_launched(tmp_path, monkeypatch, settings):
    losses = []
    for warm_up in (replay.WARM_UP, 10**6):
        monkeypatch.setattr(replay, "WARM_UP", warm_up)
        plans = make_plans(tmp_path, 2, device="cuda", out=f"after_{warm_up}", **settings)
        members = [Member(plan) for plan in plans]
        train_program(members)
        results = [json.loads((p.run.folder / "result.json").read_text()) for p in plans]
        losses.append([result["loss"] for result in results])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_that_diverges_changes_no_bit_of_a_replayed_program(tmp_path, monkeypatch, optimizer):
    """It ends before the others, which go on with a graph of their own."""
    options = {"device": "cuda", "optim": {"optimizer": optimizer}}
    calm = make_plans(tmp_path, 2, out="calm", **options)
    train_program([Member(plan) for plan in calm])
    call = RunStack.__call__

    def poison(self, numbers):
        if numbers[0] == 5 and len(numbers) == 2:
            next(self.steps[1].model.parameters()).data.fill_(torch.nan)
        call(self, numbers)

    monkeypatch.setattr(RunStack, "__call__", poison)
    plans = make_plans(tmp_path, 2, out="poisoned", **options)
    train_program([Member(plan) for plan in plans])
    assert plans[1].run.result["status"] == "diverged"
    assert_identical(plans[0].run.folder, calm[0].run.folder)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_vmapped_training_resumes_bit_identically(tmp_path, monkeypatch, optimizer):
    options = {"device": "cuda", "precision": "bf16", "deterministic": True}
    options |= {"optim": {"optimizer": optimizer}}
    whole, stopped = (make_plans(tmp_path, 2, out=out, **options) for out in ("whole", "stopped"))
    train_program([Member(plan) for plan in whole])
    with monkeypatch.context() as patch:
        interrupt_after(patch, 14)  # both runs look for signals
        train_program([Member(plan) for plan in stopped])
    assert not any(plan.run.result for plan in stopped)
    train_program([Member(plan) for plan in stopped])
    for one, other in zip(whole, stopped, strict=True):
        assert_identical(one.run.folder, other.run.folder)
