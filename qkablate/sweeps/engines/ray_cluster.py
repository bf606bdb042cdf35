"""The process that speaks with Ray for a launcher. It is one of its own because Ray ends a process
that has lost its cluster, says so at length, and takes its settings from the environment."""

import logging
import os
import re
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from qkablate import __version__
from qkablate.sweeps.engines import Ended, Task

LOG = "driver.log"
_ASKED = 8  # places that are asked for at once and not there yet
_TICK = 0.2  # seconds between two looks at what the launcher says
_LOOK = 10.0  # and between two at the nodes
_ANSWER = 60.0  # seconds for every node to answer
_FAILURES = 5  # places in a row that came to nothing
_STORE = 80 * 2**20  # bytes; runs send each other nothing
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
# What a run needs of the launcher's environment, wherever it is.
_PASSED = re.compile("(WANDB|HF|HUGGING_FACE|TIKTOKEN|QKABLATE)_|(XDG_CACHE_HOME|PYTHONPATH)$")


class Refused(Exception):
    """The cluster cannot be used: a line for the user."""


@dataclass(frozen=True)
class Wish:
    """What is wanted of the cluster."""

    address: str | None  # None: one of its own
    cpus: int
    gpus: float
    folder: str  # of the sweep: nodes must see it
    temporary: str  # a private folder


@dataclass
class _Place:
    """A host that was asked for, and what it trains."""

    actor: Any
    begun: bool = False
    task: Task | None = None


def drive(pipe: Connection, wish: Wish) -> None:
    """Messages: ("start", task), ("stop", now) come; ("ready", most runs on a node, in all),
    ("refused", why), ("begun", id), ("ended", how) go. The pipe's end is the launcher's."""
    os.setsid()  # Ctrl-C in the terminal is for the launcher
    log = os.open(Path(wish.temporary) / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    try:
        _connect(wish)
        room = _check(wish)
        cluster = _Cluster(pipe.send, wish)
        pipe.send(("ready", *room))
    except Refused as refused:
        pipe.send(("refused", str(refused)))
    except Exception as error:
        pipe.send(("refused", _line(error)))
    else:
        cluster.serve(pipe)
    _shutdown()


def _connect(wish: Wish) -> None:
    settings: dict[str, Any] = {"address": wish.address}
    host = (wish.address or _LOOPBACK[0]).rpartition(":")[0] or _LOOPBACK[0]
    if wish.address is None:
        # Nobody else may use it: it listens on loopback alone, and asks for a word nobody knows.
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        settings = {
            "address": "local",
            "num_cpus": _cores(),
            "num_gpus": None if wish.gpus else 0,
            "include_dashboard": False,
            "object_store_memory": _STORE,
            "_temp_dir": f"{wish.temporary}/ray",  # which Ray opens to everybody
            "_node_ip_address": _LOOPBACK[0],
        }
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if wish.address is None or host in _LOOPBACK:
        # Ray puts the machine's address in loopback's place, unless clusters are switched off:
        # its switch for systems on which a listening port makes a firewall ask.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    import ray

    from qkablate.sweeps.engines import ray_node

    ray.init(**settings, log_to_driver=False, logging_level=logging.CRITICAL)
    ray.cloudpickle.register_pickle_by_value(ray_node)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check(wish: Wish) -> tuple[int, int]:
    """How many runs share a node at most, and how many run at once; Refused where none can."""
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    rooms = {node["NodeID"]: _room(node["Resources"], wish) for node in alive}
    if not any(rooms.values()):
        for key, kind in (("cpus", "CPU"), ("gpus", "GPU")):
            most = max((node["Resources"].get(kind, 0) for node in alive), default=0)
            if (given := getattr(wish, key)) > most:
                where = "this machine" if wish.address is None else "the largest node"
                raise Refused(f"engine.{key}: {given:g} for a run, and {where} has {most:g}")
        raise Refused(f"engine.gpus: no node has {wish.gpus:g} beside {wish.cpus} cores")
    _look_at([node for node in alive if rooms[node["NodeID"]]], wish)
    return max(rooms.values()), sum(rooms.values())


def _room(resources: dict[str, float], wish: Wish) -> int:
    """How many runs a node takes."""
    room = int(resources.get("CPU", 0) // wish.cpus)
    if wish.gpus >= 1:
        return min(room, int(resources.get("GPU", 0) // wish.gpus))
    if wish.gpus:  # a part of one GPU, and no part lies on two
        return min(room, int(resources.get("GPU", 0)) * int(1 / wish.gpus + 1e-9))
    return room


def _look_at(nodes: list[dict[str, Any]], wish: Wish) -> None:
    """That each of them can train: it sees the folder, and has this program."""
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from qkablate.sweeps.engines import ray_node

    token = Path(wish.folder) / f".ray-{secrets.token_hex(8)}"
    token.touch()
    try:
        look = ray.remote(num_cpus=0, max_retries=0)(ray_node.look)
        asked = {}
        for node in nodes:
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            answer = look.options(scheduling_strategy=there)
            asked[answer.remote(sys.path, os.getcwd(), str(token))] = node
        answered, silent = ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER)
        for answer in silent:
            raise Refused(f"engine: node {_name(asked[answer])} does not answer")
        for answer in answered:
            name = _name(asked[answer])
            try:
                kind, what = ray.get(answer)
            except RayError as error:
                raise Refused(f"engine: node {name}: {_line(error)}") from None
            if kind:
                raise Refused(f"{'out' if kind == 'out' else 'engine'}: node {name} {what}")
            if what != __version__:
                raise Refused(f"engine: node {name} has qkablate {what}, not {__version__}")
    finally:
        token.unlink(missing_ok=True)


def _name(node: dict[str, Any]) -> str:
    return str(node.get("NodeName") or node["NodeManagerAddress"])


class _Cluster:
    """Runs wait here, in the order they come, for a place that Ray gives."""

    def __init__(self, send: Callable[[tuple], None], wish: Wish) -> None:
        import ray

        from qkablate.sweeps.engines.ray_node import Host

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


def _line(error: Exception) -> str:
    """Ray's own reason, in one line."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error)) or type(error).__name__
    return "engine.address: " + " ".join(plain.split())[:400]


def _shutdown() -> None:
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()
