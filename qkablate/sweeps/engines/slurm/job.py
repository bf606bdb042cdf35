"""The callable that submitit runs in a SLURM job.

It starts the run's process, forwards SLURM's signals to it and records its exit.
"""

import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from submitit.core.utils import DelayedSubmission

from qkablate.runs.records import write_json
from qkablate.sweeps.engines.base import EXIT_STOPPED, RunTask
from qkablate.sweeps.engines.remote import RunProcess


class SlurmJob:
    """One run. The file `status` tells the launcher: without a code in it, the run is not over."""

    def __init__(self, task: RunTask, cwd: str, status: Path) -> None:
        self._task, self._cwd, self._status = task, cwd, status
        self._process: RunProcess | None = None
        self._stop_requested = False

    def __call__(self) -> None:
        """Train the run and exit with its code, without returning."""
        self._write(None)
        signal.signal(signal.SIGTERM, self._stop)  # submitit would wait for the SIGKILL after it
        self._process = RunProcess(self._task, self._cwd, {})
        if self._stop_requested:
            self._process.terminate()
        code = self._process.wait()
        self._write(code)
        sys.exit(code if code >= 0 else 128 - code)

    def checkpoint(self) -> DelayedSubmission | None:
        """Stop the run on preemption or timeout; return what submitit is to submit again."""
        if self._process is not None:
            self._process.terminate()
            code = self._process.wait()
            if code != EXIT_STOPPED:  # it exited by itself just now
                self._write(code)
                return None
        return DelayedSubmission(SlurmJob(self._task, self._cwd, self._status))

    def _stop(self, number: int, frame: Any) -> None:
        self._stop_requested = True
        if self._process is not None:
            self._process.terminate()

    def _write(self, code: int | None) -> None:
        killed = code is not None and self._process is not None and self._process.is_out_of_memory()
        host = {"host": socket.gethostname(), "pid": os.getpid()}
        write_json(self._status, {**host, "code": code, "out_of_memory": killed})
