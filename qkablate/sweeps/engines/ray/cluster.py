"""What a Ray cluster must be for a sweep: it answers, its nodes are large enough, see the sweep's
folder and have this program. All before anything is trained.
"""

import logging
import os
import re
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkablate import __version__

_ANSWER = 60.0  # seconds for every node to answer
_STORE = 80 * 2**20  # bytes; runs send each other nothing
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


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


def connect(wish: Wish) -> None:
    settings: dict[str, Any] = {"address": wish.address}
    host = (wish.address or "").rpartition(":")[0]
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
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "5")  # seconds; somebody answers there
    if wish.address is None or host in _LOOPBACK:
        # Ray puts the machine's address in loopback's place, unless clusters are switched off:
        # its switch for systems on which a listening port makes a firewall ask.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    import ray

    from qkablate.sweeps.engines.ray import node as ray_node

    ray.init(**settings, log_to_driver=False, logging_level=logging.CRITICAL)
    ray.cloudpickle.register_pickle_by_value(ray_node)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check(wish: Wish) -> tuple[int, int]:
    """How many runs share a node at most, and how many run at once; Refused where none can."""
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    rooms = {node["NodeID"]: room_for(node["Resources"], wish) for node in alive}
    if not any(rooms.values()):
        for key, kind in (("cpus", "CPU"), ("gpus", "GPU")):
            most = max((node["Resources"].get(kind, 0) for node in alive), default=0)
            if (given := getattr(wish, key)) > most:
                where = "this machine" if wish.address is None else "the largest node"
                raise Refused(f"engine.{key}: {given:g} for a run, and {where} has {most:g}")
        raise Refused(f"engine.gpus: no node has {wish.gpus:g} beside {wish.cpus} cores")
    _look_at([node for node in alive if rooms[node["NodeID"]]], wish)
    return max(rooms.values()), sum(rooms.values())


def room_for(resources: dict[str, float], wish: Wish) -> int:
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

    from qkablate.sweeps.engines.ray import node as ray_node

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
                raise Refused(f"engine: node {name}: {one_line(error)}") from None
            if kind:
                raise Refused(f"{'out' if kind == 'out' else 'engine'}: node {name} {what}")
            if what != __version__:
                raise Refused(f"engine: node {name} has qkablate {what}, not {__version__}")
    finally:
        token.unlink(missing_ok=True)


def _name(node: dict[str, Any]) -> str:
    return str(node.get("NodeName") or node["NodeManagerAddress"])


def one_line(error: Exception) -> str:
    """Ray's own reason, in one line."""
    while error.__cause__ is not None and isinstance(error.__cause__, Exception):
        error = error.__cause__
    plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip() or type(error).__name__
    if "Traceback" in plain or "  File " in plain:
        plain = plain.splitlines()[-1]
    return " ".join(plain.split())[:400]
