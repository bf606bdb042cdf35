"""The state of a sweep, read from its runs' folders: the same for launchers and other readers."""

import os
import secrets
import shutil
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkablate.disk import link_atomic, read_file
from qkablate.runs.lease import LeaseObserver, hold_lease
from qkablate.runs.records import decode_row, read_result
from qkablate.sweeps.engines.base import LOG_FILE, read_last_line
from qkablate.sweeps.planning.manifest import Manifest, SweepRun
from qkablate.sweeps.planning.tuning import LrSearch, Searches, next_runs
from qkablate.sweeps.prefixes import count_trained_steps

ENDED = ("done", "diverged", "failed")
STATUSES = ("done", "running", "waiting", "interrupted", "diverged", "failed")
_TAIL = 4096  # bytes of metrics.jsonl that usually hold the newest rows
_MAX_TAIL = 2**22  # bytes, where diagnostics follow them


@dataclass
class RunState:
    """The state of one run."""

    run: SweepRun
    folder: Path
    status: str = "waiting"
    result: Mapping[str, Any] | None = None
    metrics: Mapping[str, Any] | None = None  # the newest value of each, while it runs
    reason: str = ""  # why it is not done

    @property
    def step(self) -> int:
        return int((self.metrics or {}).get("step", 0))

    @property
    def tokens_per_second(self) -> float:
        return float((self.metrics or {}).get("perf/tokens_per_second", 0))


class SweepState:
    """The states of a sweep's runs; `refresh` reads what may have changed."""

    def __init__(self, manifest: Manifest, observer: LeaseObserver | None = None) -> None:
        self.manifest = manifest
        self.shares_prefix = True  # runs branch off longer ones, unless the launcher is told not to
        self._runs = Path(manifest.out).expanduser() / "runs"
        self.states = {run.id: RunState(run, self._runs / run.name) for run in manifest.runs}
        self.lr_searches: list[LrSearch] = []
        self.own_ids: set[str] = set()  # runs of this launcher, which may have written nothing yet
        self.queued_ids: set[str] = set()  # those among them in a queue of the engine
        self._launchers = manifest.folder / "launchers"
        self._folders: dict[str, str] = {}  # names of the runs' folders, by id
        self._finished_searches: Searches = {}
        self._counted = 0
        self._parts: Mapping[str, float] = {}
        self.observer = observer or LeaseObserver()

    def refresh(self) -> None:
        """Read all runs whose state may have changed."""
        try:
            names = os.listdir(self._runs)
        except OSError:
            names = []
        self._folders = {name.rpartition("-")[2]: name for name in names}
        for state in list(self.states.values()):
            if state.run.id in self._folders or state.run.id in self.own_ids:
                if state.status not in ("done", "diverged"):
                    self.refresh_run(state)
            else:  # thousands may wait
                state.status, state.result, state.metrics = "waiting", None, None
        if self.manifest.finals:
            before = -1
            while before != len(self.states):  # an existing result may decide what comes next
                before = len(self.states)
                runs, self.lr_searches = next_runs(
                    self.manifest, self._find_result, self._finished_searches
                )
                for run in runs:
                    self._find_result(run)

    @contextmanager
    def register_launcher(self) -> Iterator[None]:
        """Show to others that this process runs the sweep."""
        # Containers that share the name of their host have equal process ids, too.
        own = self._launchers / f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._remove_killed_launchers()
        try:
            with hold_lease(own):
                yield
                # By now it is known of those on other machines, or from before a reboot, too.
                self._remove_killed_launchers()
        finally:
            shutil.rmtree(own, ignore_errors=True)

    def launcher_folders(self) -> list[Path]:
        """Return the folders of all launchers, also of those that were killed."""
        return sorted(self._launchers.glob("*"))

    def _remove_killed_launchers(self) -> None:
        for folder in self.launcher_folders():
            # One without a lease may be about to take it.
            if any(folder.glob("lease/[0-9]*")) and not self.observer.is_leased(folder):
                shutil.rmtree(folder, ignore_errors=True)

    def is_running(self) -> bool:
        """Return whether any launcher runs the sweep now."""
        return any(map(self.observer.is_leased, self.launcher_folders()))

    def refresh_run(self, state: RunState) -> None:
        """Read one run. Its id identifies the folder, whatever the label in its name."""
        id = state.run.id
        folder = state.folder = self._runs / self._folders.get(id, state.folder.name)
        try:
            if id in self.queued_ids:
                state.status, state.metrics, state.reason = "waiting", None, ""
            elif id in self.own_ids:  # a result may be of an earlier attempt
                state.status, state.metrics, state.reason = "running", latest_metrics(folder), ""
            else:
                read_run(state, self.observer)
        except OSError as error:  # not a run's folder, or not readable
            state.status, state.reason = "waiting", str(error)

    def expected_runs(self) -> int:
        """Return how many runs there will be, as far as is known."""
        return len(self.states) + len(self._open_arms()) * len(self.manifest.finals)

    def status_counts(self) -> Counter[str]:
        """Return the number of runs by status; those not known yet are waiting."""
        counts = Counter(state.status for state in self.states.values())
        counts["waiting"] += self.expected_runs() - len(self.states)
        return counts

    def is_finished(self) -> bool:
        """Return whether every run is done or has diverged."""
        counts = self.status_counts()
        return counts["done"] + counts["diverged"] == self.expected_runs()

    def tokens_per_second(self) -> float:
        return sum(s.tokens_per_second for s in self.states.values() if s.status == "running")

    def seconds_left(self) -> float | None:
        """Estimate the time left, at the past speed with as many runs in parallel as now.

        Runs that branch off a longer one are taken to train the steps after it alone.
        """
        flops_done = seconds = flops_left = speed = 0.0
        running, parts = 0, self._trained_parts()
        for state in self.states.values():
            arm = self.manifest.arms[state.run.arm]
            if state.status in ("done", "diverged") and state.result is not None:
                flops_done += arm.flops * state.result["tokens"]
                seconds += state.result["seconds"]
            elif state.status != "failed":
                left = 1 - state.step / int(arm.config.train.steps)
                flops_left += arm.train_flops * min(left, parts.get(state.run.id, 1.0))
            if state.status == "running":
                running += 1
                speed += state.tokens_per_second * arm.flops
        for name in self._open_arms():
            flops_left += len(self.manifest.finals) * self.manifest.arms[name].train_flops
        if running == 0 or flops_left <= 0:
            return 0.0 if flops_left <= 0 else None
        speed = running * flops_done / seconds if seconds else speed
        return flops_left / speed if speed else None

    def _trained_parts(self) -> Mapping[str, float]:
        """Return which part of a run that branches off is trained, of all runs known by now."""
        if not self.shares_prefix:
            return {}
        if len(self.states) != self._counted:
            runs = [state.run for state in self.states.values()]
            self._parts = count_trained_steps(self.manifest, runs).fractions
            self._counted = len(runs)
        return self._parts

    def _open_arms(self) -> list[str]:
        """Return the arms whose learning rate is not chosen yet."""
        return [search.arm for search in self.lr_searches if search.state in ("tuning", "stuck")]

    def _find_result(self, run: SweepRun) -> Mapping[str, Any] | None:
        """Return the result of a run, which is added to the states if it is new."""
        if run.id not in self.states:
            self.states[run.id] = RunState(run, self._runs / run.name)
            self.refresh_run(self.states[run.id])
        return self.states[run.id].result


