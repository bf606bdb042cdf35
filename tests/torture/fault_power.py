"""Power loss: what was not forced to disk is there, half there, zeros, or not there.

A run is recorded: before and after every call that moves names or forces something to disk, how
its folder looks, and what of that must outlast a power cut by what was forced: a file's content by
fsync of the file, a name by fsync of its folder, and nothing else by anything else. So every
moment allows many states of the disk, some of which are tried.
"""

import atexit
import os
import pickle
import random
import re
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import warm
from tally import Tally

SHORT = 5
FULL = 150
_KINDS = [[], ["precision=bf16"], ["variant=merged_w", "train.checkpoint_every=3"]]
_STATES = 6  # that are tried of one recording
_SECTOR = 512
_IGNORED = {"log", "corpus.txt"}

Names = dict[str, int]  # of one folder: what each name stands for


@dataclass
class _Disk:
    """At one moment: what there is, and what is sure to be there after a power cut."""

    seen: dict[int, Names | bytes] = field(default_factory=dict)
    sure: dict[int, Names | bytes] = field(default_factory=dict)
    # Changes of names in a folder since it was forced to disk; each alone may have happened.
    pending: dict[int, list[dict[str, int | None]]] = field(default_factory=dict)
    root: int = 0
    step: int = -1  # of the newest checkpoint that was finished
    ended: bool = False  # whether there is a result

    def copy(self) -> "_Disk":
        pending = {folder: list(changes) for folder, changes in self.pending.items()}
        return _Disk(dict(self.seen), dict(self.sure), pending, self.root, self.step, self.ended)

    def after_a_cut(self, target: Path, chance: random.Random) -> None:
        """One of the states that the disk may be in, made in a new folder."""
        likely = chance.choice((0.0, 0.5, 0.5, 0.9, 1.0))
        self._make(self.root, target, chance, likely)

    def _make(self, id: int, target: Path, chance: random.Random, likely: float) -> None:
        seen = self.seen[id]
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
    """Of every sector the old or the new content, or zeros where there was none; of any length
    between."""
    shorter, longer = sorted((len(sure), len(seen)))
    size = chance.choice((len(sure), len(seen), chance.randint(shorter, longer)))
    found = bytearray()
    for at in range(0, size, _SECTOR):
        old, new = sure[at : at + _SECTOR], seen[at : at + _SECTOR]
        found += chance.choice((old, new or old)).ljust(_SECTOR, b"\0")
    return bytes(found[:size])


class _Recorder:
    """Looks at the working directory of its process, whenever it is told to."""

    def __init__(self) -> None:
        self.disk, self.moments = _Disk(), list[_Disk]()
        self._ids: dict[int, int] = {}  # by inode, whose numbers are used again
        self._last = 0
        self._lock = threading.RLock()
        self._look()
        self.disk.sure, self.disk.pending = dict(self.disk.seen), {}
        self.disk.root = self._ids[os.stat(".").st_ino]

    def look(self, forced: int | None = None) -> None:
        """Note a moment; `forced` is the inode that has just been forced to disk."""
        with self._lock:
            self._look()
            id = self._ids.get(forced or 0)
            if id is not None:
                self.disk.sure[id] = self.disk.seen[id]
                self.disk.pending.pop(id, None)
            self.moments.append(self.disk.copy())

    def _look(self) -> None:
        found = dict(self._walk(Path()))
        self._ids = {inode: id for inode, id in self._ids.items() if id in found}
        for id, now in found.items():
            before = self.disk.seen.get(id)
            if isinstance(now, bytes):
                now = before if before == now else now  # memory is shared between moments
            elif now != before:
                self.disk.pending.setdefault(id, []).extend(_changes(before or {}, now))
            self.disk.seen[id] = now  # what is gone stays: a name of it may come back

    def _walk(self, folder: Path) -> Iterator[tuple[int, Any]]:
        names: Names = {}
        for entry in os.scandir(folder):
            if entry.name in _IGNORED:
                continue
            names[entry.name] = self._id(entry.inode())
            if entry.is_dir(follow_symlinks=False):
                yield from self._walk(folder / entry.name)
            else:
                yield names[entry.name], Path(entry.path).read_bytes()
        yield self._id(os.stat(folder).st_ino), names

    def _id(self, inode: int) -> int:
        if inode not in self._ids:
            self._last += 1
            self._ids[inode] = self._last
        return self._ids[inode]


def _changes(before: Any, now: Names) -> list[dict[str, int | None]]:
    """What has happened to the names of a folder; to rename is one change of two names."""
    changes: list[dict[str, int | None]] = []
    gone = {name: id for name, id in before.items() if name not in now}
    for name, id in now.items():
        if before.get(name) != id:
            old = next((old for old, its in gone.items() if its == id), None)
            changes.append({name: id} if old is None else {name: id, old: None})
            gone.pop(old or "", None)
    return [*changes, *({name: None} for name in gone)]


def _recording(file: Path) -> None:
    """In a process: record what it does, and leave the moments in a file."""
    from qkablate.tracking import Journal
    from qkablate.training import checkpoint, session
    from qkablate.training.loop import Trainer

    recorder = _Recorder()
    atexit.register(lambda: file.write_bytes(pickle.dumps(recorder.moments)))

    def watch(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def watched(*arguments: Any, **named: Any) -> Any:
            recorder.look()
            found = original(*arguments, **named)
            forced = os.fstat(arguments[0]).st_ino if name == "fsync" else None
            if owner is checkpoint:
                recorder.disk.step = arguments[1].progress.step
            recorder.disk.ended |= owner is session
            recorder.look(forced)
            return found

        setattr(owner, name, watched)

    for name in ("fsync", "rename", "replace", "link", "unlink", "mkdir", "rmdir"):
        watch(os, name)
    for owner, name in ((Trainer, "_step"), (Journal, "log"), (checkpoint, "save")):
        watch(owner, name)
    watch(session, "publish_json")


def _record(words: list[str], folder: Path) -> list[_Disk]:
    file = folder.with_suffix(".moments")
    code = warm.wait(warm.start(words, folder, before=lambda: _recording(file.absolute())))
    if code:
        raise RuntimeError(f"code {code} of {words}: {warm.log(folder)}")
    moments: list[_Disk] = pickle.loads(file.read_bytes())
    file.unlink()
    return moments


def _recover(words: list[str], folder: Path, calm: Path, disk: _Disk, name: str) -> Tally:
    """The same command, after the power is back."""
    found = Tally(1)
    code = warm.wait(pid := warm.start(words, folder))
    said = warm.log(folder)
    if code is None:
        warm.kill(pid)
        found.lost.append(f"{name}: it never ends")
    elif code:
        found.lost.append(f"{name}: code {code}: {said}")
    else:
        used = re.search(r"going on from step (\d+)", said)
        step = int(used[1]) if used else -1
        if "this run has ended before" not in said and (disk.ended or step < disk.step):
            what = "its result" if disk.ended else f"step {disk.step}"
            found.lost.append(f"{name}: {what} was not used: {said[-2000:]}")
        if different := warm.difference(calm, folder):
            found.wrong.append(f"{name}: {different}")
    return found


def _lane(cases: int, chance: random.Random, folder: Path, number: int) -> Tally:
    found, calm = Tally(), dict[int, Path]()
    chains = 0
    here = folder / "here"  # always: prepared data belongs to a text at its place
    while found.cases < cases:
        kind = chance.choice(range(number, len(_KINDS), warm.LANES))
        words = ["train", *warm.RUN, *_KINDS[kind]]
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
