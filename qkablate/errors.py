"""What a user did wrong, in one line."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake the user can mend: one line on stderr, exit code 2, no traceback."""


def nearest(word: str, known: Iterable[str]) -> str:
    """' (nearest: x)' for the known name closest to `word`, or ''."""
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (nearest: {match[0]})" if match else ""
