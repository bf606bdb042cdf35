"""W&B's own process, one for many runs: to start it takes each run longer than to be mirrored."""

import contextlib
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

# What the server does not hear that forks what a launcher starts; who is forked hears it again.
UNHEARD = {signal.SIGINT, signal.SIGTERM}
VARIABLE = "WANDB_SERVICE"  # where W&B looks for a process that is there already


def stay_within(folder: Path) -> None:
    """W&B keeps logs of its own in a cache folder; nothing is written outside this one."""
    for what in ("CACHE", "DATA"):
        os.environ.setdefault(f"WANDB_{what}_DIR", str(folder / what.lower()))
    # Its reports of its own errors keep the process waiting at the end when the server is gone.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")


def keep(folder: Path, found: Connection, others: Connection) -> None:
    """Start it, tell where it is, and keep it until none of the others is left: nobody ever writes
    to that connection, so that it ends with the last of them.
    """
    os.setsid()  # Ctrl-C in the terminal is not for us: runs have something to tell yet
    signal.pthread_sigmask(signal.SIG_UNBLOCK, UNHEARD)  # unlike who has forked us
    stay_within(folder / "wandb")
    address = ""
    with contextlib.suppress(Exception, SystemExit):  # without it each run starts its own
        import wandb

        wandb.setup(wandb.Settings(silent=True))
        address = os.environ.get(VARIABLE, "")
    with contextlib.suppress(OSError):
        found.send(address)
    with contextlib.suppress(EOFError, OSError):
        others.recv_bytes()
    with contextlib.suppress(Exception, SystemExit):
        wandb.teardown()
