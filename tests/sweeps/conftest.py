"""Small sweeps, and circuits that go wrong on purpose."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_FILE = """
import os
import pathlib
import signal

import torch

from qkablate.attention import QK, matrix, project, split_heads


class {title}(QK):
    equation = "B_h = W_q W_kᵀ"
    params = "2 d²"
    match = "none"

    def __init__(self, spec):
        super().__init__(spec)
        self.w_q, self.w_k = (matrix(spec.d_model, spec.d_model) for _ in range(2))
        self.calls = 0

    def queries(self, x_BTD):
        self.calls += x_BTD.device.type != "meta"
        first = not pathlib.Path({marker!r}).exists()
        if self.calls == {call}:
            pathlib.Path({marker!r}).touch()
            {act}
        return split_heads(project(x_BTD, self.w_q), self.spec.heads)

    def keys(self, y_BSD):
        return split_heads(project(y_BSD, self.w_k), self.spec.heads)
"""
_ACTS = {
    "raises": "raise ValueError('no queries today')",
    "killed": "first and os.kill(os.getpid(), signal.SIGKILL)",
    "crashes": "os.abort()",
    "diverges": "x_BTD = x_BTD * float('inf')",
    "starves": "torch.empty(2**60)",
    "starves_once": "first and torch.empty(2**60)",
}

# What asks for each engine, with two runs at once.
ENGINES = {
    "local": ["engine=local", "workers=2"],
    "slurm": ["engine=slurm", "engine.memory_gb=1", "workers=2"],
}
# A launcher in a process of its own looks as often as one in ours.
_COMMAND = """
import sys
from qkablate.cli import main
from qkablate.sweeps.engines.slurm import Slurm
Slurm.pause = 0.5
main(sys.argv[1:])
"""


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> list[str]:
    """The words that ask for an engine: what a sweep promises, it promises with each of them."""
    if request.param == "slurm":
        request.getfixturevalue("slurm")
    return ENGINES[request.param]


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster that SLURM_CONF names, looked at more often than a large one should be."""
    if "SLURM_CONF" not in os.environ or shutil.which("squeue") is None:
        missing = "SLURM is not on this machine (scripts/slurm-one-machine starts one)"
        if os.environ.get("QKABLATE_NEEDS_SLURM"):
            pytest.fail(missing)
        pytest.skip(missing)
    from qkablate.sweeps.engines.slurm import Slurm

    monkeypatch.setattr(Slurm, "pause", 0.5)


@pytest.fixture
def spawn() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """The command, in a process of its own."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def circuit(tmp_path: Path) -> Callable[[str], Path]:
    """A circuit that goes wrong in its own way, at the step asked for."""

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
