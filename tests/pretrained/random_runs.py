"""Runs with random weights, as a command restores them."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from qkablate.config import Config, ModelConfig, VariantConfig, resolve_variant, variants
from qkablate.models.build import build_model
from qkablate.training.warm_start.restore import RestoredRun


def random_run(
    folder: Path, name: str, keys: Mapping[str, Any] = MappingProxyType({}), **changes: Any
) -> RestoredRun:
    """Return a run of a variant, some keys of which are changed, with random parameters."""
    sizes = {"layers": 2, "d_model": 16, "heads": 4, "context": 16, "bias": True}
    model = ModelConfig(**sizes | changes)
    entry = {"rank": "auto", "groups": "auto", **variants()[name], **keys}
    variant = resolve_variant(VariantConfig(**entry), model)
    built = build_model(model, variant, 61, device="cpu").init_(0).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return RestoredRun(folder, Config(variant=variant, model=model), {}, folder, 0, built)
