"""AdamW with parameter groups, and the learning-rate schedule."""

import inspect
import math
from collections import defaultdict

import torch
from torch import nn

from qkablate.config import Config, OptimConfig
from qkablate.config.schedule import cooldown_begin
from qkablate.models.base import Model


class AdamW(torch.optim.AdamW):
    """torch's AdamW without the wrappers that keep torch.compile out of its methods.

    They import the compiler, which takes a second, and no optimizer is compiled here.
    """

    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    state_dict = inspect.unwrap(torch.optim.AdamW.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.AdamW.load_state_dict)
    zero_grad = inspect.unwrap(torch.optim.AdamW.zero_grad)
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


def make_optimizer(model: Model, config: Config) -> AdamW:
    """Group parameters by learning-rate multiplier and decay; matrices decay, vectors don't.

    With f factors in a circuit and multiplier m, its matrices decay by λ · 2/(f · m), so that the
    circuit shrinks per step as standard's does.
    """
    multipliers: dict[nn.Parameter, tuple[float, float]] = {}
    power = model.variant_layer().module.lr_power(config.variant.lr)  # the same at all sites
    for layer in model.attention_layers():
        for parameter, rate, decay in layer.module.rates(power):
            multipliers[parameter] = rate, decay / rate
    groups: defaultdict[tuple[float, float], list[nn.Parameter]] = defaultdict(list)
    for parameter in model.parameters():
        rate, decay = multipliers.get(parameter, (1.0, 1.0))
        groups[rate, decay if parameter.dim() >= 2 else 0.0].append(parameter)
    return AdamW(
        [
            {
                "params": parameters,
                "lr": config.optim.lr * rate,
                "weight_decay": config.optim.weight_decay * decay,
                "lr_multiplier": rate,
            }
            for (rate, decay), parameters in groups.items()
        ],
        betas=(config.optim.betas[0], config.optim.betas[1]),
        fused=config.device != "mps",
    )


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
