"""A disk that is full or cannot be written any more, at each kind of write.

The disk is a small one of its own in memory, and really full. Where none can be mounted, which
takes root, files that may not grow stand for it.
"""

import contextlib
import json
import os
import random
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch

from qkablate.training import checkpoint
from tests.torture import watched
from tests.torture.tally import Tally
from tests.torture.watched import CLAIM, TINY, Said

SIZE = "48m"  # more than what a run asks for before it begins
CLOCKS = {"seconds", "perf/tokens_per_second", "perf/mfu", "crc32"}
TRAIN = ["train", "variant=merged_w", *TINY]
SWEEP = ["sweep", "sweep.name=small", "variant=merged_w", "seed=7", *TINY]


class Disk:
    """A file system in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._filler = folder, folder / "filler"

    def fill(self, leave: int = 0) -> None:
        """Until nothing more fits than `leave` bytes."""
        with self._filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(2**16)) or True:
                pass
        with self._filler.open("ab", buffering=0) as file:
            with contextlib.suppress(OSError):
                while file.write(bytes(4096)):
                    pass
            file.truncate(max(0, file.tell() - leave))

    def lock(self) -> None:
        """Mount a folder on itself read-only; a disk with open files cannot be remounted."""
        subprocess.run(["mount", "--bind", self.folder, self.folder], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", self.folder], check=True)

    def free(self) -> None:
        while os.path.ismount(self.folder) and os.statvfs(self.folder).f_flag & os.ST_RDONLY:
            subprocess.run(["umount", self.folder], check=True)
        self._filler.unlink(missing_ok=True)


class Limit(Disk):
    """In its place: no file of the process that is to train may grow beyond a size."""

    def fill(self, leave: int = 0) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (leave, leave))

    def lock(self) -> None:
        self.fill()

    def free(self) -> None:
        pass


@contextlib.contextmanager
def mounted(folder: Path) -> Iterator[Disk]:
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(words, capture_output=True).returncode:
        yield Limit(folder)
        return
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def at_step(step: int, act: Callable[[], object]) -> Callable[[], None]:
    """Act on the disk in the middle of training."""

    def patch() -> None:
        from qkablate.training.loop import Trainer

        def trained(self, now, original=Trainer._step):
            if now == step:
                act()
            return original(self, now)

        Trainer._step = trained

    return patch


@dataclass(frozen=True)
class Case:
    """A command, and when the disk goes wrong; `step` None: before it begins."""

    words: list[str]
    locked: bool  # it cannot be written, or else it is full but for `leave` bytes
    leave: int = 0
    step: int | None = None

    @property
    def name(self) -> str:
        how = "read-only" if self.locked else f"full but for {self.leave} bytes"
        when = "from the beginning" if self.step is None else f"from step {self.step} on"
        return f"{self.words[0]} {self.words[1]}: {how} {when}"


def _drawn(chance: random.Random) -> Case:
    """Most of them in training, where there are most kinds of writes."""
    locked = chance.random() < 0.3
    leave = 4096 * chance.choice([0, 0, 1, 2, 4, 8, 16, 24, 32, 64])
    words = chance.choice(
        [
            *[TRAIN] * 6,
            [*TRAIN, "tracking.wandb=offline"],
            ["data", "prepare", "data=text", "data.path=corpus.txt", "data.cache=other"],
            [*TRAIN, "data.cache=other"],
            SWEEP,
            ["claim", "run", "mine.yaml", *TINY],
            ["report", "merged_w-d16-h2-s7", "-o", "page.html"],
        ]
    )
    training = words[0] == "train" and "data.cache=other" not in words
    if not training:
        return Case(words, locked, leave)
    step = chance.choice([None, 0, 1, 3, 4, 5, 7, 9, 11])
    return Case(words, locked, leave, step)


def _ended(box: Path) -> tuple[object, ...]:
    """Return everything of the run with seed 0 that must be bit-identical."""
    folder = next((box / "outputs" / "runs").glob("merged_w-d16-h2-s0-*"))
    result = json.loads((folder / "result.json").read_bytes())
    lines = (folder / "metrics.jsonl").read_bytes().splitlines()
    rows = [{k: v for k, v in json.loads(x).items() if k not in CLOCKS} for x in lines]
    (step,) = (folder / "checkpoints").glob("step-*")
    weights = safetensors.torch.load_file(step / "weights.safetensors")
    return result["status"], result["loss"], rows, {k: w.tolist() for k, w in weights.items()}


def _wrong(case: Case, said: Said) -> Iterator[str]:
    lines = said.err.strip().splitlines()
    if said.code == 0:
        return  # what it had to write found room
    if said.code not in (1, 2):
        yield f"ended with {said.code}: {lines[-1:]}"
    if "Traceback" in said.all:
        yield f"a traceback: {lines[-1:]}"
    reasons = ("No space left on device", "Read-only file system", "File too large", "MB free")
    if not any(reason in said.all for reason in reasons):
        yield f"ended with {said.code} without the reason: {said.all.strip()[-300:]!r}"


def _damaged(box: Path) -> Iterator[str]:
    """Checkpoints that have their name are whole."""
    for path in box.glob("outputs/runs/*/checkpoints/step-*"):
        try:
            checkpoint.load(path, "cpu")
        except (OSError, ValueError, TypeError) as error:
            yield f"{path.name}: {error}"


def torture(cases: int, seed: int, folder: Path) -> Tally:
    tally, chance = Tally(), random.Random(seed)
    watched.warm()
    torch.set_num_threads(1)
    with mounted(folder / "disk") as disk:
        box, kept = disk.folder / "box", folder / "kept"
        watched.begin(box)
        (box / "mine.yaml").write_text(CLAIM, encoding="utf-8")
        for variant in ("standard", "merged_w"):  # so that the sweep has nothing to train
            _say(["train", f"variant={variant}", "seed=7", *TINY], box, folder)
        shutil.copytree(box, kept, symlinks=True)
        _say(TRAIN, box, folder)
        calm = _ended(box)
        for case in [_drawn(chance) for _ in range(cases)]:
            tally.cases += 1
            watched.fresh(kept, box)
            fault = disk.lock if case.locked else (lambda leave=case.leave: disk.fill(leave))
            before = fault if case.step is None else at_step(case.step, fault)
            # By its full name: the folder it works in is not covered.
            where = [f"out={box / 'outputs'}"] * (case.locked and case.step is not None)
            said = _say([*case.words, *where], box, folder, before)
            tally.wrong += [f"{case.name}: {one}" for one in _wrong(case, said)]
            disk.free()
            tally.lost += [f"{case.name}: {one}" for one in _damaged(box)]
            if case.words[0] != "claim":
                again = _say(case.words, box, folder)
                if again.code:
                    tally.lost.append(f"{case.name}: then {again.code}: {again.err[-300:]!r}")
                elif case.words[0] == "train" and _ended(box) != calm:
                    tally.wrong.append(f"{case.name}: it ended otherwise")
    return tally


def _say(
    words: list[str], box: Path, folder: Path, before: Callable[[], object] = lambda: None
) -> Said:
    return watched.command(words, box, before=before, notes_in=folder)


SHORT, FULL = 3, 40
