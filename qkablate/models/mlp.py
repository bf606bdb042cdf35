"""The feed-forward sublayer of a block: two matrices around an activation, or three with a gate.

Shape suffixes: B batch, T context, D d_model, M units.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkablate.attention.kernels.matmul import Linear
from qkablate.config import ModelConfig
from qkablate.config.variant import mlp_units


def _squared_relu(x: Tensor) -> Tensor:
    """Return relu(x)² (So et al. 2021, Primer)."""
    return torch.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),  # that of GPT-2
    "relu2": _squared_relu,
}


class MLP(nn.Module):
    """Two linear layers with an activation between them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        units = mlp_units(config)
        self.up = Linear(config.d_model, units, bias=config.bias)
        self.down = Linear(units, config.d_model, bias=config.bias)
        self.activation = ACTIVATIONS[config.mlp]

    def forward(self, x_BTD: Tensor) -> Tensor:
        out_BTD: Tensor = self.down(self.activation(self.up(x_BTD)))
        return out_BTD


class SwiGLU(nn.Module):
    """Two linear layers, with the units of the first scaled by a gate (Shazeer 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        units = mlp_units(config)
        self.gate = Linear(config.d_model, units, bias=config.bias)
        self.up = Linear(config.d_model, units, bias=config.bias)
        self.down = Linear(units, config.d_model, bias=config.bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        units_BTM = F.silu(self.gate(x_BTD)) * self.up(x_BTD)
        out_BTD: Tensor = self.down(units_BTM)
        return out_BTD


def make_mlp(config: ModelConfig) -> MLP | SwiGLU:
    """Return the MLP of a block."""
    return SwiGLU(config) if config.mlp == "swiglu" else MLP(config)


def count_matrix_elements(mlp: MLP | SwiGLU) -> int:
    """Return how many weights each token is multiplied by."""
    return sum(part.weight.numel() for part in mlp.children() if isinstance(part, nn.Linear))
