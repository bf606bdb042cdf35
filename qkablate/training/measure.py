"""Step times of several models on this machine: medians of interleaved steps."""

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from qkablate.attention.kernels import matmul
from qkablate.config import TEXT_SOURCES, Config
from qkablate.diagnostics.panel import LENGTH, TOKENS, DiagnosticPanel
from qkablate.errors import UserError
from qkablate.models.base import Model
from qkablate.training import hardware
from qkablate.training.optim import make_optimizer
from qkablate.training.recorders.evaluation import EVAL_LOGITS, eval_tokens
from qkablate.training.resolve import build_empty_model

WARM_UP = 2
SECONDS = 60.0  # for all models together, within these numbers of rounds
MIN_ROUNDS, MAX_ROUNDS = 3, 30


@dataclass(frozen=True)
class StepTimes:
    """Times of one training step: forward, backward, optimizer."""

    median: float
    fastest: float
    rounds: int


@hardware.preserve_process_state()
def measure_step_times(
    configs: Sequence[Config], vocabulary: int, progress: Callable[[float], Any]
) -> list[StepTimes]:
    """Measure a training step of each config, all on one device with one number of threads.

    `progress` is called with the completed fraction.
    """
    first = hardware.resolve(configs[0])
    hardware.configure_process(first)
    steps = [make_training_step(hardware.resolve(config), vocabulary)[1] for config in configs]
    for step in steps:
        for _ in range(WARM_UP):
            step()
    times: list[list[float]] = [[] for _ in steps]
    began = time.perf_counter()
    fraction = 0.0
    while fraction < 1:
        for step, step_times in zip(steps, times, strict=True):
            step_times.append(hardware.time_action(step, first.device))
        fraction = len(times[0]) / MAX_ROUNDS
        if len(times[0]) >= MIN_ROUNDS:
            fraction = max(fraction, (time.perf_counter() - began) / SECONDS)
        progress(min(1.0, fraction))
    return [StepTimes(statistics.median(t), min(t), len(t)) for t in times]


def free_bytes(device: str) -> float:
    """Return the free memory of a device."""
    is_cuda = device.startswith("cuda")
    return torch.cuda.mem_get_info(device)[0] if is_cuda else hardware.free_memory()


def check_memory(params: Sequence[int], device: str) -> None:
    """Raise UserError if the models do not fit into memory together."""
    required, free = hardware.BYTES_PER_PARAMETER * sum(params), free_bytes(device)
    if required > free:
        raise UserError(
            f"--measure: these {len(params)} models need {required / 2**30:,.1f} GB together, and"
            f" {free / 2**30:,.1f} GB are free; name fewer variants or a smaller size"
        )


def random_batch(model: Model, rows: int, device: str) -> list[Tensor]:
    """Return random tokens of each input of a model at its full length, and the targets."""
    generator = torch.Generator().manual_seed(0)
    lengths = (*model.input_lengths(), model.config.context)
    shapes = ((rows, length) for length in lengths)
    draws = (torch.randint(model.vocabulary, shape, generator=generator) for shape in shapes)
    return [tokens_BT.to(device) for tokens_BT in draws]


def make_training_step(
    config: Config, vocabulary: int, passes: int = 1
) -> tuple[Model, Callable[[], None]]:
    """Return the model of a resolved config, and a function that trains it for one step."""
    model = build_empty_model(config, vocabulary).to_empty(device="cpu")
    model = model.init_(config.seeds.init).to(config.device)
    optimizer = make_optimizer(model, config)
    *inputs, targets_BT = random_batch(model, config.train.batch_size, config.device)
    loss = hardware.compile_loss(model.loss, config, graphs=True)

    def step() -> None:
        matmul.set_backend(config.matmul)  # process-wide: the configs alternate
        for _ in range(passes):
            with hardware.autocast(config):
                value = loss(*inputs, targets_BT)
            value.backward()
        clip_grad_norm_(model.parameters(), config.optim.clip or math.inf)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return model, step


@torch.no_grad()
def evaluate_once(config: Config, model: Model, vocabulary: int) -> None:
    """Evaluate one batch and the circuits, as a run does: that may take more memory than a step."""
    context = config.model.context
    limit = min(eval_tokens(config), EVAL_LOGITS // vocabulary)
    *inputs, targets_NT = random_batch(model, max(1, limit // context), config.device)
    if config.data.source in TEXT_SOURCES:  # a task has few answers: fewer than the step's targets
        with hardware.autocast(config):
            model.loss(*inputs, targets_NT)
    if config.diagnostics.every:
        starts = model.initial_attention_layers(config.seeds.init)
        length = min(context, LENGTH)
        shown = [tokens_NT[: max(1, TOKENS // length), :LENGTH] for tokens_NT in inputs]
        autocast = functools.partial(hardware.autocast, config)
        DiagnosticPanel(model, *shown, starts=starts, autocast=autocast).row()
