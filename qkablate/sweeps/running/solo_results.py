"""Seconds and memory of the arms of a sweep, each measured alone: solo.json in its folder."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from qkablate.errors import UserError
from qkablate.runs.records import read_json, write_json
from qkablate.strict_json import from_json

FILE = "solo.json"
FORMAT = 1


@dataclass(frozen=True)
class SoloRow:
    """One measurement of one arm."""

    arm: str
    repetition: int
    seconds: float  # of a training step: the median of several
    memory: float  # bytes: the peak of training, beyond those of the empty process
    load: float  # of other processes, in cores

    @property
    def is_sound(self) -> bool:
        return 0 < self.seconds < 1e9 and 0 < self.memory < 1e18 and self.repetition >= 0


@dataclass(frozen=True)
class SoloFile:
    """The measurements of a sweep, all on one machine."""

    sweep: str
    machine: Mapping[str, Any]
    rows: list[SoloRow] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        write_json(folder / FILE, {"format": FORMAT, **asdict(self)})


def read_solo(folder: Path) -> SoloFile | None:
    """Read the measurements of a sweep; None if there are none; UserError if they are damaged."""
    if not (folder / FILE).exists():
        return None
    content = read_json(folder / FILE)
    try:
        if content.pop("format") != FORMAT:
            raise ValueError("another format")
        found = from_json(SoloFile, content)
        if found.sweep != folder.resolve().name or not all(row.is_sound for row in found.rows):
            raise ValueError("of another sweep, or impossible")
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(
            f"'{folder / FILE}' is damaged or another sweep's; move it away, and the arms are"
            " measured again"
        ) from None
    return found


def read_measurements(folder: Path) -> dict[str, list[SoloRow]]:
    """Return the measurements of each arm, in the order of their repetitions."""
    found = read_solo(folder)
    by_arm: dict[str, list[SoloRow]] = {}
    for row in sorted(found.rows if found else [], key=lambda row: row.repetition):
        by_arm.setdefault(row.arm, []).append(row)
    return by_arm
