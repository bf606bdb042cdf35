"""Branches of the runs of a sweep: at which a run begins, whether it waits, when they go."""

import shutil
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress

from qkablate.runs.prefix import (
    FOLDER,
    NO_BRANCHING,
    Branching,
    Prefix,
    branch_path,
    find_branch,
    find_branches,
)
from qkablate.sweeps.planning.manifest import Manifest
from qkablate.sweeps.prefixes import find_run_prefix
from qkablate.sweeps.running.state import ENDED, RunState


class SharedPrefixes:
    """The runs of a sweep by prefix; they are added as the sweep comes to know them."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._prefixes: dict[str, Prefix | None] = {}  # by the run's id
        self._groups: dict[str, list[RunState]] = defaultdict(list)  # by prefix id

    def add(self, states: list[RunState]) -> None:
        """Add the states of runs that are not known yet."""
        for state in states:
            id = state.run.id
            if id not in self._prefixes:
                self._prefixes[id] = prefix = find_run_prefix(self.manifest, state.run)
                if prefix is not None:
                    self._groups[prefix.id].append(state)

    def must_wait(self, state: RunState, is_open: Callable[[RunState], bool]) -> bool:
        """Return whether a longer run will still come to where this one can branch off.

        `is_open` says whether a run waits to be started. A run that has passed that step keeps a
        branch there or never will.
        """
        prefix = self._prefixes[state.run.id]
        if prefix is None:
            return False
        longer = self._longer(state, prefix)
        is_coming = any(
            is_open(other) or (other.status == "running" and other.step <= prefix.steps)
            for other in longer
        )
        if not is_coming or not _needs_branch(state):
            return False
        return not any(branch_path(other.folder, prefix.steps).exists() for other in longer)

    def plan_branching(self, state: RunState) -> Branching:
        """Return where a run begins, and the lengths for which it keeps branches."""
        prefix = self._prefixes[state.run.id]
        if prefix is None:
            return NO_BRANCHING
        group = self._groups[prefix.id]
        lengths = {self._steps(s) for s in self._shorter(state, prefix) if _needs_branch(s)}
        if not self._longer(state, prefix):
            lengths.add(self._steps(state))
        others = [other.folder for other in group if other is not state]
        return Branching(find_branch(others, prefix), tuple(sorted(lengths)))

    def remove_branches(self, state: RunState | None = None) -> None:
        """Remove the branches that no run needs, of those with this one's prefix or of all.

        The longest run keeps that of its own length, to be extended.
        """
        prefixes = self._prefixes.values() if state is None else [self._prefixes[state.run.id]]
        for id in {prefix.id for prefix in prefixes if prefix is not None}:
            for member in self._groups[id]:
                self._remove_branches(member)

    def _remove_branches(self, state: RunState) -> None:
        prefix = self._prefixes[state.run.id]
        assert prefix is not None
        waiting = {self._prefix_steps(s) for s in self._shorter(state, prefix) if _needs_branch(s)}
        kept = waiting | (set() if self._longer(state, prefix) else {prefix.steps})
        with suppress(OSError):  # of a run that another user owns
            for path in find_branches(state.folder):
                if path not in {branch_path(state.folder, step) for step in kept}:
                    hidden = path.with_name(f".{path.name}.tmp")  # never half a branch
                    path.rename(hidden)
                    shutil.rmtree(hidden)
            if not waiting and not (state.folder / FOLDER).is_symlink():
                shutil.rmtree(state.folder / FOLDER / "predictions", ignore_errors=True)

    def _steps(self, state: RunState) -> int:
        return int(self.manifest.arms[state.run.arm].config.train.steps)

    def _prefix_steps(self, state: RunState) -> int:
        prefix = self._prefixes[state.run.id]
        assert prefix is not None
        return prefix.steps

    def _longer(self, state: RunState, prefix: Prefix) -> list[RunState]:
        group, steps = self._groups[prefix.id], self._steps(state)
        return [other for other in group if self._steps(other) > steps]

    def _shorter(self, state: RunState, prefix: Prefix) -> list[RunState]:
        group, steps = self._groups[prefix.id], self._steps(state)
        return [other for other in group if self._steps(other) < steps]


def _needs_branch(state: RunState) -> bool:
    """Return whether a run has not begun to be trained."""
    has_begun = any((state.folder / "checkpoints").glob("step-*"))
    return state.status not in ENDED and not has_begun
