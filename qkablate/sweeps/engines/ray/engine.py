"""A Ray cluster, one that is there or one of the sweep's own. Ray gives a run its place on a node;
there a process of its own trains it, as anywhere else.
"""

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
from qkablate.runs.lease import Observer
from qkablate.sweeps.engines import Ended, Task
from qkablate.sweeps.engines.ray.cluster import Wish
from qkablate.sweeps.engines.ray.driver import drive

_CONNECT = 10.0  # seconds for an address to answer at all
_JOIN = 40.0  # and for Ray to take us in, or to start
_LOOK = 90.0  # and for all nodes to answer
_CLOSE = 30.0  # seconds in which it ends where nothing runs
_SHORT = 32  # characters; the paths of Ray's sockets are some 70 longer, and 107 is the most
_ADDRESS = re.compile(r"(?:ray://)?(?P<host>[\w.-]+|\[[0-9a-fA-F:]+\]):(?P<port>\d{1,5})")


def check(engine: EngineConfig) -> None:
    """UserError where nothing answers at the address."""
    address = engine.address
    if address is None or address == "auto":
        return
    found = _ADDRESS.fullmatch(address)
    if found is None or not 0 < int(found["port"]) < 2**16:
        raise UserError(
            f"engine.address: '{address}' is not null, auto, HOST:PORT or ray://HOST:PORT"
        )
    place = found["host"].strip("[]"), int(found["port"])
    try:
        socket.create_connection(place, _CONNECT).close()
    except OSError as error:
        why = error.strerror or str(error)
        raise UserError(f"engine.address: nothing answers at '{address}': {why}") from None


class Ray:
    """`slots`: how many runs it takes at once, `gpus` what each of them asks for."""

    shares = True
    elsewhere = True
    pause = 0.5

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
        self._tasks: dict[str, Task] = {}
        self._queued: set[str] = set()
        self._lost: dict[str, Ended] = {}  # what may still be writing its checkpoint
        self._observer, self._at_once = Observer(), False
        short = len(tempfile.gettempdir()) < _SHORT
        self._temporary = tempfile.mkdtemp(prefix="qkr-", dir=None if short else "/tmp")
        wish = Wish(engine.address, engine.cpus or 1, gpus, str(folder.absolute()), self._temporary)
        context = multiprocessing.get_context("spawn")
        self._pipe, end = context.Pipe()
        self._driver = context.Process(target=drive, args=(end, wish), name="ray", daemon=True)
        try:
            self._driver.start()
            end.close()
            self._most, room = self._opened()
        except BaseException:
            self.close()
            raise
        note(f"Ray      a cluster {self._name}, with room for {room} at once")

    def _opened(self) -> tuple[int, int]:
        """How many runs share a node at most, and how many run at once."""
        what: list[Any] = []
        for seconds in (_JOIN, _LOOK):  # to be connected, then to be ready
            if not self._pipe.poll(seconds):
                self._driver.kill()
                raise UserError(f"engine.address: no Ray cluster {self._name} answers")
            try:
                word, *what = self._pipe.recv()
            except EOFError:
                raise UserError(
                    f"engine.address: Ray has ended without a cluster {self._name}"
                ) from None
            if word == "refused":
                raise UserError(what[0])
        return what[0], what[1]

    def adopt(self, ids: Collection[str]) -> list[str]:
        return []  # its runs end with their launcher

    def queued(self) -> Collection[str]:
        return self._queued

    def start(self, task: Task) -> None:
        self._tasks[task.id] = task
        self._queued.add(task.id)
        self._tell("start", replace(task, packed=min(task.packed, self._most)))

    def ended(self, seconds: float) -> list[Ended]:
        until = time.monotonic() + seconds
        found: list[Ended] = []
        while not found and (left := until - time.monotonic()) > 0:
            self._hear(left)
            for id, end in list(self._lost.items()):
                writes = (end.gone or end.out_of_memory) and not self._at_once
                if not writes or not self._observer.is_owned(self._tasks[id].folder):
                    found.append(self._lost.pop(id))
        for ended in found:
            del self._tasks[ended.id]
        return found

    def stop(self, *, now: bool) -> None:
        self._at_once |= now
        self._tell("stop", now)

    def close(self) -> None:
        """What still runs writes a checkpoint: it sees that nobody waits for it any more."""
        self._pipe.close()
        if self._driver.pid is not None:
            self._driver.join(None if self._tasks else _CLOSE)
            self._driver.kill()
            self._driver.join()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _hear(self, seconds: float) -> None:
        """What has become of the runs."""
        try:
            while self._pipe.poll(seconds):
                word, what = self._pipe.recv()
                if word == "begun":
                    self._queued.discard(what)
                else:
                    self._queued.discard(what.id)
                    self._lost[what.id] = what
                seconds = 0.0
        except (EOFError, OSError):
            self._lose()

    def _tell(self, word: str, what: Any) -> None:
        try:
            self._pipe.send((word, what))
        except OSError:
            self._lose()

    def _lose(self) -> None:
        """The cluster is not there any more. What ran there has lost its parent, and ends too."""
        self._tasks.clear()
        raise ConnectionError(
            f"the Ray cluster {self._name} does not answer any more; what ran there ends with a"
            " checkpoint, and the same command goes on"
        )
