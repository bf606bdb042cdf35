"""How many runs share the machine, and with how many threads each."""

import os
from collections.abc import Sequence
from dataclasses import replace

from qkablate.config import EngineConfig, SweepConfig
from qkablate.errors import UserError
from qkablate.sweeps.planning.manifest import Arm, Manifest
from qkablate.training import hardware
from qkablate.training.measure import BYTES_PER_PARAMETER

_BYTES_BESIDE = 400 * 2**20  # the interpreter, torch, and the activations of a small model
_GB_OF_A_JOB = 2.5  # the same with all that CUDA keeps on its host, and the process that waits
_PART = 0.8  # of the memory that is free

Slots = list[str | None]  # one for each run that can run at once: the GPU it stands for, or None


def pack(manifest: Manifest, settings: SweepConfig) -> tuple[Manifest, Slots]:
    """The slots of this machine, and the manifest with as many threads for each run as there are
    cores for it, where the user gives none. Measured on two cores: two runs of one thread each are
    done sooner than one after the other with two, so `auto` gives every run a core.
    """
    arms = list(manifest.arms.values())
    devices = sorted({arm.config.device for arm in arms})
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = cores or 1
    runs = len(manifest.runs)
    if settings.engine.name != "local":
        return _on_cluster(manifest, settings)
    if any(device.startswith("cuda") for device in devices):
        slots = _on_gpus(settings, devices, runs)
    else:
        slots = [None] * _on_cpu(settings.workers, arms, runs, cores)
    each = max(1, cores // len(slots))
    packed = {arm.name: _with_threads(arm, each) for arm in arms}
    return replace(manifest, arms=packed), slots


def _on_cluster(manifest: Manifest, settings: SweepConfig) -> tuple[Manifest, Slots]:
    """An engine that has machines of its own, and a queue."""
    arms, engine = list(manifest.arms.values()), settings.engine
    _check_devices([arm.config.device for arm in arms])
    if engine.gpus not in ("auto", 0, None) and not any(
        arm.config.device == "cuda" for arm in arms
    ):
        raise UserError(
            f"engine.gpus: {engine.gpus}, and the runs would be trained on the"
            f" {arms[0].config.device}; give device=cuda"
        )
    cores = engine.cpus or 1
    most = max((int(arm.config.threads) for arm in arms if _has_threads(arm)), default=1)
    if most > cores:
        raise UserError(f"threads: {most} on {cores} of a machine's cores: give engine.cpus={most}")
    runs = len(manifest.runs) + len(manifest.finals) * len(manifest.arms)
    count = min(settings.workers, runs) if isinstance(settings.workers, int) else runs
    packed = {arm.name: _with_threads(arm, cores) for arm in arms}
    return replace(manifest, arms=packed), [None] * count


def gpus_of_a_run(manifest: Manifest, engine: EngineConfig) -> int | float:
    if engine.gpus != "auto":
        return engine.gpus if isinstance(engine.gpus, int | float) else 0
    return int(any(arm.config.device.startswith("cuda") for arm in manifest.arms.values()))


def memory_of_a_run(manifest: Manifest, engine: EngineConfig) -> float:
    """In GB: what is asked for, or a bound for the largest model of the sweep."""
    if isinstance(engine.memory_gb, int | float):
        return float(engine.memory_gb)
    most = max(map(_bytes_of_a_run, manifest.arms.values()))
    return round(_GB_OF_A_JOB + most / 2**30, 1)


def _bytes_of_a_run(arm: Arm) -> float:
    """Roughly, and on the CPU, where activations share the memory with all else."""
    model, train = arm.config.model, arm.config.train
    kept = model.layers * (24 * model.d_model + 2 * model.heads * model.context)
    kept += 4 * int(arm.facts.get("vocabulary", 0))
    on_cpu = arm.config.device == "cpu"
    activations = 4 * train.batch_size * model.context * kept if on_cpu else 0
    return BYTES_PER_PARAMETER * arm.total_params + activations


def _on_gpus(settings: SweepConfig, devices: list[str], runs: int) -> Slots:
    _check_devices(devices)
    import torch  # counting leaves no trace on the GPUs; what trains is a process of its own

    found = torch.cuda.device_count()
    own = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = own.split(",") if own else [str(number) for number in range(found)]
    auto = min(found * settings.per_gpu, runs)
    count = settings.workers if isinstance(settings.workers, int) else auto
    return [names[number % found] for number in range(count)]


def _check_devices(devices: Sequence[str]) -> None:
    others = sorted({*devices} - {"cuda"})
    if others and any(device.startswith("cuda") for device in devices):
        raise UserError(
            f"device: a sweep takes the GPUs as they come; give device=cuda, not"
            f" {', '.join(others)}"
        )


def _on_cpu(workers: int | str, arms: Sequence[Arm], runs: int, cores: int) -> int:
    if isinstance(workers, int):
        return workers
    given = [int(arm.config.threads) for arm in arms if _has_threads(arm)]
    need = _BYTES_BESIDE + BYTES_PER_PARAMETER * max(arm.total_params for arm in arms)
    room = _PART * hardware.free_memory() / need
    return int(max(1, min(runs, cores // max(given, default=1), room)))


def _has_threads(arm: Arm) -> bool:
    return arm.words.get("threads", "auto") != "auto"


def _with_threads(arm: Arm, threads: int) -> Arm:
    if _has_threads(arm):
        return arm
    words = {**arm.words, "threads": str(threads)}
    return replace(arm, words=words, config=replace(arm.config, threads=threads))
