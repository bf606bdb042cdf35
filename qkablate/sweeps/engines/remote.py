"""A run's process on another machine, started and awaited by what an engine has there.

The parent imports neither torch nor the run: one line of JSON describes the task. The process ends
when its standard input closes, so that it never outlives its parent.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from qkablate.sweeps.engines.base import EXIT_STOPPED, EXPECTED_EXITS, RunTask

_WORKER = (sys.executable, "-m", "qkablate.sweeps.running.worker")


class RunProcess:
    """The process of one run."""

    # A cluster may signal every process it has started. SIGUSR1 and SIGUSR2 are not meant for the
    # worker, and would kill it.
    command: Sequence[str] = ("sh", "-c", 'trap "" USR1 USR2; exec "$@"', "sh", *_WORKER)

    def __init__(self, task: RunTask, cwd: str, environment: Mapping[str, str]) -> None:
        self._oom_kills = oom_kill_count()
        self._process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            cwd=cwd,
            env={**os.environ, **environment},
            text=True,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # already exited: its code gives the reason
            self._process.stdin.write(task.to_json() + "\n")
            self._process.stdin.flush()

    def wait(self) -> int:
        """Return the exit code; negative: the signal that killed it. Reentrant, for handlers."""
        if hasattr(os, "waitid"):
            # WNOWAIT leaves the zombie, so that two may wait and the pid is not reused.
            status = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
            assert status is not None
            code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
        else:  # macOS, before Python 3.13
            code = self._process.wait()
        # Killed by SIGTERM: it was told to stop before it had installed its handler.
        return EXIT_STOPPED if code == -signal.SIGTERM else code

    def terminate(self) -> None:
        """Ask the process to write a checkpoint and exit."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGTERM)

    def is_out_of_memory(self) -> bool:
        """Return whether the exited process was killed by the system to free memory."""
        return self.wait() == -signal.SIGKILL and oom_kill_count() > self._oom_kills


class ShelteredRunProcess(RunProcess):
    """A run under a shell, for a parent that kills its children before it is killed itself.

    Only the shell dies then; the run sees its standard input close and writes a checkpoint.
    """

    command = ("sh", "-c", '"$@"; exit $?', "sh", *_WORKER)

    def wait(self) -> int:
        code = super().wait()
        # A shell exits with 128 + n for signal n; so does a run that was asked to stop.
        return code if code <= 128 or code in EXPECTED_EXITS else 128 - code

    def terminate(self) -> None:
        """Ask the run itself to stop, by closing its standard input."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def oom_kill_count() -> int:
    """Return how many processes the kernel reports it has killed to free memory."""
    total = 0
    for path in (Path("/proc/vmstat"), Path("/sys/fs/cgroup/memory.events")):
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text(encoding="utf-8").splitlines():
                if line.startswith("oom_kill "):
                    total += int(line.split()[1])
    return total
