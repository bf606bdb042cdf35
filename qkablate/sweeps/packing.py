"""How many runs share the machine, and with how many threads each."""

import os
from collections.abc import Sequence
from dataclasses import replace

from qkablate.config import SweepConfig
from qkablate.errors import UserError
from qkablate.sweeps.manifest import Arm, Manifest
from qkablate.training import hardware
from qkablate.training.measure import BYTES_PER_PARAMETER

_BYTES_BESIDE = 400 * 2**20  # the interpreter, torch, and the activations of a small model
_PART = 0.8  # of the memory that is free

Slots = list[str | None]  # one for each run that can run at once: the GPU it stands for, or None


def pack(manifest: Manifest, settings: SweepConfig) -> tuple[Manifest, Slots]:
    """The slots of this machine, and the manifest with as many threads for each run as there are
    cores for it, where the user gives none. Measured on two cores: two runs of one thread each are
    done sooner than one after the other with two, so `auto` gives every run a core."""
    arms = list(manifest.arms.values())
    devices = sorted({arm.config.device for arm in arms})
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = cores or 1
    runs = len(manifest.runs)
    if settings.engine.name != "local":  # which has machines of its own, and a queue
        count = settings.workers if isinstance(settings.workers, int) else runs
        each = settings.engine.cpus or 1
        arms_there = {arm.name: _with_threads(arm, each) for arm in arms}
        return replace(manifest, arms=arms_there), [None] * count
    if any(device.startswith("cuda") for device in devices):
        slots = _on_gpus(settings, devices, runs)
    else:
        slots = [None] * _on_cpu(settings.workers, arms, runs, cores)
    each = max(1, cores // len(slots))
    packed = {arm.name: _with_threads(arm, each) for arm in arms}
    return replace(manifest, arms=packed), slots


def _on_gpus(settings: SweepConfig, devices: list[str], runs: int) -> Slots:
    if devices != ["cuda"]:
        raise UserError(
            f"device: a sweep takes the GPUs as they come; give device=cuda, not"
            f" {', '.join(device for device in devices if device != 'cuda')}"
        )
    import torch  # counting leaves no trace on the GPUs; what trains is a process of its own

    found = torch.cuda.device_count()
    own = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = own.split(",") if own else [str(number) for number in range(found)]
    auto = min(found * settings.per_gpu, runs)
    count = settings.workers if isinstance(settings.workers, int) else auto
    return [names[number % found] for number in range(count)]


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
