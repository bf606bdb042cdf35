"""Outcome of the cases of a fault: their number, lost work, and wrong results.

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
    lost: list[str] = field(default_factory=list)  # lost work, or a run that hangs
    wrong: list[str] = field(default_factory=list)  # another number, a traceback, or no message

    def add(self, other: "Tally") -> None:
        self.cases += other.cases
        self.lost += other.lost
        self.wrong += other.wrong