def read_run(state: RunState, observer: LeaseObserver) -> None:
    """Read the state of a run from its folder."""
    folder = state.folder
    result = read_result(folder)
    state.result = result if result and result.get("id") == state.run.id else None
    if state.result is not None:
        state.status, state.metrics, state.reason = state.result["status"], None, ""
        if state.status == "failed":
            state.reason = str(state.result.get("error"))
        elif state.status == "diverged":
            state.reason = f"not finite at step {state.result['diverged_at']}"
    elif observer.is_leased(folder):
        state.status, state.metrics, state.reason = "running", latest_metrics(folder), ""
    elif (folder / "config.yaml").exists():
        state.status, state.metrics = "interrupted", latest_metrics(folder)
        state.reason = state.reason or last_log_line(folder)
    else:
        state.status, state.reason = "waiting", state.reason or last_log_line(folder)


def latest_metrics(folder: Path) -> dict[str, Any]:
    """Return the newest value of each metric."""
    tail, lines = _TAIL, list[bytes]()
    try:
        while True:  # past the diagnostics, which are long and show no progress
            content = read_file(folder / "metrics.jsonl", tail)
            is_whole = len(content) < tail
            lines = content.splitlines()[not is_whole :]
            lines = [line for line in lines if b'"diagnostics"' not in line]
            if is_whole or tail >= _MAX_TAIL or sum(map(len, lines)) >= _TAIL // 2:
                break
            tail *= 8
    except OSError:
        return {}
    metrics: dict[str, Any] = {}
    for line in lines:
        try:
            metrics |= decode_row(line)
        except ValueError:
            continue  # cut by the tail, half-written or damaged
    return metrics


def last_log_line(folder: Path) -> str:
    """Return the last line that the run's process has printed."""
    return read_last_line(folder / LOG_FILE).removeprefix("qkablate: ")


def link_run(manifest: Manifest, state: RunState) -> bool:
    """Link a run into the sweep's folder; return whether it exists."""
    path = manifest.folder / "runs" / state.folder.name
    if path.is_symlink():
        return True
    if not state.folder.exists():
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    link_atomic(path, state.folder)
    return True
