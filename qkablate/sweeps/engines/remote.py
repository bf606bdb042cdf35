"""A run on another machine: what an engine has there starts the run's process, and waits.

Whoever calls this knows neither torch nor the run: one line says what to train. The process ends
when its input does, so that it never outlives what started it.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping

from qkablate.sweeps.engines import Task


class Child:
    """The process of one run."""

    def __init__(self, task: Task, cwd: str, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "qkablate.sweeps.worker"],
            stdin=subprocess.PIPE,
            cwd=cwd,
            env={**os.environ, **environment},
            text=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(task.as_json() + "\n")
        self._process.stdin.flush()

    def wait(self) -> int:
        """How it ended; negative: the signal that ended it."""
        return self._process.wait()

    def stop(self) -> int:
        """Let it write a checkpoint and end."""
        self._process.send_signal(signal.SIGTERM)
        return self.wait()
