"""Names that outlast a power cut: a folder has to be forced to disk, not only what is in it. And
files that are files: to open a pipe may take for ever.
"""

import errno
import os
import stat
from contextlib import suppress
from io import BufferedReader
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Make what was created or renamed in `folder` outlast a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """With its parents, unless it is there; else a power cut could take it away with all in it."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        with suppress(PermissionError):  # one may write there without reading
            sync_folder(folder.parent)


def open_file(path: Path) -> BufferedReader:
    """To read; OSError for what is no file."""
    # Nothing is waited for, and nothing is taken out of what is no file.
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no file", str(path))
    return file


def read_file(path: Path, last: int | None = None) -> bytes:
    """All of a file, or its last bytes; OSError for what is none."""
    with open_file(path) as file:
        if last is not None:
            file.seek(max(0, file.seek(0, os.SEEK_END) - last))
        return file.read()


def append(path: Path) -> int:
    """A descriptor that writes at the end of a file, made where there is none; OSError for a link
    and for what is no file.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    return os.open(path, flags, 0o666)


def name_exclusively(temporary: Path, name: Path) -> None:
    """Give a file its name; FileExistsError if that is taken."""
    try:
        os.link(temporary, name)
    except FileExistsError:
        raise
    except OSError:  # no hard links here, as on exFAT: who makes the name first may replace it
        os.close(os.open(name, os.O_CREAT | os.O_EXCL))
        temporary.replace(name)
