"""Power loss: data that was not synced is present, partial, zeroed or absent.

A run or a sweep is recorded: before and after every call that changes names or syncs, in any of its
processes, the content of its folder and the part of it that survives a power cut. fsync of a file
secures its content, fsync of a folder its names, and nothing else secures anything. So every moment
allows many states of the disk, some of which are tried.
"""

import os
import random
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from qkablate.sweeps.engines.base import LOG_FILE
from tests.torture import forked
from tests.torture.tally import Tally

SHORT = 5
FULL = 150
_KINDS = [
    ["train"],
    ["train", "precision=bf16"],
    ["train", "variant=merged_w", "train.checkpoint_every=3"],
    forked.SWEEP,
]
_STATES = 6  # tried per recording
_SECTOR = 512
_IGNORED = {"log", "corpus.txt"}

Names = dict[str, int]  # inodes by name, of one folder


@dataclass
class _Disk:
    """Content of a disk at one moment, and the part that survives a power cut."""

    current: dict[int, Names | bytes | str] = field(default_factory=dict)  # a str is a link
    durable: dict[int, Names | bytes | str] = field(default_factory=dict)
    # Changes of names in a folder since its last sync; each may or may not reach the disk.
    pending: dict[int, list[dict[str, int | None]]] = field(default_factory=dict)
    root: int = 0
    # Step of the newest complete checkpoint, by the folder of a run.
    steps: dict[str, int] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)  # runs with a result

    def copy(self) -> "_Disk":
        pending = {folder: list(changes) for folder, changes in self.pending.items()}
        steps, ended = dict(self.steps), set(self.ended)
        return _Disk(dict(self.current), dict(self.durable), pending, self.root, steps, ended)

    def make_cut_state(self, target: Path, rng: random.Random) -> None:
        """Create one of the possible states after a power cut, in a new folder."""
        probability = rng.choice((0.0, 0.5, 0.5, 0.9, 1.0))
        self._make_entry(self.root, target, rng, probability)

    def _make_entry(self, inode: int, target: Path, rng: random.Random, probability: float) -> None:
        current = self.current[inode]
        if isinstance(current, str):
            target.symlink_to(current)
            return
        if isinstance(current, bytes):
            durable = self.durable.get(inode, b"")
            assert isinstance(durable, bytes)
            target.write_bytes(
                _tear(durable, current, rng) if rng.random() > probability else current
            )
            return
        durable = self.durable.get(inode, {})
        assert isinstance(durable, dict)
        names: dict[str, int | None] = {**durable}
        for change in self.pending.get(inode, ()):
            if rng.random() < probability:
                names |= change
        target.mkdir()
        for name, child in names.items():
            if child is not None:
                self._make_entry(child, target / name, rng, probability)


def _tear(durable: bytes, current: bytes, rng: random.Random) -> bytes:
    """Return the old or the new content of every sector, or zeros, at any length between."""
    shorter, longer = sorted((len(durable), len(current)))
    size = rng.choice((len(durable), len(current), rng.randint(shorter, longer)))
    content = bytearray()
    for start in range(0, size, _SECTOR):
        old, new = durable[start : start + _SECTOR], current[start : start + _SECTOR]
        content += rng.choice((old, new or old)).ljust(_SECTOR, b"\0")
    return bytes(content[:size])


