"""Helpers of the training tests: run folders, interruptions, golden losses."""

import hashlib
import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from qkablate.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
    VariantConfig,
    resolve_variant,
    variants,
)
from qkablate.training import hardware
from qkablate.training.loop import Trainer
from qkablate.training.resolve import plan_run
from qkablate.training.signals import Signals

CLOCKS = {"seconds", "perf/tokens_per_second", "perf/mfu", "crc32"}  # differ between equal runs
GOLDEN = Path(__file__).with_name("golden.json")
LLAMA = {"norm_kind": "rms", "mlp": "swiglu", "position": "rope", "bias": False}
MUON = {"optimizer": "muon"}
# Name → variant, and changes of the model and the optimizer.
GOLDEN_RUNS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **{name: (name, {}, {}) for name in variants()},
    "standard in Llama's block": ("standard", LLAMA, {}),
    "mla in Llama's block": ("mla", LLAMA, {}),
    "standard under Muon": ("standard", {}, MUON),
    "merged_w under Muon": ("merged_w", {}, MUON),
    "mla in Llama's block under Muon": ("mla", LLAMA, MUON),
}


def run_folder(tmp_path: Path, out: str = "outputs", name: str = "*") -> Path:
    """Return the folder of the only run of this name."""
    (folder,) = (tmp_path / out / "runs").glob(name)
    return folder


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Read metrics.jsonl without clocks; every line must be intact."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in CLOCKS} for line in lines]


def count_rows(tmp_path: Path, out: str) -> int:
    """Return the number of rows of the only run, or -1 before there are any."""
    files = list((tmp_path / out / "runs").glob("*/metrics.jsonl"))
    return files[0].read_bytes().count(b"\n") if files else -1


def final_state(folder: Path) -> tuple[Any, ...]:
    """Return the parts of a finished run that must be bit-identical."""
    result = json.loads((folder / "result.json").read_text())
    (last,) = (folder / "checkpoints").glob("step-*12")
    weights = safetensors.torch.load_file(last / "weights.safetensors")
    state = torch.load(last / "state.pt", weights_only=True)
    moments = {
        (i, name): value
        for i, entry in state["optimizer"]["state"].items()
        for name, value in entry.items()
    }
    return result["loss"], result["bits_per_byte"], weights, moments


def assert_identical(one: Path, other: Path) -> None:
    """Check that two runs have the same rows, losses, weights and moments, bit for bit."""
    assert read_rows(one) == read_rows(other)
    a, b = final_state(one), final_state(other)
    assert a[:2] == b[:2]
    for first, second in zip(a[2:], b[2:], strict=True):
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first)


def wait_for(
    condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 60
) -> None:
    """Wait until the condition holds while the process runs."""
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.005)


def weights_of(run: Path) -> Path:
    return next(run.glob("checkpoints/step-*/weights.safetensors"))


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file and its checksum, as an attacker would."""
    sums = path.parent / "SHA256SUMS"
    before, after = (hashlib.sha256(c).hexdigest() for c in (path.read_bytes(), content))
    path.write_bytes(content)
    sums.write_text(sums.read_text().replace(before, after))


def interrupt_after(monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    """Simulate a SIGTERM at the n-th time that the loop checks for signals."""
    count = 0

    def is_set(self: Signals) -> bool:
        nonlocal count
        count += 1
        if count > calls:
            self.received = signal.SIGTERM
        return bool(self.received)

    monkeypatch.setattr(Signals, "__bool__", is_set)


def golden_losses(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Train 20 steps in fp32 on one thread, on text with repeats and with large scores."""
    variant, model_changes, optim_changes = GOLDEN_RUNS[name]
    text = folder / "tokens.txt"
    pieces = np.random.default_rng(1).zipf(1.3, (1_200, 8)) % 64 + 32
    text.write_bytes(np.concatenate([pieces, pieces], 1).astype(np.uint8).tobytes())
    sizes = {"layers": 2, "d_model": 32, "heads": 4, "context": 32, "bias": True}
    model_config = ModelConfig(**{**sizes, "init": "linear", **model_changes})
    config = Config(
        variant=resolve_variant(VariantConfig(**variants()[variant], lr="matched"), model_config),
        model=model_config,
        data=DataConfig(source="text", path=str(text), cache=str(folder / "cache")),
        train=TrainConfig(steps=20, batch_size=4, eval_every=250, eval_tokens=2**16),
        optim=OptimConfig(lr=0.01, warmup=2, cooldown=0.0, **optim_changes),
        device="cpu",
        precision="fp32",
        compile=False,
        threads=1,
        out=str(folder / "out"),
    )
    losses: list[float] = []
    monkeypatch.setattr(hardware, "known_peak_flops", lambda config: 1e9)
    planned = plan_run(config)
    model = planned.build().to_empty(device="cpu").init_(0)
    trainer = Trainer(planned, model, None)
    for step in range(20):
        trainer.train_step.loss_sum.zero_()
        trainer._step(step)
        losses.append(float(trainer.train_step.loss_sum))
    return [*losses, trainer.evaluate("val")["loss"]]
