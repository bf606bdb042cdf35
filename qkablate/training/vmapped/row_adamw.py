"""AdamW of all runs of a program at once: some operations on rows, where torch has launches a run.

Shape suffixes: K runs, N parameters of one run, P numbers in them.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from qkablate.training.optim.adamw import AdamW


class ParameterSlice(NamedTuple):
    """The place of a parameter in a row."""

    name: str
    begin: int
    shape: torch.Size

    def of(self, x_KP: Tensor) -> Tensor:
        """Return the parameter of every row, or of one."""
        part = x_KP[..., self.begin : self.begin + self.shape.numel()]
        return part.view(*x_KP.shape[:-1], *self.shape)


class RowAdamW:
    """Torch's AdamW, whose moments are the rows; each run's own optimizer has views of them.

    So a run is saved, and resumed alone, as if its own optimizer had taken the steps.
    """

    def __init__(
        self,
        optimizers: Sequence[AdamW],
        places: Sequence[dict[nn.Parameter, ParameterSlice]],
        weights_KP: Tensor,
        grads_KP: Tensor,
    ) -> None:
        """Take over the moments of optimizers; `places` has the parameters of each."""
        self._weights_KP, self._grads_KP = weights_KP, grads_KP
        self._first_KP, self._second_KP = (torch.zeros_like(weights_KP) for _ in range(2))
        # One for each parameter, as torch has it; they are the same.
        self._steps_KN = weights_KP.new_zeros(len(optimizers), len(places[0]))
        group = optimizers[0].param_groups[0]
        self._betas, self._eps = group["betas"], group["eps"]
        self._counted = 0  # a parameter that counts its steps: all of them do
        settings = []  # of each run, by parameter: multiplier and decay
        for row, (optimizer, parts) in enumerate(zip(optimizers, places, strict=True)):
            found = {}
            for group in optimizer.param_groups:
                rate = group["lr_multiplier"]
                for parameter in group["params"]:
                    found[parts[parameter]] = rate, rate * group["weight_decay"]
            settings.append([found[part] for part in parts.values()])
            for n, (parameter, part) in enumerate(parts.items()):
                self._bind(row, n, optimizer.state[parameter], part)
        # One row, if all are the same: unless runs differ in the rates of their circuits.
        settings = settings[:1] if all(row == settings[0] for row in settings) else settings
        sizes = [part.shape.numel() for part in places[0].values()]
        self._rates_KP, self._decays_KP = (
            torch.stack([_repeat([both[i] for both in row], sizes) for row in settings]).to(
                weights_KP.device
            )
            for i in range(2)
        )

    def _bind(self, row: int, n: int, state: dict[str, Tensor], part: ParameterSlice) -> None:
        """Move the moments of the n-th parameter into a row."""
        places = {
            "exp_avg": part.of(self._first_KP[row]),
            "exp_avg_sq": part.of(self._second_KP[row]),
            "step": self._steps_KN[row, n],
        }
        for name, place in places.items():
            if name in state:
                place.copy_(state[name])
            state[name] = place

    @torch.no_grad()
    def step(self, rates_K: Tensor) -> None:
        """Update all runs by their gradients, with learning rates before the multipliers.

        The gradients are overwritten, for lack of memory.
        """
        rates_K1 = rates_K[:, None]
        updates_KP = self._compute_updates().mul_(self._rates_KP)
        decays_KP = rates_K1 * self._decays_KP
        self._weights_KP.addcmul_(self._weights_KP, decays_KP, value=-1)
        self._weights_KP.addcmul_(updates_KP, rates_K1, value=-1)

    def _compute_updates(self) -> Tensor:
        """Return the updates of all runs at rate 1, in the place of the gradients."""
        self._steps_KN += 1
        steps_K1 = self._steps_KN[:, self._counted, None]
        # 1 − β^t; the power itself would round most of it away in fp32.
        first_K1, second_K1 = (
            -torch.expm1(steps_K1 * (math.log(beta) if beta else -math.inf)) for beta in self._betas
        )
        self._first_KP.lerp_(self._grads_KP, 1 - self._betas[0])
        self._second_KP.mul_(self._betas[1])
        self._second_KP.addcmul_(self._grads_KP, self._grads_KP, value=1 - self._betas[1])
        sizes_KP = torch.sqrt(self._second_KP, out=self._grads_KP).div_(second_K1.sqrt())
        sizes_KP.add_(self._eps).mul_(first_K1)
        return torch.div(self._first_KP, sizes_KP, out=self._grads_KP)


def _repeat(values: list[float], sizes: list[int]) -> Tensor:
    """Return each value as often as its size says."""
    pairs = zip(values, sizes, strict=True)
    return torch.cat([torch.full((size,), value) for value, size in pairs])
