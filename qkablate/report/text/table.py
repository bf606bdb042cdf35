"""Tables, and their Markdown."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from qkablate.errors import sanitize


@dataclass(frozen=True)
class Table:
    """A table with its title and notes."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)
    wrap: tuple[str, ...] = ()  # columns that may be broken into lines


def format_markdown(table: Table) -> str:
    """Return a table as Markdown."""

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(_as_cell(cell) for cell in cells)} |"

    rule = ["---", *["---:"] * (len(table.columns) - 1)]
    lines = [line(table.columns), line(rule), *map(line, table.rows)]
    notes = [f"- {escape_markdown(note)}" for note in table.notes]
    return "\n".join([f"### {escape_markdown(table.title)}", "", *lines, "", *notes])


class Code(str):
    """A cell with code to be typed verbatim."""


def _as_cell(cell: str) -> str:
    if not isinstance(cell, Code):
        return escape_markdown(cell)
    ticks = "`" * (1 + max(map(len, re.findall("`+", cell)), default=0))
    space = " " if "`" in cell else ""
    return f"{ticks}{space}{sanitize(cell)}{space}{ticks}".replace("|", "\\|").replace("\n", " ")


def escape_markdown(text: str) -> str:
    """Return text as one line of Markdown in which nothing is markup."""
    line = sanitize(" ".join(text.split())).replace("|", "∣").replace("<", "&lt;")
    return line.replace("](", "\\](")  # neither image nor link
