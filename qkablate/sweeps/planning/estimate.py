"""Time and memory of a sweep here, interpolated from a few real steps of two of its arms."""

import heapq
import multiprocessing
import os
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import MappingProxyType
from typing import Any

import torch

from qkablate.config import EVAL_COST, Config, read_limit
from qkablate.config.data import is_causal_text
from qkablate.data.text.references import peak_bytes
from qkablate.errors import UserError, print_stderr
from qkablate.runs.records import read_json, write_json
from qkablate.runs.run import NUMERICS, count_cores, read_cpu_name, run_id
from qkablate.sweeps.engines.local import PRELOADED
from qkablate.sweeps.engines.main_module import hidden_main_module
from qkablate.sweeps.planning.manifest import Arm, Manifest
from qkablate.sweeps.planning.packing import Slots
from qkablate.sweeps.planning.tuning import refinement_sizes
from qkablate.training import hardware
from qkablate.training.measure import (
    evaluate_once,
    make_training_step,
    measure_step_times,
)

STEPS = 8
_MAX_AGE = 86_400.0  # seconds: an older measurement may be of a busier machine
MAX_SECONDS = 20.0  # for the steps of one arm
LIMIT = 3 * MAX_SECONDS  # seconds until an answer, with its imports and one evaluation
# Seconds of a step of `standard` at scale=small where the claims' minutes were counted, and the
# cores there, with a run on each.
REFERENCE_SECONDS, REFERENCE_SLOTS = 0.0135, 2


class NotTimedError(Exception):
    """The runs cannot be timed on this machine; the text says why."""


@dataclass(frozen=True)
class RunEstimate:
    """The estimated cost of one run of an arm."""

    seconds: float
    bytes: float
    extrapolated: bool  # the arm is larger than what was timed


@dataclass(frozen=True)
class SweepCost:
    """The estimated cost of all runs of a sweep that are not done."""

    seconds: float
    flops: float
    max_bytes: float  # of one run
    extrapolated: bool  # any of the arms


@dataclass(frozen=True)
class Timing:
    """The measured training of an arm, while all slots are busy with the same."""

    flops: float  # of a step
    step: float  # seconds
    start: float  # seconds before the second step
    bytes: float


def estimate_arms(manifest: Manifest, slots: Slots) -> dict[str, RunEstimate]:
    """Estimate one run of every arm, or raise NotTimedError."""
    arms = sorted(manifest.arms.values(), key=_flops_per_step)
    if arms[0].config.device.startswith("cuda") and not torch.cuda.is_available():
        raise NotTimedError("this machine has no GPU")
    path = manifest.folder.with_name("estimates.json")
    cache: dict[str, Any] = read_json(path) or {}
    smallest = _measure(arms[0], manifest, slots, cache)
    # The arms that can be timed at the smallest one's rate of FLOPs; larger ones have a higher one.
    max_flops = smallest.flops * MAX_SECONDS / (STEPS * smallest.step)
    free = hardware.free_memory()
    feasible = [
        arm
        for arm in arms
        if _flops_per_step(arm) <= max_flops
        and hardware.BYTES_PER_PARAMETER * arm.total_params * len(slots) < 0.5 * free
    ]
    largest = smallest
    with suppress(NotTimedError):
        largest = _measure(feasible[-1], manifest, slots, cache) if feasible else smallest
    with suppress(OSError):  # a full disk: it is measured again
        write_json(path, cache)
    return {arm.name: _interpolate(arm, smallest, largest) for arm in arms}


def measure_pace(config: Config, vocabulary: int) -> float:
    """Return how many times as long as on the reference machine a claim's runs take on this one."""
    (times,) = measure_step_times([config], vocabulary, lambda part: None)
    is_on_gpu = hardware.resolve(config).device.startswith("cuda")
    slots = torch.cuda.device_count() if is_on_gpu else count_cores()
    return times.median / REFERENCE_SECONDS * REFERENCE_SLOTS / slots


def estimate_sweep(
    manifest: Manifest,
    estimates: Mapping[str, RunEstimate],
    slots: int,
    done: Mapping[str, str] = MappingProxyType({}),
    fractions: Mapping[str, float] = MappingProxyType({}),
) -> SweepCost:
    """Estimate the whole sweep: the largest runs first, each in the slot that is free first.

    By id, `done` are the arms of runs that need not be trained, and `fractions` the parts that are
    trained of runs that branch off another one.
    """
    left = [(run.arm, fractions.get(run.id, 1.0)) for run in manifest.runs if run.id not in done]
    planned = {run.id for run in manifest.runs}
    later = Counter(arm for id, arm in done.items() if id not in planned)
    for name, refinement in refinement_sizes(manifest).items():
        left += [(name, 1.0)] * (refinement + len(manifest.finals) - later[name])
    busy = [0.0] * slots
    for seconds in sorted((-estimates[name].seconds * part for name, part in left)):
        heapq.heapreplace(busy, busy[0] - seconds)
    return SweepCost(
        seconds=max(busy),
        flops=sum(manifest.arms[name].train_flops * part for name, part in left),
        max_bytes=max(estimate.bytes for estimate in estimates.values()),
        extrapolated=any(estimate.extrapolated for estimate in estimates.values()),
    )


