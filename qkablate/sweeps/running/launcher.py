"""The launcher of a sweep: it skips what is done, resumes, and waits for what others train."""

import dataclasses
import math
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from qkablate.runs import predictions
from qkablate.runs.prefix import NO_BRANCHING, Branching
from qkablate.runs.run import free_bytes
from qkablate.sweeps.engines import base
from qkablate.sweeps.planning.manifest import Manifest
from qkablate.sweeps.running import results
from qkablate.sweeps.running.branches import SharedPrefixes
from qkablate.sweeps.running.progress_table import ProgressTable
from qkablate.sweeps.running.state import ENDED, RunState, SweepState, link_run
from qkablate.sweeps.running.worker import has_crashed, record_death
from qkablate.table import format_count
from qkablate.training.checkpoint import bytes_needed

_POLLS_PER_REFRESH = 4  # polls of the engine for one refresh of all runs
_RESULTS_INTERVAL = 15.0  # seconds between two tables of results
_SIGNAL_LATENCY = 0.5  # seconds
_MAX_MOVES = 5  # restarts of one run on other machines without progress


class Launcher:
    """One session of a sweep, perhaps beside other launchers."""

    def __init__(
        self,
        manifest: Manifest,
        engine: base.Engine,
        table: ProgressTable,
        *,
        retry_failed: bool = False,
        stop_on_failure: bool = False,
        share_prefix: bool = True,
    ) -> None:
        self.manifest, self.engine, self.table = manifest, engine, table
        self.sweep_state = SweepState(manifest)
        self._stop_on_failure = stop_on_failure
        self._prefixes = SharedPrefixes(manifest) if share_prefix else None
        self.sweep_state.shares_prefix = share_prefix
        self._own: dict[str, RunState] = {}  # runs with this launcher's engine
        self._unsure: list[tuple[base.RunExit, int]] = []  # exits whose leases still seem held
        self._programs: dict[str, list[str]] = {}  # of each process the runs, by the first of them
        self._most: dict[str, int] = {}  # runs of a program, by arm, after memory ran out
        self._tried: set[str] = set()  # runs not to be started again by this launcher
        self._moves: Counter[str] = Counter()  # restarts without progress, by run
        self._steps: dict[str, int] = {}  # and the last step before each
        self._exclusive = ""  # the run that has the machine for itself
        self._had_exclusive: set[str] = set()
        self._stop_reason = ""  # why nothing more is started
        self._linked: set[str] = set()  # runs linked into the sweep's folder
        self._results_time = 0.0  # of the last table of results
        self._signal = self._signal_count = 0  # the last one, and how many
        self._refresh()
        failed = {state.run.id for state in self._states() if state.status == "failed"}
        self._to_retry = failed if retry_failed else set()
        self._ended_before = self._ended_ids()

    def run(self) -> int:
        """Run the sweep and return the exit code."""
        with self.sweep_state.register_launcher():
            self._adopt()
            self.table.show(self.sweep_state)
            with self._handle_signals(), closing(self.engine):
                self._train_all()
            self._refresh()
            self.table.show(self.sweep_state)
            if self._prefixes is not None:
                self._prefixes.remove_branches()
            self._write_results()
        if self._signal:
            return 128 + self._signal
        return 0 if self.sweep_state.is_finished() else 1

    def _train_all(self) -> None:
        """Train until no run is left that this launcher could start or wait for."""
        polls = 0
        while True:
            self._act_on_signals()
            if polls % _POLLS_PER_REFRESH == 0:
                self._refresh()
            for state, packed in self._startable():
                if not self._may_start() or not self._has_disk_space(state):
                    break
                self._start(state, packed)
            queued = self.engine.queued_ids()
            self.sweep_state.queued_ids = {id for first in queued for id in self._runs_of(first)}
            for state in self._own.values():
                self.sweep_state.refresh_run(state)
            self.table.show(self.sweep_state)
            if not self._own and (
                self._stop_reason
                or not any(s.status == "running" or self._is_startable(s) for s in self._states())
            ):
                return
            exits, unsure = self._wait_for_exits(), self._unsure
            self._unsure = []
            for exit, members in unsure:
                self._handle_exit(exit, members)
            for exit in exits:
                ids = self._runs_of(exit.id)
                self._programs.pop(exit.id, None)
                for id in ids:
                    self._handle_exit(dataclasses.replace(exit, id=id), len(ids))
            polls = 0 if exits else polls + 1

    def _refresh(self) -> None:
        """Read the state of all runs, of which there may be new ones."""
        self.sweep_state.refresh()
        if self._prefixes is not None:
            self._prefixes.add(self._states())

    @property
    def trained(self) -> bool:
        """True if this launcher has trained any run."""
        return bool(self._tried)

    @property
    def saw_an_end(self) -> bool:
        """True if a run has ended since this launcher began, trained by it or by another."""
        return self.trained or bool(self._ended_ids() - self._ended_before)

    def _ended_ids(self) -> set[str]:
        return {state.run.id for state in self._states() if state.status in ENDED}

    def _states(self) -> list[RunState]:
        return list(self.sweep_state.states.values())

    def _adopt(self) -> None:
        """Take over the jobs that an earlier launcher has left with the engine."""
        open_ids = [state.run.id for state in self._states() if state.status not in ENDED]
        for ids in self.engine.adopt(open_ids):
            self._follow(ids[0], [self.sweep_state.states[id] for id in ids if id in open_ids])
        if self._own:
            count = format_count(len(self._own), "run")
            self.table.note(f"{count} still with the engine from an earlier session")

    def _wait_for_exits(self) -> list[base.RunExit]:
        """Wait for the engine for one poll interval, or until a signal comes."""
        until = time.monotonic() + self.engine.poll_interval
        signal_count = self._signal_count
        while True:
            exits = self.engine.wait_for_exits(min(_SIGNAL_LATENCY, self.engine.poll_interval))
            if exits or signal_count != self._signal_count or time.monotonic() >= until:
                return exits

    def _may_start(self) -> bool:
        """Return whether the launcher goes on and the engine has a free slot."""
        stopped = self._stop_reason or self._signal_count
        return not stopped and len(self._programs) < self.engine.slots

    def _runs_of(self, id: str) -> list[str]:
        """Return the runs of the process that was started with this one."""
        return self._programs.get(id, [id])

    def _startable(self) -> Iterator[tuple[RunState, int]]:
        """Yield the runs to start, and how many will share the machine.

        The largest come first; those that ran out of memory come last, one at a time. There may be
        thousands: all are examined at once.
        """
        if not self._may_start() or self._exclusive in self._own:
            return
        open_count = sum(map(self._is_open, self._states()))
        startable = [state for state in self._states() if self._is_startable(state)]
        shared = [state for state in startable if not may_fit_alone(state)]
        if shared:
            arms = self.manifest.arms
            others = sum(
                state.status == "running" and state.run.id not in self._own
                for state in self._states()
            )
            own = min(self.engine.slots, open_count + len(self._own))
            packed = own + others if self.engine.shares_machine else 1
            shared.sort(key=lambda state: -arms[state.run.arm].train_flops)
            yield from ((state, packed) for state in shared)
        elif startable and not self._own:
            yield startable[0], 1

    def _is_startable(self, state: RunState) -> bool:
        """Return whether a run is open and need not wait for a longer one."""
        if not self._is_open(state) or self._prefixes is None:
            return self._is_open(state)
        return not self._prefixes.must_wait(state, self._will_train)

    def _will_train(self, state: RunState) -> bool:
        """Return whether a run is open, or with the engine and not training yet."""
        is_queued = state.run.id in self._own and state.status == "waiting"
        return is_queued or self._is_open(state)

    def _is_open(self, state: RunState) -> bool:
        id = state.run.id
        if id in self._own or state.status == "running":
            return False
        if state.status == "failed":
            exclusively = may_fit_alone(state) and id not in self._had_exclusive
            return id in self._to_retry or exclusively
        return state.status in ("waiting", "interrupted") and id not in self._tried

    def _start(self, state: RunState, packed: int) -> None:
        id = state.run.id
        self.sweep_state.refresh_run(state)
        if not self._is_startable(state):  # another launcher has started it since
            return
        if may_fit_alone(state) and packed == 1:
            self._exclusive = id
            self._had_exclusive.add(id)
            self.table.note(
                f"retrying alone: {state.run.label} ran out of memory beside other runs"
            )
        members = [state, *self._find_others(state)]
        first, *others = [self._make_task(member, packed) for member in members]
        self.engine.start(dataclasses.replace(first, others=tuple(others)))
        self._follow(id, members)

    def _make_task(self, state: RunState, packed: int) -> base.RunTask:
        id, retry = state.run.id, state.status == "failed"
        self._to_retry.discard(id)
        config, branching = self.manifest.config_of(state.run), self._plan_branching(state)
        fingerprint = self.manifest.arms[state.run.arm].parent_data
        return base.RunTask(id, state.folder, config, packed, retry, branching, fingerprint)

    def _find_others(self, state: RunState) -> list[RunState]:
        """Return the runs that train with this one as one program.

        All free slots get some, as far as there are enough; but on a GPU, where a program takes as
        long with one run as with all, it is filled first.
        """
        most = self._limit(state)
        if most == 1 or may_fit_alone(state):
            return []
        open_ = [s for s in self._states() if self._is_startable(s) and self._limit(s) > 1]
        share = math.ceil(len(open_) / (self.engine.slots - len(self._programs)))
        if self.manifest.arms[state.run.arm].config.device.startswith("cuda"):
            share = most
        others = [s for s in open_ if s.run.arm == state.run.arm and s is not state]
        others = [s for s in others if not may_fit_alone(s)]
        return others[: max(0, min(most, share) - 1)]

    def _limit(self, state: RunState) -> int:
        """Return how many runs a program of this arm may have."""
        arm = state.run.arm
        return self._most.get(arm, int(self.manifest.arms[arm].config.train.vmap))

    def _plan_branching(self, state: RunState) -> Branching:
        return NO_BRANCHING if self._prefixes is None else self._prefixes.plan_branching(state)

    def _follow(self, first: str, members: list[RunState]) -> None:
        """Count the runs of a process, named by the first it began with, among this launcher's."""
        self._programs[first] = [state.run.id for state in members]
        for state in members:
            id = state.run.id
            self._tried.add(id)
            self._own[id] = state
            self.sweep_state.own_ids.add(id)
            state.status, state.metrics, state.reason = "running", None, ""

    def _handle_exit(self, exit: base.RunExit, members: int) -> None:
        """Read the outcome of a run; restart it if its machine was lost.

        If the process of several runs was killed to free memory, half of them are tried.
        """
        state = self._own.pop(exit.id)
        self.sweep_state.own_ids.discard(exit.id)
        self.sweep_state.queued_ids.discard(exit.id)
        state.reason = ""
        self.sweep_state.refresh_run(state)
        is_leased = exit.code in (base.EXIT_ALREADY_RUNNING, base.EXIT_LEASE_LOST)
        if is_leased and state.status not in ENDED:
            self._tried.discard(exit.id)  # the holder of its lease may still die
            return
        if state.step > self._steps.get(exit.id, 0):
            self._steps[exit.id], self._moves[exit.id] = state.step, 0
        if state.status not in ENDED and not self._stop_reason and not self._signal_count:
            if exit.out_of_memory and members > 1:
                self._most[state.run.arm] = members // 2
                self._tried.discard(exit.id)
                self.table.note(
                    f"retrying {members // 2} at a time: {state.run.label}: out of memory"
                )
                return
            if exit.requeue_reason and self._moves[exit.id] < _MAX_MOVES:
                self._moves[exit.id] += 1
                self._tried.discard(exit.id)
                self.table.note(f"restarting elsewhere: {state.run.label}: {exit.requeue_reason}")
                return
            if has_crashed(exit) and not self.sweep_state.observer.observe(state.folder).sure:
                # On another machine. Only silence will tell that no process holds its lease.
                self._own[exit.id] = state
                self.sweep_state.own_ids.add(exit.id)
                self._unsure.append((exit, members))
                return
            exclusive = self._exclusive == exit.id or not self.engine.shares_machine
            packed = 1 if exclusive else self.engine.slots
            is_remote = self.engine.is_remote
            if record_death(
                self.manifest,
                state,
                exit,
                packed=packed,
                is_remote=is_remote,
                observer=self.sweep_state.observer,
            ):
                self.sweep_state.refresh_run(state)
        if self._prefixes is not None and state.status in ENDED:
            self._prefixes.remove_branches(state)
        if state.status == "failed" and self._stop_on_failure and not may_fit_alone(state):
            self._stop(f"{state.run.label} failed, and on_failure=stop")
        if time.monotonic() - self._results_time > _RESULTS_INTERVAL:
            self._write_results()

    def _write_results(self) -> None:
        try:
            for state in self._states():
                if state.run.id not in self._linked and link_run(self.manifest, state):
                    self._linked.add(state.run.id)
            results.write_results(self.sweep_state)
            self._results_time = time.monotonic()
        except OSError as error:  # they can be rebuilt at any time
            self.table.note(f"results: {error}")

    def _has_disk_space(self, state: RunState) -> bool:
        """Stop the sweep unless the disk has space for what the run writes."""
        arm = self.manifest.arms[state.run.arm]
        branches = len(self._plan_branching(state).horizons or ())
        need = bytes_needed(arm.total_params, branches) + predictions.bytes_needed(arm.config)
        out = Path(self.manifest.out).expanduser()
        need *= self._limit(state)
        free = free_bytes(out)
        if free >= need:
            return True
        self._stop(
            f"'{out}' has {free / 2**20:,.0f} MB free, and {state.run.label} needs"
            f" {need / 2**20:,.0f} MB"
        )
        return False

    def _stop(self, reason: str) -> None:
        self._stop_reason = reason
        self.table.note(f"stopping: {reason}; running runs write a checkpoint")
        self.engine.stop(now=False)

    def _act_on_signals(self) -> None:
        """Stop after one signal, at once after two."""
        if self._signal_count and not self._stop_reason.startswith("SIG"):
            hint = (
                " (press Ctrl-C again to stop immediately)" if self._signal == signal.SIGINT else ""
            )
            self._stop(f"{signal.Signals(self._signal).name}{hint}")
        if self._signal_count > 1:
            self.engine.stop(now=True)

    @contextmanager
    def _handle_signals(self) -> Iterator[None]:
        def handle(number: int, frame: Any) -> None:  # only counts: it may interrupt anything
            self._signal, self._signal_count = number, self._signal_count + 1

        numbers = (signal.SIGINT, signal.SIGTERM)
        try:
            before = {number: signal.signal(number, handle) for number in numbers}
        except ValueError:  # only the main thread can handle signals
            before = {}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def may_fit_alone(state: RunState) -> bool:
    """Return whether a run failed for lack of memory beside others: it is retried alone once.

    A vmapped run is not on a GPU, where its program needs as much memory with one run as with all.
    """
    result = state.result or {}
    is_fixed = result.get("device") == "cuda" and result.get("vmap")
    return bool(result.get("out_of_memory")) and result["packed"] > 1 and not is_fixed
