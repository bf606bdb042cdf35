"""A run on another machine: what an engine has there starts the run's process, and waits.

Whoever calls this knows neither torch nor the run: one line says what to train. The process ends
when its input does, so that it never outlives what started it.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from qkablate.sweeps.engines import DELIBERATE, STOPPED, Task

_WORKER = (sys.executable, "-m", "qkablate.sweeps.running.worker")


class Child:
    """The process of one run."""

    # A cluster's signals may go to everything that it has started; those that would kill a
    # process which knows nothing of them are not meant for this one.
    command: Sequence[str] = ("sh", "-c", 'trap "" USR1 USR2; exec "$@"', "sh", *_WORKER)

    def __init__(self, task: Task, cwd: str, environment: Mapping[str, str]) -> None:
        self._kills = killed_for_memory()
        self._process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            cwd=cwd,
            env={**os.environ, **environment},
            text=True,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already: its code says so
            self._process.stdin.write(task.as_json() + "\n")
            self._process.stdin.flush()

    def wait(self) -> int:
        """How it ended; negative: the signal that ended it. A signal's handler may call this
        while it is being called.
        """
        code = self._code()
        return STOPPED if code == -signal.SIGTERM else code  # it was told before it could listen

    def _code(self) -> int:
        if not hasattr(os, "waitid"):  # macOS, before Python 3.13
            return self._process.wait()
        # Not taken away (WNOWAIT), so that two may wait, and the number stays the child's.
        found = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        assert found is not None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def terminate(self) -> None:
        """Ask it to write a checkpoint and end."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGTERM)

    def stop(self) -> int:
        """The same, and wait."""
        self.terminate()
        return self.wait()

    def starved(self) -> bool:
        """Once it has ended: whether the system did that to get memory back."""
        return self.wait() == -signal.SIGKILL and killed_for_memory() > self._kills


class Sheltered(Child):
    """Under a shell, for a parent that kills its children before it is killed itself: the shell
    dies then, and the run sees its input end and writes a checkpoint.
    """

    command = ("sh", "-c", '"$@"; exit $?', "sh", *_WORKER)

    def wait(self) -> int:
        code = super().wait()
        # A shell says 128 + n for signal n; so does a run that was asked to end.
        return code if code <= 128 or code in DELIBERATE else 128 - code

    def terminate(self) -> None:
        """The end of its input asks the run itself."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def killed_for_memory() -> int:
    """How many processes the kernel has killed to get memory back, as far as it says."""
    total = 0
    for path in (Path("/proc/vmstat"), Path("/sys/fs/cgroup/memory.events")):
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text(encoding="utf-8").splitlines():
                if line.startswith("oom_kill "):
                    total += int(line.split()[1])
    return total
