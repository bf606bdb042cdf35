"""Write the dark version of charts: `python scripts/darken.py docs/report-gaps.svg …`."""

import re
import sys
from pathlib import Path

from qkablate.report.palette import DARK, LIGHT


def main(names: list[str]) -> None:
    """Write NAME-dark.svg beside every NAME.svg, with the dark theme's colors."""
    dark = {light: DARK[name] for name, light in LIGHT.items()}
    for path in map(Path, names):
        text = path.read_text(encoding="utf-8")
        text = re.sub(r"#[0-9a-f]{6}", lambda match: dark.get(match[0], match[0]), text)
        path.with_name(f"{path.stem}-dark.svg").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
