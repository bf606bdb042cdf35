"""Who trains a run: a lease that holds between processes, and between machines that share a folder.

<folder>/owner/
    00000001    a claim: one line of JSON, a dot for every heartbeat, "released" at the end
    00000002    the highest number is the one that counts

A number is never used twice. On one kernel a lock says whether the owner lives: it ends with the
process, even by kill -9. Between kernels the claim's size does: whoever sees it stand still for
SILENCE seconds takes over. No clock of another machine, and no time of a file, is believed.
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

BEAT = 5.0  # seconds between two heartbeats
SILENCE = 60.0  # seconds without one, after which the owner counts as dead
_RELEASED = b"released\n"
_CLAIM = re.compile("[0-9]{8,}")
_SOMEONE = "another process"
# It goes on while the machine sleeps, unlike Linux's monotonic clock: sleep must be noticed.
_AWAKE_OR_NOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Owned(Exception):
    """Another process trains the run."""


class Lost(Exception):
    """Another process has taken the run over: this one must write no more."""


class Claim(NamedTuple):
    """What stands on disk, at one look."""

    number: int
    size: int
    released: bool
    locked: bool | None  # None where only the heartbeat can tell
    token: str | None  # None where the claim is damaged
    by: str


class Judgement(NamedTuple):
    """What an observer makes of a claim."""

    number: int  # of the claim that counts, 0 where there is none
    alive: bool
    sure: bool  # not merely because it was not watched for long enough
    by: str


def now() -> float:
    return time.clock_gettime(_AWAKE_OR_NOT)


class Observer:
    """Judges claims; the more often it looks, the more it knows."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # The counter, since when, and whether it has moved under the observer's eyes.
        self._seen: dict[Path, tuple[tuple[int, int] | None, float, bool]] = {}

    def is_owned(self, folder: Path) -> bool:
        return self.judge(folder).alive

    def judge(self, folder: Path) -> Judgement:
        before = self._clock()  # a look that takes long, as on a stalled disk, is no silence
        claim = _newest(folder)
        if claim is None or claim.released:
            return Judgement(claim.number if claim else 0, alive=False, sure=True, by="")
        if claim.locked is not None:
            return Judgement(claim.number, claim.locked, sure=True, by=claim.by)
        counter = claim.number, claim.size
        seen, since, moved = self._seen.get(folder, (None, 0.0, False))
        if seen != counter:
            moved = seen is not None
            self._seen[folder] = counter, self._clock(), moved
            return Judgement(claim.number, alive=True, sure=moved, by=claim.by)
        silent = before - since >= SILENCE
        return Judgement(claim.number, not silent, sure=silent or moved, by=claim.by)

    def settle(self, folder: Path, sleep: Callable[[float], None] = time.sleep) -> None:
        """Look until it is sure whether the run is owned: about SILENCE seconds at most."""
        while not self.judge(folder).sure:
            sleep(1.0)


def is_owned(folder: Path) -> bool:
    """Whether a process is training the run, at one look."""
    return Observer().is_owned(folder)


@contextmanager
def owning(folder: Path, observer: Observer | None = None) -> Iterator["Owner"]:
    """Own the run; raises Owned where its owner is alive."""
    observer = observer or Observer()
    while (owner := _take(folder, observer)) is None:
        pass
    try:
        _sweep(folder, owner.number)
        yield owner
    finally:
        owner.release()


class Owner:
    """A claim that was made, and whether it still counts."""

    def __init__(self, folder: Path, number: int) -> None:
        """Make the claim of this number; FileExistsError if someone else was first."""
        self.folder, self.number, self._token = folder, number, secrets.token_hex()
        self._lost_to: str | None = None
        self._looked = now()
        self._descriptor = _make(folder, number, self._token)
        _OWNERS.add(self)
        self._end = threading.Event()
        self._heart = threading.Thread(target=self._live, name="heartbeat", daemon=True)
        self._heart.start()

    def lost(self) -> bool:
        """Cheap: it looks only if none has for two beats, as after a sleep of the machine."""
        if self._lost_to is None and now() - self._looked > 2 * BEAT:
            with suppress(OSError):
                self._look()
        return self._lost_to is not None

    def check(self) -> None:
        """Raise Lost where `lost` says so."""
        if self.lost():
            raise Lost(f"{self.folder} was taken over by {self._lost_to}; this process stopped")

    def verify(self) -> None:
        """Look now, and raise Lost if the claim counts no more."""
        self._look()
        self.check()

    def beat(self) -> None:
        """One heartbeat, and one look. A disk that is full or away does not end the run here."""
        with suppress(OSError):
            os.write(self._descriptor, b".")
            os.fsync(self._descriptor)  # a network file system would keep it back
        with suppress(OSError):
            self._look()

    def release(self) -> None:
        if self._descriptor < 0:  # in a forked child: the claim is its parent's
            return
        self._end.set()
        self._heart.join()
        if self._lost_to is None:
            with suppress(OSError):  # then the lock or the silence tells
                os.write(self._descriptor, _RELEASED)
        self.forget()

    def forget(self) -> None:
        """Close the claim, and with its last descriptor the lock."""
        _OWNERS.discard(self)
        with suppress(OSError):
            os.close(self._descriptor)
        self._descriptor, self._lost_to = -1, self._lost_to or _SOMEONE

    def _live(self) -> None:
        while self._lost_to is None and not self._end.wait(BEAT):
            self.beat()

    def _look(self) -> None:
        before = now()
        claim = _newest(self.folder)
        if claim is None:
            self._lost_to = self._lost_to or "someone who removed its claim"
        elif claim.number != self.number or claim.token not in (self._token, None):
            self._lost_to = claim.by
        self._looked = before


