"""Tables in plain text, and the same rows as JSON or CSV."""

import csv
import itertools
import json
import math
import re
import shlex
import sys
import textwrap
from collections.abc import Collection, Sequence
from typing import Any, TextIO

from qkablate.errors import show_typed_folders
from qkablate.screen import PLAIN, Screen, cell_style, find_screen


def print_table(
    columns: list[str],
    rows: list[list[str]],
    left: int = 1,
    wrap: tuple[str, ...] = (),
    keys: int = 1,
) -> None:
    """Print a table; see `format_table`."""
    print("\n".join(format_table(columns, rows, left, wrap, keys, find_screen(sys.stdout))))


def print_text(text: str, indent: str = "  ") -> None:
    """Print a line, wrapped to the terminal."""
    print("\n".join(find_screen(sys.stdout).wrap(show_typed_folders(text), indent)))


def print_heading(text: str) -> None:
    """Print a heading, bold on a terminal."""
    screen = find_screen(sys.stdout)
    print("\n".join(screen.paint(line, "bold") for line in screen.wrap(text, "  ")))


def format_table(
    columns: list[str],
    rows: list[list[str]],
    left: int = 1,
    wrap: tuple[str, ...] = (),
    keys: int = 1,
    screen: Screen = PLAIN,
) -> list[str]:
    """Return the lines of a table: the first `left` columns aligned left, the others right.

    On a terminal that is too narrow, headers and the cells of the columns in `wrap` are broken at
    spaces. Columns that still do not fit follow in further blocks, which repeat the first `keys`
    columns: so the columns that decide come first.
    """
    cells_of = [*zip(columns, *rows, strict=True)]
    widths = [max(map(len, cells)) for cells in cells_of]
    if screen.width is None or sum(widths) + 2 * (len(widths) - 1) <= screen.width:
        return _format_block(columns, rows, widths, range(left), screen)
    least = [
        _least_width(cells, name in wrap) for name, cells in zip(columns, cells_of, strict=True)
    ]
    lines: list[str] = []
    for block in _split(least, keys, screen.width):
        fitted = _fit([widths[i] for i in block], [least[i] for i in block], screen.width)
        parts = [[cells[i] for i in block] for cells in (columns, *rows)]
        aligned = [n for n, i in enumerate(block) if i < left]
        lines += [""] * bool(lines) + _format_block(parts[0], parts[1:], fitted, aligned, screen)
    return lines


def _least_width(cells: Sequence[str], is_wrapped: bool) -> int:
    """Return the width at which no word is broken; the first cell is the header."""
    pieces = [*cells[0].split(), *(cells[1:] if not is_wrapped else " ".join(cells[1:]).split())]
    return max(map(len, pieces), default=1)


def _split(widths: list[int], keys: int, most: int) -> list[list[int]]:
    """Return the columns of each block, the key columns in each."""
    blocks = [[*range(keys)]]
    for column in range(keys, len(widths)):
        taken = sum(widths[i] + 2 for i in blocks[-1])
        if len(blocks[-1]) > keys and taken + widths[column] > most:
            blocks.append([*range(keys)])
        blocks[-1].append(column)
    return blocks


def _fit(widths: list[int], least: list[int], most: int) -> list[int]:
    """Narrow the widest columns until they fit; below their least width only if they must."""
    fitted, room = [*widths], most - 2 * (len(widths) - 1)
    for floor in (least, [1] * len(least)):
        while sum(fitted) > room:
            shrinkable = [i for i, width in enumerate(fitted) if width > floor[i]]
            if not shrinkable:
                break
            fitted[max(shrinkable, key=lambda i: fitted[i])] -= 1
    return fitted


def _format_block(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    widths: list[int],
    left: Collection[int],
    screen: Screen,
) -> list[str]:
    lines = []
    for number, cells in enumerate((columns, *rows)):
        styles = ["bold" if number == 0 else cell_style(cell) for cell in cells]
        broken = [
            textwrap.wrap(c, w) if len(c) > w else [c] for c, w in zip(cells, widths, strict=True)
        ]
        for parts in itertools.zip_longest(*broken, fillvalue=""):
            texts = []
            for i, (part, width) in enumerate(zip(parts, widths, strict=True)):
                pad, text = " " * (width - len(part)), screen.paint(part, styles[i])
                texts.append(text + pad if i in left else pad + text)
            lines.append("  ".join(texts).rstrip())
    return lines


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


def format_part(tokens: int | None) -> str:
    """Format how much of a split is read: 4,096 tokens; None: the whole split."""
    return "the whole split" if tokens is None else format_count(tokens, "token")


def format_list(names: list[str], most: int = 4) -> str:
    """Format the first names: a, b, c, d and 7 more."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def print_next_commands(*commands: list[str]) -> None:
    """Print the commands that a user may want to type next, each of as many lines as it needs."""
    print()
    print_heading("Next")
    for words in commands:
        typed = map(show_typed_folders, words)
        print(_continue_lines(["qkablate", *typed], find_screen(sys.stdout).width))


def _continue_lines(words: list[str], width: int | None) -> str:
    """Return a command, on a terminal broken between words as a shell accepts it."""
    lines = [" "]
    for word in map(shlex.quote, words):
        if width is not None and len(lines[-1]) + len(word) > width - 3 and lines[-1].strip():
            lines.append("   ")
        lines[-1] += f" {word}"
    return " \\\n".join(lines)
