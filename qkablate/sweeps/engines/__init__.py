"""Engines carry runs to where they are trained. An engine knows nothing of sweeps: it is given a
run (its frozen config and its folder) and says how its process ended; all else is read there."""

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from qkablate.config import Config

LOG = "output.log"  # what a process said, in the run's folder
OWNED, LOST = 75, 76  # exit codes of a process that found another one training its run
# Those with which a process ends without a result, and has said why.
DELIBERATE = (2, 128 + signal.SIGINT, 128 + signal.SIGTERM, OWNED, LOST)


@dataclass(frozen=True)
class Task:
    """A run on its way."""

    id: str
    folder: Path
    config: Config
    packed: int  # how many runs share the machine, this one included
    retry: bool  # whether a failure that is there already is to be tried again


@dataclass(frozen=True)
class Ended:
    """How the process of a run ended."""

    id: str
    code: int  # negative: the signal that ended it
    out_of_memory: bool = False  # the system ended it to get memory back


class Engine(Protocol):
    slots: int

    def start(self, task: Task) -> None:
        """Begin to train; there is a free slot."""

    def ended(self, seconds: float) -> list[Ended]:
        """Wait until a process ends, for so long at most."""
        ...

    def stop(self, *, now: bool) -> None:
        """Let all processes write a checkpoint and end; or end them at once."""

    def close(self) -> None: ...
