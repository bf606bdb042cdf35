"""Lease on a run: one process trains it, also among machines that share a folder.

<folder>/lease/
    00000001    a record: one line of JSON, a dot for every heartbeat, "released" at the end
    00000002    the highest number is the one that counts

A number is never used twice. On one kernel a lock shows whether the holder is alive: it ends with
the process, even by kill -9. Between kernels the size of the record does: an observer that sees no
heartbeat for TIMEOUT seconds takes over. Neither clocks of other machines nor file times are used
for that; lists, which look once, take a record that has not changed for long for a dead holder's.
"""

import fcntl
import json
import os
import re
import secrets
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from qkablate.disk import make_folder, name_exclusively
from qkablate.errors import UserError

FOLDER = "lease"
HEARTBEAT = 5.0  # seconds between two heartbeats
TIMEOUT = 60.0  # seconds without a heartbeat after which the holder counts as dead
_OLD = 900.0  # seconds since a record was written: more than clocks of machines differ
_RELEASED = b"released\n"
_NAME = re.compile("[0-9]{8,}")
_UNKNOWN = "another process"
# Unlike Linux's monotonic clock it includes the time a machine is suspended.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class AlreadyRunning(UserError):
    """Another process holds the lease."""


class LeaseLost(Exception):
    """Another process has taken the lease over: this one must not write any more."""


class LeaseRecord(NamedTuple):
    """The newest record on disk, read once."""

    number: int
    size: int = 0
    written: float = 0.0  # the file's time
    released: bool = False
    locked: bool | None = None  # None: only the heartbeat shows whether the holder is alive
    token: str | None = None  # None: the record is damaged
    holder: str = _UNKNOWN


class LeaseState(NamedTuple):
    """An observer's conclusion about a lease."""

    number: int  # of the newest record; 0: there is none
    alive: bool
    sure: bool  # False: it counts as alive only because it was not watched for long enough
    holder: str


def now() -> float:
    """Return the seconds since the machine was started, including suspended time."""
    return time.clock_gettime(_CLOCK)


class LeaseObserver:
    """Liveness of leases, judged by what changes between two looks.

    With `by_file_times`, as in lists, the holder of an old record counts as dead at the first look.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, by_file_times: bool = False
    ) -> None:
        self._clock, self._by_file_times = clock, by_file_times
        # (number, size) of the record, since when, and whether it has changed while observed.
        self._seen: dict[Path, tuple[tuple[int, int] | None, float, bool]] = {}

    def is_leased(self, folder: Path) -> bool:
        return self.observe(folder).alive

    def observe(self, folder: Path) -> LeaseState:
        before = self._clock()  # the time of a slow read, as on a stalled disk, is no silence
        record = _newest(folder)
        if record is None or record.released:
            return LeaseState(record.number if record else 0, alive=False, sure=True, holder="")
        if record.locked is not None:
            return LeaseState(record.number, record.locked, sure=True, holder=record.holder)
        counter = record.number, record.size
        seen, since, changed = self._seen.get(folder, (None, 0.0, False))
        timed_out = seen == counter and before - since >= TIMEOUT
        if seen != counter:
            changed = seen is not None
            self._seen[folder] = counter, self._clock(), changed
        is_old = self._by_file_times and time.time() - record.written > _OLD
        return LeaseState(
            record.number, not (timed_out or is_old), timed_out or changed, record.holder
        )

    def wait_until_sure(self, folder: Path, sleep: Callable[[float], None] = time.sleep) -> None:
        """Observe until it is certain whether the holder is alive: about TIMEOUT seconds."""
        while not self.observe(folder).sure:
            sleep(1.0)


def is_leased(folder: Path) -> bool:
    """Return whether the lease is held, judged from a single observation."""
    return LeaseObserver().is_leased(folder)


@contextmanager
def hold_lease(folder: Path, observer: LeaseObserver | None = None) -> Iterator["Lease"]:
    """Hold the lease on a folder; raise AlreadyRunning if its holder is alive."""
    observer, lease = observer or LeaseObserver(), None
    while lease is None:
        make_folder(folder / FOLDER)
        state = observer.observe(folder)
        if state.alive:
            raise AlreadyRunning(f"{folder} is being trained by {state.holder}")
        with suppress(FileExistsError, FileNotFoundError):  # another process was faster
            lease = Lease(folder, state.number + 1)
    try:
        _remove_old(folder, lease.number)
        yield lease
    finally:
        lease.release()


class Lease:
    """A lease that this process has acquired, and may have lost since."""

    def __init__(self, folder: Path, number: int) -> None:
        """Create the record of this number; FileExistsError if another process was first."""
        self.folder, self.number, self._token = folder, number, secrets.token_hex()
        self._lost_to: str | None = None
        self._last_look = now()
        self._descriptor = _create(folder, number, self._token)
        _LEASES.add(self)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_alive, name="heartbeat", daemon=True)
        self._thread.start()

    def is_lost(self) -> bool:
        """Return whether the lease is lost; reads the disk only after two missed heartbeats."""
        if self._lost_to is None and now() - self._last_look > 2 * HEARTBEAT:
            with suppress(OSError):
                self._look()
        return self._lost_to is not None

    def check(self) -> None:
        """Raise LeaseLost if the lease is known to be lost."""
        if self.is_lost():
            raise LeaseLost(
                f"{self.folder} was taken over by {self._lost_to}; this process stopped"
            )

    def verify(self) -> None:
        """Read the newest record, and raise LeaseLost if it is another process's."""
        self._look()
        self.check()

    def beat(self) -> None:
        """Write a heartbeat and look for a newer record; failures of the disk are ignored."""
        with suppress(OSError):
            os.write(self._descriptor, b".")
            os.fsync(self._descriptor)  # a network file system would delay it
        with suppress(OSError):
            self._look()

    def release(self) -> None:
        if self._descriptor < 0:  # in a forked child: the lease is its parent's
            return
        self._stop.set()
        self._thread.join()
        if self._lost_to is None:
            with suppress(OSError):  # the lock or the timeout frees it as well
                os.write(self._descriptor, _RELEASED)
        self.close()

    def close(self) -> None:
        """Close the record, and with its last descriptor the lock."""
        _LEASES.discard(self)
        with suppress(OSError):
            os.close(self._descriptor)
        self._descriptor, self._lost_to = -1, self._lost_to or _UNKNOWN

    def _keep_alive(self) -> None:
        while self._lost_to is None and not self._stop.wait(HEARTBEAT):
            self.beat()

    def _look(self) -> None:
        before = now()
        record = _newest(self.folder)
        if record is None:
            self._lost_to = self._lost_to or "a process that removed its record"
        elif record.number != self.number or record.token not in (self._token, None):
            self._lost_to = record.holder
        self._last_look = before


