"""Plans of runs that differ in seed and learning rate, on any data."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from qkablate.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
    VariantConfig,
    resolve,
    resolve_variant,
    variants,
)
from qkablate.config.schema import SeedsConfig
from qkablate.training.resolve import RunPlan, plan_run


def make_plans(
    folder: Path,
    count: int,
    *,
    variant: str = "standard",
    model: dict[str, Any] | None = None,
    data: DataConfig | None = None,
    train: dict[str, Any] | None = None,
    optim: dict[str, Any] | None = None,
    out: str = "out",
    **others: Any,
) -> list[RunPlan]:
    """Plan vmapped runs, each with a seed and a learning rate of its own."""
    text = folder / "tokens.txt"
    if not text.exists():
        pieces = np.random.default_rng(1).zipf(1.3, (1_200, 8)) % 64 + 32
        text.write_bytes(np.concatenate([pieces, pieces], 1).astype(np.uint8).tobytes())
    shape = {"layers": 2, "d_model": 16, "heads": 2, "context": 16}
    model_config = ModelConfig(**{**shape, **(model or {})})
    data = data or DataConfig(source="text", path=str(text), val_tokens=1024, test_tokens=1024)
    steps = {"steps": 12, "batch_size": 2, "eval_every": 6, "checkpoint_every": 4, "vmap": 4}
    config = Config(
        variant=resolve_variant(VariantConfig(**variants()[variant]), model_config),
        model=model_config,
        data=replace(data, cache=str(folder / "cache")),
        train=TrainConfig(**{**steps, **(train or {})}),
        optim=OptimConfig(**{"lr": 3e-3, "warmup": 2, **(optim or {})}),
        **{"device": "cpu", "precision": "fp32", "compile": False, "threads": 1, **others},
        out=str(folder / out),
    )
    config = resolve(replace(config, tracking=replace(config.tracking, wandb="disabled")))
    plans = []
    for seed in range(count):
        lr = config.optim.lr / (1 + seed)
        own = replace(config, optim=replace(config.optim, lr=lr), seed=seed)
        plans.append(plan_run(replace(own, seeds=SeedsConfig(seed, seed, seed))))
    return plans
