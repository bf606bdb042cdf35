"""Power loss: what was not forced to disk is there, half there, zeros, or not there.

A run or a sweep is recorded: before and after every call of any of its processes that moves names
or forces something to disk, how its folder looks, and what of that must outlast a power cut by what
was forced: a file's content by fsync of the file, a name by fsync of its folder, and nothing else
by anything else. So every moment allows many states of the disk, some of which are tried.
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
from tests.torture import warm
from tests.torture.tally import Tally

SHORT = 5
FULL = 150
_KINDS = [
    ["train"],
    ["train", "precision=bf16"],
    ["train", "variant=merged_w", "train.checkpoint_every=3"],
    ["sweep", "variant=standard,no_q", "seed=0", "workers=2", "sweep.baseline=null"],
]
_STATES = 6  # that are tried of one recording
_SECTOR = 512
_IGNORED = {"log", "corpus.txt"}

Names = dict[str, int]  # of one folder: what each name stands for


@dataclass
class _Disk:
    """At one moment: what there is, and what is sure to be there after a power cut."""

    seen: dict[int, Names | bytes | str] = field(default_factory=dict)  # a str is a link
    sure: dict[int, Names | bytes | str] = field(default_factory=dict)
    # Changes of names in a folder since it was forced to disk; each alone may have happened.
    pending: dict[int, list[dict[str, int | None]]] = field(default_factory=dict)
    root: int = 0
    # By the folder of a run: the step of the newest checkpoint that was finished.
    steps: dict[str, int] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)  # those with a result

    def copy(self) -> "_Disk":
        pending = {folder: list(changes) for folder, changes in self.pending.items()}
        steps, ended = dict(self.steps), set(self.ended)
        return _Disk(dict(self.seen), dict(self.sure), pending, self.root, steps, ended)

    def after_a_cut(self, target: Path, chance: random.Random) -> None:
        """One of the states that the disk may be in, made in a new folder."""
        likely = chance.choice((0.0, 0.5, 0.5, 0.9, 1.0))
        self._make(self.root, target, chance, likely)

    def _make(self, id: int, target: Path, chance: random.Random, likely: float) -> None:
        seen = self.seen[id]
        if isinstance(seen, str):
            target.symlink_to(seen)
            return
        if isinstance(seen, bytes):
            sure = self.sure.get(id, b"")
            assert isinstance(sure, bytes)
            target.write_bytes(_torn(sure, seen, chance) if chance.random() > likely else seen)
            return
        sure = self.sure.get(id, {})
        assert isinstance(sure, dict)
        names: dict[str, int | None] = {**sure}
        for change in self.pending.get(id, ()):
            if chance.random() < likely:
                names |= change
        target.mkdir()
        for name, child in names.items():
            if child is not None:
                self._make(child, target / name, chance, likely)


def _torn(sure: bytes, seen: bytes, chance: random.Random) -> bytes:
    """Return the old or the new content of every sector, or zeros, at any length between."""
    shorter, longer = sorted((len(sure), len(seen)))
    size = chance.choice((len(sure), len(seen), chance.randint(shorter, longer)))
    found = bytearray()
    for at in range(0, size, _SECTOR):
        old, new = sure[at : at + _SECTOR], seen[at : at + _SECTOR]
        found += chance.choice((old, new or old)).ljust(_SECTOR, b"\0")
    return bytes(found[:size])


class _Recorder:
    """Looks at a folder, whenever one of the processes at work there tells it to and waits."""

    def __init__(self, folder: Path) -> None:
        self.disk, self.moments, self._folder = _Disk(), list[_Disk](), folder
        self._held: dict[int, int] = {}  # descriptors by inode: no number is used again meanwhile
        self._lock = threading.Lock()
        self._look()
        self.disk.sure, self.disk.pending = dict(self.disk.seen), {}
        self.disk.root = folder.stat().st_ino

    def serve(self, listener: Listener) -> None:
        """Until nobody can come any more."""
        with suppress(OSError):
            while True:
                one = listener.accept()
                threading.Thread(target=self._hear, args=(one,), daemon=True).start()

    def close(self) -> None:
        for descriptor in self._held.values():
            os.close(descriptor)

    def _hear(self, one: Connection) -> None:
        with suppress(EOFError, OSError):
            while True:
                forced, run, step = one.recv()
                self._note(forced, run, step)
                one.send(None)

    def _note(self, forced: int | None, run: str, step: int | None) -> None:
        """Record a synced inode, a run's checkpoint, or (without a step) its result."""
        with self._lock:
            self._look()
            if forced in self.disk.seen:
                self.disk.sure[forced] = self.disk.seen[forced]
                self.disk.pending.pop(forced, None)
            if run and step is None:
                self.disk.ended.add(run)
            elif run:
                self.disk.steps[run] = step or 0
            self.moments.append(self.disk.copy())

    def _look(self) -> None:
        while True:
            with suppress(FileNotFoundError):  # another process has moved on
                found = dict(self._walk(self._folder))
                break
        for id, now in found.items():
            before = self.disk.seen.get(id)
            if isinstance(now, dict):
                if now != before:
                    self.disk.pending.setdefault(id, []).extend(_changes(before or {}, now))
            elif before == now:
                now = before  # memory is shared between moments
            self.disk.seen[id] = now  # what is gone stays: a name of it may come back

    def _walk(self, folder: Path) -> Iterator[tuple[int, Any]]:
        names: Names = {}
        for entry in os.scandir(folder):
            if entry.name in _IGNORED:
                continue
            names[entry.name] = inode = entry.inode()
            if inode not in self._held:
                kind = os.O_PATH if entry.is_symlink() else os.O_RDONLY
                self._held[inode] = os.open(entry.path, kind | os.O_NOFOLLOW)
            if entry.is_symlink():
                yield inode, os.readlink(entry.path)
            elif entry.is_dir():
                yield from self._walk(folder / entry.name)
            else:
                file = self._held[inode]
                yield inode, os.pread(file, os.fstat(file).st_size, 0)
        yield folder.stat().st_ino, names


