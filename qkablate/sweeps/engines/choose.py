"""The engine that a sweep's settings ask for."""

import importlib.util
from collections.abc import Sequence

from qkablate.config import EngineConfig
from qkablate.errors import UserError
from qkablate.sweeps.engines import Engine
from qkablate.sweeps.manifest import Manifest

_NEEDS = {"slurm": "submitit", "ray": "ray"}  # the extra of the same name brings it


def check(engine: EngineConfig) -> None:
    """UserError for one that cannot be used here: before any work."""
    needed = _NEEDS.get(engine.name)
    if needed and importlib.util.find_spec(needed) is None:
        raise UserError(
            f"engine: {engine.name} needs {needed}, which is not installed:"
            f" pip install 'qkablate[{engine.name}]'"
        )
    # Here each engine's own look at the machine: SLURM's commands, the partition, Ray's address.


def opened(
    engine: EngineConfig, manifest: Manifest, devices: Sequence[str | None], *, wandb: bool
) -> Engine:
    """`devices` has an entry for every run that the engine may have at once."""
    from qkablate.sweeps.engines.local import Local

    assert engine.name == "local"
    return Local(list(devices), wandb=wandb)
