"""The death of a run's process without a result: its reason, and a failure where it crashed."""

import signal
from contextlib import suppress

from qkablate.disk import open_append
from qkablate.errors import UserError
from qkablate.runs.lease import AlreadyRunning, LeaseLost
from qkablate.sweeps.engines.base import EXPECTED_EXITS, LOG_FILE, RunExit
from qkablate.sweeps.planning.manifest import Manifest
from qkablate.sweeps.running.state import RunState
from qkablate.training.resolve import plan_run
from qkablate.training.result import record_failure

# A process killed from outside can be resumed; one that crashed would crash again.
_EXTERNAL_SIGNALS = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def record_death(
    manifest: Manifest, state: RunState, exit: RunExit, *, packed: int, is_remote: bool
) -> bool:
    """Set the state's reason and log it; return whether the run was recorded as failed."""
    if exit.code in EXPECTED_EXITS:
        return False  # it has given the reason itself
    if exit.requeue_reason:
        state.reason = exit.requeue_reason
    elif exit.code < 0:
        state.reason = f"its process was ended by {signal.Signals(-exit.code).name}"
    elif exit.code != 1 or not state.reason:  # 1: an exception, the last line of its log
        state.reason = f"its process ended with code {exit.code}"
    with (
        suppress(OSError),
        open(open_append(state.folder / LOG_FILE), "a", encoding="utf-8") as log,
    ):
        log.write(f"{state.reason}\n")  # for other readers
    is_external = exit.requeue_reason or -exit.code in _EXTERNAL_SIGNALS
    if is_external and not exit.out_of_memory:
        return False
    reason = "out of memory" if exit.out_of_memory else state.reason
    # With a full disk, or where another launcher trains it, the run stays interrupted.
    with suppress(AlreadyRunning, LeaseLost, UserError, OSError):
        planned = plan_run(manifest.config_of(state.run), remote=is_remote)
        if planned.run.id != exit.id:  # this machine would compute it in another way
            return False
        record_failure(planned, reason, out_of_memory=exit.out_of_memory, packed=packed)
    return True
