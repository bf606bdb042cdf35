"""Files that survive a power cut: folders are synced too, not only their files.

Only regular files are read; FIFOs would block.
"""

import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path

from qkablate.errors import UserError


def describe_os_error(error: Exception) -> str:
    """Return the reason of a failed read or write in a few words."""
    return getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__


def expand_user(name: str, path: str) -> Path:
    """Return a path that a user has typed, `~` being a home directory; UserError if it is none."""
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise UserError(f"{name}: '{path}' names a user without a home directory")
    return Path(expanded)


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that files created or renamed in it survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Sync a file that is written."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def make_folder(folder: Path) -> None:
    """Create and sync a folder with its parents, unless it exists."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        with suppress(PermissionError):  # writable, but not readable
            sync_folder(folder.parent)


def open_file(path: Path) -> BufferedReader:
    """Open a regular file to read; OSError for anything else, which is neither awaited nor read."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def read_file(path: Path, last: int | None = None) -> bytes:
    """Read a regular file, or its last bytes; OSError for anything else."""
    with open_file(path) as file:
        if last is not None:
            file.seek(max(0, file.seek(0, os.SEEK_END) - last))
        return file.read()


def hash_file(path: Path) -> str:
    """Return the sha256 of a regular file; OSError for anything else."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def link_atomic(path: Path, target: Path) -> None:
    """Make or replace a relative link to a folder, as another process may at the same time."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(os.path.relpath(target.resolve(), path.parent.resolve()))
    temporary.replace(path)


def open_append(path: Path) -> int:
    """Return a descriptor that appends to a file, created if needed; OSError for a link or FIFO."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    return os.open(path, flags, 0o666)


@contextmanager
def hold_lock(path: Path, waits_for: str = "") -> Iterator[None]:
    """Hold the lock at `path`; it is freed when the process ends, however it ends."""
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waits_for:
                print(f"waiting for {waits_for}", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def exclusive_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder inside `folder`, which this process alone writes; both are removed.

    What a process that was killed has left there is removed first. BlockingIOError while another
    process is at it.
    """
    folder.mkdir(exist_ok=True)
    if folder.is_symlink():
        raise FileExistsError(errno.EEXIST, "it is a link", str(folder))
    content, lock = folder / "new", folder / "lock"
    with os.fdopen(os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not (lock.exists() and os.path.samestat(lock.stat(), os.fstat(file.fileno()))):
            raise BlockingIOError(errno.EAGAIN, "another process has just removed it", str(lock))
        try:
            if content.is_dir() and not content.is_symlink():
                shutil.rmtree(content)
            content.unlink(missing_ok=True)
            content.mkdir()
            yield content
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def name_exclusively(temporary: Path, name: Path) -> None:
    """Rename a file; FileExistsError if the name is taken."""
    try:
        os.link(temporary, name)
    except FileExistsError:
        raise
    except OSError:  # no hard links, as on exFAT: the first to create the name may replace it
        os.close(os.open(name, os.O_CREAT | os.O_EXCL))
        temporary.replace(name)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, without waiting for the disk."""
    temporary = path.with_name(f".{path.name[:200]}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write all of a file or nothing."""
    # A unique name: two launchers of a sweep may write the same file at the same time.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        write_synced(temporary, content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_synced(path: Path, content: str | bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with path.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