def _interpolate(arm: Arm, small: Timing, large: Timing) -> RunEstimate:
    """Estimate an arm on the line through two timings; proportionally where there is only one."""
    flops, steps = _flops_per_step(arm), int(arm.config.train.steps)
    if (span := large.flops - small.flops) > 0:
        part = (flops - small.flops) / span
        step, memory = (
            max(low + part * (high - low), min(low, high) * 0.1)
            for low, high in ((small.step, large.step), (small.bytes, large.bytes))
        )
    else:
        step, memory = small.step * flops / small.flops, small.bytes
    # The test split is read once.
    train = arm.config.train
    evaluated = (steps // int(train.eval_every) + 2) * int(train.eval_tokens)
    limit = read_limit(arm.config, "test")
    tested = arm.test_tokens if limit is None else min(arm.test_tokens, limit)
    evaluated += tested * train.evaluate_test
    evaluation = EVAL_COST * evaluated / (arm.tokens / steps) * step
    return RunEstimate(
        seconds=large.start + steps * step + evaluation,
        bytes=max(memory, hardware.BYTES_PER_PARAMETER * arm.total_params) + _reference_bytes(arm),
        extrapolated=flops > 1.01 * large.flops,
    )


def _reference_bytes(arm: Arm) -> float:
    """Return the memory of the n-grams and the compressor that the first run on a text measures."""
    data = arm.config.data
    is_measured = is_causal_text(data) and arm.config.train.evaluate_test
    is_on_cpu = arm.config.device == "cpu"
    return peak_bytes(arm.tokens, data.test_tokens) if is_measured and is_on_cpu else 0


def _flops_per_step(arm: Arm) -> float:
    return arm.train_flops / int(arm.config.train.steps)


def _measure(arm: Arm, manifest: Manifest, slots: Slots, cache: dict[str, Any]) -> Timing:
    """Return the timing of an arm, from the cache or measured in as many processes as slots."""
    run = next(run for run in manifest.runs if run.arm == arm.name)
    config, vocabulary = manifest.config_of(run), int(arm.facts["vocabulary"])
    machine = [len(slots), config.threads, read_cpu_name(), torch.__version__, NUMERICS]
    key = run_id({"timing": [run.id, *machine]})
    if time.time() - cache.get(key, {}).get("at", 0) > _MAX_AGE:
        print_stderr(f"qkablate: timing the first steps of {arm.name} …")
        processes = [MeasuringProcess(_time_steps, config, vocabulary, gpu) for gpu in slots]
        timings, deadline = [], time.monotonic() + LIMIT
        reason = f"the first steps of {arm.name} take more than {LIMIT:.0f} s here"
        for process in processes:
            try:
                seconds = max(0.0, deadline - time.monotonic())
                if timing := process.receive(seconds, f"{arm.name} cannot be timed"):
                    timings.append(timing)
            except EOFError:
                reason = f"the process that timed {arm.name} was killed (short of memory?)"
        if not timings:
            raise NotTimedError(reason)
        cache[key] = {"timing": [*map(statistics.median, zip(*timings, strict=True))]}
        cache[key]["at"] = time.time()
    return Timing(_flops_per_step(arm), *cache[key]["timing"])


def _time_steps(config: Config, vocabulary: int, gpu: str | None) -> tuple[float, float, int]:
    """Return the seconds of a step and of the start, and the memory."""
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    began = time.perf_counter()
    hardware.configure_process(config)
    model, step = make_training_step(config, vocabulary, config.train.grad_accum)
    ready, times = time.perf_counter(), list[float]()
    while len(times) < 1 + STEPS and sum(times) < MAX_SECONDS:
        times.append(hardware.time_action(step, config.device))
    evaluate_once(config, model, vocabulary)
    median = statistics.median(times[1:] or times)
    return median, ready - began + times[0], hardware.peak_memory(config.device)


class MeasuringProcess:
    """A process of its own, which inherits no memory or warm cache, for one call of `measure`."""

    def __init__(self, measure: Callable[..., tuple[float, ...]], *arguments: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([measure.__module__, *PRELOADED])
        self._answer, answer_end = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_send_answer, args=(measure, arguments, answer_end), daemon=True
        )
        with hidden_main_module():
            self._process.start()
        answer_end.close()

    def receive(self, seconds: float, failure: str) -> tuple[float, ...] | None:
        """Return the answer, or None if it takes longer, and end the process.

        Raise EOFError if the process was killed; UserError, which begins with `failure`, if
        `measure` raised an error.
        """
        try:
            answer = self._answer.recv() if self._answer.poll(seconds) else None
        finally:
            self._process.kill()
            self._process.join()
        if isinstance(answer, str):
            raise UserError(f"{failure}: {answer}")
        return answer


def _send_answer(
    measure: Callable[..., tuple[float, ...]], arguments: tuple[Any, ...], answer: Connection
) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        answer.send(measure(*arguments))
    except Exception as error:
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        answer.send(f"{kind}{error}")


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
