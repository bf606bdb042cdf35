"""The files of one job array, in the folder of its sweep.

<sweep>/slurm/
    lock               one launcher at a time submits
    <batch>/           of one array; its jobs are called <sweep>.<batch> in SLURM's queue
        batch.json     the ids of its runs, in the order of its tasks; written before sbatch
        <task>.json    where the task began, and how its run ended
        …              submitit's: script, tasks, logs

What stands there is believed only as far as SLURM's queue knows the jobs; no pickle is read back.
"""

import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from qkablate.runs.records import read_json, write_json


class Batch:
    """One array: `left` counts its runs that have not ended, `room` those that may run at once."""

    def __init__(self, folder: Path, left: int = 0, room: int = 0) -> None:
        self.folder, self.left, self.room = folder, left, room
        self.name = f"{folder.parents[1].name}.{folder.name}"  # of its jobs
        self.silent = False  # one of them ended without a word: its log stays

    @classmethod
    def new(cls, folder: Path, runs: Sequence[str], room: int) -> "Batch":
        """One that is to be submitted. Whoever comes after us must know what its jobs are."""
        batch = cls(folder / secrets.token_hex(6), len(runs), room)
        batch.folder.mkdir()
        write_json(batch.folder / "batch.json", {"runs": runs})
        return batch

    def file(self, task: int) -> Path:
        """Where a task says how it is."""
        return self.folder / f"{task}.json"

    def said(self, task: int) -> dict[str, Any] | None:
        found = read_json(self.file(task))
        return found if isinstance(found, dict) else None

    def is_begun(self) -> bool:
        """Whether any task has said something. On a network file system, only a listing asks for
        new files.
        """
        with suppress(OSError):  # another launcher has removed it
            return any(re.fullmatch(r"\d+\.json", path.name) for path in self.folder.iterdir())
        return False

    def last_words(self, task: int) -> str:
        """The end of a task's log, where there is one."""
        for path in self.folder.glob(f"*_{task}_0_log.out"):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            return next((line for line in reversed(lines) if line.strip()), "")
        return ""

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def batches(folder: Path) -> Iterator[tuple[Batch, list[Any]]]:
    """Those in the folder, each with what should be the ids of its runs."""
    for path in sorted(folder.iterdir()):
        if re.fullmatch("[0-9a-f]{12}", path.name) and not path.is_symlink():
            content = read_json(path / "batch.json")
            runs = content.get("runs") if isinstance(content, dict) else None
            if isinstance(runs, list):
                yield Batch(path), runs