def _changes(before: Any, now: Names) -> list[dict[str, int | None]]:
    """Return the changes of names in a folder; a rename changes two."""
    changes: list[dict[str, int | None]] = []
    gone = {name: id for name, id in before.items() if name not in now}
    for name, id in now.items():
        if before.get(name) != id:
            old = next((old for old, its in gone.items() if its == id), None)
            changes.append({name: id} if old is None else {name: id, old: None})
            gone.pop(old or "", None)
    return [*changes, *({name: None} for name in gone)]


def _recording(address: str) -> None:
    """In a process, and in those that it forks: tell the recorder of what is done."""
    from qkablate.tracking import MetricsFile
    from qkablate.training import checkpoint, result
    from qkablate.training.loop import Trainer

    own: dict[int, Connection] = {}
    lock = threading.RLock()

    def tell(forced: int | None = None, run: str = "", step: int | None = None) -> None:
        with lock:
            if os.getpid() not in own:
                own[os.getpid()] = Client(address, "AF_UNIX")
            own[os.getpid()].send((forced, run, step))
            own[os.getpid()].recv()

    def watch(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def watched(*arguments: Any, **named: Any) -> Any:
            tell()
            found = original(*arguments, **named)
            if name == "fsync":
                tell(forced=os.fstat(arguments[0]).st_ino)
            elif owner is checkpoint:
                tell(run=arguments[0].parent.name, step=arguments[1].progress.step)
            elif owner is result:
                tell(run=arguments[0].parent.name)
            else:
                tell()
            return found

        setattr(owner, name, watched)

    for name in ("fsync", "rename", "replace", "link", "symlink", "unlink", "mkdir", "rmdir"):
        watch(os, name)
    for owner, name in ((Trainer, "_step"), (MetricsFile, "log"), (checkpoint, "save")):
        watch(owner, name)
    watch(result, "write_json_once")
    os.register_at_fork(after_in_child=lambda: lock.__init__())  # type: ignore[misc]


def _record(words: list[str], folder: Path) -> list[_Disk]:
    address = str(folder.with_name("recorder"))
    with Listener(address, "AF_UNIX") as listener:
        recorder = _Recorder(folder)
        threading.Thread(target=recorder.serve, args=(listener,), daemon=True).start()
        code = warm.wait(warm.start(words, folder, before=lambda: _recording(address)))
    recorder.close()
    if code:
        raise RuntimeError(f"code {code} of {words}: {warm.log(folder)}")
    return recorder.moments


def _recover(words: list[str], folder: Path, calm: Path, disk: _Disk, name: str) -> Tally:
    """Run the same command after the power is back."""
    found, results = Tally(1), _results(folder)
    found.lost += [f"{name}: the result of {run}" for run in disk.ended - results.keys()]
    code = warm.wait(pid := warm.start(words, folder))
    said = warm.log(folder)
    if code is None:
        warm.kill(pid)
        found.lost.append(f"{name}: it never ends")
        return found
    if code:
        found.lost.append(f"{name}: code {code}: {said}")
        return found
    now = _results(folder)
    for run in disk.ended & results.keys():
        if now[run] != results[run]:
            found.lost.append(f"{name}: {run} had its result, and was trained again")
    for run, step in disk.steps.items():
        log = folder / "outputs" / "runs" / run / LOG_FILE
        told = log.read_text("utf-8", "replace") if log.exists() else said
        used = [-1, *map(int, re.findall(r"resuming from step (\d+)", told))][-1]
        if run not in results and used < step:
            found.lost.append(f"{name}: step {step} of {run} was not used: {told[-2000:]}")
    if different := warm.difference(calm, folder):
        found.wrong.append(f"{name}: {different}")
    return found


def _results(folder: Path) -> dict[str, bytes]:
    files = folder.glob("outputs/runs/*/result.json")
    return {file.parent.name: file.read_bytes() for file in files}


def _lane(cases: int, chance: random.Random, folder: Path, number: int) -> Tally:
    found, calm = Tally(), dict[int, Path]()
    chains = 0
    here = folder / "here"  # always: prepared data belongs to a text at its place
    while found.cases < cases:
        kind = chance.choice(range(number, len(_KINDS), warm.LANES))
        words = [_KINDS[kind][0], *warm.RUN, *_KINDS[kind][1:]]
        warm.prepare(here)
        for power_cuts in range(1, 4):  # of a run, of its recovery, and of that one's
            moments = _record(words, here)
            recorded = here.rename(folder / f"{chains}-{power_cuts}")
            calm.setdefault(kind, recorded)
            for state in range(_STATES):
                if found.cases >= cases:
                    return found
                last = max(0, len(moments) - 25)  # where the result is written
                at = chance.randrange(chance.choice((0, 0, last)), len(moments))
                moments[at].after_a_cut(here, chance)
                shutil.copy2(recorded / "corpus.txt", here)
                if state < _STATES - 1:  # the last one's recovery is recorded
                    name = f"state {state} of {recorded}, moment {at}"
                    found.add(_recover(words, here, calm[kind], moments[at], name))
                    shutil.rmtree(here)
        shutil.rmtree(here)
        chains += 1
    return found


def torture(cases: int, seed: int, folder: Path) -> Tally:
    return warm.apart(__file__, cases, seed, folder)


if __name__ == "__main__":
    warm.main(_lane)
