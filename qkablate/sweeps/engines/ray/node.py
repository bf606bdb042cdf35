"""Code for the nodes of a Ray cluster, pickled by value: it imports qkablate once paths are set."""

from typing import Any


def check_node(paths: list[str], cwd: str, token: str) -> tuple[str, str]:
    """Return the key at fault and the reason why this node cannot train, or "" and its version."""
    import os
    import sys

    sys.path[:0] = [path for path in paths if path not in sys.path]
    if not os.path.isdir(cwd):
        return "engine", f"has no folder '{cwd}', in which the sweep was started"
    if not os.path.exists(token):
        return "out", f"does not see the sweep's folder '{os.path.dirname(token)}'"
    try:
        import qkablate
    except ImportError as error:
        return "engine", f"cannot import qkablate: {error}"
    return "", qkablate.__version__


class RunActor:
    """A Ray actor with the resources of one run: it trains one run after another."""

    def __init__(self, launcher: tuple[list[str], str, dict[str, str]]) -> None:
        """Adopt the launcher's import paths, working folder and environment variables."""
        import sys

        paths, self._cwd, self._environment = launcher
        sys.path[:0] = [path for path in paths if path not in sys.path]
        self._process: Any = None
        self._stopped = False

    def begin(self) -> None:
        """Return once Ray has placed the actor on a node."""

    def train(self, line: str) -> tuple[int, bool]:
        """Train a run; return its exit code, and whether it was killed to free memory."""
        from qkablate.sweeps.engines.base import RunTask
        from qkablate.sweeps.engines.remote import ShelteredRunProcess

        task = RunTask.from_json(line)
        process = self._process = ShelteredRunProcess(task, self._cwd, self._environment)
        if self._stopped:  # meanwhile
            process.terminate()
        return process.wait(), process.is_out_of_memory()

    def stop(self, now: bool) -> None:
        """Let the run write a checkpoint and exit, or kill it."""
        self._stopped = True
        if self._process is not None:
            self._process.kill() if now else self._process.terminate()
