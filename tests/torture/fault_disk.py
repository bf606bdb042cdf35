"""A disk that becomes full or read-only, at each kind of write.

The disk is a small tmpfs that is really full. Where none can be mounted, which takes root, a limit
on the size of files stands in for it.
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
from tests.torture import sandbox
from tests.torture.sandbox import CLAIM, TINY, CommandResult
from tests.torture.tally import Tally

SIZE = "48m"  # more than a run requires before it starts
CLOCKS = {"seconds", "perf/tokens_per_second", "perf/mfu", "crc32"}
TRAIN = ["train", "variant=merged_w", *TINY]
SWEEP = ["sweep", "sweep.name=small", "variant=merged_w", "sweep.floor=false", "seed=7", *TINY]


class Disk:
    """A file system in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._filler = folder, folder / "filler"

    def fill(self, leave: int = 0) -> None:
        """Fill the disk until only `leave` bytes are free."""
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


class SizeLimit(Disk):
    """Stand-in for a disk: no file of the training process may grow beyond a size."""

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
        yield SizeLimit(folder)
        return
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def at_step(step: int, act: Callable[[], object]) -> Callable[[], None]:
    """Act on the disk in the middle of training."""

    def patch() -> None:
        from qkablate.training.loop import Trainer

        def patched_step(self, number, original=Trainer._step):
            if number == step:
                act()
            return original(self, number)

        Trainer._step = patched_step

    return patch


@dataclass(frozen=True)
class Case:
    """A command and the time of the fault; a `step` of None means before the command."""

    words: list[str]
    is_read_only: bool  # else it is full except for `leave` bytes
    leave: int = 0
    step: int | None = None

    @property
    def name(self) -> str:
        state = "read-only" if self.is_read_only else f"full except for {self.leave} bytes"
        moment = "from the beginning" if self.step is None else f"from step {self.step} on"
        return f"{self.words[0]} {self.words[1]}: {state} {moment}"


def _draw_case(rng: random.Random) -> Case:
    """Draw a case, mostly in training, which has most kinds of writes."""
    is_read_only = rng.random() < 0.3
    leave = 4096 * rng.choice([0, 0, 1, 2, 4, 8, 16, 24, 32, 64])
    words = rng.choice(
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
        return Case(words, is_read_only, leave)
    step = rng.choice([None, 0, 1, 3, 4, 5, 7, 9, 11])
    return Case(words, is_read_only, leave, step)


def _read_end(box: Path) -> tuple[object, ...]:
    """Return everything of the run with seed 0 that must be bit-identical."""
    folder = next((box / "outputs" / "runs").glob("merged_w-d16-h2-s0-*"))
    result = json.loads((folder / "result.json").read_bytes())
    lines = (folder / "metrics.jsonl").read_bytes().splitlines()
    rows = [{k: v for k, v in json.loads(x).items() if k not in CLOCKS} for x in lines]
    (step,) = (folder / "checkpoints").glob("step-*")
    weights = safetensors.torch.load_file(step / "weights.safetensors")
    return result["status"], result["loss"], rows, {k: w.tolist() for k, w in weights.items()}


def _find_problems(case: Case, result: CommandResult) -> Iterator[str]:
    lines = result.err.strip().splitlines()
    if result.code == 0:
        return  # everything fitted
    if result.code not in (1, 2):
        yield f"ended with {result.code}: {lines[-1:]}"
    if "Traceback" in result.all:
        yield f"a traceback: {lines[-1:]}"
    reasons = ("No space left on device", "Read-only file system", "File too large", "MB free")
    if not any(reason in result.all for reason in reasons):
        yield f"ended with {result.code} without the reason: {result.all.strip()[-300:]!r}"


def _find_damaged(box: Path) -> Iterator[str]:
    """Yield the checkpoints that have their final name and are damaged."""
    for path in box.glob("outputs/runs/*/checkpoints/step-*"):
        try:
            checkpoint.load(path, "cpu")
        except (OSError, ValueError, TypeError) as error:
            yield f"{path.name}: {error}"


def torture(cases: int, seed: int, folder: Path) -> Tally:
    tally, rng = Tally(), random.Random(seed)
    sandbox.import_everything()
    torch.set_num_threads(1)
    with mounted(folder / "disk") as disk:
        box, saved = disk.folder / "box", folder / "kept"
        sandbox.make_box(box)
        (box / "mine.yaml").write_text(CLAIM, encoding="utf-8")
        for variant in ("standard", "merged_w"):  # so the sweep has nothing to train
            _run(["train", f"variant={variant}", "seed=7", *TINY], box, folder)
        shutil.copytree(box, saved, symlinks=True)
        _run(TRAIN, box, folder)
        reference = _read_end(box)
        for case in [_draw_case(rng) for _ in range(cases)]:
            tally.cases += 1
            sandbox.restore_box(saved, box)
            act = disk.lock if case.is_read_only else (lambda leave=case.leave: disk.fill(leave))
            before = act if case.step is None else at_step(case.step, act)
            # By its absolute path: the working folder itself is not covered by the mount.
            out_words = [f"out={box / 'outputs'}"] * (case.is_read_only and case.step is not None)
            result = _run([*case.words, *out_words], box, folder, before)
            tally.wrong += [f"{case.name}: {problem}" for problem in _find_problems(case, result)]
            disk.free()
            tally.lost += [f"{case.name}: {problem}" for problem in _find_damaged(box)]
            if case.words[0] != "claim":
                second = _run(case.words, box, folder)
                if second.code:
                    tally.lost.append(
                        f"{case.name}: the next one ended with {second.code}: {second.err[-300:]!r}"
                    )
                elif case.words[0] == "train" and _read_end(box) != reference:
                    tally.wrong.append(f"{case.name}: the next command computed other numbers")
    return tally


def _run(
    words: list[str], box: Path, folder: Path, before: Callable[[], object] = lambda: None
) -> CommandResult:
    return sandbox.run_command(words, box, before=before, notes_folder=folder)


SHORT, FULL = 3, 40