_LEASES: set[Lease] = set()
# A forked child would share the lock, and keep it when its parent is killed.
os.register_at_fork(after_in_child=lambda: any(map(Lease.close, list(_LEASES))))


def _create(folder: Path, number: int, token: str) -> int:
    """Create a record, complete and locked before it gets its name; return its descriptor."""
    content: dict[str, Any] = {"token": token, "host": socket.gethostname(), "pid": os.getpid()}
    content |= {"boot": None, "device": None, "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    temporary = folder / FOLDER / f".{token}.tmp"
    descriptor = os.open(temporary, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with suppress(OSError):  # a file system without locks: only the heartbeat counts
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            content |= _lock_scope(descriptor)
        os.write(descriptor, json.dumps(content).encode() + b"\n")
        os.fsync(descriptor)
        name_exclusively(temporary, folder / FOLDER / f"{number:08d}")
        if max(map(int, _names(folder)), default=0) > number:
            raise FileExistsError(number)  # the number had been used, and its record removed
    except BaseException:
        os.close(descriptor)
        raise
    finally:
        temporary.unlink(missing_ok=True)
    return descriptor


def _remove_old(folder: Path, number: int) -> None:
    """Remove all records but the last two, and unfinished files of killed processes."""
    for name in os.listdir(folder / FOLDER):
        if not _NAME.fullmatch(name) or int(name) < number - 1:
            with suppress(OSError):
                (folder / FOLDER / name).unlink()


def _names(folder: Path) -> list[str]:
    with suppress(FileNotFoundError):
        return list(filter(_NAME.fullmatch, os.listdir(folder / FOLDER)))
    return []


def _newest(folder: Path) -> LeaseRecord | None:
    while names := _names(folder):
        with suppress(FileNotFoundError):  # removed meanwhile: there are newer ones
            return _read(folder / FOLDER / max(names, key=int))
    return None


def _read(path: Path) -> LeaseRecord:
    number = int(path.name)
    try:
        # On a network file system only opening the file updates its size.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except PermissionError:
        status = path.stat()
        return LeaseRecord(number, status.st_size, status.st_mtime)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return LeaseRecord(number)
        content = _parse(os.pread(descriptor, 4096, 0))  # the heartbeats may be many
        end = os.pread(descriptor, 4096, max(0, status.st_size - len(_RELEASED)))
        same_scope = content.get("boot") and content.items() >= _lock_scope(descriptor).items()
        locked = _is_locked(descriptor) if same_scope else None
    finally:
        os.close(descriptor)
    template = "process {pid} on {host} since {since}" if content else _UNKNOWN
    return LeaseRecord(
        number,
        status.st_size,
        status.st_mtime,
        released=end == _RELEASED,
        locked=locked,
        token=content.get("token"),
        holder=template.format_map(content),
    )


def _parse(head: bytes) -> dict[str, Any]:
    """Return the JSON line of a record; an empty dict if it is damaged."""
    try:
        content = json.loads(head.partition(b"\n")[0])
    except (ValueError, RecursionError):
        return {}
    keys = {"token", "host", "pid", "boot", "device", "since"}
    return content if isinstance(content, dict) and content.keys() >= keys else {}


def _is_locked(descriptor: int) -> bool | None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def _lock_scope(descriptor: int) -> dict[str, Any]:
    """Return the running kernel and the mount: two mounts of a network folder may share no lock."""
    boot = None
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return {"boot": boot, "device": os.fstat(descriptor).st_dev}
