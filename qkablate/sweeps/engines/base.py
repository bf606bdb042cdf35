"""The protocol between a sweep's launcher and its engines.

A run to train goes in, and the exit of its process comes out. An engine knows nothing of sweeps;
everything else about a run is read from its folder.
"""

import dataclasses
import json
import signal
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from qkablate.config import Config, from_plain
from qkablate.disk import read_file
from qkablate.runs.prefix import NO_BRANCHING, Branching
from qkablate.strict_json import from_json

LOG_FILE = "output.log"  # stdout and stderr of a run's process, in the run's folder
_TAIL = 4096  # bytes of a log that hold its last line
EXIT_ALREADY_RUNNING, EXIT_LEASE_LOST = 75, 76  # another process trains the run
EXIT_STOPPED = 128 + signal.SIGTERM
# A process with one of these exit codes has no result, and has given the reason itself.
EXPECTED_EXITS = (
    *(2, EXIT_ALREADY_RUNNING, EXIT_LEASE_LOST, EXIT_STOPPED),
    *(128 + number for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)),
)


def read_last_line(log: Path) -> str:
    """Return the last line of a log that is not blank, or nothing."""
    try:
        lines = read_file(log, _TAIL).decode("utf-8", "replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1] if lines else ""


@dataclass(frozen=True)
class RunTask:
    """A run to be trained."""

    id: str
    folder: Path
    config: Config
    packed: int  # runs that share the machine, including this one
    retry: bool  # train again a run that has failed before
    branching: Branching = NO_BRANCHING
    data_fingerprint: str = ""  # of a trained parent's data, which may be known by nothing else
    others: tuple["RunTask", ...] = ()  # the other runs of a vmapped program

    def to_json(self) -> str:
        """Return the task as one line, for another machine."""
        return json.dumps(dataclasses.asdict(self), default=str)

    @classmethod
    def from_json(cls, line: str) -> "RunTask":
        return cls._from_plain(json.loads(line))

    @classmethod
    def _from_plain(cls, content: dict[str, Any]) -> "RunTask":
        content |= {"config": from_plain(content["config"]), "folder": Path(content["folder"])}
        content["branching"] = from_json(Branching, content["branching"])
        content["others"] = tuple(cls._from_plain(other) for other in content["others"])
        return cls(**content)


@dataclass(frozen=True)
class RunExit:
    """The exit of a run's process."""

    id: str
    code: int  # negative: the signal that killed it
    out_of_memory: bool = False  # killed by the operating system to free memory
    requeue_reason: str = ""  # why the run should be started again, such as a lost machine


class Engine(Protocol):
    """The operations that a launcher needs of an engine, with the defaults of most."""

    slots: int  # runs accepted at once, training or waiting in the engine's own queue
    shares_machine: bool = True  # runs share a machine, so that one may need it exclusively
    is_remote: bool  # runs are trained on other machines than the launcher's
    poll_interval: float = 0.5  # seconds

    def adopt(self, ids: Collection[str]) -> list[list[str]]:
        """Return the runs of each job, of any of these, that an earlier launcher has left."""
        return []

    def start(self, task: RunTask) -> None:
        """Train or queue a run. Requires a free slot; may be deferred to `wait_for_exits`."""

    def wait_for_exits(self, seconds: float) -> list[RunExit]:
        """Wait until a process exits, at most so many seconds."""
        ...

    def queued_ids(self) -> Collection[str]:
        """Return the runs that are accepted but not yet training, as of the last poll."""
        return ()

    def stop(self, *, now: bool) -> None:
        """Ask all processes to write a checkpoint and exit, or kill them at once."""

    def close(self) -> None:
        """Release the engine. Processes on this machine end; jobs on a cluster stay."""
