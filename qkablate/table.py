"""Tables in plain text, and the same rows as JSON or CSV."""

import csv
import itertools
import json
import math
import re
import shutil
import sys
import textwrap
from typing import Any


def print_table(
    columns: list[str], rows: list[list[str]], left: int = 1, wrap: tuple[str, ...] = ()
) -> None:
    print("\n".join(aligned(columns, rows, left, wrap)))


def aligned(
    columns: list[str], rows: list[list[str]], left: int = 1, wrap: tuple[str, ...] = ()
) -> list[str]:
    """The lines of a table: the first `left` columns to the left, numbers to the right. On a
    terminal that is too narrow, the columns to `wrap` are broken into lines.
    """
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    may = [i for i, column in enumerate(columns) if column in wrap] if sys.stdout.isatty() else []
    while may and sum(widths) + 2 * (len(widths) - 1) > shutil.get_terminal_size().columns:
        widest = max(may, key=lambda i: widths[i])
        if widths[widest] <= _NARROWEST:
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


_NARROWEST = 12


def print_json(value: Any) -> None:
    text = json.dumps(value, indent=1, ensure_ascii=False)
    # What is repeated of files must not steer the terminal; JSON can say it otherwise.
    print(
        re.sub(r"[^\n -~]", lambda m: m[0] if m[0].isprintable() else json.dumps(m[0])[1:-1], text)
    )


def print_csv(rows: list[dict[str, Any]]) -> None:
    writer = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def short(number: float) -> str:
    """Four digits at most, with the unit's prefix: 1.18 M."""
    for size, prefix in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return (
                f"{number / size:.3g} {prefix}"
                if abs(number) < 999.5 * size
                else f"{number / size:,.0f} {prefix}"
            )
    return f"{number:.4g}"


def short_bytes(number: float) -> str:
    text = short(number)
    return f"{text}B" if text[-1].isalpha() else f"{text} B"


def nats(number: float) -> str:
    """+0.0123; what would round to nothing keeps its sign and size: -3e-06."""
    return f"{number:+.0e}" if 0 < abs(number) < 5e-5 else f"{number:+z.4f}"


def digits(value: float, half: float | None, *, signed: bool = False) -> str:
    """With no more digits than an interval so wide supports: two of its half. Four decimals where
    there is none.
    """
    places = 4
    if half is not None and math.isfinite(half) and half > 0:
        places = min(6, max(0, 1 - math.floor(math.log10(half))))
    return f"{value:{'+z' if signed else 'z'}.{places}f}"


def counted(number: int, what: str) -> str:
    """3 layers, 1 layer."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def some(names: list[str], most: int = 4) -> str:
    """a, b, c, d and 7 more."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
