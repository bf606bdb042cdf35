"""The training loop: pairing, evaluation without side effects, golden losses."""

import importlib
import itertools
import json
import math
import shutil
import sys

import numpy as np
import pytest
import torch

from qkablate.config import (
    Config,
    OptimConfig,
)
from qkablate.data.batches import RandomWindows
from qkablate.training import hardware
from qkablate.training.hardware import has_fast_bf16, resolve
from qkablate.training.optim import learning_rate
from tests.training.helpers import GOLDEN, GOLDEN_RUNS, golden_losses


def metrics(tmp_path, out):
    (file,) = (tmp_path / out / "runs").glob("*/metrics.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [r for r in rows if "train/loss" in r], [r for r in rows if "val/loss" in r]


def drop_clocks(rows):
    return [
        {k: v for k, v in r.items() if k not in ("seconds", "crc32") and "perf/" not in k}
        for r in rows
    ]


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_evaluation_does_not_change_training(qkablate, tiny, tmp_path, dropout):
    words = [*tiny, f"model.dropout={dropout}"]
    assert qkablate("train", *words, "train.eval_every=12", "out=seldom").code == 0
    assert qkablate("train", *words, "train.eval_every=1", "out=often").code == 0
    seldom, often = metrics(tmp_path, "seldom"), metrics(tmp_path, "often")
    assert drop_clocks(seldom[0]) == drop_clocks(often[0])
    assert (len(seldom[1]), len(often[1])) == (2, 13)
    assert drop_clocks(seldom[1])[-1] == drop_clocks(often[1])[-1]


def test_rows_have_the_documented_keys(qkablate, tiny, tmp_path):
    assert qkablate("train", *tiny).code == 0
    train, val = metrics(tmp_path, "outputs")
    position = {"step", "tokens", "flops", "seconds", "crc32"}
    assert set(train[-1]) == position | {
        "train/loss", "train/lr", "train/grad_norm", "perf/tokens_per_second", "perf/mfu"
    }  # fmt: skip
    assert set(val[-1]) == position | {"val/loss", "val/bits_per_byte"}
    assert [row["step"] for row in train] == [2, 4, 6, 8, 10, 12]
    assert [row["step"] for row in val] == [0, 6, 12]
    assert train[0]["tokens"] == 2 * 2 * 16
    assert train[1]["flops"] == pytest.approx(2 * train[0]["flops"])
    assert val[-1]["val/bits_per_byte"] == pytest.approx(val[-1]["val/loss"] / math.log(2))
    assert 0 < train[-1]["perf/mfu"] < 1
    assert "perf/tokens_per_second" not in train[0]  # the first stretch warms up


@pytest.mark.slow
def test_batches_do_not_depend_on_the_model(qkablate, tiny, monkeypatch):
    seen = []

    def step(self, step, original=RandomWindows.step):
        batch = original(self, step)
        seen[-1].append(torch.cat([part.tokens_NT for part in batch]).clone())
        return batch

    monkeypatch.setattr(RandomWindows, "step", step)
    for words in (
        ["variant=standard"],
        ["variant=merged_w", "model.d_model=8", "train.eval_every=1"],
        ["variant=no_q", "model.layers=1", "train.batch_size=1", "train.grad_accum=2"],
    ):
        seen.append([])
        assert qkablate("train", *tiny, *words).code == 0
    assert len(seen[0]) == 12
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))


def test_gradient_accumulation_equals_larger_batch(qkablate, tiny, tmp_path):
    words = [*tiny, "train.eval_every=12", "optim.clip=0"]
    assert qkablate("train", *words, "train.batch_size=4", "out=one").code == 0
    more = ["train.batch_size=1", "train.grad_accum=4"]
    assert qkablate("train", *words, *more, "out=four").code == 0
    (_, one), (_, four) = metrics(tmp_path, "one"), metrics(tmp_path, "four")
    assert one[-1]["val/loss"] == pytest.approx(four[-1]["val/loss"], rel=1e-5)


COMMANDS = ["model=nano_translator", "data=commands", "model.source=12", "model.context=49"]
COMMANDS += ["model.layers=1", "model.d_model=16", "model.heads=2", "threads=1", "precision=fp32"]
COMMANDS += ["data.val_tokens=640", "data.test_tokens=640", "tracking.wandb=disabled"]


