"""Tables, their cells, and their Markdown."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from qkablate.errors import sanitize
from qkablate.table import format_nats

_NUMBER = re.compile(r"[-+−×<~(\[ ]*\d|–|$")


@dataclass(frozen=True)
class Table:
    """A table with its title and notes."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)


def format_known(value: Any, form: str | Callable[[Any], str] = ".4f") -> str:
    """Format a value by a format specification or a function; an unknown one is a dash."""
    if value is None:
        return "–"
    return format(value, form) if isinstance(form, str) else form(value)


def format_interval(
    ends: Sequence[float] | None, form: str | Callable[[Any], str] = format_nats
) -> str:
    """Format an interval: [+0.0081, +0.0160]; a dash if an end is unknown or infinite."""
    if ends is None or not all(map(math.isfinite, ends)):
        return "–"
    return f"[{', '.join(format_known(end, form) for end in ends)}]"


def find_number_columns(rows: Sequence[Sequence[str]]) -> list[bool]:
    """Return by column whether its cells begin as numbers do, or are dashes or empty."""
    return [any(cells) and all(map(_NUMBER.match, cells)) for cells in zip(*rows, strict=True)]


def format_markdown(table: Table) -> str:
    """Return a table as Markdown."""

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(map(_as_cell, cells))} |"

    are_numbers = find_number_columns(table.rows) or [False] * len(table.columns)
    rule = ["---:" if right else "---" for right in are_numbers]
    lines = [line(table.columns), line(rule), *map(line, table.rows)]
    notes = [f"- {escape_markdown(note)}" for note in table.notes]
    return "\n".join([f"### {escape_markdown(table.title)}", "", *lines, "", *notes])


class Code(str):
    """A cell with code to be typed verbatim."""


class Markdown(str):
    """A cell whose Markdown is kept."""


def _as_cell(cell: str) -> str:
    if isinstance(cell, Markdown):
        return cell
    if not isinstance(cell, Code):
        return escape_markdown(cell)
    ticks = "`" * (1 + max(map(len, re.findall("`+", cell)), default=0))
    space = " " if "`" in cell else ""
    return f"{ticks}{space}{sanitize(cell)}{space}{ticks}".replace("|", "\\|").replace("\n", " ")


def escape_markdown(text: str) -> str:
    """Return text as one line of Markdown in which nothing is markup."""
    line = sanitize(" ".join(text.split())).replace("|", "∣").replace("<", "&lt;")
    return line.replace("](", "\\](")  # neither image nor link
