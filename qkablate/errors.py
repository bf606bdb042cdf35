"""Errors of the user, reported in one line."""

import difflib
import re
import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

from qkablate.redaction import redact


class UserError(Exception):
    """Mistake that the user can correct: one line on stderr, exit code 2, no traceback."""

    def __str__(self) -> str:
        return super().__str__().replace("\n", "�")  # of quoted input


class ImpossibleConfig(UserError):
    """Values that are valid one by one, but not together."""


_typed_folders: dict[str, str] = {}


def show_folder_as(folder: str, typed: str) -> None:
    """Let messages and commands name a folder as the user typed it."""
    _typed_folders[folder] = typed


def typed_folder(folder: str) -> str | None:
    """Return what the user typed for a folder of unpacked archives; None for other folders."""
    return _typed_folders.get(folder)


def show_typed_folders(text: str) -> str:
    """Return the text with the folders as the user typed them, as archives that were unpacked."""
    for folder, typed in _typed_folders.items():
        text = re.sub(rf"{re.escape(folder)}(?![\w/-])", typed.replace("\\", r"\\"), text)
    return text


def print_stderr(text: str) -> None:
    """Print a line on stderr, without secrets and control characters."""
    print(sanitize(redact(show_typed_folders(text))), file=sys.stderr)


def reject_secrets(values: Mapping[str, Any]) -> None:
    """Raise UserError if a setting contains a key or a password: settings are written to disk."""
    text = "\n".join(map(str, values.values()))
    if redact(text) == text:  # reads the user's keys once, not once per value
        return
    for name, value in values.items():
        if redact(f"{value}") != f"{value}":
            raise UserError(
                f"{redact(name)}: keys and passwords must not be settings; W&B and the Hub read"
                " theirs from WANDB_API_KEY, HF_TOKEN or .netrc"
            )


def sanitize(text: str) -> str:
    """Replace control characters, which could control the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "�" for c in text)


# Words that other programs use for ours.
_SYNONYMS = {"gpu": "cuda", "off": "disabled", "false": "disabled", "no": "disabled"}
_SYNONYMS |= {"pdf": "svg", "jpg": "png", "markdown": "md"}
_SYNONYMS |= dict.fromkeys(("finished", "complete", "completed", "ended"), "done")
_LONGEST_LIST = 8  # names; of more, a message names the nearest


def nearest_hint(word: str, known: Iterable[str]) -> str:
    """Return ' (nearest: x)' for the known name closest to `word`, or ''."""
    nearest = find_nearest(word, known)
    return f" (nearest: {nearest})" if nearest else ""


def find_nearest(word: str, known: Iterable[str]) -> str:
    """Return the known name closest to `word`, or ''."""
    names = {name.lstrip("-"): name for name in known}
    synonyms = {other: ours for other, ours in _SYNONYMS.items() if ours in names}
    if synonym := synonyms.get(word.lower()):
        return synonym
    names = synonyms | names
    bare = word.lstrip("-")
    if not bare:
        return ""
    # Flags are short words: to be near, more of one has to agree, or its beginning.
    begins = [name for name in names if bare != word and name.startswith(bare)]
    match = begins or _closest(bare, names, 1, 0.6 if bare == word else 0.65)
    return names[match[0]] if match else ""


def _closest(word: str, names: Iterable[str], most: int, cutoff: float) -> list[str]:
    """Return the names closest to `word`, in upper or lower case."""
    folded = {name.lower(): name for name in names}
    return [folded[x] for x in difflib.get_close_matches(word.lower(), folded, most, cutoff)]


def not_one_of(word: str, known: Iterable[str], command: str = "--help") -> str:
    """Return that a word is not one of the known names: the nearest first, and the rest if few.

    Of a long list, which the command (if any) shows in full, only the names most like the word are
    given.
    """
    names = list(known)
    listed, more = names, ""
    if len(names) > _LONGEST_LIST:
        listed = _closest(word, names, 3, 0.0)
        more = f", … (`{command}` lists all {len(names)})"
        more = more if command else f" and {len(names) - len(listed)} more"
    shown = f"'{sanitize(word[:40])}'{nearest_hint(word, names)}"
    return f"{shown} is not one of {', '.join(listed)}{more}"


def install_hint(extra: str) -> str:
    """Return how to install an optional extra."""
    return f"pip install '.[{extra}]' in a clone of qkablate"


def require_extra(extra: str, *modules: str) -> None:
    """Raise UserError where a module of an optional extra is not installed."""
    for module in modules:
        try:
            import_module(module)
        except ImportError as error:
            raise UserError(
                f"this needs {error.name}, of the extra '{extra}': {install_hint(extra)}"
            ) from None
