"""The joint training step of several runs: one vmapped program for the gradients of all.

Shape suffixes: K runs, P parameters of one run.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from qkablate.attention.kernels import vmapped
from qkablate.data import Batch
from qkablate.models.base import Model
from qkablate.training import hardware
from qkablate.training.checkpoint import Checkpoint, TrainProgress
from qkablate.training.step import NEVER, TrainStep
from qkablate.training.vmapped.replay import Inputs, Replay, can_replay


class StackedStep(TrainStep):
    """The step of one run of a program, whose `RunStack` computes the gradients of all."""

    norm: Tensor  # of the last gradient

    def __call__(self, step: int) -> Tensor:
        """Return the gradient norm of the step that the stack has computed."""
        return self.norm

    def checkpoint(self, progress: TrainProgress) -> Checkpoint:
        """Return an ordinary checkpoint, whose tensors share no memory with other runs."""
        state = super().checkpoint(progress)
        return Checkpoint(progress, _clone(state.weights), _clone(state.state))


class _Part(NamedTuple):
    """The place of a parameter in a row."""

    name: str
    begin: int
    shape: torch.Size

    def of(self, x_KP: Tensor) -> Tensor:
        """Return the parameter of every row, or of one."""
        part = x_KP[..., self.begin : self.begin + self.shape.numel()]
        return part.view(*x_KP.shape[:-1], *self.shape)


class RunStack:
    """Parameters and gradients of several runs, a row each.

    The parameters of the runs' models are views of the rows, so that a run is updated, evaluated
    and saved as if it were alone. Rows without a run repeat the first one.
    """

    def __init__(self, steps: Sequence[StackedStep]) -> None:
        self.steps = list(steps)
        first = self.steps[0]
        self._config, self._device = first.config, first.device
        self._is_cuda = self._device.startswith("cuda")
        begin, self._parts = 0, list[_Part]()
        for name, parameter in first.model.named_parameters():
            self._parts.append(_Part(name, begin, parameter.shape))
            begin += parameter.numel()
        count = len(self.steps)
        if not self._device.startswith("cpu"):  # the number of rows may decide which kernels run
            count = max(count, int(self._config.train.vmap))
        self._weights_KP = torch.empty(count, begin, device=self._device)
        self._grads_KP = torch.zeros_like(self._weights_KP)
        self._loss_sums_K = torch.zeros(count, device=self._device)
        self._after_K = torch.zeros(count, dtype=torch.int64, device=self._device)
        self._nonfinite_K = torch.full((count,), NEVER, device=self._device)
        for row, step in enumerate(self.steps):
            self._bind(row, step)
        self._weights_KP[len(self.steps) :] = self._weights_KP[0]
        self._leaves = {
            part.name: part.of(self._weights_KP).detach().requires_grad_() for part in self._parts
        }
        self._loss = _Loss(first.model)
        self._replay = None
        if can_replay(first):
            optimizers = [step.optimizer for step in self.steps]
            self._replay = Replay(self._compute, optimizers, self._device)

    @torch.no_grad()
    def _bind(self, row: int, step: StackedStep) -> None:
        """Move a run's weights and sums into a row."""
        self._loss_sums_K[row], self._nonfinite_K[row] = step.loss_sum, step.nonfinite
        step.loss_sum, step.nonfinite = self._loss_sums_K[row], self._nonfinite_K[row]
        for parameter, part in zip(step.model.parameters(), self._parts, strict=True):
            place = part.of(self._weights_KP[row])
            place.copy_(parameter)
            parameter.data, parameter.grad = place, part.of(self._grads_KP[row])

    def __call__(self, numbers: Sequence[int]) -> None:
        """Compute a step of every run, each with the number of its own."""
        rows = [*range(len(self.steps)), *[0] * (len(self._weights_KP) - len(self.steps))]
        inputs = self._read(numbers, rows)
        after_K = torch.tensor([numbers[row] + 1 for row in rows])
        after_K = after_K.pin_memory() if self._is_cuda else after_K
        self._after_K.copy_(after_K, non_blocking=True)
        for step, number in zip(self.steps, numbers, strict=True):
            step.set_learning_rate(number)
        if self._replay is not None:
            self._replay(inputs)
        else:
            self._compute([[x.to(self._device, non_blocking=True) for x in m] for m in inputs])

    def _read(self, numbers: Sequence[int], rows: Sequence[int]) -> Inputs:
        """Return what the loss of every row reads, in pinned memory for a GPU: one copy for all."""
        read = [step.feed.read(n) for step, n in zip(self.steps, numbers, strict=True)]
        inputs = []
        for batches in zip(*[read[row] for row in rows], strict=True):
            weights_K = torch.tensor([batch.weight for batch in batches])
            tensors = [weights_K, *_stack(batches)]
            inputs.append([x.pin_memory() for x in tensors] if self._is_cuda else tensors)
        return inputs

    def _compute(self, inputs: Inputs) -> None:
        """Compute gradients and update all runs; this waits for nothing, so that it is replayed."""
        micro_steps = len(inputs)
        for micro, (weights_K, *tensors) in enumerate(inputs):
            losses_K = self._losses(tensors) * weights_K
            grads = torch.autograd.grad(
                (losses_K / micro_steps).sum(), [self._leaves[part.name] for part in self._parts]
            )
            flat = [grad.flatten(1) for grad in grads]
            if micro:
                self._grads_KP += torch.cat(flat, 1)
            else:
                torch.cat(flat, 1, out=self._grads_KP)
            self._loss_sums_K += losses_K.detach() / micro_steps
        self._clip()
        for step in self.steps:
            step.optimizer.step()
        after_K = self._after_K.masked_fill(torch.isfinite(self._loss_sums_K), NEVER)
        torch.minimum(self._nonfinite_K, after_K, out=self._nonfinite_K)

    def _losses(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the loss of every row, on a batch of its own."""
        with hardware.autocast(self._config), vmapped.enabled():
            losses_K: Tensor = vmap(self._loss.compute)(self._leaves, *tensors)
        return losses_K

    def _clip(self) -> None:
        """Clip the gradient of each run by its own norm."""
        norms = [torch.linalg.vector_norm(self._grads_KP[k]) for k in range(len(self.steps))]
        for step, norm in zip(self.steps, norms, strict=True):
            step.norm = norm
        if clip := self._config.optim.clip:
            for row, norm in enumerate(norms):
                self._grads_KP[row] *= (clip / (norm + 1e-6)).clamp(max=1.0)


def _stack(batches: Sequence[Batch]) -> list[Tensor]:
    """Return the inputs, the targets and, if there are any, their positions of all batches."""
    each = [(*b.inputs, b.targets_NA) for b in batches]
    stacked = [torch.stack(tensors) for tensors in zip(*each, strict=True)]
    positions = [b.positions_NA for b in batches if b.positions_NA is not None]
    return [*stacked, torch.stack(positions)] if positions else stacked


class _Loss(nn.Module):
    """The loss of a model as a function of its parameters."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, *batch: Tensor) -> Tensor:
        return self.model.loss(*batch)

    def compute(self, parameters: dict[str, Tensor], *batch: Tensor) -> Tensor:
        named = {f"model.{name}": value for name, value in parameters.items()}
        loss: Tensor = functional_call(self, named, batch)
        return loss


def _clone(value: Any) -> Any:
    """Return a copy of nested containers with copies of their tensors."""
    if isinstance(value, dict):
        return {key: _clone(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_clone(item) for item in value]
    return value.clone() if isinstance(value, Tensor) else value
