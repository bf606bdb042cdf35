"""The process that speaks with Ray for a launcher. It is one of its own because Ray ends a process
that has lost its cluster, says so at length, and takes its settings from the environment.
"""

import os
import re
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from qkablate.sweeps.engines import Ended, Task
from qkablate.sweeps.engines.ray.cluster import Refused, Wish, check, connect, one_line

LOG = "driver.log"
_ASKED = 8  # places that are asked for at once and not there yet
_TICK = 0.2  # seconds between two looks at what the launcher says
_LOOK = 10.0  # and between two at the nodes
_FAILURES = 5  # places in a row that came to nothing
# What a run needs of the launcher's environment, wherever it is.
_PASSED = re.compile("(WANDB|HF|HUGGING_FACE|TIKTOKEN|QKABLATE)_|(XDG_CACHE_HOME|PYTHONPATH)$")


@dataclass
class _Place:
    """A host that was asked for, and what it trains."""

    actor: Any
    begun: bool = False
    task: Task | None = None


def drive(pipe: Connection, wish: Wish) -> None:
    """What comes: ("start", task), ("stop", now). What goes: ("connected",), ("ready", most runs on
    a node, in all) or ("refused", why); then ("begun", id) and ("ended", how). When the pipe ends,
    the launcher has gone.
    """
    os.setsid()  # Ctrl-C in the terminal is for the launcher
    log = os.open(Path(wish.temporary) / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    try:
        connect(wish)
        pipe.send(("connected",))
        room = check(wish)
        cluster = _Cluster(pipe.send, wish)
        pipe.send(("ready", *room))
    except Refused as refused:
        pipe.send(("refused", str(refused)))
    except Exception as error:
        pipe.send(("refused", f"engine.address: {one_line(error)}"))
    else:
        cluster.serve(pipe)
    _shutdown()
    shutil.rmtree(wish.temporary, ignore_errors=True)  # the launcher may have been killed


class _Cluster:
    """Runs wait here, in the order they come, for a place that Ray gives."""

    def __init__(self, send: Callable[[tuple], None], wish: Wish) -> None:
        import ray

        from qkablate.sweeps.engines.ray.node import Host

        self._send = send
        passed = {name: value for name, value in os.environ.items() if _PASSED.match(name)}
        # An object of its own: what Ray keeps and shows of an actor does not have it.
        self._given = ray.put((list(sys.path), os.getcwd(), passed))
        self._host = ray.remote(Host).options(
            num_cpus=wish.cpus,
            num_gpus=wish.gpus,
            max_concurrency=2,  # it trains, and hears that it is to stop
            max_restarts=0,
            max_task_retries=0,
        )
        self._waiting: deque[Task] = deque()
        self._places: dict[Any, _Place] = {}  # by what Ray will answer
        self._failures = 0
        self._stopped = False

    def serve(self, pipe: Connection) -> None:
        """Until the launcher goes, and what ran for it has ended."""
        import ray

        looked = time.monotonic()
        listening = True
        while listening or self._places:
            try:
                while listening and pipe.poll(0 if self._busy else None):
                    self._obey(*pipe.recv())
            except (EOFError, OSError):
                listening = False
                self._send = lambda message: None
                self._stop(now=False)
            self._ask()
            if self._places:
                answers, _ = ray.wait(list(self._places), num_returns=1, timeout=_TICK)
                for answer in answers:
                    self._hear(answer)
            if time.monotonic() - looked > _LOOK:
                looked = time.monotonic()
                if not any(node["Alive"] for node in ray.nodes()):
                    return  # what waits would wait for ever

    @property
    def _busy(self) -> bool:
        return bool(self._places or self._waiting)

    def _obey(self, word: str, what: Any) -> None:
        if word == "start":
            self._waiting.append(what)
        else:
            self._stop(now=what)

    def _ask(self) -> None:
        """For places for what waits."""
        asked = sum(not place.begun for place in self._places.values())
        for _ in range(min(len(self._waiting), _ASKED) - asked):
            actor = self._host.remote(self._given)
            self._places[actor.begin.remote()] = _Place(actor)

    def _hear(self, answer: Any) -> None:
        import ray
        from ray.exceptions import OutOfMemoryError, RayError

        place = self._places.pop(answer)
        try:
            said = ray.get(answer)
        except RayError as error:
            if place.task is not None:
                starved = isinstance(error, OutOfMemoryError)
                gone = "" if starved else _why(error)
                code = -9 if starved else 1
                self._send(("ended", Ended(place.task.id, code, starved, gone)))
            elif not self._stopped:
                self._failures += 1
                if self._failures >= _FAILURES:
                    raise
            return
        self._failures, place.begun = 0, True
        if place.task is not None:
            code, starved = said
            self._send(("ended", Ended(place.task.id, code, starved)))
            place.task = None
        if not self._waiting:
            ray.kill(place.actor)
            return
        task = place.task = self._waiting.popleft()
        self._send(("begun", task.id))
        self._places[place.actor.train.remote(task.as_json())] = place

    def _stop(self, *, now: bool) -> None:
        import ray

        self._stopped = True
        for task in self._waiting:
            self._send(("ended", Ended(task.id, 128 + 15)))
        self._waiting.clear()
        for answer, place in list(self._places.items()):
            if place.task is not None:
                place.actor.stop.remote(now)
            else:
                ray.kill(place.actor)
                del self._places[answer]


def _why(error: Exception) -> str:
    """Why a run has lost its place."""
    return "its node has died" if "node has died" in str(error) else "its Ray worker has died"


def _shutdown() -> None:
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()
