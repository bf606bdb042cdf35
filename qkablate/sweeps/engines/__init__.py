"""Engines carry runs to where they are trained. An engine knows nothing of sweeps: it is given a
run (its frozen config and its folder) and says how its process ended; all else is read there.
"""

import dataclasses
import json
import signal
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from qkablate.config import Config, from_plain

LOG = "output.log"  # what a process said, in the run's folder
OWNED, LOST = 75, 76  # exit codes of a process that found another one training its run
STOPPED = 128 + signal.SIGTERM  # that of one which was told to end
# Those with which a process ends without a result, and has said why.
_TOLD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
DELIBERATE = (2, *(128 + number for number in _TOLD), OWNED, LOST)


@dataclass(frozen=True)
class Task:
    """A run on its way."""

    id: str
    folder: Path
    config: Config
    packed: int  # how many runs share the machine, this one included
    retry: bool  # whether a failure that is there already is to be tried again

    def as_json(self) -> str:
        """One line, as another machine reads it."""
        return json.dumps(dataclasses.asdict(self), default=str)

    @classmethod
    def from_json(cls, line: str) -> "Task":
        content = json.loads(line)
        config, folder = from_plain(content.pop("config")), Path(content.pop("folder"))
        return cls(**content, config=config, folder=folder)


@dataclass(frozen=True)
class Ended:
    """How the process of a run ended."""

    id: str
    code: int  # negative: the signal that ended it
    out_of_memory: bool = False  # the system ended it to get memory back
    gone: str = ""  # why it is to go on elsewhere: its machine, say, is not there any more


class Engine(Protocol):
    slots: int  # runs that it takes at once, to train or to let them wait in a queue of its own
    shares: bool  # whether runs share a machine, so that one may want it for itself
    elsewhere: bool  # whether its machines are others than the launcher's
    pause: float  # seconds between two looks at it

    def adopt(self, ids: Collection[str]) -> list[str]:
        """Which of these it has already: an earlier launcher is gone, and its jobs are not."""
        ...

    def start(self, task: Task) -> None:
        """Begin to train, or queue; there is a free slot. May be put off until `ended`."""

    def ended(self, seconds: float) -> list[Ended]:
        """Wait until a process ends, for so long at most."""
        ...

    def queued(self) -> Collection[str]:
        """What it has taken and does not train yet, as far as the last look knows."""
        ...

    def stop(self, *, now: bool) -> None:
        """Let all processes write a checkpoint and end; or end them at once."""

    def close(self) -> None:
        """The launcher goes. What runs on this machine ends with it; jobs of a cluster stay."""
