"""Tables in plain text, and the same rows as JSON or CSV."""

import csv
import json
import sys
from typing import Any


def print_table(columns: list[str], rows: list[list[str]], left: int = 1) -> None:
    """Aligned: the first `left` columns to the left, numbers to the right."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    for cells in (columns, *rows):
        pairs = enumerate(zip(cells, widths, strict=True))
        line = "  ".join(f"{c:<{w}}" if i < left else f"{c:>{w}}" for i, (c, w) in pairs)
        print(line.rstrip())


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=1, ensure_ascii=False))


def print_csv(rows: list[dict[str, Any]]) -> None:
    writer = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def short(number: float) -> str:
    """Four digits at most, with the unit's prefix: 1.18 M."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return (
                f"{number / size:.3g} {prefix}"
                if abs(number) < 999.5 * size
                else f"{number / size:,.0f} {prefix}"
            )
    return f"{number:.4g}"
