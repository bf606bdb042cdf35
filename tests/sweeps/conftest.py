"""Small sweeps, and circuits that go wrong on purpose."""

from collections.abc import Callable
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
