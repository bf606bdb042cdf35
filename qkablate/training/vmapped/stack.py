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


class StackedStep(TrainStep):
    """The step of one run of a program, whose `RunStack` computes the gradients of all."""

    norm: Tensor  # of the last gradient

    def __call__(self, step: int) -> Tensor:
        """Return the gradient norm of the step that the stack has computed."""
        return self.norm

    def update(self, step: int) -> None:
        """Update the weights as a run alone does, once it has its gradients."""
        self._set_learning_rate(step)
        self.optimizer.step()

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
        self._nonfinite_K = torch.full((count,), NEVER, device=self._device)
        for row, step in enumerate(self.steps):
            self._bind(row, step)
        self._weights_KP[len(self.steps) :] = self._weights_KP[0]
        self._leaves = {
            part.name: part.of(self._weights_KP).detach().requires_grad_() for part in self._parts
        }
        self._loss = _Loss(first.model)

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
        config = self._config
        rows = [*range(len(self.steps)), *[0] * (len(self._weights_KP) - len(self.steps))]
        feeds = [step.feed.take(n) for step, n in zip(self.steps, numbers, strict=True)]
        micro_steps = config.train.grad_accum
        for micro, batches in enumerate(zip(*[feeds[row] for row in rows], strict=True)):
            losses_K = self._losses(batches)
            weights = [batch.weight for batch in batches]
            if any(weight != 1 for weight in weights):
                losses_K = losses_K * torch.tensor(weights, device=self._device)
            grads = torch.autograd.grad(
                (losses_K / micro_steps).sum(), [self._leaves[part.name] for part in self._parts]
            )
            flat = [grad.flatten(1) for grad in grads]
            if micro:
                self._grads_KP += torch.cat(flat, 1)
            else:
                torch.cat(flat, 1, out=self._grads_KP)
            self._loss_sums_K += losses_K.detach() / micro_steps
        for step, number in zip(self.steps, numbers, strict=True):
            step.feed.fetch_ahead(number + 1)
        self._clip()
        for step, number in zip(self.steps, numbers, strict=True):
            step.update(number)
        after_K = torch.tensor([numbers[row] + 1 for row in rows], device=self._device)
        after_K = torch.where(torch.isfinite(self._loss_sums_K), NEVER, after_K)
        torch.minimum(self._nonfinite_K, after_K, out=self._nonfinite_K)

    def _losses(self, batches: Sequence[Batch]) -> Tensor:
        """Return the loss of every row, on a batch of its own."""
        tensors = [
            torch.stack(tensors)
            for tensors in zip(*[(*b.inputs, b.targets_NA) for b in batches], strict=True)
        ]
        positions = [b.positions_NA for b in batches if b.positions_NA is not None]
        tensors += [torch.stack(positions)] if positions else []
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