def test_gradient_accumulation_equals_larger_batch_of_padded_pairs(qkablate, tmp_path):
    """Every answer counts the same, although the parts of a batch have unequally many."""
    steps = ("train.steps=6", "tracking.log_every=1", "train.eval_every=6")
    for out, size in {"one": (8, 1), "many": (2, 4)}.items():
        words = (f"train.batch_size={size[0]}", f"train.grad_accum={size[1]}", f"out={out}")
        assert qkablate("train", *COMMANDS, *steps, *words).code == 0
    one, many = (metrics(tmp_path, out)[0] for out in ("one", "many"))
    for a, b in zip(one, many, strict=True):
        assert b["train/loss"] == pytest.approx(a["train/loss"], rel=1e-5)
        assert b["train/grad_norm"] == pytest.approx(a["train/grad_norm"], rel=1e-4)


def test_logged_norm_is_before_clipping(qkablate, tiny, tmp_path):
    """The logged norm is the one before clipping; a tiny bound changes training."""
    assert qkablate("train", *tiny, "out=free", "optim.clip=0").code == 0
    assert qkablate("train", *tiny, "out=bound", "optim.clip=1e-6").code == 0
    free, bound = metrics(tmp_path, "free")[0], metrics(tmp_path, "bound")[0]
    assert free[0]["train/grad_norm"] > 1e-3
    assert free[-1]["train/loss"] != bound[-1]["train/loss"]


@pytest.mark.slow
def test_training_learns(qkablate, tiny, tmp_path):
    words = ["train.steps=150", "train.eval_every=150", "train.batch_size=8", "optim.lr=3e-3"]
    assert qkablate("train", *tiny, *words).code == 0
    _, val = metrics(tmp_path, "outputs")
    assert val[0]["val/loss"] == pytest.approx(math.log(256), rel=0.02)
    assert val[-1]["val/loss"] < 2.7


@pytest.mark.exhaustive
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled_training_equals_eager(qkablate, tiny, tmp_path, precision):
    words = [*tiny, f"precision={precision}", "model.layers=1"]
    assert qkablate("train", *words, "out=eager").code == 0
    assert qkablate("train", *words, "out=compiled", "compile=true").code == 0
    eager, compiled = metrics(tmp_path, "eager")[1], metrics(tmp_path, "compiled")[1]
    tolerance = 1e-5 if precision == "fp32" else 1e-2
    assert eager[-1]["val/loss"] == pytest.approx(compiled[-1]["val/loss"], rel=tolerance)


@pytest.mark.slow
def test_bf16_is_close_to_fp32(qkablate, tiny, tmp_path):
    for precision in ("fp32", "bf16"):
        assert qkablate("train", *tiny, f"precision={precision}", f"out={precision}").code == 0
    full, half = (metrics(tmp_path, p)[1][-1]["val/loss"] for p in ("fp32", "bf16"))
    assert full != half
    assert full == pytest.approx(half, rel=1e-2)


def test_auto_precision_follows_the_hardware(monkeypatch):
    expected = "bf16" if has_fast_bf16() else "fp32"
    assert resolve(Config(device="cpu")).precision == expected
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setenv("CC", sys.executable)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    for capability, precision in (((9, 0), "bf16"), ((7, 5), "fp16")):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda _, c=capability: c)
        config = resolve(Config())
        assert (config.device, config.precision, config.compile) == ("cuda", precision, True)


