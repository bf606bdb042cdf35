"""W&B's service process, shared by many runs: starting one per run would be slow."""

import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

# Signals blocked in the fork server of a launcher; the processes it forks unblock them.
BLOCKED_SIGNALS = {signal.SIGINT, signal.SIGTERM}
SERVICE_VARIABLE = "WANDB_SERVICE"  # W&B finds a running service by it


_ours: dict[str, str] = {}  # variables that this process has set; other values are the user's


def keep_files_in(folder: Path) -> None:
    """Make W&B write its own logs and caches in this folder only, until the next call."""
    for what in ("CACHE", "DATA"):
        name = f"WANDB_{what}_DIR"
        if os.environ.get(name) in (None, _ours.get(name)):
            os.environ[name] = _ours[name] = str(folder / what.lower())
    # Its error reports would delay the exit of the process when the server is gone.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")


def users_environment() -> dict[str, str]:
    """Return the variables of this process without those of its own runs in W&B.

    With them, runs of another process would share its service and write in the folders of its runs.
    """
    ours = {name for name, value in _ours.items() if os.environ.get(name) == value}
    return {k: v for k, v in os.environ.items() if k not in ours and k != SERVICE_VARIABLE}


@contextlib.contextmanager
def temporary_files_in(folder: Path) -> Iterator[None]:
    """Make temporary files of this process in a folder, for as long as the context lasts."""
    before = tempfile.tempdir
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.tempdir = str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before


def run_service(folder: Path, answer: Connection, clients: Connection) -> None:
    """Start W&B's service, send its address, and keep it until all clients are gone.

    Nothing is ever written to `clients`: it is closed when the last client exits.
    """
    os.setsid()  # Ctrl-C must not end the service before the runs have logged their end
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_SIGNALS)  # unlike the fork server
    keep_files_in(folder / "wandb")
    address = ""
    with contextlib.suppress(Exception, SystemExit):  # without it every run starts its own
        import wandb

        wandb.setup(wandb.Settings(silent=True))
        address = os.environ.get(SERVICE_VARIABLE, "")
    with contextlib.suppress(OSError):
        answer.send(address)
    with contextlib.suppress(EOFError, OSError):
        clients.recv_bytes()
    with contextlib.suppress(Exception, SystemExit):
        wandb.teardown()
