"""What SLURM starts on a node: submitit calls it there. It starts the run's process, passes on what
SLURM wants of it, and writes down how it ended.
"""

import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from submitit.core.utils import DelayedSubmission

from qkablate.runs.records import write_json
from qkablate.sweeps.engines import STOPPED, Task
from qkablate.sweeps.engines.remote import Child


class Job:
    """`state` is the file that tells the launcher: without a code in it, the run is not over."""

    def __init__(self, task: Task, cwd: str, state: Path) -> None:
        self._task, self._cwd, self._state = task, cwd, state
        self._child: Child | None = None
        self._told = False  # to end

    def __call__(self) -> None:
        """Never returns: the job's exit code is the run's."""
        self._write(None)
        signal.signal(signal.SIGTERM, self._end)  # submitit would wait for the kill that follows
        self._child = Child(self._task, self._cwd, {})
        if self._told:
            self._child.terminate()
        code = self._child.wait()
        self._write(code)
        sys.exit(code if code >= 0 else 128 - code)

    def checkpoint(self) -> DelayedSubmission | None:
        """SLURM needs the machine, or the time is over: submitit puts the job back into the queue
        with what is returned here.
        """
        if self._child is not None:
            code = self._child.stop()
            if code != STOPPED:  # it had ended by itself just now
                self._write(code)
                return None
        return DelayedSubmission(Job(self._task, self._cwd, self._state))

    def _end(self, number: int, frame: Any) -> None:
        self._told = True
        if self._child is not None:
            self._child.terminate()

    def _write(self, code: int | None) -> None:
        starved = code is not None and self._child is not None and self._child.starved()
        said = {"host": socket.gethostname(), "pid": os.getpid()}
        write_json(self._state, {**said, "code": code, "out_of_memory": starved})