@pytest.mark.slow
def test_matmul_backend_is_used_and_recorded(qkablate, tiny, tmp_path, monkeypatch):
    """Compare training by torch and by oneDNN."""
    convolve, calls = torch.nn.functional.conv2d, []

    def counted(*given, **more):
        calls[-1] += torch.is_grad_enabled()
        return convolve(*given, **more)

    monkeypatch.setattr("torch.nn.functional.conv2d", counted)
    losses, ids = [], set()
    for name in ("torch", "onednn"):
        calls.append(0)
        words = ("precision=fp32", f"matmul={name}", "train.batch_size=100", f"out={name}")
        assert qkablate("train", *tiny, *words).code == 0
        losses.append(metrics(tmp_path, name)[1][-1]["val/loss"])
        (path,) = tmp_path.glob(f"{name}/runs/*/result.json")
        result = json.loads(path.read_text())
        assert result["matmul"] == name
        ids.add(result["id"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert calls[0] == 0
    assert calls[1] > 0
    assert len(ids) == 2


def test_cuda_without_index_sets_no_device(monkeypatch):
    """Torch refuses set_device("cuda"), so that it must not be called."""
    from qkablate.training import hardware

    devices = []
    monkeypatch.setattr("torch.cuda.set_device", devices.append)
    with hardware.preserve_process_state():
        for device in ("cuda", "cuda:1"):
            hardware.configure_process(
                Config(device=device, threads=1, compile=False, matmul="torch")
            )
    assert devices == ["cuda:1"]


@pytest.mark.slow
def test_many_sizes_compile_in_one_process(qkablate, tiny, tmp_path, monkeypatch):
    """Torch silently falls back to eager after too many shapes of one function."""
    importlib.import_module("torch._inductor.config")  # reads CXX once, for the whole process
    monkeypatch.setenv("CXX", sys.executable)  # the eager backend needs no compiler
    compiled = []

    def count(graph, inputs):
        compiled[-1] += 1
        return graph

    compile_ = torch.compile
    monkeypatch.setattr(
        "torch.compile", lambda function, **named: compile_(function, backend=count, **named)
    )
    for width in (8, 10, 12, 14, 16, 18):
        compiled.append(0)
        words = ["compile=true", f"model.d_model={width}", "model.layers=1", "train.steps=2"]
        assert qkablate("train", *tiny, *words).code == 0
    assert len(set(compiled)) == 1
    assert compiled[0] >= 2


def test_cosine_schedule():
    optim = OptimConfig(lr=1.0, warmup=10, cooldown=0.0, lr_final=0.1)
    rates = [learning_rate(optim, step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[10] == pytest.approx(1)
    assert rates[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))


def test_wsd_schedule():
    optim = OptimConfig(lr=1.0, schedule="wsd", warmup=10, cooldown=0.2, lr_final=0.0)
    rates = [learning_rate(optim, step, 100) for step in range(100)]
    assert rates[10:80] == pytest.approx([1.0] * 70)
    assert rates[-1] == pytest.approx(0)
    falls = np.diff(rates[79:])
    assert falls == pytest.approx([falls[0]] * len(falls))


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_schedules_of_very_short_runs(steps, schedule):
    optim = OptimConfig(lr=1.0, schedule=schedule, warmup=0, cooldown=0.2)
    assert all(0 < learning_rate(optim, s, steps) <= 1 for s in range(steps))


@pytest.mark.parametrize("name", GOLDEN_RUNS)
def test_golden_losses(name, tmp_path, monkeypatch):
    """Detect any change of the numbers.

    If they must change: raise NUMERICS in runs/run.py, and write the new ones with
    `python -m tests.training.write_golden`.
    """
    assert golden_losses(name, tmp_path, monkeypatch) == pytest.approx(
        json.loads(GOLDEN.read_text())[name], rel=1e-5
    )


def test_activation_checkpointing_changes_no_numbers(qkablate, tiny, tmp_path):
    words = [*tiny, "model.dropout=0.1"]
    assert qkablate("train", *words, "out=kept").code == 0
    assert qkablate("train", *words, "out=twice", "train.checkpoint_activations=true").code == 0
    kept, twice = metrics(tmp_path, "kept"), metrics(tmp_path, "twice")
    for first, second in zip(kept, twice, strict=True):
        assert drop_clocks(first) == drop_clocks(second)
    names = [next((tmp_path / out / "runs").iterdir()).name for out in ("kept", "twice")]
    assert names[0] == names[1]  # one run


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_compiled_activation_checkpointing(qkablate, tiny, tmp_path):
    words = [*tiny, "compile=true", "train.steps=4", "train.checkpoint_activations=true"]
    assert qkablate("train", *words, "out=compiled").code == 0
    assert qkablate("train", *words, "out=eager", "compile=false").code == 0
    compiled, eager = (metrics(tmp_path, out)[1][-1]["val/loss"] for out in ("compiled", "eager"))
    assert compiled == pytest.approx(eager, rel=1e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_generators_are_seeded_where_something_draws(qkablate, tiny, monkeypatch, dropout):
    seeded = []
    monkeypatch.setattr(hardware, "seed_generators", lambda device, key: seeded.append(key))
    assert qkablate("train", *tiny, f"model.dropout={dropout}").code == 0
    assert len({*seeded}) == len(seeded) == (12 if dropout else 0)


def test_circuits_of_the_user_may_draw(qkablate, tiny, tmp_path, monkeypatch):
    file = tmp_path / "noisy.py"
    file.write_text(
        "import torch\n"
        "from qkablate.attention.qk.factored import SeparateQK\n"
        "class Noisy(SeparateQK):\n"
        "    def queries(self, x):\n"
        "        return super().queries(x) + torch.rand(())\n"
    )
    words = [f"variant.file={file}", "variant.qk=noisy", "variant.name=noisy"]
    losses = []
    for out in ("one", "two"):
        torch.manual_seed(len(losses))
        assert qkablate("train", *tiny, *words, f"out={out}").code == 0
        losses.append(drop_clocks(metrics(tmp_path, out)[0]))
    assert losses[0] == losses[1]
