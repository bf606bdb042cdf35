"""Where text comes from: documents, in an order that depends on their names alone."""

import os
import sysconfig
from pathlib import Path

from qkablate.config import DataConfig
from qkablate.errors import UserError

# Tests, vendored packages, and tables of numbers that are no text.
_NOT_TEXT = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "encodings",
    "pydoc_data",
}


def files(config: DataConfig) -> list[Path]:
    """The files that make the corpus."""
    if config.source == "stdlib":
        return _stdlib_files()
    assert config.path is not None
    path = Path(config.path).expanduser()
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError(f"data.path: there is no file or folder '{config.path}'")
    found = sorted(file for file in path.rglob("*") if file.is_file() and not _hidden(file, path))
    if not found:
        raise UserError(f"data.path: the folder '{config.path}' holds no file")
    return found


def read(file: Path) -> bytes:
    """A document, which must be UTF-8 text."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UserError(f"data.path: cannot read '{file}': {error.strerror}") from None
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"data.path: '{file}' is not UTF-8 text (byte {error.start})") from None
    return content


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, inner, names in os.walk(root):
        inner[:] = set(inner) - _NOT_TEXT  # what is not walked into costs nothing
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    if len(found) < 100:
        raise UserError(
            f"data: this Python has no standard library sources in {root};"
            " write data=text data.path=FILE_OR_FOLDER"
        )
    return sorted(found)


def _hidden(file: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(root).parts)
