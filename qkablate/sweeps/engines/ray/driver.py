"""The process that talks to Ray for a launcher.

It is separate because Ray exits a process that has lost its cluster, prints much while doing so,
and takes its settings from the environment.
"""

import os
import re
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from qkablate.sweeps.engines.base import EXIT_STOPPED, RunExit, RunTask
from qkablate.sweeps.engines.ray import cluster

_LOG_FILE = "driver.log"
_MAX_PENDING = 8  # actors requested and not placed yet
_TICK = 0.2  # seconds between two looks at the launcher's messages
_NODE_CHECK = 10.0  # seconds between two looks at the nodes
_MAX_FAILURES = 5  # actors in a row that could not be placed
# The launcher's variables that a run needs on every node.
_PASSED = re.compile("(WANDB|HF|HUGGING_FACE|TIKTOKEN|QKABLATE)_|(XDG_CACHE_HOME|PYTHONPATH)$")


@dataclass
class _Slot:
    """An actor, and the run it trains."""

    actor: Any
    placed: bool = False
    task: RunTask | None = None


def drive(pipe: Connection, request: cluster.ClusterRequest) -> None:
    """Serve the launcher until the pipe closes.

    It receives ("start", task) and ("stop", now). It sends ("connected",), then ("ready", most runs
    on a node, on all nodes) or ("refused", reason), then ("started", id) and ("ended", exit).
    """
    os.setsid()  # Ctrl-C in the terminal is for the launcher
    log = os.open(
        Path(request.temporary) / _LOG_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
    )
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    try:
        cluster.connect(request)
        pipe.send(("connected",))
        counts = cluster.check_cluster(request)
        scheduler = _Scheduler(pipe.send, request)
        pipe.send(("ready", *counts))
    except cluster.ClusterUnusable as unusable:
        pipe.send(("refused", str(unusable)))
    except Exception as error:
        pipe.send(("refused", f"engine.address: {cluster.format_error(error)}"))
    else:
        scheduler.serve(pipe)
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()
    shutil.rmtree(request.temporary, ignore_errors=True)  # the launcher may have been killed


class _Scheduler:
    """A queue of runs for the actors that Ray places."""

    def __init__(
        self, send: Callable[[tuple[Any, ...]], None], request: cluster.ClusterRequest
    ) -> None:
        import ray

        from qkablate.sweeps.engines.ray.node import RunActor

        self._send = send
        passed = {name: value for name, value in os.environ.items() if _PASSED.match(name)}
        # A separate object, so that it is not among the arguments that Ray records of an actor.
        self._launcher = ray.put((list(sys.path), os.getcwd(), passed))
        self._actor_class = ray.remote(RunActor).options(
            num_cpus=request.cpus,
            num_gpus=request.gpus,
            max_concurrency=2,  # one call trains, another stops it
            max_restarts=0,
            max_task_retries=0,
        )
        self._waiting: deque[RunTask] = deque()
        self._slots: dict[Any, _Slot] = {}  # by the reference to Ray's next answer
        self._failures = 0
        self._stopped = False

    def serve(self, pipe: Connection) -> None:
        """Train until the launcher is gone and its runs have ended."""
        import ray

        checked = time.monotonic()
        listening = True
        while listening or self._slots:
            try:
                while listening and pipe.poll(0 if self._slots or self._waiting else None):
                    command, argument = pipe.recv()
                    if command == "start":
                        self._waiting.append(argument)
                    else:
                        self._stop(now=argument)
            except (EOFError, OSError):
                listening = False
                self._send = lambda message: None
                self._stop(now=False)
            pending = sum(not slot.placed for slot in self._slots.values())
            for _ in range(min(len(self._waiting), _MAX_PENDING) - pending):
                actor = self._actor_class.remote(self._launcher)
                self._slots[actor.begin.remote()] = _Slot(actor)
            if self._slots:
                answers, _ = ray.wait(list(self._slots), num_returns=1, timeout=_TICK)
                for answer in answers:
                    self._handle(answer)
            if time.monotonic() - checked > _NODE_CHECK:
                checked = time.monotonic()
                if not any(node["Alive"] for node in ray.nodes()):
                    return  # what waits would wait forever

    def _handle(self, answer: Any) -> None:
        """Handle the answer of an actor: report the run's exit, and give it the next run."""
        import ray
        from ray.exceptions import OutOfMemoryError, RayError

        slot = self._slots.pop(answer)
        try:
            value = ray.get(answer)
        except RayError as error:
            if slot.task is not None:
                if isinstance(error, OutOfMemoryError):
                    exit = RunExit(slot.task.id, -signal.SIGKILL, out_of_memory=True)
                else:
                    lost = "node" if "node has died" in str(error) else "Ray worker"
                    exit = RunExit(slot.task.id, 1, requeue_reason=f"its {lost} has died")
                self._send(("ended", exit))
            elif not self._stopped:
                self._failures += 1
                if self._failures >= _MAX_FAILURES:
                    raise
            return
        self._failures, slot.placed = 0, True
        if slot.task is not None:
            self._send(("ended", RunExit(slot.task.id, *value)))
            slot.task = None
        if not self._waiting:
            ray.kill(slot.actor)
            return
        task = slot.task = self._waiting.popleft()
        self._send(("started", task.id))
        self._slots[slot.actor.train.remote(task.to_json())] = slot

    def _stop(self, *, now: bool) -> None:
        import ray

        self._stopped = True
        for task in self._waiting:
            self._send(("ended", RunExit(task.id, EXIT_STOPPED)))
        self._waiting.clear()
        for answer, slot in list(self._slots.items()):
            if slot.task is not None:
                slot.actor.stop.remote(now)
            else:
                ray.kill(slot.actor)
                del self._slots[answer]
