"""Where a sweep stands, read from its runs' folders: the same for its launcher, another launcher,
and anyone who looks.
"""

import os
import shutil
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkablate.disk import read_file
from qkablate.runs.lease import Observer, owning
from qkablate.runs.records import read_result, read_row
from qkablate.sweeps.engines import LOG
from qkablate.sweeps.planning.manifest import Manifest, SweepRun
from qkablate.sweeps.planning.tuning import Bowl, further

ENDED = ("done", "diverged", "failed")
STATUSES = ("done", "running", "waiting", "interrupted", "diverged", "failed")
_TAIL = 4096  # bytes of metrics.jsonl that hold the newest rows
_LONGEST_TAIL = 2**22  # where they lie behind others


@dataclass
class State:
    """Of one run."""

    run: SweepRun
    folder: Path
    status: str = "waiting"
    result: Mapping[str, Any] | None = None
    row: Mapping[str, Any] | None = None  # the newest of each metric, while it runs
    reason: str = ""  # why it is not done

    @property
    def step(self) -> int:
        return int((self.row or {}).get("step", 0))


class Standing:
    """The states of a sweep's runs; `look` reads what may have changed."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.states: dict[str, State] = {}
        self.bowls: list[Bowl] = []
        self._launchers = manifest.folder / "launchers"
        self._runs = Path(manifest.out).expanduser() / "runs"
        self.here: set[str] = set()  # what runs in a process of our own, which may not show yet
        self.queued: set[str] = set()  # and what of it waits in a queue of the engine's
        self._there: dict[str, str] = {}  # the folders of runs, by id
        self._settled: dict[str, tuple[list[SweepRun], Bowl]] = {}
        self._observer = Observer()
        for run in manifest.runs:
            self._know(run)

    def look(self) -> None:
        """Read everything that is not settled."""
        try:
            names = os.listdir(self._runs)
        except OSError:
            names = []
        self._there = {name.rpartition("-")[2]: name for name in names}
        for state in list(self.states.values()):
            if state.run.id in self._there or state.run.id in self.here:
                if state.status not in ("done", "diverged"):
                    self.look_at(state)
            else:  # thousands may wait
                state.status, state.result, state.row = "waiting", None, None
        if self.manifest.finals:
            before = -1
            while before != len(self.states):  # what is found may settle what comes next
                before = len(self.states)
                runs, self.bowls = further(self.manifest, self._result, self._settled)
                for run in runs:
                    if run.id not in self.states:
                        self.look_at(self._know(run))

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Be one of those who run the sweep, for others to see."""
        own = self._launchers / f"{socket.gethostname()}-{os.getpid()}"
        for other in self._launchers.glob("*"):
            # It was killed; but one without a claim may be about to make it.
            if any(other.glob("owner/[0-9]*")) and not self._observer.is_owned(other):
                shutil.rmtree(other, ignore_errors=True)
        try:
            with owning(own):
                yield
        finally:
            shutil.rmtree(own, ignore_errors=True)

    def is_run(self) -> bool:
        """Whether anybody runs the sweep now."""
        return any(map(self._observer.is_owned, self._launchers.glob("*")))

    def look_at(self, state: State) -> None:
        try:
            self._look_at(state)
        except OSError as error:  # what stands there is no run, or not ours to read
            state.status, state.reason = "waiting", str(error)

    def _look_at(self, state: State) -> None:
        """Read one run. The id finds its folder: another label makes no other run."""
        folder = state.folder = self._runs / self._there.get(state.run.id, state.folder.name)
        if state.run.id in self.queued:
            state.status, state.row, state.reason = "waiting", None, ""
            return
        if state.run.id in self.here:  # what is there may be of an earlier try
            state.status, state.row, state.reason = "running", newest_row(folder), ""
            return
        read_run(state, self._observer)

    def expected(self) -> int:
        """How many runs there will be, as far as is known."""
        if not self.manifest.finals:
            return len(self.states)
        return len(self.states) + len(self._open_arms()) * len(self.manifest.finals)

    def counts(self) -> Counter[str]:
        found = Counter(state.status for state in self.states.values())
        found["waiting"] += self.expected() - len(self.states)
        return found

    def tokens_per_second(self) -> float:
        """Of all that runs."""
        rows = [state.row or {} for state in self.states.values() if state.status == "running"]
        return sum(float(row.get("perf/tokens_per_second", 0)) for row in rows)

    def seconds_left(self) -> float | None:
        """At the pace so far, with as many side by side as now."""
        work = seconds = left = speed = 0.0
        running = 0
        for state in self.states.values():
            arm = self.manifest.arms[state.run.arm]
            if state.status in ("done", "diverged") and state.result is not None:
                work += arm.flops * state.result["tokens"]
                seconds += state.result["seconds"]
            elif state.status != "failed":
                left += arm.work * (1 - state.step / int(arm.config.train.steps))
            if state.status == "running":
                running += 1
                speed += float((state.row or {}).get("perf/tokens_per_second", 0)) * arm.flops
        left += self._work_to_come()
        if running == 0 or left <= 0:
            return 0.0 if left <= 0 else None
        pace = running * work / seconds if seconds else speed
        return left / pace if pace else None

    def _work_to_come(self) -> float:
        finals = len(self.manifest.finals)
        return sum(finals * self.manifest.arms[name].work for name in self._open_arms())

    def _open_arms(self) -> list[str]:
        """Arms whose learning rate is not chosen yet."""
        return [bowl.arm for bowl in self.bowls if bowl.state in ("tuning", "stuck")]

    def _know(self, run: SweepRun) -> State:
        self.states[run.id] = State(run, self._runs / run.name)
        return self.states[run.id]

    def _result(self, run: SweepRun) -> Mapping[str, Any] | None:
        state = self.states.get(run.id)
        if state is None:
            state = self._know(run)
            self.look_at(state)
        return state.result


