"""This machine: a fresh process for every run, forked from a server that has torch loaded. A crash
stays in its run, and a run starts in a few hundredths of a second.
"""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path

from qkablate.sweeps.engines import Ended, Task
from qkablate.sweeps.engines.remote import killed_for_memory
from qkablate.sweeps.running import worker
from qkablate.tracking.wandb.service import UNHEARD, keep

# What a run imports on its way, besides: half a second for each of them otherwise.
PRELOADED = [worker.__name__, "omegaconf"]
_WANDB = ["wandb", "wandb.sdk.launch"]  # the latter is imported by its start, in a quarter second
_PATIENCE = 10.0  # seconds for W&B's process to come up


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """What is started now does not hear what may come to a whole group of processes: the launcher
    needs the server until what runs has written its checkpoints, and also while it starts up.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, UNHEARD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass
class _Running:
    process: BaseProcess
    slot: int
    lifeline: connection.Connection  # a run ends when its launcher is gone
    kills: int  # what the kernel had killed for memory before


@dataclass(frozen=True)
class Service:
    """W&B's process: where it is (empty: each run starts its own), and what keeps it."""

    address: str = ""
    keeper: connection.Connection | None = None
    process: BaseProcess | None = None


class Local:
    """`devices` has an entry for every slot: the GPU it stands for, or None for the CPU."""

    shares = True
    elsewhere = False
    pause = 0.5

    def __init__(self, devices: list[str | None], *, wandb: Path | None) -> None:
        """`wandb` is the folder for what W&B's own process writes, if there is to be one."""
        self._devices = devices
        self.slots = len(devices)
        self._running: dict[str, _Running] = {}
        self._context = multiprocessing.get_context("forkserver")
        # The server imports and computes nothing: a thread of its own would hang its children.
        self._context.set_forkserver_preload(PRELOADED + _WANDB * (wandb is not None))
        self._wandb, self._service = wandb, Service()

    def adopt(self, ids: Collection[str]) -> list[str]:
        return []  # its runs end with their launcher

    def queued(self) -> Collection[str]:
        return ()

    def start(self, task: Task) -> None:
        taken = {running.slot for running in self._running.values()}
        slot = next(number for number in range(self.slots) if number not in taken)
        resource_tracker.ensure_running()  # its start would unblock the signal
        with _deaf():
            forkserver.ensure_running()
        if self._wandb is not None and self._service.keeper is None:
            self._service = self._served(self._wandb)
        end, lifeline = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=worker.work,
            args=(task, self._devices[slot], end, self._service.address, self._service.keeper),
            name=task.id,
        )
        process.start()
        end.close()
        self._running[task.id] = _Running(process, slot, lifeline, killed_for_memory())

    def _served(self, folder: Path) -> "Service":
        """W&B's process, for all runs; it goes when the launcher and all of them are gone."""
        others, keeper = self._context.Pipe(duplex=False)
        answer, found = self._context.Pipe(duplex=False)
        process = self._context.Process(target=keep, args=(folder, found, others), name="W&B")
        process.start()
        others.close()
        found.close()
        address = ""
        with contextlib.suppress(EOFError):
            address = answer.recv() if answer.poll(_PATIENCE) else ""
        return Service(address, keeper, process)

    def ended(self, seconds: float) -> list[Ended]:
        waiting = {running.process.sentinel: id for id, running in self._running.items()}
        found = []
        for sentinel in connection.wait(list(waiting), seconds):
            id = waiting[sentinel]  # type: ignore[index]
            running = self._running.pop(id)
            running.process.join()
            running.lifeline.close()
            code = running.process.exitcode or 0
            starved = code == -signal.SIGKILL and killed_for_memory() > running.kills
            found.append(Ended(id, code, starved))
        return found

    def stop(self, *, now: bool) -> None:
        for running in self._running.values():
            pid = running.process.pid
            with contextlib.suppress(ProcessLookupError):
                if pid is not None:
                    os.kill(pid, signal.SIGKILL if now else signal.SIGTERM)

    def close(self) -> None:
        """What still runs writes a checkpoint: it sees that nobody waits for it any more."""
        for running in self._running.values():
            running.lifeline.close()
        for running in self._running.values():
            running.process.join()
        self._running.clear()
        if self._service.keeper is not None and self._service.process is not None:
            self._service.keeper.close()
            self._service.process.join(_PATIENCE)
