"""The number of runs that share a machine, and the threads of each."""

import os
from dataclasses import replace

import torch

from qkablate.config import EngineConfig, SweepConfig, stream_width
from qkablate.errors import UserError
from qkablate.models.catalogue import encoder_layers
from qkablate.runs.run import count_cores
from qkablate.sweeps.planning.manifest import Arm, Manifest
from qkablate.training import hardware
from qkablate.training.vmapped.support import bytes_per_parameter

_PROCESS_BYTES = 400 * 2**20  # the interpreter, torch, and the activations of a small model
_JOB_GB = 2.5  # the same with CUDA's host memory, and the parent process
_USABLE = 0.8  # of the free memory

Slots = list[str | None]  # one for each concurrent run: its GPU, or None


def pack(manifest: Manifest, settings: SweepConfig) -> tuple[Manifest, Slots]:
    """Return the manifest with the threads of every run, and a slot for each concurrent run.

    Measured on two cores, two runs with one thread each finish sooner than one after the other with
    two, so `auto` gives every run one core, or more where there are fewer runs than cores.
    """
    arms, engine, runs = [*manifest.arms.values()], settings.engine, len(manifest.runs)
    devices = {arm.config.device for arm in arms}
    has_gpu = any(device.startswith("cuda") for device in devices)
    if has_gpu and (others := sorted(devices - {"cuda"})):
        raise UserError(
            f"device: a sweep assigns the GPUs itself; give device=cuda, not {', '.join(others)}"
        )
    threads = max((int(arm.config.threads) for arm in arms if _has_threads(arm)), default=1)
    slots: Slots
    if engine.name != "local":  # with machines and a queue of its own
        cores = engine.cpus or 1
        if engine.gpus not in ("auto", 0, None) and "cuda" not in devices:
            raise UserError(
                f"engine.gpus: {engine.gpus}, and the runs would be trained on the"
                f" {arms[0].config.device}; give device=cuda"
            )
        if threads > cores:
            raise UserError(
                f"threads: {threads} on {cores} of a machine's cores: give engine.cpus={threads}"
            )
        runs += len(manifest.finals) * len(arms)
        slots = [None] * min(_count_slots(settings, runs), runs)
    else:
        cores = count_cores()
        if has_gpu:
            slots = _gpu_slots(settings, runs)
            if not slots:
                raise UserError("device: torch sees no CUDA GPU here, and the runs need one")
        else:
            need = _PROCESS_BYTES + max(
                bytes_per_parameter(arm.config) * arm.total_params * int(arm.config.train.vmap)
                for arm in arms
            )
            fit = _USABLE * hardware.free_memory() / need
            slots = [None] * _count_slots(settings, int(max(1, min(runs, cores // threads, fit))))
        cores = max(1, cores // len(slots))
    # The arms for which the user gives no threads get these.
    packed = {
        name: arm if _has_threads(arm) else arm.with_threads(cores)
        for name, arm in manifest.arms.items()
    }
    return replace(manifest, arms=packed), slots


def gpus_per_run(manifest: Manifest, engine: EngineConfig) -> int | float:
    """Return the GPUs that a cluster gives each run."""
    if engine.gpus != "auto":
        return engine.gpus if isinstance(engine.gpus, int | float) else 0
    return int(any(arm.config.device.startswith("cuda") for arm in manifest.arms.values()))


def memory_gb_per_run(manifest: Manifest, engine: EngineConfig) -> float:
    """Return the memory requested for each run, or a bound for the sweep's largest model."""
    if isinstance(engine.memory_gb, int | float):
        return float(engine.memory_gb)
    most = max(map(_estimate_bytes, manifest.arms.values()))
    return round(_JOB_GB + most / 2**30, 1)


def _estimate_bytes(arm: Arm) -> float:
    """Estimate a run's memory, on the CPU including its activations."""
    model, train = arm.config.model, arm.config.train
    d, heads, context = model.d_model, model.heads, model.context
    numbers: float = model.layers * (24 * d + 2 * heads * context)
    if model.form == "encoder_decoder":
        source = model.source or context
        numbers += model.layers * (8 * d + 2 * heads * source)
        width = stream_width(model, "encoder")
        numbers += encoder_layers(model) * (24 * width + 2 * heads * source) * source / context
    numbers += 4 * int(arm.facts.get("vocabulary", 0))
    on_cpu = arm.config.device == "cpu"
    activations = 4 * train.batch_size * context * numbers if on_cpu else 0
    return int(train.vmap) * (bytes_per_parameter(arm.config) * arm.total_params + activations)


def _count_slots(settings: SweepConfig, auto: int) -> int:
    return settings.workers if isinstance(settings.workers, int) else auto


def _gpu_slots(settings: SweepConfig, runs: int) -> Slots:
    available = torch.cuda.device_count()  # creates no context on them
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(number) for number in range(available)]
    count = _count_slots(settings, min(available * settings.runs_per_gpu, runs))
    return [names[number % available] for number in range(count)]


def _has_threads(arm: Arm) -> bool:
    return arm.overrides.get("threads", "auto") != "auto"
