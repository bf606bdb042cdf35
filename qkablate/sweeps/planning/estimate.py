"""Time and memory of a sweep on this machine, from a few real steps of its smallest arm and of the
largest that can be timed, and a line through the two. What was measured is kept.
"""

import multiprocessing
import os
import signal
import statistics
import time
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from qkablate.config import Config
from qkablate.errors import UserError
from qkablate.runs.records import read_json, write_json
from qkablate.runs.run import NUMERICS, cpu_name, run_id
from qkablate.sweeps.engines.local import PRELOADED
from qkablate.sweeps.planning.manifest import Arm, Manifest
from qkablate.sweeps.planning.packing import Slots
from qkablate.training import hardware
from qkablate.training.measure import BYTES_PER_PARAMETER, training_step

STEPS = 8
_OLD = 86_400.0  # seconds; what was measured before that, on a busy machine perhaps, is forgotten
PATIENCE = 20.0  # seconds for the steps of one arm


@dataclass(frozen=True)
class Estimate:
    """Of one run of an arm."""

    seconds: float
    bytes: float
    beyond: bool  # the arm is larger than what was timed


@dataclass(frozen=True)
class _Timed:
    """Of an arm's training, while all slots are busy with the same."""

    flops: float  # of a step
    step: float  # seconds
    start: float  # seconds before the first step
    bytes: int


def estimate(manifest: Manifest, slots: Slots) -> dict[str, Estimate]:
    """For every arm."""
    arms = sorted(manifest.arms.values(), key=_flops_per_step)
    cache = Path(manifest.out).expanduser() / "sweeps" / "estimates.json"
    kept: dict[str, Any] = read_json(cache) or {}
    smallest = _timed(arms[0], manifest, slots, kept)
    # At the smallest arm's pace, what can be timed in reasonable time; larger arms are faster.
    within = smallest.flops * PATIENCE / (STEPS * smallest.step)
    free = hardware.free_memory()
    able = [
        arm
        for arm in arms
        if _flops_per_step(arm) <= within
        and BYTES_PER_PARAMETER * arm.total_params * len(slots) < 0.5 * free
    ]
    largest = _timed(able[-1], manifest, slots, kept) if able else smallest
    with suppress(OSError):  # a full disk: it is measured again
        write_json(cache, kept)
    return {arm.name: _of(arm, smallest, largest) for arm in arms}


def is_here(manifest: Manifest) -> bool:
    """Whether this machine has the device that the runs are trained on."""
    device = next(iter(manifest.arms.values())).config.device
    return not device.startswith("cuda") or torch.cuda.is_available()


def total_seconds(
    manifest: Manifest,
    estimates: Mapping[str, Estimate],
    slots: int,
    done: Collection[str] = (),
) -> float:
    """Of the whole sweep: the largest first, each to the slot that is free first."""
    counts = Counter(run.arm for run in manifest.runs if run.id not in done)
    for name in manifest.arms:
        counts[name] += len(manifest.finals)
    busy = [0.0] * slots
    for name in sorted(counts, key=lambda name: -estimates[name].seconds):
        for _ in range(counts[name]):
            first = min(range(slots), key=busy.__getitem__)
            busy[first] += estimates[name].seconds
    return max(busy)


def _of(arm: Arm, small: _Timed, large: _Timed) -> Estimate:
    flops = _flops_per_step(arm)
    span = large.flops - small.flops
    part = (flops - small.flops) / span if span > 0 else flops / small.flops - 1
    step = _along(small.step, large.step, part) if span > 0 else small.step * (1 + part)
    held = _along(small.bytes, large.bytes, part) if span > 0 else small.bytes
    train = arm.config.train
    steps = int(train.steps)
    # Readings of whole splits: a forward pass is a third of a training step.
    readings = steps // train.eval_every + 3
    read = readings * arm.held_out / (arm.tokens / steps) * step / 3
    return Estimate(
        seconds=large.start + steps * step + read,
        bytes=max(held, BYTES_PER_PARAMETER * arm.total_params),
        beyond=flops > 1.01 * large.flops,
    )


def _along(low: float, high: float, part: float) -> float:
    return max(low + part * (high - low), min(low, high) * 0.1)


def _flops_per_step(arm: Arm) -> float:
    return arm.work / int(arm.config.train.steps)


def _timed(arm: Arm, manifest: Manifest, slots: Slots, kept: dict[str, Any]) -> _Timed:
    run = next(run for run in manifest.runs if run.arm == arm.name)
    config, vocabulary = manifest.config_of(run), int(arm.facts["vocabulary"])
    about = [run.id, len(slots), config.threads, cpu_name(), torch.__version__, NUMERICS]
    key = run_id({"timed": about})
    if time.time() - kept.get(key, {}).get("at", 0) > _OLD:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, *PRELOADED])
        pipes = []
        for gpu in slots:
            end, start = context.Pipe(duplex=False)
            process = context.Process(
                target=_time, args=(config, vocabulary, gpu, start), daemon=True
            )
            process.start()
            start.close()
            pipes.append((end, process))
        found = []
        for end, process in pipes:
            if wait([end], 20 * PATIENCE):
                with_what = _received(end)
                if isinstance(with_what, dict):
                    found.append(with_what)
                elif with_what is not None:
                    raise UserError(f"{arm.name} cannot be timed: {with_what}")
            process.kill()
            process.join()
        if not found:
            raise UserError(f"{arm.name} cannot be timed: its process ended without a word")
        kept[key] = {name: statistics.median(one[name] for one in found) for name in found[0]}
        kept[key]["at"] = time.time()
    return _Timed(_flops_per_step(arm), *(kept[key][name] for name in ("step", "start", "bytes")))


def _received(end: Connection) -> Any:
    try:
        return end.recv()
    except EOFError:
        return None


def _time(config: Config, vocabulary: int, gpu: str | None, answer: Connection) -> None:
    """In a process of its own: a few steps, of which nothing is kept."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    try:
        began = time.perf_counter()
        hardware.prepare(config)
        step = training_step(config, vocabulary)
        ready, times = time.perf_counter(), list[float]()
        while len(times) < 1 + STEPS and sum(times) < PATIENCE:
            start = time.perf_counter()
            step()
            hardware.synchronize(config.device)
            times.append(time.perf_counter() - start)
        answer.send(
            {
                "step": statistics.median(times[1:] or times),
                "start": ready - began + times[0],
                "bytes": hardware.peak_memory(config.device),
            }
        )
    except Exception as error:
        answer.send(f"{type(error).__name__}: {error}")