class _Recorder:
    """Recorder of a folder's states, triggered by the processes that write to it."""

    def __init__(self, folder: Path) -> None:
        self.disk, self.moments, self._folder = _Disk(), list[_Disk](), folder
        # Descriptors by inode, kept open so that no number is used again meanwhile.
        self._open_files: dict[int, int] = {}
        self._lock = threading.Lock()
        self._scan()
        self.disk.durable, self.disk.pending = dict(self.disk.current), {}
        self.disk.root = folder.stat().st_ino

    def serve(self, listener: Listener) -> None:
        """Accept processes until the listener is closed."""
        with suppress(OSError):
            while True:
                connection = listener.accept()
                threading.Thread(target=self._serve_client, args=(connection,), daemon=True).start()

    def close(self) -> None:
        for descriptor in self._open_files.values():
            os.close(descriptor)

    def _serve_client(self, connection: Connection) -> None:
        with suppress(EOFError, OSError):
            while True:
                synced, run, step = connection.recv()
                self._record_event(synced, run, step)
                connection.send(None)

    def _record_event(self, synced: int | None, run: str, step: int | None) -> None:
        """Record a synced inode, a run's checkpoint, or (without a step) its result."""
        with self._lock:
            self._scan()
            if synced in self.disk.current:
                self.disk.durable[synced] = self.disk.current[synced]
                self.disk.pending.pop(synced, None)
            if run and step is None:
                self.disk.ended.add(run)
            elif run:
                self.disk.steps[run] = step or 0
            self.moments.append(self.disk.copy())

    def _scan(self) -> None:
        while True:
            with suppress(FileNotFoundError):  # another process has removed an entry
                entries = dict(self._walk(self._folder))
                break
        for inode, new_content in entries.items():
            before = self.disk.current.get(inode)
            if isinstance(new_content, dict):
                if new_content != before:
                    self.disk.pending.setdefault(inode, []).extend(
                        _name_changes(before or {}, new_content)
                    )
            elif before == new_content:
                new_content = before  # share memory between moments
            self.disk.current[inode] = new_content  # never removed: its name may come back

    def _walk(self, folder: Path) -> Iterator[tuple[int, Any]]:
        names: Names = {}
        for entry in os.scandir(folder):
            if entry.name in _IGNORED:
                continue
            names[entry.name] = inode = entry.inode()
            if inode not in self._open_files:
                kind = os.O_PATH if entry.is_symlink() else os.O_RDONLY
                self._open_files[inode] = os.open(entry.path, kind | os.O_NOFOLLOW)
            if entry.is_symlink():
                yield inode, os.readlink(entry.path)
            elif entry.is_dir():
                yield from self._walk(folder / entry.name)
            else:
                file = self._open_files[inode]
                yield inode, os.pread(file, os.fstat(file).st_size, 0)
        yield folder.stat().st_ino, names


def _name_changes(before: Any, new_content: Names) -> list[dict[str, int | None]]:
    """Return the changes of names in a folder; a rename changes two."""
    changes: list[dict[str, int | None]] = []
    gone = {name: inode for name, inode in before.items() if name not in new_content}
    for name, inode in new_content.items():
        if before.get(name) != inode:
            old = next((old for old, its in gone.items() if its == inode), None)
            changes.append({name: inode} if old is None else {name: inode, old: None})
            gone.pop(old or "", None)
    return [*changes, *({name: None} for name in gone)]


