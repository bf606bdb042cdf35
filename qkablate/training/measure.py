"""Step times of several models on this machine: solo, interleaved, medians."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qkablate.attention.kernels import matmul
from qkablate.config import Config
from qkablate.errors import UserError
from qkablate.training import hardware
from qkablate.training.optimizer import make_optimizer
from qkablate.training.resolve import empty_model

WARM_UP = 2
SECONDS = 60.0  # of measuring, shared by all models; each is timed three times at least
BYTES_PER_PARAMETER = 16  # weights, gradients, two moments


@dataclass(frozen=True)
class Measured:
    """Times of one training step: forward, backward, optimiser."""

    median: float
    fastest: float
    rounds: int


def step_times(
    configs: Sequence[Config], vocabulary: int, progress: Callable[[float], Any]
) -> list[Measured]:
    """The time of a training step of each config. All run on one device with one set of threads;
    `progress` hears how large a part is done.
    """
    with hardware.process_state():
        return _in_turns(configs, vocabulary, progress)


def _in_turns(
    configs: Sequence[Config], vocabulary: int, progress: Callable[[float], Any]
) -> list[Measured]:
    first = hardware.resolve(configs[0])
    hardware.prepare(first)
    steps = [training_step(hardware.resolve(config), vocabulary) for config in configs]
    for step in steps:
        for _ in range(WARM_UP):
            step()
    times: list[list[float]] = [[] for _ in steps]
    began = time.perf_counter()
    while True:
        for step, own in zip(steps, times, strict=True):
            hardware.synchronize(first.device)
            start = time.perf_counter()
            step()
            hardware.synchronize(first.device)
            own.append(time.perf_counter() - start)
        passed = time.perf_counter() - began
        rounds = len(times[0])
        progress(min(1.0, max(passed / SECONDS, rounds / 30) if rounds >= 3 else rounds / 30))
        if (passed > SECONDS and rounds >= 3) or rounds >= 30:
            return [Measured(statistics.median(t), min(t), rounds) for t in times]


def check_memory(params: Sequence[int], device: str) -> None:
    """All models live side by side; say so before the machine is full."""
    need = BYTES_PER_PARAMETER * sum(params)
    if device.startswith("cuda"):
        have: float = torch.cuda.mem_get_info(device)[0]
    else:
        have = hardware.free_memory()
    if need > have:
        raise UserError(
            f"--measure: these {len(params)} models need {need / 2**30:,.1f} GB side by side, and"
            f" {have / 2**30:,.1f} GB are free; name fewer variants or a smaller size"
        )


def training_step(config: Config, vocabulary: int) -> Callable[[], None]:
    """One step of the resolved config on random tokens, as often as it is called."""
    model = (
        empty_model(config, vocabulary)
        .to_empty(device="cpu")
        .init_(config.seeds.init)
        .to(config.device)
    )
    optimizer = make_optimizer(model, config)
    shape = (config.train.batch_size, config.model.context + 1)
    tokens_BT = torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(0))
    tokens_BT = tokens_BT.to(config.device)
    loss: Any = torch.compile(model.loss, dynamic=False) if config.compile else model.loss

    def step() -> None:
        matmul.choose(config.products)  # of the process: several configs take turns
        with hardware.autocast(config):
            value = loss(tokens_BT[:, :-1], tokens_BT[:, 1:])
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
