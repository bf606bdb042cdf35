"""Muon for the matrices of a model, AdamW for its other parameters.

Shape suffixes: N matrices, R rows, C columns.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from qkablate.attention import Attention
from qkablate.models.base import Model
from qkablate.training.optim.adamw import AdamW

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Keller Jordan's, as in torch.optim.Muon
_ITERATIONS = 5
RMS = 0.2  # of an update, in units of the rate; that of AdamW's (Liu et al. 2025)
_AT_ONCE = 2**22  # numbers that are orthogonalized together, to bound the memory of a step


class Blocks(NamedTuple):
    """The matrices that a parameter consists of; see Circuit.matrices."""

    split: Callable[[Tensor], Tensor]  # a gradient into NRC
    join: Callable[[Tensor], Tensor]  # their updates into one


_WHOLE = Blocks(lambda x_RC: x_RC.unsqueeze(0), lambda x_NRC: x_NRC.squeeze(0))


def find_matrices(model: Model) -> dict[nn.Parameter, Blocks]:
    """Return the parameters of the blocks that multiply vectors: no embeddings, head or vectors."""
    found: dict[nn.Parameter, Blocks] = {}
    for unit in model.sharding_units():
        for module in unit.modules():
            if isinstance(module, nn.Linear):
                assert isinstance(module.weight, nn.Parameter)
                found[module.weight] = _WHOLE
    for layer in model.attention_layers():
        found |= find_attention_matrices(layer.module)
    return found


def find_attention_matrices(layer: Attention) -> dict[nn.Parameter, Blocks]:
    """Return the parameters of an attention layer that multiply vectors."""
    return {
        circuit.get_parameter(name): Blocks(split, join)
        for circuit in layer.parts
        for name, split, join in circuit.matrices()
    }


class Muon(AdamW):
    """Torch's Muon, one matrix of a head at a time, and AdamW for groups without `momentum`.

    Updates have the RMS of AdamW's (`adjust_lr_fn="match_rms_adamw"`), so that one learning rate
    serves both. torch.optim.Muon itself takes whole parameters of two dimensions only.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], blocks: dict[nn.Parameter, Blocks], **settings: Any
    ) -> None:
        super().__init__(groups, **settings)
        self.blocks = blocks
        # With fp16 the gradient scaler, not a fused kernel, skips steps that are not finite.
        self._step_supports_amp_scaling = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.optim.Optimizer.__setstate__(self, state)  # Adam's expects moments of every parameter

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update all parameters from their gradients."""
        groups = self.param_groups
        try:
            self.param_groups = [group for group in groups if "momentum" not in group]
            super().step()
        finally:
            self.param_groups = groups
        for group in groups:
            if "momentum" in group:
                self._step_matrices(group)

    def _step_matrices(self, group: dict[str, Any]) -> None:
        """Update a group, with matrices of one shape orthogonalized together, as memory permits."""
        waiting = defaultdict[torch.Size, dict[nn.Parameter, Tensor]](dict)
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            update_NRC = self._accumulate(parameter, parameter.grad, group["momentum"])
            alike = waiting[update_NRC.shape[1:]]
            alike[parameter] = update_NRC
            if sum(update.numel() for update in alike.values()) >= _AT_ONCE:
                self._apply(group, waiting.pop(update_NRC.shape[1:]))
        for alike in waiting.values():
            self._apply(group, alike)

    def _apply(self, group: dict[str, Any], updates: dict[nn.Parameter, Tensor]) -> None:
        """Update parameters whose matrices have one shape."""
        all_NRC = orthogonalize(torch.cat([*updates.values()]))
        rate = group["lr"] * RMS * math.sqrt(max(all_NRC.shape[1:]))
        parts = all_NRC.split([len(update_NRC) for update_NRC in updates.values()])
        for parameter, update_NRC in zip(updates, parts, strict=True):
            update: Tensor = self.blocks[parameter].join(update_NRC).to(parameter.dtype)
            if hasattr(parameter, "full_tensor"):  # a DTensor: its module is slow to import
                from qkablate.training.distributed.sharding import shard_like

                update = shard_like(update, cast("DTensor", parameter))
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(update, alpha=-rate)

    def _accumulate(self, parameter: nn.Parameter, grad: Tensor, momentum: float) -> Tensor:
        """Return the matrices of the gradient with Nesterov's momentum, NRC."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        buffer = state["momentum_buffer"].lerp_(grad, 1 - momentum)
        update = grad.lerp(buffer, momentum)
        gather = getattr(update, "full_tensor", None)  # of a DTensor
        return self.blocks[parameter].split(gather() if gather else update)


def orthogonalize(x_NRC: Tensor) -> Tensor:
    """Return each matrix with singular values near 1: five Newton–Schulz iterations.

    In bf16 on a GPU, as torch's, and in fp32 elsewhere, where bf16 is not faster.
    """
    y_NRC = x_NRC.to(torch.bfloat16 if x_NRC.is_cuda else torch.float32)
    tall = y_NRC.shape[1] > y_NRC.shape[2]
    y_NRC = y_NRC.mT if tall else y_NRC
    y_NRC = y_NRC / y_NRC.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    a, b, c = _NEWTON_SCHULZ
    for _ in range(_ITERATIONS):
        gram_NRR = y_NRC @ y_NRC.mT
        polynomial_NRR = torch.baddbmm(gram_NRR, gram_NRR, gram_NRR, beta=b, alpha=c)
        y_NRC = torch.baddbmm(y_NRC, polynomial_NRR, y_NRC, beta=a)
    return y_NRC.mT if tall else y_NRC