def _patch_process(address: str) -> None:
    """Make this process and its forks report their changes to the recorder."""
    from qkablate.tracking import MetricsFile
    from qkablate.training import checkpoint, result
    from qkablate.training.loop import Trainer

    clients: dict[int, Connection] = {}
    lock = threading.RLock()

    def report(synced: int | None = None, run: str = "", step: int | None = None) -> None:
        with lock:
            if os.getpid() not in clients:
                clients[os.getpid()] = Client(address, "AF_UNIX")
            clients[os.getpid()].send((synced, run, step))
            clients[os.getpid()].recv()

    def wrap(target: Any, name: str) -> None:
        original = getattr(target, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            report()
            value = original(*args, **kwargs)
            if name == "fsync":
                report(synced=os.fstat(args[0]).st_ino)
            elif target is checkpoint:
                report(run=args[0].parent.name, step=args[1].progress.step)
            elif target is result:
                report(run=args[0].parent.name)
            else:
                report()
            return value

        setattr(target, name, wrapped)

    for name in ("fsync", "rename", "replace", "link", "symlink", "unlink", "mkdir", "rmdir"):
        wrap(os, name)
    for target, name in ((Trainer, "_step"), (MetricsFile, "log"), (checkpoint, "save")):
        wrap(target, name)
    wrap(result, "write_json_once")
    os.register_at_fork(after_in_child=lambda: lock.__init__())  # type: ignore[misc]


def _record(words: list[str], folder: Path) -> list[_Disk]:
    address = str(folder.with_name("recorder"))
    with Listener(address, "AF_UNIX") as listener:
        recorder = _Recorder(folder)
        threading.Thread(target=recorder.serve, args=(listener,), daemon=True).start()
        code = forked.wait(forked.start(words, folder, before=lambda: _patch_process(address)))
    recorder.close()
    if code:
        raise RuntimeError(f"code {code} of {words}: {forked.read_log(folder)}")
    return recorder.moments


def _recover(words: list[str], folder: Path, reference: Path, disk: _Disk, name: str) -> Tally:
    """Run the same command after the power is back."""
    tally, results = Tally(1), _results(folder)
    tally.lost += [f"{name}: the result of {run}" for run in disk.ended - results.keys()]
    code = forked.wait(pid := forked.start(words, folder))
    log_text = forked.read_log(folder)
    if code is None:
        forked.kill(pid)
        tally.lost.append(f"{name}: the command hangs")
        return tally
    if code:
        tally.lost.append(f"{name}: code {code}: {log_text}")
        return tally
    new_results = _results(folder)
    for run in disk.ended & results.keys():
        if new_results[run] != results[run]:
            tally.lost.append(f"{name}: {run} had a result, but was trained again")
    for run, step in disk.steps.items():
        path = folder / "outputs" / "runs" / run / LOG_FILE
        run_log = path.read_text("utf-8", "replace") if path.exists() else log_text
        resumed = [-1, *map(int, re.findall(r"resuming from step (\d+)", run_log))][-1]
        if run not in results and resumed < step:
            tally.lost.append(f"{name}: step {step} of {run} was not used: {run_log[-2000:]}")
    if difference := forked.find_difference(reference, folder):
        tally.wrong.append(f"{name}: {difference}")
    return tally


def _results(folder: Path) -> dict[str, bytes]:
    files = folder.glob("outputs/runs/*/result.json")
    return {file.parent.name: file.read_bytes() for file in files}


def _lane(cases: int, rng: random.Random, folder: Path, number: int) -> Tally:
    tally, reference = Tally(), dict[int, Path]()
    chains = 0
    work_folder = folder / "here"  # always the same: prepared data depends on the path of its text
    while tally.cases < cases:
        kind = rng.choice(range(number, len(_KINDS), forked.LANES))
        words = [_KINDS[kind][0], *forked.RUN, *_KINDS[kind][1:]]
        forked.prepare(work_folder)
        for power_cuts in range(1, 4):  # of a run, its recovery, and the recovery's recovery
            moments = _record(words, work_folder)
            recorded = work_folder.rename(folder / f"{chains}-{power_cuts}")
            reference.setdefault(kind, recorded)
            for state in range(_STATES):
                if tally.cases >= cases:
                    return tally
                last = max(0, len(moments) - 25)  # where the result is written
                index = rng.randrange(rng.choice((0, 0, last)), len(moments))
                moments[index].make_cut_state(work_folder, rng)
                shutil.copy2(recorded / "corpus.txt", work_folder)
                if state < _STATES - 1:  # the recovery of the last one is recorded
                    name = f"state {state} of {recorded}, moment {index}"
                    tally.add(_recover(words, work_folder, reference[kind], moments[index], name))
                    shutil.rmtree(work_folder)
        shutil.rmtree(work_folder)
        chains += 1
    return tally


def torture(cases: int, seed: int, folder: Path) -> Tally:
    return forked.run_isolated(__file__, cases, seed, folder)


if __name__ == "__main__":
    forked.main(_lane)
