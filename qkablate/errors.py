"""What a user did wrong, in one line."""

import difflib
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from qkablate.redaction import redacted


class UserError(Exception):
    """A mistake the user can mend: one line on stderr, exit code 2, no traceback."""

    def __str__(self) -> str:
        return super().__str__().replace("\n", "�")  # of a word or a file that is repeated in it


class Impossible(UserError):
    """Values that are fine one by one, and make no model together."""


def tell(text: str) -> None:
    """A line on stderr."""
    print(printable(redacted(text)), file=sys.stderr)


def refuse_secrets(values: Mapping[str, Any]) -> None:
    """UserError for a key or a password among what the user sets: it is all written down."""
    for name, value in values.items():
        if redacted(f"{value}") != f"{value}":
            raise UserError(
                f"{redacted(name)}: a key or a password is not written down; W&B and the Hub find"
                " theirs in WANDB_API_KEY, HF_TOKEN or .netrc"
            )


def printable(text: str) -> str:
    """What is repeated of files and arguments must not steer the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "�" for c in text)


def nearest(word: str, known: Iterable[str]) -> str:
    """' (nearest: x)' for the known name closest to `word`, or ''."""
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (nearest: {match[0]})" if match else ""
