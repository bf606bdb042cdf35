"""Shared parts of all faults: cases, and what was lost or wrong in them.

A fault is a module `fault_<name>.py` beside this file with a docstring that names it, `SHORT` and
`FULL` (how many cases the tests and `make torture` try) and

    def torture(cases: int, seed: int, folder: Path) -> Tally

which tries them in an empty folder. The same seed tries the same cases.
"""

from dataclasses import dataclass, field
from pathlib import Path

FAULTS = sorted(
    path.stem.removeprefix("fault_") for path in Path(__file__).parent.glob("fault_*.py")
)


assert FAULTS


@dataclass
class Tally:
    """Outcome of the cases of one fault."""

    cases: int = 0
    lost: list[str] = field(default_factory=list)  # work that is gone, or a run that never ends
    wrong: list[str] = field(default_factory=list)  # another number, a traceback, a silence

    def add(self, other: "Tally") -> None:
        self.cases += other.cases
        self.lost += other.lost
        self.wrong += other.wrong
