"""The process of one run: from its frozen config to its result, with a log beside it.

A local launcher forks it (`work`). Elsewhere it is the command
`python -m qkablate.sweeps.running.worker`:
one line of standard input is the task, and the input's end says that nobody waits any more.
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

from qkablate.disk import append, make_folder
from qkablate.errors import UserError, tell
from qkablate.redaction import redacted
from qkablate.runs.lease import Lost, Observer, Owned
from qkablate.runs.run import EXIT_CODES
from qkablate.sweeps.engines import LOG, LOST, OWNED, Task
from qkablate.tracking.wandb import service
from qkablate.training import session
from qkablate.training.resolve import plan
from qkablate.training.signals import Stopped


def work(
    task: Task, gpu: str | None, lifeline: Connection, wandb: str, keeper: Connection | None
) -> None:
    """Train the run, and exit as it went. `wandb` is where W&B's process is, which stays as long as
    anybody has the `keeper`.
    """
    os.setsid()  # Ctrl-C in the terminal is for the launcher, which passes it on
    signal.pthread_sigmask(signal.SIG_UNBLOCK, service.UNHEARD)  # unlike the server
    if wandb:
        os.environ[service.VARIABLE] = wandb
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    sys.exit(_logged(task, lifeline.recv_bytes))


def main() -> None:
    """The same, of a task that comes from another machine."""
    task = Task.from_json(sys.stdin.readline())
    sys.exit(_logged(task, sys.stdin.readline))


def _logged(task: Task, wait: Callable[[], object]) -> int:
    """Train it, with all it says in a file; what ends the `wait` is the end of the launcher."""
    make_folder(task.folder)
    log = append(task.folder / LOG)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    # tqdm's own lock is one between processes, and would bring a process of its own to watch it.
    tqdm.set_lock(threading.RLock())
    threading.Thread(target=_end_with_launcher, args=(wait,), daemon=True).start()
    return _train(task)


def _train(task: Task) -> int:
    try:
        planned = plan(task.config)
        if planned.run.id != task.id:
            raise UserError(
                f"this run would be {planned.run.id} now, not {task.id}: data, circuits or this"
                " program have changed since the sweep was frozen"
            )
        observer = Observer()
        observer.settle(task.folder)  # a claim of another machine: the launcher saw it stand still
        outcome = session.run(planned, packed=task.packed, retry=task.retry, observer=observer)
        return EXIT_CODES[outcome.result["status"]]
    except Owned as owned:
        tell(str(owned))
        return OWNED
    except Lost as lost:
        tell(str(lost))
        return LOST
    except Stopped as stopped:
        return stopped.exit_code
    except UserError as mistake:
        tell(f"qkablate: {mistake}")
        return 2
    except Exception:
        print(redacted(traceback.format_exc()), file=sys.stderr)
        return 1


def _end_with_launcher(wait: Callable[[], object]) -> None:
    """The launcher never writes; what ends the wait is its own end."""
    with suppress(EOFError, OSError):
        wait()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
