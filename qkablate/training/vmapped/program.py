"""Several runs as one program: each has a session of its own, and all take their steps together.

A session (session.py) does everything but the step as if its run were alone: lease, rows,
evaluation, checkpoints, divergence, result. It pauses before each step; once all have paused,
`RunStack` computes the steps of all. Runs need not be at the same step, and whichever ends, its row
is removed: that changes no bit of the others.
"""

import gc
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from typing import TextIO

import torch

from qkablate.models.base import Model
from qkablate.runs.lease import LeaseObserver
from qkablate.runs.prefix import NO_BRANCHING, Branching
from qkablate.training import environment, hardware
from qkablate.training import session as single
from qkablate.training.checkpoint import Checkpoint
from qkablate.training.distributed.ranks import SINGLE_PROCESS, Ranks
from qkablate.training.resolve import RunPlan
from qkablate.training.session import (
    Outcome,
    Session,
    find_result,
    train_session,
)
from qkablate.training.signals import Signals
from qkablate.training.vmapped.stack import RunStack, StackedStep


@dataclass
class Member:
    """A run of a program, and how its training ended."""

    plan: RunPlan
    packed: int = 1  # runs that share the machine
    retry: bool = True
    rerun: bool = False
    observer: LeaseObserver | None = None
    branching: Branching = NO_BRANCHING
    log: TextIO | None = None  # of its output; None: that of the process
    # Or why the run has no result: another process trains it, it was stopped, its disk is full.
    outcome: Outcome | Exception | None = None

    @contextmanager
    def output(self) -> Iterator[None]:
        """Send output to the log of this run."""
        if self.log is None:
            yield
        else:
            with redirect_stdout(self.log), redirect_stderr(self.log):
                yield


class _OutOfMemory(Exception):
    """The runs do not fit into memory together."""


@dataclass
class _Session:
    """The session of a member, paused before a step."""

    member: Member
    signals: Signals
    count: int  # members of its program
    step: StackedStep | None = None
    number: int = 0  # of the step that it waits for
    _session: Session = field(init=False)

    def __post_init__(self) -> None:
        self._session = self._train()

    def _train(self) -> Session:
        member, plan = self.member, self.member.plan
        with plan.run.hold_lease(member.observer) as lease:
            if member.rerun:
                plan.run.restart()
                member.rerun = False  # once, also if memory runs out
            if existing := find_result(plan.run, retry=member.retry):
                member.outcome = Outcome(existing, trained=False)
                return existing
            result = yield from train_session(
                plan,
                self.signals,
                lease,
                member.packed,
                SINGLE_PROCESS,
                member.branching,
                program_runs=self.count,
                make_step=self._make_step,
                is_recoverable=self._is_recoverable,
            )
            member.outcome = Outcome(result, trained=True, signal=self.signals.received)
            return result

    def _make_step(
        self, plan: RunPlan, model: Model, resumed: Checkpoint | None, ranks: Ranks
    ) -> StackedStep:
        self.step = StackedStep(plan, model, resumed, ranks)
        return self.step

    def _is_recoverable(self, error: Exception) -> bool:
        plan, is_several = self.member.plan, self.count > 1
        return is_several and _needs_less_when_halved(plan) and hardware.is_out_of_memory(error)

    def advance(self, error: Exception | None = None) -> bool:
        """Go on to the next step, or raise an error within the session; false if it has ended.

        Whatever a session raises is the outcome of its run alone, unless memory has run out.
        """
        member = self.member
        with member.output():
            try:
                self.number = next(self._session) if error is None else self._session.throw(error)
                return True
            except StopIteration:
                return False
            except Exception as reason:
                if self._is_recoverable(reason):
                    raise _OutOfMemory from None
                member.outcome = reason
                return False

    def close(self) -> None:
        """End the session where it is; it can resume from its last checkpoint."""
        with self.member.output():
            self._session.close()


def train_planned(
    plan: RunPlan,
    *,
    rerun: bool = False,
    observer: LeaseObserver | None = None,
    ranks: Ranks = SINGLE_PROCESS,
    branching: Branching = NO_BRANCHING,
) -> Outcome:
    """Train one run, vmapped or not, as its plan says; errors are those of `train_run`."""
    if plan.config.train.vmap == 1:
        return single.train_run(
            plan, rerun=rerun, observer=observer, ranks=ranks, branching=branching
        )
    return train_alone(Member(plan, rerun=rerun, observer=observer, branching=branching))


def train_alone(member: Member) -> Outcome:
    """Train a program of one run; return its result, or raise why it has none."""
    train_program([member])
    if isinstance(member.outcome, Outcome):
        return member.outcome
    assert member.outcome is not None
    raise member.outcome


def train_program(members: Sequence[Member]) -> None:
    """Train the runs together; the outcome of each is set.

    Where memory runs out, each half of them is a program of its own, one after the other.
    """
    signals = Signals()
    with signals.listen(), hardware.preserve_process_state():
        by_threads = defaultdict(list)  # a run resumes with the threads it began with
        for member in members:
            plan, _ = environment.restore_environment(member.plan, 1)
            by_threads[plan.config.threads].append(member)
        for group in by_threads.values():
            _train_or_halve(group, signals)


def _train_or_halve(members: Sequence[Member], signals: Signals) -> None:
    try:
        _train(members, signals)
        return
    except _OutOfMemory:
        pass  # outside of this block its traceback holds no tensors any more
    gc.collect()
    left = [member for member in members if member.outcome is None]
    half = max(1, len(left) // 2)
    for part in (left[:half], left[half:]):
        for member in part:
            with member.output():
                print(
                    f"memory ran out: training goes on with {len(part)} runs in the program of"
                    f" {member.plan.run.label}, not {len(members)}",
                    file=sys.stderr,
                )
        if part:
            _train_or_halve(part, signals)


def _needs_less_when_halved(plan: RunPlan) -> bool:
    """Return whether a program of fewer runs has fewer rows: not on a GPU, see RunStack."""
    return plan.config.device == "cpu"


def _too_many(plan: RunPlan, error: Exception) -> Exception:
    """Return the error of a program that is too large for its GPU."""
    device, count = plan.config.device, plan.config.train.vmap
    return torch.OutOfMemoryError(
        f"train.vmap: {count} runs at once need more memory than {device} has; give a smaller"
        f" number ({error})"
    )


def _train(members: Sequence[Member], signals: Signals) -> None:
    """Train the runs; raise _OutOfMemory with all sessions closed."""
    waiting = sessions = [_Session(member, signals, len(members)) for member in members]
    stack: RunStack | None = None
    try:
        while True:
            waiting = [session for session in waiting if session.advance()]
            if not waiting:
                return
            steps = [session.step for session in waiting if session.step is not None]
            try:
                if stack is None or stack.steps != steps:
                    stack = None  # frees its memory only with the last view of it
                    stack = RunStack(steps)
                stack([session.number for session in waiting])
            except Exception as error:
                stack = None
                if hardware.is_out_of_memory(error):
                    plan = members[0].plan
                    if not _needs_less_when_halved(plan):
                        error = _too_many(plan, error)
                    elif len(members) > 1:
                        raise _OutOfMemory from None
                for session in waiting:  # each records it as its own
                    session.advance(error)
                return
    finally:
        for session in sessions:
            session.close()
