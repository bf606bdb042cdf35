"""Creation of the engine that a sweep's settings select."""

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

from qkablate.config import EngineConfig, SweepConfig
from qkablate.errors import UserError, install_hint
from qkablate.sweeps.engines.base import Engine
from qkablate.sweeps.engines.local import LocalEngine
from qkablate.sweeps.engines.ray.engine import RayEngine, check_address
from qkablate.sweeps.engines.slurm import cluster
from qkablate.sweeps.engines.slurm.engine import SlurmEngine
from qkablate.sweeps.planning import packing
from qkablate.sweeps.planning.manifest import Manifest

_REQUIRED = {"slurm": "submitit", "ray": "ray"}  # installed by the extra of the engine's name


def check_engine(engine: EngineConfig) -> None:
    """Raise UserError if the engine cannot be used on this machine."""
    required = _REQUIRED.get(engine.name)
    if required and importlib.util.find_spec(required) is None:
        raise UserError(
            f"engine: {engine.name} needs {required}, which is not installed:"
            f" {install_hint(engine.name)}"
        )
    if engine.name == "slurm":
        cluster.check_cluster(engine)
    if engine.name == "ray":
        check_address(engine)


def check_resources(engine: EngineConfig, manifest: Manifest) -> None:
    """Raise UserError if the engine would reject the jobs of these runs."""
    if engine.name == "slurm":
        cluster.check_job(_job_parameters(engine, manifest))


def open_engine(
    settings: SweepConfig,
    manifest: Manifest,
    devices: Sequence[str | None],
    *,
    wandb: bool,
    note: Callable[[str], None],
) -> Engine:
    """Return the engine. `devices` has one entry per concurrent run; `note` prints a message."""
    engine = settings.engine
    if engine.name == "slurm":
        limit = settings.workers if isinstance(settings.workers, int) else None
        return SlurmEngine(manifest.folder, _job_parameters(engine, manifest), limit, note)
    if engine.name == "ray":
        gpus = packing.gpus_per_run(manifest, engine)
        return RayEngine(engine, gpus, len(devices), manifest.folder, note)
    return LocalEngine(list(devices), wandb=manifest.folder if wandb else None)


def _job_parameters(engine: EngineConfig, manifest: Manifest) -> dict[str, Any]:
    memory_gb = packing.memory_gb_per_run(manifest, engine)
    return cluster.submitit_parameters(
        engine, memory_gb, int(packing.gpus_per_run(manifest, engine))
    )
