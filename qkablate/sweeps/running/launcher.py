"""Run a sweep to its end: what is done is skipped, what was interrupted goes on, and what others
train is waited for.
"""

import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from qkablate.disk import append
from qkablate.errors import UserError
from qkablate.runs import predictions
from qkablate.runs.lease import Lost, Owned
from qkablate.runs.run import free_bytes
from qkablate.sweeps.engines import DELIBERATE, LOG, LOST, OWNED, Ended, Engine, Task
from qkablate.sweeps.planning.manifest import Manifest
from qkablate.sweeps.running import results_table
from qkablate.sweeps.running.progress_table import Board
from qkablate.sweeps.running.state import ENDED, Standing, State, link
from qkablate.table import counted
from qkablate.training.checkpoint import bytes_needed
from qkablate.training.ending import record_failure
from qkablate.training.resolve import plan

_SCAN = 4  # looks at the engine for one at everything
_PAUSE = 15.0  # seconds between two tables of results
# A process that was ended from outside can go on; one that died of itself would die again.
_FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_HEARD = 0.5  # seconds until a signal is
_MOVES = 5  # times that one run goes on elsewhere without having got further


class Launcher:
    """One sitting at a sweep, perhaps beside others."""

    def __init__(
        self,
        manifest: Manifest,
        engine: Engine,
        board: Board,
        *,
        retry_failed: bool = False,
        stop_on_failure: bool = False,
    ) -> None:
        self.manifest, self.engine, self.board = manifest, engine, board
        self.standing = Standing(manifest)
        self._stop_on_failure = stop_on_failure
        self._here: dict[str, State] = {}  # what runs here
        self._tried: set[str] = set()  # what this launcher has had its try at
        self._moves: Counter[str] = Counter()  # how often a run has lost its machine
        self._steps: dict[str, int] = {}  # and how far it had come
        self._alone = ""  # the run that has the machine for itself
        self._had_alone: set[str] = set()
        self._stopped = ""  # why nothing more is started
        self._linked: set[str] = set()  # what is shown in the sweep's folder
        self._written = 0.0  # when the table of results was
        self._signal = self._signals = 0  # the last one, and how many
        self.standing.look()
        if retry_failed:
            self._again = {s.run.id for s in self._all() if s.status == "failed"}
        else:
            self._again = set()

    def run(self) -> int:
        """The exit code."""
        with self.standing.launching():
            return self._run()

    def _run(self) -> int:
        rounds = 0
        self._adopt()
        self.board.show(self.standing)
        with self._listening():
            try:
                while True:
                    self._obey()
                    if rounds % _SCAN == 0:
                        self.standing.look()
                    self._start_what_can_be()
                    self._look_here()
                    self.board.show(self.standing)
                    if not self._here and (self._stopped or not self._elsewhere()):
                        break
                    ended = self._ended()
                    for one in ended:
                        self._note_end(one)
                    rounds = 0 if ended else rounds + 1
            finally:
                self.engine.close()
        self.standing.look()
        self.board.show(self.standing)
        self._write_results()
        if self._signal:
            return 128 + self._signal
        finished = all(state.status in ("done", "diverged") for state in self._all())
        return 0 if finished and self.standing.expected() == len(self.standing.states) else 1

    @property
    def trained(self) -> bool:
        """Whether anything ran here."""
        return bool(self._tried)

    def _all(self) -> list[State]:
        return list(self.standing.states.values())

    def _adopt(self) -> None:
        """Take over what an earlier launcher has left with the engine."""
        able = [id for id, state in self.standing.states.items() if state.status not in ENDED]
        for id in self.engine.adopt(able):
            self._await(self.standing.states[id])
        if self._here:
            self.board.note(f"{counted(len(self._here), 'run')} with the engine since before")

    def _ended(self) -> list[Ended]:
        """Wait for the engine; but a signal is heard at once."""
        until = time.monotonic() + self.engine.pause
        signals = self._signals
        while True:
            ended = self.engine.ended(min(_HEARD, self.engine.pause))
            if ended or signals != self._signals or time.monotonic() >= until:
                return ended

    def _look_here(self) -> None:
        self.standing.queued = set(self.engine.queued())
        for state in self._here.values():
            self.standing.look_at(state)

    def _start_what_can_be(self) -> None:
        for state, packed in self._next():
            if not self._has_room(state):
                return
            self._start(state, packed)
            if self._stopped or self._signals or len(self._here) >= self.engine.slots:
                return

    def _next(self) -> Iterator[tuple[State, int]]:
        """What can be started, the largest first, and how many will share the machine; what ran
        out of memory comes last, alone. There may be thousands: all are looked at once.
        """
        full = self._stopped or self._signals or len(self._here) >= self.engine.slots
        if full or self._alone in self._here:
            return
        able = [state for state in self._all() if self._is_startable(state)]
        beside = [state for state in able if not _ran_out_of_memory_beside_others(state)]
        if beside:
            arms = self.manifest.arms
            running = (state.run.id for state in self._all() if state.status == "running")
            elsewhere = sum(id not in self._here for id in running)
            here = min(self.engine.slots, len(able) + len(self._here))
            packed = here + elsewhere if self.engine.shares else 1
            beside.sort(key=lambda state: -arms[state.run.arm].work)
            yield from ((state, packed) for state in beside)
        elif able and not self._here:
            yield able[0], 1

    def _is_startable(self, state: State) -> bool:
        id = state.run.id
        if id in self._here or state.status == "running":
            return False
        if state.status == "failed":
            alone = _ran_out_of_memory_beside_others(state) and id not in self._had_alone
            return id in self._again or alone
        return state.status in ("waiting", "interrupted") and id not in self._tried

    def _start(self, state: State, packed: int) -> None:
        id = state.run.id
        self.standing.look_at(state)
        if not self._is_startable(state):  # another launcher was here since
            return
        if _ran_out_of_memory_beside_others(state) and packed == 1:
            self._alone = id
            self._had_alone.add(id)
            self.board.note(f"again, alone: {state.run.label} ran out of memory beside others")
        self._again.discard(id)
        retry = state.status == "failed"
        config = self.manifest.config_of(state.run)
        self.engine.start(Task(id, state.folder, config, packed, retry))
        self._await(state)

    def _await(self, state: State) -> None:
        id = state.run.id
        self._tried.add(id)
        self._here[id] = state
        self.standing.here.add(id)
        state.status, state.row, state.reason = "running", None, ""

    def _note_end(self, ended: Ended) -> None:
        state = self._here.pop(ended.id)
        self.standing.here.discard(ended.id)
        self.standing.queued.discard(ended.id)
        state.reason = ""
        self.standing.look_at(state)
        if ended.code in (OWNED, LOST):
            self._tried.discard(ended.id)  # its owner may die yet
            return
        if state.step > self._steps.get(ended.id, 0):  # it gets on, if not at one go
            self._steps[ended.id], self._moves[ended.id] = state.step, 0
        moved = ended.gone and state.status not in ENDED and self._moves[ended.id] < _MOVES
        if moved and not self._stopped and not self._signals:
            self._moves[ended.id] += 1
            self._tried.discard(ended.id)
            self.board.note(f"again, elsewhere: {state.run.label}: {ended.gone}")
            return
        if state.status not in ENDED and not self._stopped and not self._signals:
            self._note_death(state, ended)
        again = _ran_out_of_memory_beside_others(state)
        if state.status == "failed" and self._stop_on_failure and not again:
            self._stop(f"{state.run.label} failed, and on_failure=stop")
        if time.monotonic() - self._written > _PAUSE:
            self._write_results()

    def _note_death(self, state: State, ended: Ended) -> None:
        """The process is gone and has left no result: a failure, if it died of itself."""
        if ended.code in DELIBERATE:
            return  # it has said why
        if ended.gone:
            state.reason = ended.gone
        elif ended.code < 0:
            state.reason = f"its process was ended by {signal.Signals(-ended.code).name}"
        elif ended.code != 1 or not state.reason:  # 1: an exception, the last line of its log
            state.reason = f"its process ended with code {ended.code}"
        with suppress(OSError), open(append(state.folder / LOG), "a", encoding="utf-8") as log:
            log.write(f"{state.reason}\n")  # for others who look
        if ended.out_of_memory or not (ended.gone or -ended.code in _FROM_OUTSIDE):
            reason = "out of memory" if ended.out_of_memory else state.reason
            alone = self._alone == ended.id or not self.engine.shares
            packed = 1 if alone else self.engine.slots
            with suppress(Owned, Lost, UserError, OSError):  # a full disk: it is interrupted
                config = self.manifest.config_of(state.run)
                planned = plan(config, elsewhere=self.engine.elsewhere)
                if planned.run.id != ended.id:  # here it would be computed in another way
                    return
                record_failure(planned, reason, out_of_memory=ended.out_of_memory, packed=packed)
            self.standing.look_at(state)

    def _write_results(self) -> None:
        try:
            for state in self._all():
                if state.run.id not in self._linked and link(self.manifest, state):
                    self._linked.add(state.run.id)
            results_table.write(self.standing)
            self._written = time.monotonic()
        except OSError as error:  # they can be made again at any moment
            self.board.note(f"results: {error}")

    def _elsewhere(self) -> bool:
        """Whether other processes are still at work on this sweep, or anything can be started."""
        return any(state.status == "running" or self._is_startable(state) for state in self._all())

    def _has_room(self, state: State) -> bool:
        """Whether the disk can take what the run writes."""
        arm = self.manifest.arms[state.run.arm]
        need = bytes_needed(arm.total_params) + predictions.bytes_needed(arm.config)
        out = Path(self.manifest.out).expanduser()
        free = free_bytes(out)
        if free >= need:
            return True
        self._stop(
            f"'{out}' has {free / 2**20:,.0f} MB free, and {state.run.label} needs"
            f" {need / 2**20:,.0f} MB"
        )
        return False

    def _stop(self, why: str) -> None:
        self._stopped = why
        self.board.note(f"stopping: {why}; what runs writes a checkpoint")
        self.engine.stop(now=False)

    def _obey(self) -> None:
        """Do what a signal asks for: an end, or, asked twice, an end at once."""
        if self._signals and not self._stopped.startswith("SIG"):
            again = " (Ctrl-C again: at once)" if self._signal == signal.SIGINT else ""
            self._stop(f"{signal.Signals(self._signal).name}{again}")
        if self._signals > 1:
            self.engine.stop(now=True)

    @contextmanager
    def _listening(self) -> Iterator[None]:
        def handle(number: int, frame: Any) -> None:  # may come in the middle of anything
            self._signal, self._signals = number, self._signals + 1

        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _ran_out_of_memory_beside_others(state: State) -> bool:
    """Such a run is tried once more, with the machine for itself."""
    result = state.result or {}
    return bool(result.get("out_of_memory")) and result["packed"] > 1
