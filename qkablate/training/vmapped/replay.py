"""The step of a program as a CUDA graph, which one launch replays."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from qkablate.training.optim.adamw import AdamW
from qkablate.training.step import TrainStep

WARM_UP = 3  # steps that are launched first: libraries initialize and choose their kernels
Inputs = list[list[Tensor]]  # of every micro-step


def can_replay(step: TrainStep) -> bool:
    """Return whether the step of this run reads nothing that a graph would keep as it was."""
    is_plain = type(step.optimizer) is AdamW  # Muon multiplies by rates that are numbers
    return step.device.startswith("cuda") and is_plain and not step.draws_random_numbers


class Replay:
    """Compute steps on inputs that are copied to the same place every time.

    All that differs between steps must be on the device: the learning rates are, as tensors, while
    a step is computed.
    """

    def __init__(
        self, compute: Callable[[Inputs], None], optimizers: Sequence[AdamW], device: str
    ) -> None:
        self._compute = compute
        self._groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._rates = torch.empty(len(self._groups), device=device)
        self._inputs: Inputs | None = None
        self._graph: Any = None
        self._launched = 0

    def __call__(self, inputs: Inputs) -> None:
        """Compute a step; the inputs are in pinned memory."""
        rates = torch.tensor([group["lr"] for group in self._groups], dtype=self._rates.dtype)
        self._rates.copy_(rates.pin_memory(), non_blocking=True)
        if self._inputs is None:
            device = self._rates.device
            self._inputs = [[x.to(device, non_blocking=True) for x in micro] for micro in inputs]
        else:
            for places, micro in zip(self._inputs, inputs, strict=True):
                for place, x in zip(places, micro, strict=True):
                    place.copy_(x, non_blocking=True)
        if self._launched < WARM_UP:
            self._launched += 1
            with self._rates_as_tensors(capturable=False):
                self._compute(self._inputs)
            return
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with (
                self._rates_as_tensors(capturable=True),
                # Another thread may write a checkpoint meanwhile.
                torch.cuda.graph(self._graph, capture_error_mode="thread_local"),
            ):
                self._compute(self._inputs)
        self._graph.replay()

    @contextmanager
    def _rates_as_tensors(self, *, capturable: bool) -> Iterator[None]:
        """Let the optimizers read their rates from the device, launched or replayed."""
        before = [(group["lr"], group["capturable"]) for group in self._groups]
        for group, rate in zip(self._groups, self._rates, strict=True):
            group["lr"], group["capturable"] = rate, capturable
        try:
            yield
        finally:
            for group, (rate, was) in zip(self._groups, before, strict=True):
                group["lr"], group["capturable"] = rate, was
