"""Engines, Ray clusters and circuits that fail on purpose."""

import importlib.util
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qkablate.compose.configs import make_config, open_hydra
from qkablate.compose.grid import read_request
from qkablate.sweeps.planning.expand import Grid, expand_grid
from qkablate.sweeps.planning.manifest import Manifest

_FILE = """
import os
import pathlib
import signal

import torch

from qkablate.attention import QK, apply_matrix, empty_matrix, split_heads


class {title}(QK):
    equation = "B_h = W_q W_kᵀ"
    params = "2 d²"
    match = "none"

    def __init__(self, spec):
        super().__init__(spec)
        self.w_q, self.w_k = (empty_matrix(spec.d_model, spec.d_model) for _ in range(2))
        self.calls = 0

    def queries(self, x_BTD):
        self.calls += x_BTD.device.type != "meta"
        first = not pathlib.Path({marker!r}).exists()
        if self.calls == {call}:
            pathlib.Path({marker!r}).touch()
            {act}
        return split_heads(apply_matrix(x_BTD, self.w_q), self.spec.heads)

    def keys(self, y_BSD):
        return split_heads(apply_matrix(y_BSD, self.w_k), self.spec.heads)
"""
_ACTS = {
    "raises": "raise ValueError('no queries today')",
    "killed": "first and os.kill(os.getpid(), signal.SIGKILL)",
    "crashes": "os.abort()",
    "diverges": "x_BTD = x_BTD * float('inf')",
    "starves": "torch.empty(2**60)",
    "starves_once": "first and torch.empty(2**60)",
}

# The arguments that select each engine, with two concurrent runs.
ENGINES = {
    "local": ["engine=local", "workers=2"],
    "slurm": ["engine=slurm", "engine.memory_gb=1", "workers=2"],
    "ray": ["engine=ray", "workers=2"],  # plus an address
}
# A launcher in a separate process, with the short poll interval of the fixture `slurm`.
_COMMAND = """
import sys
from qkablate.cli import main
from qkablate.sweeps.engines.slurm.engine import SlurmEngine
SlurmEngine.poll_interval = 0.5
main(sys.argv[1:])
"""


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> list[str]:
    """Return the arguments that select an engine; tests that use it run with every engine."""
    if request.param == "slurm":
        request.getfixturevalue("slurm")
    if request.param == "ray":
        return [*ENGINES["ray"], f"engine.address={request.getfixturevalue('ray')}"]
    return ENGINES[request.param]


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the cluster of SLURM_CONF, with a short poll interval."""
    if "SLURM_CONF" not in os.environ or shutil.which("squeue") is None:
        missing = "SLURM is not on this machine (scripts/slurm-one-machine starts one)"
        if os.environ.get("QKABLATE_NEEDS_SLURM"):
            pytest.fail(missing)
        pytest.skip(missing)
    from qkablate.sweeps.engines.slurm.engine import SlurmEngine

    monkeypatch.setattr(SlurmEngine, "poll_interval", 0.5)


# Ray replaces loopback by the machine's address, or lets no second node join there.
_RAY = """
from ray._private import services
services.resolve_ip_for_localhost = lambda host: host
from ray.scripts.scripts import main
main()
"""
_NODE = [
    *("--block", "--node-ip-address=127.0.0.1", "--min-worker-port=0", "--max-worker-port=0"),
    *("--dashboard-agent-listen-port=0", "--object-store-memory=83886080"),
    "--disable-usage-stats",
]


class RayNodes:
    """A Ray cluster whose nodes all run on this machine."""

    def __init__(self) -> None:
        if importlib.util.find_spec("ray") is None:
            if os.environ.get("QKABLATE_NEEDS_RAY"):
                pytest.fail("Ray is not installed")
            pytest.skip("Ray is not installed")
        self.folder = Path(tempfile.mkdtemp(prefix="qkt-", dir="/tmp"))
        (self.folder / "home").mkdir()
        self.token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.address = ""
        self._nodes: list[subprocess.Popen[str]] = []

    def start(self, *words: str, before: tuple[str, ...] = (), **environment: str) -> None:
        """Start a node; the first one starts the cluster."""
        if self.address:
            words = (f"--address={self.address}", *words)
        else:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            self.address = f"127.0.0.1:{port}"
            folder = f"--temp-dir={self.folder}/ray"
            words = ("--head", f"--port={port}", folder, "--include-dashboard=false", *words)
        node = subprocess.Popen(
            [*before, sys.executable, "-c", _RAY, "start", *_NODE, *words],
            env={
                **os.environ,
                **self.token,
                "HOME": f"{self.folder}/home",
                "RAY_worker_niceness": "0",  # 15 by default: beside other tests nothing would move
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._nodes.append(node)
        assert node.stdout is not None
        output = ""
        while "--block" not in output:
            line = node.stdout.readline()
            assert line, output
            output += line

    def stop(self) -> None:
        while self._nodes:
            node = self._nodes.pop()
            node.terminate()
            node.communicate()
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(scope="session")
def ray_nodes() -> Iterator[RayNodes]:
    """Start one cluster for all tests: a node with two cores and a pretended GPU."""
    nodes = RayNodes()
    nodes.start("--num-cpus=2", "--num-gpus=1")
    yield nodes
    nodes.stop()


@pytest.fixture
def ray(ray_nodes: RayNodes, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the address of the shared cluster."""
    for name, value in ray_nodes.token.items():
        monkeypatch.setenv(name, value)
    return ray_nodes.address


@pytest.fixture
def other_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[RayNodes]:
    """Return a private cluster without nodes."""
    nodes = RayNodes()
    for name, value in nodes.token.items():
        monkeypatch.setenv(name, value)
    yield nodes
    nodes.stop()


@pytest.fixture
def program() -> list[str]:
    return [sys.executable, "-c", _COMMAND]


@pytest.fixture
def plan_grid(tiny: list[str]) -> Callable[..., Manifest]:
    """Return a function that plans a grid of tiny runs."""

    def plan(*words: str) -> Manifest:
        given = {word.partition("=")[0] for word in words}
        kept = [word for word in tiny if word.partition("=")[0] not in given]
        with open_hydra():
            request = read_request(["sweep.floor=false", *kept, *words])
            grid = Grid(request.settings.sweep, request.controls, request.choices)
            return expand_grid(grid, make_config, ["qkablate", "sweep", *words])

    return plan


@pytest.fixture
def circuit(tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that writes a circuit which fails at some step."""

    def write(name: str, step: int = 8) -> Path:
        path = tmp_path / f"{name}.py"
        # A model of two layers reads 2000 tokens of validation before its first step.
        call = 1 + step if step else 1
        path.write_text(
            _FILE.format(
                title=name.title().replace("_", ""),
                act=_ACTS[name],
                marker=str(tmp_path / f"{name}.was-here"),
                call=call,
            ),
            encoding="utf-8",
        )
        return path

    return write
