"""The engine that a sweep's settings ask for."""

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

from qkablate.config import EngineConfig, SweepConfig
from qkablate.errors import UserError
from qkablate.sweeps.engines import Engine
from qkablate.sweeps.planning.manifest import Manifest

_NEEDS = {"slurm": "submitit", "ray": "ray"}  # the extra of the same name brings it


def check(engine: EngineConfig) -> None:
    """UserError for one that cannot be used here: before any work."""
    needed = _NEEDS.get(engine.name)
    if needed and importlib.util.find_spec(needed) is None:
        raise UserError(
            f"engine: {engine.name} needs {needed}, which is not installed:"
            f" pip install 'qkablate[{engine.name}]'"
        )
    if engine.name == "slurm":
        from qkablate.sweeps.engines.slurm import cluster

        cluster.check(engine)
    if engine.name == "ray":
        from qkablate.sweeps.engines.ray import engine as ray

        ray.check(engine)


def check_runs(engine: EngineConfig, manifest: Manifest) -> None:
    """The same, now that it is known what the runs need."""
    if engine.name == "slurm":
        from qkablate.sweeps.engines.slurm import cluster

        cluster.check_job(_of_a_job(engine, manifest))


def opened(
    settings: SweepConfig,
    manifest: Manifest,
    devices: Sequence[str | None],
    *,
    wandb: bool,
    note: Callable[[str], None],
) -> Engine:
    """`devices` has an entry for every run that the engine may have at once; `note` is told what
    a person should know of it.
    """
    engine = settings.engine
    if engine.name == "slurm":
        from qkablate.sweeps.engines.slurm.engine import Slurm

        limit = settings.workers if isinstance(settings.workers, int) else None
        return Slurm(manifest.folder, _of_a_job(engine, manifest), limit, note)
    if engine.name == "ray":
        from qkablate.sweeps.engines.ray.engine import Ray
        from qkablate.sweeps.planning.packing import gpus_of_a_run

        return Ray(engine, gpus_of_a_run(manifest, engine), len(devices), manifest.folder, note)
    from qkablate.sweeps.engines.local import Local

    assert engine.name == "local"
    return Local(list(devices), wandb=manifest.folder if wandb else None)


def _of_a_job(engine: EngineConfig, manifest: Manifest) -> dict[str, Any]:
    from qkablate.sweeps.engines.slurm.cluster import parameters
    from qkablate.sweeps.planning.packing import gpus_of_a_run, memory_of_a_run

    gpus = int(gpus_of_a_run(manifest, engine))
    return parameters(engine, memory_of_a_run(manifest, engine), gpus)
