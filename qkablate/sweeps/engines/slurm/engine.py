"""Training on a SLURM cluster: job arrays, which a launcher leaves and the next one takes over."""

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from qkablate.errors import UserError
from qkablate.sweeps.engines.base import (
    EXIT_ALREADY_RUNNING,
    EXIT_STOPPED,
    Engine,
    RunExit,
    RunTask,
)
from qkablate.sweeps.engines.slurm import cluster
from qkablate.sweeps.engines.slurm.batch import ArrayTask, JobArray, find_job_arrays
from qkablate.table import format_count

_CRASHES = {-number for number in (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV)}
_USUAL_REASONS = {"None", "Priority", "Resources", "BeginTime", "JobArrayTaskLimit", ""}
_RETRY = 60.0  # seconds before rejected jobs are submitted again
_POLLS = 2  # that must find a job over before its missing exit is believed


class SlurmEngine(Engine):
    """Runs on a SLURM cluster, at most `limit` at once, or as many as it has room for."""

    slots = 10**9
    shares_machine = False
    is_remote = True
    poll_interval = 5.0

    def __init__(
        self,
        folder: Path,
        parameters: dict[str, Any],
        limit: int | None,
        note: Callable[[str], None],
    ) -> None:
        self._folder = folder.absolute() / "slurm"
        self._parameters, self._limit, self._note = parameters, limit, note
        self._collected: dict[str, RunTask] = {}  # to be submitted
        self._tasks: dict[str, ArrayTask] = {}  # by the run's id
        self._exits: list[RunExit] = []  # not yet reported
        self._submitted = False  # sbatch has accepted a job
        self._begun = False  # a job has started far enough to write
        self._stopping: str = ""  # soon, now
        self._next_poll = 0.0
        self._next_submission = 0.0
        self._warning = ""
        self._reasons: set[str] = set()  # already printed
        self._max_array = 0

    def adopt(self, ids: Collection[str]) -> list[list[str]]:
        """Take over the jobs of earlier launchers; return the ids of the runs of each."""
        while True:
            with contextlib.suppress(cluster.SlurmCommandFailed), self._locked():
                self._take_over(ids, with_crashes=True)
                adopted = {task.job: task.array for task in self._tasks.values() if task.job}
                for job, array in adopted.items():
                    if cluster.set_throttle(job, self._limit or 0):
                        array.limit = self._limit or array.limit
                return [[task.id, *task.others] for task in self._tasks.values()]
            self._warn("SLURM does not answer")
            time.sleep(self.poll_interval)

    def start(self, task: RunTask) -> None:
        self._collected[task.id] = task

    def queued_ids(self) -> Collection[str]:
        """Return the runs that are not submitted or wait in SLURM's queue."""
        waiting = {id for id, task in self._tasks.items() if task.state not in cluster.ACTIVE}
        return waiting | self._collected.keys()

    def wait_for_exits(self, seconds: float) -> list[RunExit]:
        """Submit what was collected, and wait until a run ends, at most so many seconds."""
        self._submit()
        time.sleep(max(0.0, min(seconds, self._next_poll - time.monotonic())))
        if time.monotonic() >= self._next_poll:
            self._poll()
            self._next_poll = time.monotonic() + self.poll_interval
        exits, self._exits = self._exits, []
        return exits

    def stop(self, *, now: bool) -> None:
        """Cancel all jobs, with time for a checkpoint or without."""
        self._stopping = "now" if now else "soon"
        self._exits += [RunExit(id, EXIT_STOPPED) for id in self._collected]
        self._collected.clear()
        self._cancel()
        self._next_poll = 0.0

    def close(self) -> None:
        """Leave the jobs to the next launcher."""

    def _cancel(self) -> None:
        """Cancel the jobs. Repeated at every poll: a job that is starting misses the signal."""
        jobs = sorted({task.job for task in self._tasks.values() if task.job})
        if self._stopping == "now":
            commands = [["--signal=KILL"], []]
        else:  # SIGTERM only: a plain scancel would send SIGKILL before the checkpoint is written
            commands = [["--state=PENDING"], ["--state=RUNNING", "--signal=TERM"]]
        for options in commands if jobs else []:
            with contextlib.suppress(cluster.SlurmCommandFailed):
                cluster.run_command("scancel", "--quiet", *options, *jobs)

    def _submit(self) -> None:
        """Submit the collected runs as one array, or as several where one would be too long."""
        while self._collected and time.monotonic() >= self._next_submission:
            free = len(self._collected) if self._limit is None else self._limit - len(self._tasks)
            if free <= 0:
                return
            try:
                with self._locked():
                    self._take_over(self._collected)  # submitted by another launcher just now
                    for id in self._tasks.keys() & self._collected.keys():
                        del self._collected[id]
                    self._max_array = self._max_array or cluster.max_array_size()
                    if self._collected:
                        self._submit_array([*self._collected.values()][: self._max_array], free)
                        self._next_poll = 0.0
                self._warning = ""
            except cluster.SubmissionRejected as reason:
                longest = min(self._max_array, len(self._collected))
                if longest > 1:  # a user's number of submitted jobs may be limited
                    self._max_array = longest // 2
                    continue
                if not self._submitted:
                    raise UserError(f"engine: sbatch refuses the jobs: {reason}") from None
                self._max_array, self._next_submission = 0, time.monotonic() + _RETRY
                self._warn(f"not submitted yet: {reason}")
            except cluster.SlurmCommandFailed as reason:
                self._next_submission = time.monotonic() + 2 * self.poll_interval
                self._warn(f"not submitted yet: {reason}")

    def _submit_array(self, tasks: list[RunTask], limit: int) -> None:
        programs = [[one.id for one in (task, *task.others)] for task in tasks]
        array = JobArray.create(self._folder, programs, limit)
        jobs = array.submit(tasks, self._parameters)
        self._submitted = True
        for index, (task, job) in enumerate(zip(tasks, jobs, strict=True)):
            self._tasks[task.id] = ArrayTask(task.id, array, index, job)
            del self._collected[task.id]

    def _take_over(self, ids: Collection[str], *, with_crashes: bool = False) -> None:
        """Follow other launchers' live jobs of these runs.

        With crashes: also those that were not reported, and jobs that began with another run.
        """
        known = {task.array.folder for task in self._tasks.values()}
        arrays = [pair for pair in find_job_arrays(self._folder) if pair[0].folder not in known]
        entries = cluster.query_queue(os.getuid(), [array.name for array, _ in arrays])
        for array, programs in arrays:
            in_use = False
            for index, (id, *others) in enumerate(one or [""] for one in programs):
                entry = entries.get((array.name, index))
                over = entry is None or entry.is_over
                code = (array.read_status(index) or {}).get("code") if over else None
                array.keep_logs |= over and not isinstance(code, int)
                sought = {id, *others} if with_crashes else {id}
                wanted = not sought.isdisjoint(ids) and id not in self._tasks
                if over and not (with_crashes and wanted and code in _CRASHES):
                    continue
                in_use = True
                if wanted:
                    task = ArrayTask(id, array, index, others=tuple(others))
                    if entry is not None:
                        task.job, task.state = entry.job, entry.state
                    self._tasks[id] = task
                    array.left += 1
            if not in_use and not array.keep_logs:
                array.remove()
            array.limit = len(programs)

    def _poll(self) -> None:
        if not self._tasks:
            return
        if self._stopping:
            self._cancel()
        try:
            names = {task.array.name for task in self._tasks.values()}
            entries = cluster.query_queue(os.getuid(), names)
        except cluster.SlurmCommandFailed as reason:
            if self._stopping == "now":
                self._note(f"SLURM does not answer, and its jobs may still be there: {reason}")
                self._exits += [RunExit(id, EXIT_STOPPED) for id in self._tasks]
                self._tasks.clear()
            else:
                self._warn(f"SLURM does not answer; waiting for it: {reason}")
            return
        if self._warning:
            self._note("SLURM answers again")
            self._warning = ""
        for task in list(self._tasks.values()):
            exit = self._find_exit(task, entries.get((task.array.name, task.index)))
            if exit is not None:
                self._exits.append(exit)
                del self._tasks[task.id]
                task.array.left -= 1
                if task.array.left == 0 and not task.array.keep_logs:
                    task.array.remove()
        waiting = [entry.reason for entry in entries.values() if entry.state == "PENDING"]
        for why in {*waiting} - _USUAL_REASONS - self._reasons:  # each once
            self._reasons.add(why)
            self._note(f"{format_count(waiting.count(why), 'run')} in SLURM's queue: {why}")
        self._raise_throttle()

    def _find_exit(self, task: ArrayTask, entry: cluster.QueueEntry | None) -> RunExit | None:
        task.state = entry.state if entry else "gone"
        over = entry is None or entry.is_over
        if not over and task.state != "COMPLETING":
            task.polls_over = 0
            return None
        status = task.array.read_status(task.index)
        if status is None and not task.array.folder.exists():
            return RunExit(task.id, EXIT_ALREADY_RUNNING)  # another launcher has handled it
        code = status.get("code") if status else None
        # A stopped task may be on its way back into the queue.
        if status and isinstance(code, int) and (over or code != EXIT_STOPPED):
            self._begun = True
            if code == EXIT_STOPPED and task.state in cluster.TAKEN_AWAY and not self._stopping:
                reason = f"its job {task.job} ended as {task.state}"
                return RunExit(task.id, code, requeue_reason=reason)
            return RunExit(task.id, code, status.get("out_of_memory") is True)
        task.polls_over += over
        if task.polls_over < _POLLS:
            return None
        if task.state == "CANCELLED" or self._stopping:  # who cancels a job wants no other one
            return RunExit(task.id, EXIT_STOPPED)
        task.array.keep_logs = True
        if task.state == "OUT_OF_MEMORY":
            return RunExit(task.id, -signal.SIGKILL, out_of_memory=True)
        where = f" on {entry.node}" if entry and entry.node else ""
        arrays = {other.array for other in self._tasks.values()}
        if not self._begun and not any(array.has_begun() for array in arrays):
            self._raise_first_job_failed(task, where)
        how = "is no longer in the queue" if entry is None else f"ended as {task.state}{where}"
        reason = f"its job {task.job} {how}, without recording an exit"
        return RunExit(task.id, -signal.SIGKILL, requeue_reason=reason)

    def _raise_first_job_failed(self, task: ArrayTask, where: str) -> None:
        """Stop all jobs and raise UserError: the first one failed before it wrote anything."""
        self.stop(now=True)
        if line := task.array.last_log_line(task.index):
            raise UserError(f"engine: the first job{where} ended before its run began: {line}")
        raise UserError(
            f"out: the first job{where} ended before it could write anything in"
            f" '{task.array.folder}': does that node see the folder? `out` must be on a file system"
            " that all nodes share"
        )

    def _raise_throttle(self) -> None:
        """Let the newest array use the slots that ended runs of earlier arrays have freed."""
        if self._limit is None or not self._tasks or self._stopping:
            return
        newest = [*self._tasks.values()][-1].array
        free = self._limit - sum(task.array is not newest for task in self._tasks.values())
        if 0 < newest.limit < min(free, newest.left):
            job = next(task.job for task in self._tasks.values() if task.array is newest)
            if cluster.set_throttle(job, free):
                newest.limit = free

    def _warn(self, text: str) -> None:
        if text != self._warning:
            self._warning = text
            self._note(text)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock that keeps two launchers from submitting the same run."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "lock").open("a") as file:
            with contextlib.suppress(OSError):  # without locks, the run's lease decides
                fcntl.flock(file, fcntl.LOCK_EX)
            yield
