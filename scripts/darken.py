"""Write the dark version of charts: `python scripts/darken.py docs/report-gap-curves.svg …`."""

import sys
from pathlib import Path

from qkablate.report.palette import darken


def main(names: list[str]) -> None:
    """Write NAME-dark.svg beside every NAME.svg, with the dark theme's colors."""
    for path in map(Path, names):
        dark = darken(path.read_text(encoding="utf-8"))
        path.with_name(f"{path.stem}-dark.svg").write_text(dark, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
