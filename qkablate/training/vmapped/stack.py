"""The joint training step of several runs: one vmapped program for the gradients of all.

Shape suffixes: K runs, P parameters of one run.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from qkablate.attention.kernels import vmapped
from qkablate.data import Batch
from qkablate.models.base import Model
from qkablate.training import hardware
from qkablate.training.checkpoint import Checkpoint, TrainProgress
from qkablate.training.optim.adamw import AdamW
from qkablate.training.optim.muon import Muon
from qkablate.training.step import NEVER, TrainStep
from qkablate.training.vmapped.replay import Replay
from qkablate.training.vmapped.row_adamw import ParameterSlice, RowAdamW
from qkablate.training.vmapped.row_muon import RowMuon


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
        begin, self._parts = 0, list[ParameterSlice]()
        for name, parameter in first.model.named_parameters():
            self._parts.append(ParameterSlice(name, begin, parameter.shape))
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
        # A GPU would wait for the launches of so many optimizers.
        self._optimizer = self._make_optimizer() if self._is_cuda else None
        self._replay: Replay | None = None
        if self._optimizer is not None and not first.draws_random_numbers:
            self._replay = Replay(self._device)

    def _make_optimizer(self) -> RowAdamW | None:
        """Return the optimizer of all runs, if theirs has a form by rows."""
        steps, rows = self.steps, len(self._weights_KP)
        places = [dict(zip(s.model.parameters(), self._parts, strict=True)) for s in steps]
        weights_KP, grads_KP = self._weights_KP[: len(steps)], self._grads_KP[: len(steps)]
        optimizers = [step.optimizer for step in steps]
        if type(optimizers[0]) is AdamW:
            return RowAdamW(optimizers, places, weights_KP, grads_KP)
        if type(optimizers[0]) is Muon:
            return RowMuon(cast("list[Muon]", optimizers), places, weights_KP, grads_KP, rows)
        return None

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
        rates = []
        for step, number in zip(self.steps, numbers, strict=True):
            rates.append(step.set_learning_rate(number))
        rows = [*range(len(self.steps)), *[0] * (len(self._weights_KP) - len(self.steps))]
        after_K = torch.tensor([numbers[row] + 1 for row in rows])
        inputs = [torch.tensor(rates), after_K, *self._read(numbers, rows)]
        if self._is_cuda:  # so that the host does not wait for the copies
            inputs = [x.pin_memory() for x in inputs]
        if self._replay is None:
            self._compute([x.to(self._device, non_blocking=True) for x in inputs])
        else:
            self._replay(self._compute, inputs)

    def _read(self, numbers: Sequence[int], rows: Sequence[int]) -> list[Tensor]:
        """Return what the losses of each micro-step read, one after the other."""
        read = [step.prefetcher.read(n) for step, n in zip(self.steps, numbers, strict=True)]
        inputs: list[Tensor] = []
        for batches in zip(*[read[row] for row in rows], strict=True):
            inputs += [torch.tensor([batch.weight for batch in batches]), *_stack(batches)]
        return inputs

    def _compute(self, inputs: Sequence[Tensor]) -> None:
        """Compute gradients and update all runs; this waits for nothing, so that it is replayed."""
        rates_K, after_K, *read = inputs
        micro_steps = self._config.train.grad_accum
        size = len(read) // micro_steps
        for micro in range(micro_steps):
            weights_K, *tensors = read[micro * size : (micro + 1) * size]
            losses_K = self._losses(tensors) * weights_K
            grads = torch.autograd.grad(
                (losses_K / micro_steps).sum(),
                [self._leaves[part.name] for part in self._parts],
                materialize_grads=True,  # some variants do not use a norm or a bias
            )
            flat = [grad.flatten(1) for grad in grads]
            if micro:
                self._grads_KP += torch.cat(flat, 1)
            else:
                torch.cat(flat, 1, out=self._grads_KP)
            self._loss_sums_K += losses_K.detach() / micro_steps
            del grads, flat
        self._clip()
        if self._optimizer is None:
            for step in self.steps:
                step.optimizer.step()
        else:
            self._optimizer.step(rates_K)
        after_K = after_K.masked_fill(torch.isfinite(self._loss_sums_K), NEVER)
        torch.minimum(self._nonfinite_K, after_K, out=self._nonfinite_K)

    def _losses(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the loss of every row, on a batch of its own."""
        with hardware.autocast(self._config), vmapped.enabled():
            losses_K: Tensor = vmap(self._loss.compute)(self._leaves, *tensors)
        return losses_K

    def _clip(self) -> None:
        """Clip the gradient of each run by its own norm."""
        clip = self._config.optim.clip
        if self._is_cuda:  # of all rows: their number may decide about the order of a sum
            norms_K = torch.linalg.vector_norm(self._grads_KP, dim=1)
            norms = list(norms_K[: len(self.steps)])
            if clip:
                self._grads_KP *= (clip / (norms_K + 1e-6)).clamp(max=1.0)[:, None]
        else:
            norms = [torch.linalg.vector_norm(self._grads_KP[k]) for k in range(len(self.steps))]
            for row, norm in enumerate(norms):
                if clip:
                    self._grads_KP[row] *= (clip / (norm + 1e-6)).clamp(max=1.0)
        for step, norm in zip(self.steps, norms, strict=True):
            step.norm = norm


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
