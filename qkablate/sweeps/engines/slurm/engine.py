"""A SLURM cluster: job arrays over the runs, by submitit. A launcher that goes leaves its jobs, and
the next one takes them over.
"""

import contextlib
import fcntl
import io
import os
import re
import signal
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkablate.errors import UserError
from qkablate.sweeps.engines import OWNED, STOPPED, Ended, Task
from qkablate.sweeps.engines.slurm.batch import Batch, batches
from qkablate.sweeps.engines.slurm.cluster import (
    Row,
    Unanswered,
    ask,
    executor,
    largest_array,
    one_line,
    queue,
)
from qkablate.table import counted

# A job in one of these, or not in the queue at all, will not go on.
_OVER = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "REVOKED", "TIMEOUT"),
}
# In one of these, it was not the run or a person that wanted its end.
_TAKEN = {"BOOT_FAIL", "DEADLINE", "NODE_FAIL", "PREEMPTED", "REVOKED", "TIMEOUT"}
_CRASHES = {-number for number in (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV)}
_AT_WORK = {"RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "SUSPENDED", "STOPPED"}
_AWAY = re.compile("(?i)contact|timed out|communicat|not respond|temporarily|connection")
_FULL = 60.0  # seconds until what was refused is submitted again
_LOOKS = 2  # that find a job over, and nothing from it, before that is believed


@dataclass
class _Job:
    id: str
    batch: Batch
    number: int  # of the task in its array
    job: str = ""  # SLURM's number of the array
    state: str = "PENDING"
    over: int = 0  # looks that found it so


class Refused(Unanswered):
    """sbatch will not have the jobs."""


class Slurm:
    """`limit`: how many may run at once; None: as many as the cluster has room for."""

    slots = 10**9
    shares = False
    elsewhere = True
    pause = 5.0

    def __init__(
        self,
        folder: Path,
        parameters: dict[str, Any],
        limit: int | None,
        note: Callable[[str], None],
    ) -> None:
        self._folder = folder.absolute() / "slurm"
        self._parameters, self._limit, self._note = parameters, limit, note
        self._collected: dict[str, Task] = {}  # to be submitted
        self._jobs: dict[str, _Job] = {}  # by the run's id
        self._ended: list[Ended] = []  # not yet told
        self._submitted = False  # whether sbatch has taken anything
        self._begun = False  # whether any job has got as far as to write
        self._stopping: str = ""  # how
        self._next_look = 0.0
        self._hold = 0.0  # nothing is submitted before
        self._complaint = ""
        self._reasons: set[str] = set()
        self._most = 0

    def adopt(self, ids: Collection[str]) -> list[str]:
        while True:
            with contextlib.suppress(Unanswered), self._alone():
                self._take_over(ids, unheard=True)
                self._throttle()
                return list(self._jobs)
            self._complain("SLURM does not answer")
            time.sleep(self.pause)

    def start(self, task: Task) -> None:
        self._collected[task.id] = task

    def queued(self) -> Collection[str]:
        waiting = {id for id, job in self._jobs.items() if job.state not in _AT_WORK}
        return waiting | self._collected.keys()

    def ended(self, seconds: float) -> list[Ended]:
        self._submit()
        time.sleep(max(0.0, min(seconds, self._next_look - time.monotonic())))
        if time.monotonic() >= self._next_look:
            self._look()
            self._next_look = time.monotonic() + self.pause
        told, self._ended = self._ended, []
        return told

    def stop(self, *, now: bool) -> None:
        self._stopping = "now" if now else "soon"
        for id in self._collected:
            self._ended.append(Ended(id, STOPPED))
        self._collected.clear()
        self._cancel()
        self._next_look = 0.0

    def close(self) -> None:
        pass  # the jobs stay

    def _cancel(self) -> None:
        """Asked again at every look: who is not there yet hears nothing."""
        jobs = sorted({job.job for job in self._jobs.values() if job.job})
        if self._stopping == "now":
            commands = [["--signal=KILL"], []]
        else:  # SIGTERM alone: after a plain scancel, SIGKILL would come before the checkpoint
            commands = [["--state=PENDING"], ["--state=RUNNING", "--signal=TERM"]]
        for words in commands if jobs else []:
            with contextlib.suppress(Unanswered):
                ask("scancel", "--quiet", *words, *jobs)

    def _submit(self) -> None:
        """What was collected, as one array, or as several where it is too long."""
        while self._collected and time.monotonic() >= self._hold:
            room = len(self._collected)
            if self._limit is not None:
                room = self._limit - len(self._jobs)
            if room <= 0:
                return
            try:
                with self._alone():
                    self._take_over(self._collected)  # another launcher's, submitted just now
                    for id in self._jobs.keys() & self._collected.keys():
                        del self._collected[id]
                    self._most = self._most or largest_array()
                    if self._collected:
                        self._submit_array([*self._collected.values()][: self._most], room)
                        self._next_look = 0.0
                self._complaint = ""
            except Refused as reason:
                longest = min(self._most, len(self._collected))
                if longest > 1:  # there may be a limit to what one user may submit
                    self._most = longest // 2
                    continue
                if not self._submitted:
                    raise UserError(f"engine: sbatch refuses the jobs: {reason}") from None
                self._most, self._hold = 0, time.monotonic() + _FULL
                self._complain(f"not submitted yet: {reason}")
            except Unanswered as reason:
                self._hold = time.monotonic() + 2 * self.pause
                self._complain(f"not submitted yet: {reason}")

    def _submit_array(self, tasks: list[Task], room: int) -> None:
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        from qkablate.sweeps.engines.slurm.job import Job

        batch = Batch.new(self._folder, [task.id for task in tasks], room)
        parameters = {**self._parameters, "array_parallelism": room}
        jobs = [_Job(task.id, batch, number) for number, task in enumerate(tasks)]
        made = [Job(task, os.getcwd(), batch.file(number)) for number, task in enumerate(tasks)]
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # it would print what it raises
                submitted = executor(batch.folder, parameters, batch.name).submit_array(made)
        except (FailedJobError, FailedSubmissionError) as error:
            batch.remove()
            reason = one_line(str(error)) or "sbatch failed"
            raise (Unanswered if _AWAY.search(reason) else Refused)(reason) from None
        self._submitted = True
        for job, known in zip(jobs, submitted, strict=True):
            job.job = known.job_id.partition("_")[0]
            self._jobs[job.id] = job
            del self._collected[job.id]

    def _take_over(self, ids: Collection[str], *, unheard: bool = False) -> None:
        """Jobs of these runs that others have submitted, and that will go on; also those that
        crashed while nobody heard of it.
        """
        known = {job.batch.folder for job in self._jobs.values()}
        found = [pair for pair in batches(self._folder) if pair[0].folder not in known]
        rows = queue(os.getuid(), [batch.name for batch, _ in found])
        for batch, runs in found:
            live = False
            for number, id in enumerate(runs):
                row = rows.get((batch.name, number))
                over = row is None or row.state in _OVER
                code = (batch.said(number) or {}).get("code") if over else None
                batch.silent |= over and not isinstance(code, int)
                wanted = isinstance(id, str) and id in ids and id not in self._jobs
                if over and not (unheard and wanted and code in _CRASHES):
                    continue
                live = True
                if wanted:
                    self._jobs[id] = _Job(id, batch, number, *((row.job, row.state) if row else ()))
                    batch.left += 1
            if not live and not batch.silent:
                batch.remove()
            batch.room = len(runs)

    def _look(self) -> None:
        """One question for all jobs."""
        if not self._jobs:
            return
        if self._stopping:
            self._cancel()
        try:
            rows = queue(os.getuid(), {job.batch.name for job in self._jobs.values()})
        except Unanswered as reason:
            if self._stopping == "now":
                self._note(f"SLURM does not answer, and its jobs may still be there: {reason}")
                self._ended += [Ended(id, STOPPED) for id in self._jobs]
                self._jobs.clear()
                return
            self._complain(f"SLURM does not answer, and is waited for: {reason}")
            return
        if self._complaint:
            self._note("SLURM answers again")
            self._complaint = ""
        for job in list(self._jobs.values()):
            row = rows.get((job.batch.name, job.number))
            ended = self._judge(job, row)
            if ended is not None:
                self._ended.append(ended)
                self._forget(job)
        self._tell_reasons(rows.values())
        self._widen()

    def _judge(self, job: _Job, row: Row | None) -> Ended | None:
        """How the job ended, if it did."""
        job.state = row.state if row else "gone"
        over = row is None or row.state in _OVER
        if not over and job.state != "COMPLETING":
            job.over = 0
            return None
        said = job.batch.said(job.number)
        if said is None and not job.batch.folder.exists():  # another launcher has seen to it
            return Ended(job.id, OWNED)  # and it may have submitted it again
        code = said.get("code") if said else None
        # Told to end, it may be on its way back into the queue.
        if said and isinstance(code, int) and (over or code != STOPPED):
            self._begun = True
            if code == STOPPED and job.state in _TAKEN and not self._stopping:
                return Ended(job.id, code, gone=f"its job {job.job} ended as {job.state}")
            return Ended(job.id, code, said.get("out_of_memory") is True)
        job.over += over
        if job.over < _LOOKS:
            return None
        if job.state == "CANCELLED" or self._stopping:  # by hand: who did that wants no other one
            return Ended(job.id, STOPPED)
        job.batch.silent = True
        if job.state == "OUT_OF_MEMORY":
            return Ended(job.id, -signal.SIGKILL, out_of_memory=True)
        where = f" on {row.node}" if row and row.node else ""
        if not self._begun and not any(
            b.is_begun() for b in {j.batch for j in self._jobs.values()}
        ):
            self._fail_to_begin(job, where)
        how = "is not in the queue any more" if row is None else f"ended as {job.state}{where}"
        return Ended(job.id, -signal.SIGKILL, gone=f"its job {job.job} {how}, and left no word")

    def _fail_to_begin(self, job: _Job, where: str) -> None:
        """The first job could not even say that it is there: so would all others."""
        self.stop(now=True)
        if last := job.batch.last_words(job.number):
            raise UserError(f"engine: the first job{where} ended before its run began: {last}")
        raise UserError(
            f"out: the first job{where} ended before it could write anything in"
            f" '{job.batch.folder}': does that node see the folder? `out` must be on a file system"
            " that all nodes share"
        )

    def _forget(self, job: _Job) -> None:
        del self._jobs[job.id]
        job.batch.left -= 1
        if job.batch.left == 0 and not job.batch.silent:
            job.batch.remove()

    def _widen(self) -> None:
        """The last array began beside others, in the room they left; that grows as they end."""
        if self._limit is None or not self._jobs or self._stopping:
            return
        newest = [*self._jobs.values()][-1].batch
        room = self._limit - sum(job.batch is not newest for job in self._jobs.values())
        if 0 < newest.room < min(room, newest.left):
            number = next(job.job for job in self._jobs.values() if job.batch is newest)
            with contextlib.suppress(Unanswered):
                ask("scontrol", "update", f"JobId={number}", f"ArrayTaskThrottle={room}")
                newest.room = room

    def _throttle(self) -> None:
        """What was adopted began with another limit, perhaps."""
        limit = f"ArrayTaskThrottle={self._limit or 0}"
        adopted = {job.job: job.batch for job in self._jobs.values() if job.job}
        for number, batch in adopted.items():
            with contextlib.suppress(Unanswered):  # a job alone has no throttle
                ask("scontrol", "update", f"JobId={number}", limit)
                batch.room = self._limit or batch.room

    def _tell_reasons(self, rows: Collection[Row]) -> None:
        """Why jobs wait, once for each reason, where it may not pass by itself."""
        usual = {"None", "Priority", "Resources", "BeginTime", "JobArrayTaskLimit", ""}
        waiting = [row.reason for row in rows if row.state == "PENDING"]
        for reason in {*waiting} - usual - self._reasons:
            self._reasons.add(reason)
            self._note(f"{counted(waiting.count(reason), 'run')} in SLURM's queue: {reason}")

    def _complain(self, text: str) -> None:
        if text != self._complaint:
            self._complaint = text
            self._note(text)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Two launchers must not submit the same run."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "lock").open("a") as file:
            with contextlib.suppress(OSError):  # without locks, the run's owner decides
                fcntl.flock(file, fcntl.LOCK_EX)
            yield