_OWNERS: set[Owner] = set()


def _forget_all() -> None:
    for owner in list(_OWNERS):
        owner.forget()


# A forked child would share the lock, and keep it when its parent is killed.
os.register_at_fork(after_in_child=_forget_all)


def _take(folder: Path, observer: Observer) -> Owner | None:
    """None where someone else was faster."""
    make_folder(folder / "owner")
    found = observer.judge(folder)
    if found.alive:
        raise Owned(f"{folder} is being trained by {found.by}")
    with suppress(FileExistsError, FileNotFoundError):
        return Owner(folder, found.number + 1)
    return None


def _make(folder: Path, number: int, token: str) -> int:
    """Make a claim, whole and locked before it has its name; its descriptor."""
    claim: dict[str, Any] = {"token": token, "host": socket.gethostname(), "pid": os.getpid()}
    claim |= {"boot": None, "device": None, "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    temporary = folder / "owner" / f".{token}.tmp"
    descriptor = os.open(temporary, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with suppress(OSError):  # where there are no locks, the heartbeat speaks alone
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            claim |= _where_locks_hold(descriptor)
        os.write(descriptor, json.dumps(claim).encode() + b"\n")
        os.fsync(descriptor)
        name_exclusively(temporary, folder / "owner" / f"{number:08d}")
        if max(map(int, _claims(folder)), default=0) > number:
            raise FileExistsError(number)  # it had been swept up: a number of the past
    except BaseException:
        os.close(descriptor)
        raise
    finally:
        temporary.unlink(missing_ok=True)
    return descriptor


def _sweep(folder: Path, number: int) -> None:
    """Remove the claims before the last one, and what killed processes left half made."""
    for name in os.listdir(folder / "owner"):
        if not _CLAIM.fullmatch(name) or int(name) < number - 1:
            with suppress(OSError):
                (folder / "owner" / name).unlink()


def _claims(folder: Path) -> list[str]:
    try:
        return list(filter(_CLAIM.fullmatch, os.listdir(folder / "owner")))
    except FileNotFoundError:
        return []


def _newest(folder: Path) -> Claim | None:
    while names := _claims(folder):
        with suppress(FileNotFoundError):  # swept up meanwhile: there are newer ones
            return _read(folder / "owner" / max(names, key=int))
    return None


def _read(path: Path) -> Claim:
    try:
        # Opened even for its size: on a network file system only that asks the server.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except PermissionError:
        return Claim(int(path.name), path.stat().st_size, False, None, None, _SOMEONE)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return Claim(int(path.name), 0, False, None, None, _SOMEONE)
        size = os.fstat(descriptor).st_size
        head = os.pread(descriptor, 4096, 0)  # dots may be many
        released = os.pread(descriptor, 4096, max(0, size - len(_RELEASED))) == _RELEASED
        claim = _parsed(head)
        here = claim.get("boot") and claim.items() >= _where_locks_hold(descriptor).items()
        locked = _is_locked(descriptor) if here else None
    finally:
        os.close(descriptor)
    by = "process {pid} on {host} since {since}".format_map(claim) if claim else _SOMEONE
    return Claim(int(path.name), size, released, locked, claim.get("token"), by)


def _parsed(head: bytes) -> dict[str, Any]:
    """The line of JSON; empty where it is damaged."""
    try:
        claim = json.loads(head.partition(b"\n")[0])
    except (ValueError, RecursionError):
        return {}
    keys = {"token", "host", "pid", "boot", "device", "since"}
    return claim if isinstance(claim, dict) and claim.keys() >= keys else {}


def _is_locked(descriptor: int) -> bool | None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def _where_locks_hold(descriptor: int) -> dict[str, Any]:
    """The running kernel, and the mount: two mounts of one network folder may share no locks."""
    boot = None
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return {"boot": boot, "device": os.fstat(descriptor).st_dev}
