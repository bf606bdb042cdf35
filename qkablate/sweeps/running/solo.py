"""Measurement of the arms of a sweep, each alone: seconds of a training step, and peak memory.

Every measurement is a process of its own, so that none inherits memory or a warm cache; arms take
turns, in reverse order in every second repetition, so that a drift of the machine meets all alike.
"""

import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from qkablate.config import Config
from qkablate.disk import hold_lock
from qkablate.errors import UserError, print_stderr
from qkablate.runs.lease import LeaseObserver
from qkablate.runs.run import read_cpu_name
from qkablate.sweeps.planning.estimate import MeasuringProcess
from qkablate.sweeps.planning.manifest import Manifest
from qkablate.sweeps.running.solo_results import SoloFile, SoloRow, read_solo
from qkablate.training import hardware
from qkablate.training.measure import make_training_step

WARM_UP = 3  # steps
SECONDS = 2.0  # of steps in one measurement, but at least as many steps as follow
MIN_STEPS = 10
LIMIT = 600.0  # seconds of one measurement
TYPICAL = 6.0  # seconds of one, with the start of its process


def measure_arms(manifest: Manifest, arms: Sequence[str], repetitions: int) -> None:
    """Measure each arm so often, as far as it is not done; one kill costs one measurement at most.

    It waits while a run of the same folder is being trained: what is measured beside one is not the
    arm.
    """
    with hold_lock(manifest.folder / ".solo.lock", "another launcher that measures these arms"):
        _measure_missing(manifest, arms, repetitions)


def _measure_missing(manifest: Manifest, arms: Sequence[str], repetitions: int) -> None:
    found = read_solo(manifest.folder)
    machine = {
        "cpu": read_cpu_name(),
        "device": next(iter(manifest.arms.values())).facts["device"],
        "torch": torch.__version__,
        "threads": sorted({int(manifest.arms[arm].config.threads) for arm in arms}),
    }
    if found is not None and found.machine != machine:
        print_stderr("solo.json was measured on another machine: all arms are measured again")
        found = None
    found = found or SoloFile(manifest.folder.resolve().name, machine)
    done = {(row.arm, row.repetition) for row in found.rows}
    turns = [
        (arm, number)
        for number in range(repetitions)
        for arm in (arms if number % 2 == 0 else arms[::-1])
        if (arm, number) not in done
    ]
    if turns:  # the first process starts the server of the others: what it costs is not recorded
        _measure(manifest, *turns[0])
    is_shown = sys.stderr.isatty()
    for turn, (arm, number) in enumerate(
        tqdm(turns, "measured alone", leave=False, disable=not is_shown)
    ):
        if turn % 10 == 0 and not is_shown:
            print_stderr(f"measured alone: {turn} of {len(turns)}")
        _wait_for_others(Path(manifest.out).expanduser())
        row = _measure(manifest, arm, number)
        found = dataclasses.replace(found, rows=[*found.rows, row])
        found.write(manifest.folder)
    if turns and not is_shown:
        print_stderr(f"measured alone: {len(arms)} arms, {repetitions} times")


def _wait_for_others(out: Path) -> None:
    """Wait until no run of a folder is being trained."""
    observer, told = LeaseObserver(), False
    while busy := [f.parent for f in out.glob("runs/*/lease") if observer.is_leased(f.parent)]:
        if not told:
            print_stderr(
                f"seconds and memory are measured alone: waiting for {busy[0].name} to end"
            )
            told = True
        time.sleep(5)


def _measure(manifest: Manifest, arm: str, repetition: int) -> SoloRow:
    run = next(run for run in manifest.runs if run.arm == arm)
    config, vocabulary = manifest.config_of(run), int(manifest.arms[arm].facts["vocabulary"])
    before, busy, began = sum(os.times()[:4]), _busy_seconds(), time.monotonic()
    failure = f"{arm} cannot be measured"
    try:
        costs = MeasuringProcess(_measure_costs, config, vocabulary).receive(LIMIT, failure)
    except EOFError:
        raise UserError(f"{failure}: its process was killed (memory?)") from None
    if costs is None:
        raise UserError(f"{arm}: a few training steps take more than {LIMIT:.0f} s here")
    seconds, peak, own = costs
    passed = time.monotonic() - began
    others = _busy_seconds() - busy - own - (sum(os.times()[:4]) - before)
    return SoloRow(arm, repetition, seconds, peak, max(0.0, others / passed))


def _busy_seconds() -> float:
    """Return the seconds that all cores have been busy since the machine was started."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            user, nice, system = map(int, file.readline().split()[1:4])
    except (OSError, ValueError):
        return 0.0  # not Linux: it is not known
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def _measure_costs(config: Config, vocabulary: int) -> tuple[float, float, float]:
    """Return seconds of a step, peak memory and the process's own time."""
    hardware.configure_process(config)
    is_cuda = config.device.startswith("cuda")
    empty = 0 if is_cuda else _resident_bytes("VmRSS", config.device)
    _, step = make_training_step(config, vocabulary, config.train.grad_accum)
    for _ in range(WARM_UP):
        step()
    _reset_peak(config.device)
    times: list[float] = []
    while len(times) < MIN_STEPS or sum(times) < SECONDS:
        times.append(hardware.time_action(step, config.device))
    peak = _resident_bytes("VmHWM", config.device) - empty
    if peak <= 0:
        raise UserError("its memory is not known on this machine")
    return statistics.median(times), float(peak), time.process_time()


def _reset_peak(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    elif sys.platform == "linux":
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")  # the high-water mark of the resident set


def _resident_bytes(field: str, device: str) -> int:
    """Return the memory of this process: now (VmRSS), or at most since the last reset (VmHWM).

    On a CPU it is the resident set, in pages that the allocator may keep: it tells megabytes.
    """
    if device.startswith("cuda") or sys.platform != "linux":
        return hardware.peak_memory(device)
    with open("/proc/self/status", encoding="ascii") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(field))
