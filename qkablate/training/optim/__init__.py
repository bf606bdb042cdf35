"""The optimizer of a run, its parameter groups, and the learning-rate schedule."""

import math
from collections import defaultdict
from typing import Any

from torch import nn

from qkablate.attention import CircuitLr
from qkablate.config import Config, OptimConfig
from qkablate.config.schedule import cooldown_begin
from qkablate.errors import ImpossibleConfig
from qkablate.models.base import Model
from qkablate.training.optim.adamw import AdamW
from qkablate.training.optim.muon import Muon, find_matrices


def make_optimizer(model: Model, config: Config) -> AdamW:
    """Group parameters by learning-rate multiplier and decay; matrices decay, vectors don't.

    With f factors in a circuit and multiplier m, its matrices decay by λ · 2/(f · m), so that the
    circuit shrinks per step as standard's does.
    """
    multipliers: dict[nn.Parameter, tuple[float, float]] = {}
    # The same at all sites with the variant; elsewhere QK has the rate of the model.
    given = model.variant_layer().module.circuit_lr(config.variant.lr)
    sites = model.variant_layers()
    for layer in model.attention_layers():
        own = given if layer.site in sites else CircuitLr(given.power)
        for parameter, rate, decay in layer.module.rates(own):
            multipliers[parameter] = rate, decay / rate
    blocks = find_matrices(model) if config.optim.optimizer == "muon" else {}
    groups: defaultdict[tuple[float, float, bool], list[nn.Parameter]] = defaultdict(list)
    for parameter in model.parameters():
        rate, decay = multipliers.get(parameter, (1.0, 1.0))
        decay = decay if parameter.dim() >= 2 else 0.0
        groups[rate, decay, parameter in blocks].append(parameter)
    settings: list[dict[str, Any]] = [
        {
            "params": parameters,
            "lr": config.optim.lr * rate,
            "weight_decay": config.optim.weight_decay * decay,
            "lr_multiplier": rate,
            **({"momentum": config.optim.momentum} if is_matrix else {}),
        }
        for (rate, decay, is_matrix), parameters in groups.items()
    ]
    betas = (config.optim.betas[0], config.optim.betas[1])
    fused = config.device != "mps"
    if config.optim.optimizer == "muon":
        return Muon(settings, blocks, betas=betas, fused=fused)
    return AdamW(settings, betas=betas, fused=fused)


def check_optimizer(model: Model, config: Config) -> None:
    """Raise ImpossibleConfig if Muon has no matrices to train."""
    if config.optim.optimizer == "muon" and not find_matrices(model):
        raise ImpossibleConfig("optim.optimizer: muon, but the blocks have no matrices; use adamw")


def learning_rate(optim: OptimConfig, step: int, steps: int) -> float:
    """Return the learning rate of step 0 … steps - 1, before a group's multiplier."""
    assert isinstance(optim.warmup, int)
    if step < optim.warmup:
        return optim.lr * (step + 1) / optim.warmup
    if optim.schedule == "constant":
        return optim.lr
    last = max(steps - 1, optim.warmup + 1)
    if optim.schedule == "cosine":
        fraction = (step - optim.warmup) / (last - optim.warmup)
        height = 0.5 * (1 + math.cos(math.pi * fraction))
    else:  # wsd: stable, then straight down
        begin = cooldown_begin(optim, steps)
        height = 1.0 if step <= begin else (last - step) / (last - begin)
    return optim.lr * (optim.lr_final + (1 - optim.lr_final) * height)
