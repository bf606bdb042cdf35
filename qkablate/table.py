"""Tables in plain text, and the same rows as JSON or CSV."""

import csv
import itertools
import json
import math
import re
import shlex
import shutil
import sys
import textwrap
from typing import Any, TextIO


def print_table(
    columns: list[str], rows: list[list[str]], left: int = 1, wrap: tuple[str, ...] = ()
) -> None:
    """Print a table; see `format_table`."""
    print("\n".join(format_table(columns, rows, left, wrap)))


def format_table(
    columns: list[str], rows: list[list[str]], left: int = 1, wrap: tuple[str, ...] = ()
) -> list[str]:
    """Return the lines of a table: the first `left` columns aligned left, the others right.

    On a terminal that is too narrow, the cells of the columns in `wrap` are wrapped.
    """
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    to_wrap = [i for i, name in enumerate(columns) if name in wrap and sys.stdout.isatty()]
    while to_wrap and sum(widths) + 2 * (len(widths) - 1) > shutil.get_terminal_size().columns:
        widest = max(to_wrap, key=lambda i: widths[i])
        if widths[widest] <= _MIN_WIDTH:
            break
        widths[widest] -= 1
    lines = []
    for cells in (columns, *rows):
        broken = [
            textwrap.wrap(c, w) if len(c) > w else [c] for c, w in zip(cells, widths, strict=True)
        ]
        for parts in itertools.zip_longest(*broken, fillvalue=""):
            pairs = enumerate(zip(parts, widths, strict=True))
            line = "  ".join(f"{c:<{w}}" if i < left else f"{c:>{w}}" for i, (c, w) in pairs)
            lines.append(line.rstrip())
    return lines


_MIN_WIDTH = 12


def print_json(value: Any) -> None:
    """Print JSON in which control characters are escaped."""
    text = json.dumps(value, indent=1, ensure_ascii=False)
    print(
        re.sub(r"[^\n -~]", lambda m: m[0] if m[0].isprintable() else json.dumps(m[0])[1:-1], text)
    )


def print_csv(rows: list[dict[str, Any]], file: TextIO | None = None) -> None:
    """Print rows as CSV, with the keys of the first row as header."""
    writer = csv.DictWriter(file or sys.stdout, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def format_short(number: float) -> str:
    """Format with at most four digits and a unit prefix: 1.18 M."""
    for size, prefix in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            digits = ".3g" if abs(number) < 999.5 * size else ",.0f"
            return f"{number / size:{digits}} {prefix}"
    return f"{number:.4g}"


def format_duration(seconds: float) -> str:
    """Format a time as 8 s, 3 min 20 s, 2 h 05 min or 2.5 days."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole / 86400:,.1f} days"


def format_bytes(number: float) -> str:
    """Format a number of bytes: 1.18 MB."""
    text = format_short(number)
    return f"{text}B" if text[-1].isalpha() else f"{text} B"


def format_nats(number: float) -> str:
    """Format a difference of losses: +0.0123; tiny values keep their magnitude: -3e-06."""
    return f"{number:+.0e}" if 0 < abs(number) < 5e-5 else f"{number:+z.4f}"


def format_digits(value: float, half: float | None, *, signed: bool = False) -> str:
    """Round to two significant digits of the interval's half width, or to four decimals."""
    places = 4
    if half is not None and math.isfinite(half) and half > 0:
        places = min(6, max(0, 1 - math.floor(math.log10(half))))
    return f"{value:{'+z' if signed else 'z'}.{places}f}"


def format_count(number: int, what: str) -> str:
    """Format a number with its noun: 3 layers, 1 layer."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def format_list(names: list[str], most: int = 4) -> str:
    """Format the first names: a, b, c, d and 7 more."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def print_next_commands(*commands: list[str]) -> None:
    """Print the commands that a user may want to type next."""
    print("\nNext", *(f"  {shlex.join(['qkablate', *words])}" for words in commands), sep="\n")