def read_run(state: State, observer: Observer) -> None:
    """What the run's folder says."""
    folder = state.folder
    state.result = read_result(folder)
    if state.result is not None and state.result.get("id") != state.run.id:
        state.result = None  # another run's
    if state.result is not None:
        state.status, state.row, state.reason = state.result["status"], None, ""
        if state.status == "failed":
            state.reason = str(state.result.get("error"))
        elif state.status == "diverged":
            state.reason = f"not finite at step {state.result['diverged_at']}"
    elif observer.is_owned(folder):
        state.status, state.row, state.reason = "running", newest_row(folder), ""
    elif (folder / "config.yaml").exists():
        state.status, state.row = "interrupted", newest_row(folder)
        state.reason = state.reason or last_line(folder)
    else:
        state.status, state.reason = "waiting", state.reason or last_line(folder)


def newest_row(folder: Path) -> dict[str, Any]:
    """The newest value of each metric."""
    tail, lines = _TAIL, list[bytes]()
    try:
        while True:  # past the diagnostics, which are long and no progress
            content = read_file(folder / "metrics.jsonl", tail)
            whole = len(content) < tail
            lines = content.splitlines()[not whole :]
            lines = [line for line in lines if b'"mechanism"' not in line]
            if whole or tail >= _LONGEST_TAIL or sum(map(len, lines)) >= _TAIL // 2:
                break
            tail *= 8
    except OSError:
        return {}
    row: dict[str, Any] = {}
    for line in lines:
        try:
            row |= read_row(line)
        except ValueError:
            continue  # cut by our tail, half-written or damaged
    return row


def last_line(folder: Path) -> str:
    """What the run's process said last."""
    try:
        lines = read_file(folder / LOG, _TAIL).decode("utf-8", "replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1].removeprefix("qkablate: ") if lines else ""


def link(manifest: Manifest, state: State) -> bool:
    """Show the run in the sweep's folder; whether it is there to be shown."""
    path = manifest.folder / "runs" / state.folder.name
    if path.is_symlink():
        return True
    if not state.folder.exists():
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    target = os.path.relpath(state.folder.resolve(), path.parent.resolve())
    # Two launchers may come here at once, and one link is enough.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.symlink_to(target)
    temporary.replace(path)
    return True


def duration(seconds: float) -> str:
    """8 s, 3 min 20 s, 2 h 05 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole / 86400:,.1f} days"


def now() -> str:
    return time.strftime("%H:%M:%S")
