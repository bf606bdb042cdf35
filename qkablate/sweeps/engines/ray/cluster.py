"""Connection to a Ray cluster, and the checks before training.

The cluster must answer, and its nodes must be large enough, see the sweep's folder and have the
same version of this program.
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
from qkablate.runs.run import count_cores

_NODE_SECONDS = 60.0  # for every node to answer
_OBJECT_STORE = 80 * 2**20  # bytes; runs send each other nothing
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class ClusterUnusable(Exception):
    """The cluster cannot train the runs; the text is one line for the user."""


@dataclass(frozen=True)
class ClusterRequest:
    """The cluster to connect to, and what each run needs of it."""

    address: str | None  # None: a private cluster on this machine
    cpus: int
    gpus: float
    folder: str  # of the sweep: nodes must see it
    temporary: str  # a private folder


def connect(request: ClusterRequest) -> None:
    """Connect to the cluster, or start a private one."""
    settings: dict[str, Any] = {"address": request.address}
    host = (request.address or "").rpartition(":")[0]
    if request.address is None:
        # Private: it listens on loopback only, and requires a random token.
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        # Ray's workers have a nice value of 15: beside other work they would get 3 % of a core.
        os.environ.setdefault("RAY_worker_niceness", "0")
        settings = {
            "address": "local",
            "num_cpus": count_cores(),
            "num_gpus": None if request.gpus else 0,
            "include_dashboard": False,
            "object_store_memory": _OBJECT_STORE,
            "_temp_dir": f"{request.temporary}/ray",  # Ray makes this one readable by everybody
            "_node_ip_address": _LOOPBACK[0],
        }
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "5")  # seconds; the port already answers
    if request.address is None or host in _LOOPBACK:
        # Ray replaces loopback by the machine's address unless multi-node clusters are disabled,
        # which this switch does. (It exists for firewalls that ask about listening ports.)
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    import ray

    from qkablate.sweeps.engines.ray import node

    ray.init(**settings, log_to_driver=False, logging_level=logging.CRITICAL)
    ray.cloudpickle.register_pickle_by_value(node)


def check_cluster(request: ClusterRequest) -> tuple[int, int]:
    """Return the most runs on one node and on all; raise ClusterUnusable where none can run."""
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]
    counts = {node["NodeID"]: runs_per_node(node["Resources"], request) for node in nodes}
    if not any(counts.values()):
        for key, resource in (("cpus", "CPU"), ("gpus", "GPU")):
            largest = max((node["Resources"].get(resource, 0) for node in nodes), default=0)
            if (requested := getattr(request, key)) > largest:
                where = "this machine" if request.address is None else "the largest node"
                raise ClusterUnusable(
                    f"engine.{key}: a run needs {requested:g}, and {where} has {largest:g}"
                )
        raise ClusterUnusable(
            f"engine.gpus: no node has {request.gpus:g} beside {request.cpus} cores"
        )
    _check_nodes([node for node in nodes if counts[node["NodeID"]]], request)
    return max(counts.values()), sum(counts.values())


def runs_per_node(resources: dict[str, float], request: ClusterRequest) -> int:
    """Return how many runs fit on a node with these resources."""
    count = int(resources.get("CPU", 0) // request.cpus)
    if request.gpus >= 1:
        return min(count, int(resources.get("GPU", 0) // request.gpus))
    if request.gpus:  # a fraction of a GPU never spans two
        return min(count, int(resources.get("GPU", 0)) * int(1 / request.gpus + 1e-9))
    return count


def _check_nodes(nodes: list[dict[str, Any]], request: ClusterRequest) -> None:
    """Check that every node answers, sees the folder and has this program."""
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from qkablate.sweeps.engines.ray.node import check_node

    token = Path(request.folder) / f".ray-{secrets.token_hex(8)}"
    token.touch()
    try:
        check = ray.remote(num_cpus=0, max_retries=0)(check_node)
        names = {}
        for node in nodes:
            affinity = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            answer = check.options(scheduling_strategy=affinity)
            name = str(node.get("NodeName") or node["NodeManagerAddress"])
            names[answer.remote(sys.path, os.getcwd(), str(token))] = name
        answers, unanswered = ray.wait(list(names), num_returns=len(names), timeout=_NODE_SECONDS)
        for answer in unanswered:
            raise ClusterUnusable(f"engine: node {names[answer]} does not answer")
        for answer in answers:
            name = names[answer]
            try:
                key, text = ray.get(answer)
            except RayError as error:
                raise ClusterUnusable(f"engine: node {name}: {format_error(error)}") from None
            if key:
                raise ClusterUnusable(f"{key}: node {name} {text}")
            if text != __version__:
                raise ClusterUnusable(f"engine: node {name} has qkablate {text}, not {__version__}")
    finally:
        token.unlink(missing_ok=True)


def format_error(error: Exception) -> str:
    """Return Ray's own reason for an error as one line."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip() or type(error).__name__
    if "Traceback" in text or "  File " in text:
        text = text.splitlines()[-1]
    return " ".join(text.split())[:400]
