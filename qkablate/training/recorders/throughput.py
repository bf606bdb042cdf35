"""Throughput of training: tokens per second and model FLOPs utilization (MFU)."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from qkablate.training import hardware
from qkablate.training.resolve import RunPlan

WARM_UP = 5  # steps of a session before its speed counts


class Throughput:
    """Speed of the steps since the last row, without warm-up, evaluation and checkpoints."""

    def __init__(self, plan: RunPlan, processes: int) -> None:
        self._plan, self._device = plan, plan.config.device
        self._peak = hardware.measure_peak_flops(plan.config) * processes
        self._warm_up = WARM_UP
        self.restart()

    def restart(self) -> None:
        """Start to measure the next row."""
        self._start, self._paused, self._steps = time.perf_counter(), 0.0, 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude what happens in the context."""
        hardware.synchronize(self._device)
        start = time.perf_counter()
        yield
        self._paused += time.perf_counter() - start

    def count_step(self) -> None:
        """Count a completed step."""
        self._steps += 1
        if self._warm_up:  # the first steps compile, warm caches and allocate
            self._warm_up -= 1
            hardware.synchronize(self._device)
            self.restart()

    def row(self) -> dict[str, float]:
        """Return the speed since the last row, or nothing during warm-up."""
        if not self._steps:
            return {}
        seconds = time.perf_counter() - self._start - self._paused
        speed = self._steps * self._plan.tokens_per_step / seconds
        flops = speed * self._plan.flops_per_token
        self._peak = max(self._peak, flops)  # the machine may have been busy when it was measured
        return {"perf/tokens_per_second": speed, "perf/mfu": flops / self._peak}
