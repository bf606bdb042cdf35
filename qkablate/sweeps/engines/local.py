"""Training on this machine, each run in a process of its own.

The processes are forked from a server that has imported torch. A crash stays within its run, and a
run starts within a few hundredths of a second.
"""

import contextlib
import multiprocessing
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path

from qkablate.sweeps.engines.base import Engine, RunExit, RunTask
from qkablate.sweeps.engines.main_module import hidden_main_module
from qkablate.sweeps.engines.remote import oom_kill_count
from qkablate.sweeps.running import worker
from qkablate.tracking.wandb.service import BLOCKED_SIGNALS, run_service, users_environment

# Importing these in the server saves every run half a second.
PRELOADED = [worker.__name__, "omegaconf"]
_WANDB = ["wandb", "wandb.sdk.launch"]  # the latter is imported by wandb.init, in 0.25 s
_STARTUP_SECONDS = 10.0  # limit for W&B's process to start


@contextlib.contextmanager
def blocked_signals() -> Iterator[None]:
    """Block stop signals in a process started within this context.

    A signal to the whole process group must not end the server, not even while it starts: the
    launcher needs it until all runs have written their checkpoints.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass
class _Running:
    process: BaseProcess
    slot: int
    lifeline: connection.Connection  # a run stops when its launcher's end of this closes
    oom_kills: int  # on this machine before the run started


class LocalEngine(Engine):
    """Runs on this machine. `devices` has one entry per slot: its GPU, or None for the CPU."""

    is_remote = False

    def __init__(self, devices: list[str | None], *, wandb: Path | None) -> None:
        """Prepare the server; W&B's process, if there is one, writes in the folder `wandb`."""
        self._devices = devices
        self.slots = len(devices)
        self._running: dict[str, _Running] = {}
        self._context = multiprocessing.get_context("forkserver")
        # The server only imports: forking after it had started a thread would hang its children.
        self._context.set_forkserver_preload(PRELOADED + _WANDB * (wandb is not None))
        self._wandb = wandb
        self._wandb_address = ""  # of the process shared by all runs; empty: each starts its own
        self._wandb_keeper: connection.Connection | None = None  # keeps that process alive
        self._wandb_process: BaseProcess | None = None

    def start(self, task: RunTask) -> None:
        taken = {running.slot for running in self._running.values()}
        slot = next(number for number in range(self.slots) if number not in taken)
        resource_tracker.ensure_running()  # started later, it would unblock the signals
        with blocked_signals():
            forkserver.ensure_running()
        if self._wandb is not None and self._wandb_process is None:
            self._start_wandb(self._wandb)
        end, lifeline = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=worker.run_worker,
            args=(
                *(task, self._devices[slot], end, self._wandb_address, self._wandb_keeper),
                users_environment(),  # the server's is that of the first sweep of this process
            ),
            name=task.id,
        )
        with hidden_main_module():
            process.start()
        end.close()
        self._running[task.id] = _Running(process, slot, lifeline, oom_kill_count())

    def _start_wandb(self, folder: Path) -> None:
        """Start W&B's process, which ends when the launcher and all runs have ended."""
        runs_end, self._wandb_keeper = self._context.Pipe(duplex=False)
        answer, answer_end = self._context.Pipe(duplex=False)
        self._wandb_process = self._context.Process(
            target=run_service, args=(folder, answer_end, runs_end), name="W&B"
        )
        with hidden_main_module():
            self._wandb_process.start()
        runs_end.close()
        answer_end.close()
        with contextlib.suppress(EOFError):
            self._wandb_address = answer.recv() if answer.poll(_STARTUP_SECONDS) else ""

    def wait_for_exits(self, seconds: float) -> list[RunExit]:
        ids = {running.process.sentinel: id for id, running in self._running.items()}
        exits = []
        for sentinel in connection.wait(list(ids), seconds):
            id = ids[sentinel]  # type: ignore[index]
            running = self._running.pop(id)
            running.process.join()
            running.lifeline.close()
            code = running.process.exitcode or 0
            out_of_memory = code == -signal.SIGKILL and oom_kill_count() > running.oom_kills
            # The code of multiprocessing for a child whose server can no longer tell it.
            lost = "the server of its process was killed" if code == 255 else ""
            exits.append(RunExit(id, code, out_of_memory, lost))
        return exits

    def stop(self, *, now: bool) -> None:
        for running in self._running.values():
            running.process.kill() if now else running.process.terminate()

    def close(self) -> None:
        """Wait for what still runs: it sees its lifeline close and writes a checkpoint."""
        for running in self._running.values():
            running.lifeline.close()
        for running in self._running.values():
            running.process.join()
        self._running.clear()
        if self._wandb_keeper is not None and self._wandb_process is not None:
            self._wandb_keeper.close()
            self._wandb_process.join(_STARTUP_SECONDS)
