"""The process of one run: it trains a frozen config, with its output in a log.

A local launcher forks it (`run_worker`). On other machines it is the command
`python -m qkablate.sweeps.running.worker`: one line of standard input is the task, and the end of
the input means that the launcher is gone.
"""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

from tqdm import tqdm

from qkablate.disk import make_folder, open_append
from qkablate.errors import UserError, print_stderr
from qkablate.redaction import redact
from qkablate.runs.lease import AlreadyRunning, LeaseLost, LeaseObserver
from qkablate.runs.run import EXIT_CODES
from qkablate.sweeps.engines.base import EXIT_ALREADY_RUNNING, EXIT_LEASE_LOST, LOG_FILE, RunTask
from qkablate.tracking.wandb import service
from qkablate.training import session
from qkablate.training.resolve import plan_run
from qkablate.training.signals import Stopped


def run_worker(
    task: RunTask, gpu: str | None, lifeline: Connection, wandb: str, keeper: Connection | None
) -> None:
    """Train the run and exit with its code.

    `wandb` is the address of W&B's process, which lives as long as anybody holds the `keeper`.
    """
    os.setsid()  # Ctrl-C in the terminal is for the launcher, which forwards it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, service.BLOCKED_SIGNALS)  # blocked in the server
    if wandb:
        os.environ[service.SERVICE_VARIABLE] = wandb
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    sys.exit(_train_logged(task, lifeline.recv_bytes))


def main() -> None:
    """Train the run that standard input describes."""
    task = RunTask.from_json(sys.stdin.readline())
    sys.exit(_train_logged(task, sys.stdin.readline))


def _train_logged(task: RunTask, wait: Callable[[], object]) -> int:
    """Train with the output in a log, until `wait` returns: then the launcher is gone."""
    make_folder(task.folder)
    log = open_append(task.folder / LOG_FILE)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    # tqdm's own lock is shared between processes, and would start a process to track it.
    tqdm.set_lock(threading.RLock())
    threading.Thread(target=_stop_with_launcher, args=(wait,), daemon=True).start()
    return _train(task)


def _train(task: RunTask) -> int:
    try:
        planned = plan_run(task.config)
        if planned.run.id != task.id:
            raise UserError(
                f"this run would be {planned.run.id} now, not {task.id}: data, circuits or this"
                " program have changed since the sweep was frozen"
            )
        observer = LeaseObserver()
        observer.wait_until_sure(task.folder)  # the launcher saw no heartbeat of another machine
        outcome = session.train_run(
            planned, packed=task.packed, retry=task.retry, observer=observer
        )
        return EXIT_CODES[outcome.result["status"]]
    except AlreadyRunning as error:
        print_stderr(str(error))
        return EXIT_ALREADY_RUNNING
    except LeaseLost as error:
        print_stderr(str(error))
        return EXIT_LEASE_LOST
    except Stopped as stopped:
        return stopped.exit_code
    except UserError as error:
        print_stderr(f"qkablate: {error}")
        return 2
    except Exception:
        print(redact(traceback.format_exc()), file=sys.stderr)
        return 1


def _stop_with_launcher(wait: Callable[[], object]) -> None:
    """Stop once the wait for the launcher ends; the launcher never writes."""
    with suppress(EOFError, OSError):
        wait()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
