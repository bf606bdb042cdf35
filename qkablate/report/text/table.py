"""Tables, and how they are written as Markdown."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from qkablate.errors import printable


@dataclass(frozen=True)
class Table:
    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)
    wrap: tuple[str, ...] = ()


def markdown(table: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(_as_cell(cell) for cell in cells)} |"

    rule = ["---", *["---:"] * (len(table.columns) - 1)]
    lines = [line(table.columns), line(rule), *map(line, table.rows)]
    notes = [f"- {as_markdown(note)}" for note in table.notes]
    return "\n".join([f"### {as_markdown(table.title)}", "", *lines, "", *notes])


class Code(str):
    """A cell that is to be typed as it stands."""


def _as_cell(cell: str) -> str:
    if not isinstance(cell, Code):
        return as_markdown(cell)
    ticks = "`" * (1 + max(map(len, re.findall("`+", cell)), default=0))
    space = " " if "`" in cell else ""
    return f"{ticks}{space}{printable(cell)}{space}{ticks}".replace("|", "\\|").replace("\n", " ")


def as_markdown(text: str) -> str:
    """A line of it in which names and reasons are words, and neither marks nor elements."""
    line = printable(" ".join(text.split())).replace("|", "∣").replace("<", "&lt;")
    return line.replace("](", "\\](")  # no picture, and no link
