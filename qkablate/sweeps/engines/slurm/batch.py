"""The files of a job array, in the folder of its sweep.

<sweep>/slurm/
    lock               held by the launcher that submits
    <batch>/           one array; its jobs are named <sweep>.<batch> in SLURM's queue
        batch.json     the ids of its runs, in the order of its tasks, and of the others in each
                       task's program; written before sbatch
        <task>.json    where the task started, and the exit of its run
        …              submitit's files: script, tasks, logs

These files are trusted only as far as SLURM's queue confirms the jobs; no pickle is read back.
"""

import contextlib
import io
import itertools
import os
import re
import secrets
import shutil
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkablate.runs.records import read_json, write_json
from qkablate.sweeps.engines.base import EXIT_STOPPED, RunTask, read_last_line
from qkablate.sweeps.engines.remote import RunProcess
from qkablate.sweeps.engines.slurm import cluster

_UNREACHABLE = re.compile("(?i)contact|timed out|communicat|not respond|temporarily|connection")


class JobArray:
    """One array: `left` of its runs have not ended, and at most `limit` of them run at once."""

    def __init__(self, folder: Path, left: int = 0, limit: int = 0) -> None:
        self.folder, self.left, self.limit = folder, left, limit
        self.name = f"{folder.parents[1].name}.{folder.name}"  # of its jobs
        self.keep_logs = False  # a task ended without recording an exit

    @classmethod
    def create(cls, folder: Path, programs: Sequence[Sequence[str]], limit: int) -> "JobArray":
        """Create the folder of an array to submit, with the ids of each task's runs."""
        array = cls(folder / secrets.token_hex(6), len(programs), limit)
        array.folder.mkdir()
        content = {"runs": [ids[0] for ids in programs], "others": [[*ids[1:]] for ids in programs]}
        write_json(array.folder / "batch.json", content)
        return array

    def submit(self, tasks: Sequence[RunTask], parameters: Mapping[str, Any]) -> list[str]:
        """Submit the array and return SLURM's job number of each task."""
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        jobs = [SlurmJob(task, os.getcwd(), self.file(n)) for n, task in enumerate(tasks)]
        parameters = {**parameters, "array_parallelism": self.limit}
        executor = cluster.make_executor(self.folder, parameters, self.name)
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # submitit prints what it raises
                return [job.job_id.partition("_")[0] for job in executor.submit_array(jobs)]
        except (FailedJobError, FailedSubmissionError) as error:
            self.remove()
            reason = cluster.format_error(str(error)) or "sbatch failed"
            if _UNREACHABLE.search(reason):
                raise cluster.SlurmCommandFailed(reason) from None
            raise cluster.SubmissionRejected(reason) from None

    def file(self, index: int) -> Path:
        return self.folder / f"{index}.json"

    def read_status(self, index: int) -> dict[str, Any] | None:
        status = read_json(self.file(index))
        return status if isinstance(status, dict) else None

    def has_begun(self) -> bool:
        # A listing, because nothing else makes a network file system show new files.
        with contextlib.suppress(OSError):  # another launcher has removed it
            return any(re.fullmatch(r"\d+\.json", path.name) for path in self.folder.iterdir())
        return False

    def last_log_line(self, index: int) -> str:
        """Return the last line of a task's log, or nothing."""
        return next(map(read_last_line, self.folder.glob(f"*_{index}_0_log.out")), "")

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class SlurmJob:
    """The callable that submitit runs in a job: it trains one run and records its exit.

    The file `status` tells the launcher: without a code in it, the run is not over.
    """

    def __init__(self, task: RunTask, cwd: str, status: Path) -> None:
        self._task, self._cwd, self._status = task, cwd, status
        self._process: RunProcess | None = None
        self._stop_requested = False

    def __call__(self) -> None:
        """Train the run and exit with its code, without returning."""
        self._write(None)
        signal.signal(signal.SIGTERM, self._stop)  # submitit would wait for the SIGKILL after it
        self._process = RunProcess(self._task, self._cwd, {})
        if self._stop_requested:
            self._process.terminate()
        code = self._process.wait()
        self._write(code)
        sys.exit(code if code >= 0 else 128 - code)

    def checkpoint(self) -> Any:
        """Stop the run on preemption or timeout; return what submitit is to submit again."""
        from submitit.core.utils import DelayedSubmission

        if self._process is not None:
            self._process.terminate()
            code = self._process.wait()
            if code != EXIT_STOPPED:  # it exited by itself just now
                self._write(code)
                return None
        return DelayedSubmission(SlurmJob(self._task, self._cwd, self._status))

    def _stop(self, number: int, frame: Any) -> None:
        self._stop_requested = True
        if self._process is not None:
            self._process.terminate()

    def _write(self, code: int | None) -> None:
        killed = code is not None and self._process is not None and self._process.is_out_of_memory()
        status = {"host": socket.gethostname(), "pid": os.getpid(), "code": code}
        write_json(self._status, {**status, "out_of_memory": killed})


@dataclass
class ArrayTask:
    """One task of an array, as the engine follows it."""

    id: str  # of its first run
    array: JobArray
    index: int  # in its array
    job: str = ""  # SLURM's number of the array
    state: str = "PENDING"
    polls_over: int = 0  # consecutive polls that found it over without a recorded exit
    others: tuple[str, ...] = ()  # the other runs of its program


def find_job_arrays(folder: Path) -> Iterator[tuple[JobArray, list[list[str]]]]:
    """Yield the arrays in a sweep's folder, each with what should be the ids of each task's runs.

    The list of a task is empty where they cannot be read.
    """
    for path in sorted(folder.iterdir()):
        if re.fullmatch("[0-9a-f]{12}", path.name) and not path.is_symlink():
            content = read_json(path / "batch.json")
            runs = content.get("runs") if isinstance(content, dict) else None
            if isinstance(runs, list):
                others = content.get("others")
                lists = others if isinstance(others, list) else []
                pairs = itertools.zip_longest(runs, lists[: len(runs)])
                yield JobArray(path), [_program_ids(first, more) for first, more in pairs]


def _program_ids(first: Any, others: Any) -> list[str]:
    ids = [first, *(others if isinstance(others, list) else [])]
    return ids if all(isinstance(id, str) for id in ids) else []
