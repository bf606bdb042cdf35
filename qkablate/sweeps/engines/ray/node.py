"""What stands on a Ray cluster's nodes. It is sent there by value: only when the launcher's paths
are known does it import anything of this program.
"""

from typing import Any


def look(paths: list[str], cwd: str, token: str) -> tuple[str, str]:
    """What keeps a node from training: of which kind it is, and what. Empty where nothing does."""
    import os
    import sys

    sys.path[:0] = [path for path in paths if path not in sys.path]
    if not os.path.isdir(cwd):
        return "folder", f"has no folder '{cwd}', in which the sweep was started"
    if not os.path.exists(token):
        return "out", f"does not see the sweep's folder '{os.path.dirname(token)}'"
    try:
        import qkablate
    except ImportError as error:
        return "program", f"cannot import qkablate: {error}"
    return "", qkablate.__version__


class Host:
    """A place for a run, on some node: it trains one, then perhaps another."""

    def __init__(self, given: tuple[list[str], str, dict[str, str]]) -> None:
        import sys

        paths, cwd, environment = given
        sys.path[:0] = [path for path in paths if path not in sys.path]
        self._cwd, self._environment = cwd, environment
        self._child: Any = None
        self._stopped = False

    def begin(self) -> None:
        """It answers as soon as Ray has given it a node."""

    def train(self, line: str) -> tuple[int, bool]:
        """How the run's process ended, and whether the system wanted its memory."""
        from qkablate.sweeps.engines import Task
        from qkablate.sweeps.engines.remote import Sheltered

        child = self._child = Sheltered(Task.from_json(line), self._cwd, self._environment)
        if self._stopped:  # meanwhile
            child.terminate()
        return child.wait(), child.starved()

    def stop(self, now: bool) -> None:
        """Let the run write a checkpoint, or not even that."""
        self._stopped = True
        if self._child is not None:
            self._child.kill() if now else self._child.terminate()
