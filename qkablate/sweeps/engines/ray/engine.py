"""Training on a Ray cluster, existing or of the sweep's own: Ray places the runs' processes."""

import multiprocessing
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from qkablate.config import EngineConfig
from qkablate.errors import UserError
from qkablate.runs.lease import LeaseObserver
from qkablate.sweeps.engines.base import Engine, RunExit, RunTask
from qkablate.sweeps.engines.main_module import hidden_main_module
from qkablate.sweeps.engines.ray.cluster import ClusterRequest
from qkablate.sweeps.engines.ray.driver import drive

# Seconds.
_CONNECT = 10.0  # for an address to accept a connection
_JOIN = 40.0  # for Ray to start, or to accept the driver
_CHECK = 90.0  # for all nodes to answer
_CLOSE = 30.0  # for the driver to exit where nothing runs
# Characters; Ray's socket paths are some 70 longer than the folder, and limited to 107.
_SHORT = 32
_ADDRESS = re.compile(r"(?:ray://)?(?P<host>[\w.-]+|\[[0-9a-fA-F:]+\]):(?P<port>\d{1,5})")


def check_address(engine: EngineConfig) -> None:
    """Raise UserError if nothing answers at the cluster's address."""
    address = engine.address
    if address is None or address == "auto":
        return
    parts = _ADDRESS.fullmatch(address)
    if parts is None or not 0 < int(parts["port"]) < 2**16:
        raise UserError(
            f"engine.address: '{address}' is not null, auto, HOST:PORT or ray://HOST:PORT"
        )
    try:
        target = parts["host"].strip("[]"), int(parts["port"])
        socket.create_connection(target, _CONNECT).close()
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"engine.address: nothing answers at '{address}': {reason}") from None


class RayEngine(Engine):
    """Runs on a Ray cluster: at most `slots` at once, with so many GPUs each."""

    is_remote = True

    def __init__(
        self,
        engine: EngineConfig,
        gpus: float,
        slots: int,
        folder: Path,
        note: Callable[[str], None],
    ) -> None:
        self.slots = slots
        self._name = "of its own" if engine.address is None else f"at {engine.address}"
        self._tasks: dict[str, RunTask] = {}
        self._queued: set[str] = set()
        self._exits: dict[str, RunExit] = {}  # a lost run may still be writing its checkpoint
        self._observer, self._killed = LeaseObserver(), False
        short = len(tempfile.gettempdir()) < _SHORT
        self._temporary = tempfile.mkdtemp(prefix="qkr-", dir=None if short else "/tmp")
        request = ClusterRequest(
            engine.address, engine.cpus or 1, gpus, str(folder.absolute()), self._temporary
        )
        context = multiprocessing.get_context("spawn")
        self._pipe, end = context.Pipe()
        self._driver = context.Process(target=drive, args=(end, request), name="ray", daemon=True)
        try:
            with hidden_main_module():
                self._driver.start()
            end.close()
            self._runs_per_node, total = self._connect()
        except BaseException:
            self.close()
            raise
        note(f"Ray      a cluster {self._name}, with room for {total} at once")

    def _connect(self) -> tuple[int, int]:
        """Wait for the cluster; return the most runs on one node and on all."""
        values: list[Any] = []
        for seconds in (_JOIN, _CHECK):  # to be connected, then to be ready
            if not self._pipe.poll(seconds):
                self._driver.kill()
                raise UserError(f"engine.address: no Ray cluster {self._name} answers")
            try:
                message, *values = self._pipe.recv()
            except EOFError:
                raise UserError(
                    f"engine.address: Ray exited before a cluster {self._name} was ready"
                ) from None
            if message == "refused":
                raise UserError(values[0])
        return values[0], values[1]

    def queued_ids(self) -> Collection[str]:
        return self._queued

    def start(self, task: RunTask) -> None:
        self._tasks[task.id] = task
        self._queued.add(task.id)
        self._send("start", replace(task, packed=min(task.packed, self._runs_per_node)))

    def wait_for_exits(self, seconds: float) -> list[RunExit]:
        until = time.monotonic() + seconds
        exits: list[RunExit] = []
        while not exits and (left := until - time.monotonic()) > 0:
            self._receive(left)
            for id, exit in list(self._exits.items()):
                may_write = (exit.requeue_reason or exit.out_of_memory) and not self._killed
                if not may_write or not self._observer.is_leased(self._tasks[id].folder):
                    exits.append(self._exits.pop(id))
        for exit in exits:
            del self._tasks[exit.id]
        return exits

    def stop(self, *, now: bool) -> None:
        self._killed |= now
        self._send("stop", now)

    def close(self) -> None:
        """Disconnect. What still runs sees its standard input close and writes a checkpoint."""
        self._pipe.close()
        if self._driver.pid is not None:
            self._driver.join(None if self._tasks else _CLOSE)
            self._driver.kill()
            self._driver.join()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _receive(self, seconds: float) -> None:
        try:
            while self._pipe.poll(seconds):
                message, value = self._pipe.recv()
                if message == "started":
                    self._queued.discard(value)
                else:
                    self._queued.discard(value.id)
                    self._exits[value.id] = value
                seconds = 0.0
        except (EOFError, OSError):
            self._raise_lost()

    def _send(self, command: str, argument: Any) -> None:
        try:
            self._pipe.send((command, argument))
        except OSError:
            self._raise_lost()

    def _raise_lost(self) -> None:
        """Raise ConnectionError: the cluster is gone, and its runs end with their parents."""
        self._tasks.clear()
        raise ConnectionError(
            f"the Ray cluster {self._name} does not answer any more; its runs write a checkpoint"
            " and end, and the same command continues them"
        )
