"""The screen that output is written to: its width, and its colors."""

import os
import re
import shutil
import textwrap
from dataclasses import dataclass
from typing import TextIO

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
# Words that a cell begins with, or that `paint_words` finds in a line.
_WORDS = {
    "cyan": "equivalent|EQUIVALENT|not worse",
    "green": "better|done|holds|SUPPORTED",
    "red": "worse|(?:arm |baseline )?diverged|failed|VIOLATED|REFUTED",
    "yellow": "no difference (?:was )?found|no verdict|insensitive|too few pairs"
    "|no pairs|interrupted|INSENSITIVE|MIXED|UNDERPOWERED|INCOMPLETE",
}
_PATTERN = re.compile("|".join(rf"(?P<{style}>\b(?:{words})\b)" for style, words in _WORDS.items()))


@dataclass(frozen=True)
class Screen:
    """A terminal, or a file or pipe: that has neither a width nor colors."""

    width: int | None = None
    has_color: bool = False

    def paint(self, text: str, style: str | None) -> str:
        """Return text in a style, where there are colors."""
        if not self.has_color or style is None or not text.strip():
            return text
        return f"\x1b[{_CODES[style]}m{text}\x1b[0m"

    def paint_words(self, text: str) -> str:
        """Return text in which outcomes and statuses are colored."""
        return _PATTERN.sub(lambda match: self.paint(match[0], match.lastgroup), text)

    def wrap(self, text: str, indent: str = "") -> list[str]:
        """Break a line at spaces to the width; the lines that follow are indented.

        Longer words stay whole, so that a path can be copied.
        """
        if self.width is None or len(text) <= self.width:
            return [text]
        if not text.strip():
            return [""]
        start = text[: len(text) - len(text.lstrip())]
        return textwrap.wrap(
            text.strip(),
            self.width,
            initial_indent=start,
            subsequent_indent=start + indent,
            break_long_words=False,
            break_on_hyphens=False,
        )


PLAIN = Screen()


def find_screen(stream: TextIO) -> Screen:
    """Return the screen of a stream: NO_COLOR, FORCE_COLOR and TERM=dumb decide on colors."""
    is_terminal = stream.isatty()
    has_color = is_terminal and os.environ.get("TERM") != "dumb"
    if os.environ.get("FORCE_COLOR"):
        has_color = os.environ["FORCE_COLOR"] != "0"
    if os.environ.get("NO_COLOR"):
        has_color = False
    return Screen(shutil.get_terminal_size().columns if is_terminal else None, has_color)


def cell_style(cell: str) -> str | None:
    """Return the style of a table's cell, by the outcome or status that it begins with."""
    match = _PATTERN.match(cell.lstrip("( "))
    return match.lastgroup if match else None
