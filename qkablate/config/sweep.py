"""The schema of a sweep: what is compared, what is held equal, and how the runs are run."""

import dataclasses
import re
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

from qkablate.config.schema import BIG
from qkablate.errors import UserError, nearest, refuse_secrets


@dataclass
class ControlConfig:
    """What every arm has as much of as the baseline, and what pays for it."""

    match: str = "none"
    knob: str = "mlp"
    tolerance: float = 0.01


@dataclass
class GridConfig:
    """The runs of a sweep. Values are written as on the command line: `32,64`, `range(3)`."""

    name: str = "grid"
    axes: dict[str, Any] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)
    baseline: Any = "standard"
    where: list[str] = field(default_factory=list)
    tune: bool = False
    tuning_seeds: list[int] = field(default_factory=lambda: [1000, 1001])


@dataclass
class EngineConfig:
    """Where the runs are trained. A key that is none of the engine's own stays empty."""

    name: str = "local"
    partition: str | None = None
    account: str | None = None
    hours: float | None = None
    grace: int | None = None
    address: str | None = None
    cpus: int | None = None
    gpus: int | float | str | None = None
    memory_gb: int | float | str | None = None
    sbatch: dict[str, Any] = field(default_factory=dict)


@dataclass
class SweepConfig:
    sweep: GridConfig = field(default_factory=GridConfig)
    control: ControlConfig = field(default_factory=ControlConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    workers: int | str = "auto"
    per_gpu: int = 1
    on_failure: str = "continue"


CHOICES = {
    "control.match": ("none", "params", "flops"),
    "control.knob": ("mlp", "d_model", "layers"),
    "on_failure": ("continue", "stop"),
}
# Keys of the sweep itself; all others belong to its runs.
SWEEP_KEYS = ("workers", "per_gpu", "on_failure", "engine")
# Each engine's own.
ENGINE_KEYS = {
    "local": (),
    "slurm": ("partition", "account", "hours", "grace", "cpus", "gpus", "memory_gb", "sbatch"),
    "ray": ("address", "cpus", "gpus"),
}
_ENGINE_RANGES = {
    "hours": (0.02, 24 * 365),
    "grace": (1, 24 * 3600),
    "cpus": (1, 4096),
    "gpus": (0, 1),  # a run of a sweep has one at most: see docs/clusters.md for torchrun
    "memory_gb": (0.1, 2**20),
}


def check_sweep(config: SweepConfig) -> None:
    """Every rule that needs no run."""
    refuse_secrets(dataclasses.asdict(config))
    values = {"on_failure": config.on_failure}
    values |= {f"control.{key}": getattr(config.control, key) for key in ("match", "knob")}
    for key, value in values.items():
        if value not in CHOICES[key]:
            names = ", ".join(CHOICES[key])
            raise UserError(f"{key}: '{value}' is not one of {names}{nearest(value, CHOICES[key])}")
    if not 0 <= config.control.tolerance < 1:
        raise UserError(
            f"control.tolerance: {config.control.tolerance} is not from 0 to below 1, as 0.01 is"
        )
    if config.workers != "auto" and not (
        isinstance(config.workers, int) and 1 <= config.workers <= 4096
    ):
        raise UserError(f"workers: '{config.workers}' is not auto, or a number from 1 to 4096")
    if not 1 <= config.per_gpu <= 64:
        raise UserError(f"per_gpu: {config.per_gpu} is not a number from 1 to 64")
    _check_engine(config.engine)
    if config.per_gpu != 1 and config.engine.name != "local":
        what = "engine.gpus; write a part of 1" if config.engine.name == "ray" else "whole GPUs"
        raise UserError(f"per_gpu: engine={config.engine.name} has {what}")
    grid = config.sweep
    if not re.fullmatch(r"\w[\w+-]*", grid.name):
        raise UserError(f"sweep.name: '{grid.name}' is not made of letters, digits, _, + and -")
    if not grid.tuning_seeds or not all(0 <= seed <= BIG for seed in grid.tuning_seeds):
        raise UserError(f"sweep.tuning_seeds: {grid.tuning_seeds} are not one or more seeds")
    if not isinstance(grid.baseline, str | dict | None):
        raise UserError(
            f"sweep.baseline: '{grid.baseline}' is not a variant, a map of keys to values, or null"
        )


def _check_engine(engine: EngineConfig) -> None:
    """That every key given belongs to the engine, and is in its range."""
    own = ENGINE_KEYS[engine.name]
    for key, value in vars(engine).items():
        if key in ("name", *own) or value in (None, {}):
            continue
        has = f"; it has {', '.join(own)}" if own else ""
        raise UserError(f"engine.{key}: engine={engine.name} has no such key{has}")
    for key, (least, most) in _ENGINE_RANGES.items():
        value = getattr(engine, key)
        if key not in own or (value == "auto" and key in ("gpus", "memory_gb")):
            continue
        if isinstance(value, (bool, str, NoneType)) or not least <= value <= most:
            auto = "auto, or " if key in ("gpus", "memory_gb") else ""
            raise UserError(f"engine.{key}: '{value}' is not {auto}a number from {least} to {most}")
    if engine.name == "slurm" and engine.gpus != "auto" and int(engine.gpus or 0) != engine.gpus:
        raise UserError(f"engine.gpus: '{engine.gpus}': SLURM has whole GPUs; Ray has parts of one")
    if engine.grace is not None and engine.grace >= 3600 * (engine.hours or 0):
        raise UserError(
            f"engine.grace: {engine.grace} s are not less than engine.hours, {engine.hours:g} h"
        )


def as_word(value: Any) -> str:
    """A value of a file, as it is typed on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def as_quoted(value: Any) -> str:
    """The same, of a text that stands for nothing but itself."""
    if not isinstance(value, str) or (re.fullmatch(r"[\w./+-]+", value) and not _is_read(value)):
        return as_word(value)
    # In Hydra's quotes a backslash is one, but before a quote.
    inner = re.sub(r'(\\*)"', r'\1\1\\"', value)
    inner = re.sub(r"(\\+)$", r"\1\1", inner)
    return f'"{inner}"'


def _is_read(word: str) -> bool:
    """Whether Hydra takes it for something else than a text."""
    try:
        float(word.replace("_", ""))
    except ValueError:
        return word.lower() in ("null", "true", "false")
    return True
