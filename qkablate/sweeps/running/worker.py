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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from multiprocessing.connection import Connection

from tqdm import tqdm

from qkablate.config import Config
from qkablate.data import TASKS, Data, find_data
from qkablate.disk import make_folder, open_append
from qkablate.errors import UserError, print_stderr
from qkablate.redaction import redact
from qkablate.runs.lease import AlreadyRunning, LeaseLost, LeaseObserver
from qkablate.runs.run import EXIT_CODES, count_cores
from qkablate.sweeps.engines import base
from qkablate.sweeps.planning.manifest import Manifest
from qkablate.sweeps.running.state import RunState
from qkablate.tracking.wandb import service
from qkablate.training import session
from qkablate.training.resolve import RunPlan, plan_run
from qkablate.training.result import record_failure
from qkablate.training.signals import Stopped
from qkablate.training.vmapped import program

# A process killed from outside can be resumed; one that crashed would crash again.
_EXTERNAL_SIGNALS = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}

MAX_COMPILERS = 8  # processes with which a run compiles


def run_worker(
    task: base.RunTask,
    gpu: str | None,
    lifeline: Connection,
    wandb: str,
    keeper: Connection | None,
    environment: Mapping[str, str],
) -> None:
    """Train the run and exit with its code.

    `wandb` is the address of W&B's process, which lives as long as anybody holds the `keeper`. The
    environment is the launcher's: that of the fork server may be of an earlier sweep.
    """
    os.environ.clear()
    os.environ.update(environment)
    os.setsid()  # Ctrl-C in the terminal is for the launcher, which forwards it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, service.BLOCKED_SIGNALS)  # blocked in the server
    if wandb:
        os.environ[service.SERVICE_VARIABLE] = wandb
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    sys.exit(_train_logged(task, lifeline.recv_bytes))


def main() -> None:
    """Train the run that standard input describes."""
    task = base.RunTask.from_json(sys.stdin.readline())
    sys.exit(_train_logged(task, sys.stdin.readline))


def _train_logged(task: base.RunTask, wait: Callable[[], object]) -> int:
    """Train with the output in a log, until `wait` returns: then the launcher is gone."""
    make_folder(task.folder)
    log = open_append(task.folder / base.LOG_FILE)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    # tqdm's own lock is shared between processes, and would start a process to track it.
    tqdm.set_lock(threading.RLock())
    threading.Thread(target=_stop_with_launcher, args=(wait,), daemon=True).start()
    limit_compilers(task.packed)
    return _train(task) if task.config.train.vmap == 1 else _train_program(task)


def limit_compilers(packed: int) -> None:
    """Let torch's compiler use this run's share of the cores, unless the user has set another.

    Otherwise every run starts as many processes as there are cores, up to 32.
    """
    share = max(1, count_cores() // max(1, packed))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(MAX_COMPILERS, share)))


def _train(task: base.RunTask) -> int:
    with _exit_code() as code:
        planned, observer = _plan(task)
        outcome = session.train_run(
            planned,
            packed=task.packed,
            retry=task.retry,
            observer=observer,
            branching=task.branching,
        )
        code.append(EXIT_CODES[outcome.result["status"]])
    return code[0]


def _plan(task: base.RunTask) -> tuple[RunPlan, LeaseObserver]:
    """Plan a run as it was frozen; wait until it is certain whether another process trains it."""
    planned = plan_run(task.config, data=_find_parent_data(task.config, task.data_fingerprint))
    if planned.run.id != task.id:
        raise UserError(
            f"this run now has the id {planned.run.id}, not {task.id}: the data, the circuits or"
            " qkablate changed after the sweep was frozen; start a new sweep"
        )
    observer = LeaseObserver()
    observer.wait_until_sure(task.folder)  # the launcher saw no heartbeat of another machine
    return planned, observer


def _find_parent_data(config: Config, fingerprint: str) -> Data | None:
    """Return the data of a trained parent, if it is prepared here: its paths may be unknown here.

    That of a task is generated.
    """
    if not fingerprint or config.data.source in TASKS:
        return None
    return find_data(config.data, config.model, fingerprint)


def _train_program(task: base.RunTask) -> int:
    """Train the runs of a program, each with its output in its own log.

    The code is that of the runs that have no result, if there are any. Of several it is the one
    after which a run is tried again: those of leases and signals are the largest.
    """
    members, missing, ended = list[program.Member](), list[int](), list[int]()
    tasks = (task, *task.others)
    for one in tasks:
        make_folder(one.folder)
        # By lines: this process ends without closing it.
        log = open(open_append(one.folder / base.LOG_FILE), "a", 1, encoding="utf-8")  # noqa: SIM115
        with redirect_stdout(log), redirect_stderr(log), _exit_code() as code:
            planned, observer = _plan(one)
            packed = task.packed - 1 + len(tasks)
            member = program.Member(planned, packed, one.retry, log=log)
            members.append(replace(member, observer=observer, branching=one.branching))
        missing += code
    with _exit_code() as code:
        program.train_program(members)
    missing += code
    for member in members:
        if isinstance(member.outcome, session.Outcome):
            ended.append(EXIT_CODES[member.outcome.result["status"]])
            continue
        with member.output(), _exit_code() as code:
            if member.outcome is not None:
                raise member.outcome
        missing += code
    return max(missing or ended)


@contextmanager
def _exit_code() -> Iterator[list[int]]:
    """Add the code of an error in the context to a list, and print the error."""
    codes: list[int] = []
    try:
        yield codes
    except (AlreadyRunning, LeaseLost) as error:
        print_stderr(str(error))
        lost = isinstance(error, LeaseLost)
        codes.append(base.EXIT_LEASE_LOST if lost else base.EXIT_ALREADY_RUNNING)
    except Stopped as stopped:
        codes.append(stopped.exit_code)
    except UserError as error:
        print_stderr(f"qkablate: {error}")
        codes.append(2)
    except Exception:
        print(redact(traceback.format_exc()), file=sys.stderr)
        codes.append(1)


def _stop_with_launcher(wait: Callable[[], object]) -> None:
    """Stop once the wait for the launcher ends; the launcher never writes."""
    with suppress(EOFError, OSError):
        wait()
    os.kill(os.getpid(), signal.SIGTERM)


def has_crashed(exit: base.RunExit) -> bool:
    """Return whether a process ended without a reason from outside, so that its run has failed."""
    is_external = bool(exit.requeue_reason) or -exit.code in _EXTERNAL_SIGNALS
    return exit.code not in base.EXPECTED_EXITS and (exit.out_of_memory or not is_external)


def record_death(
    manifest: Manifest,
    state: RunState,
    exit: base.RunExit,
    *,
    packed: int,
    is_remote: bool,
    observer: LeaseObserver | None = None,
) -> bool:
    """Set the state's reason and log it; return whether the run was recorded as failed.

    A process on another machine has died for sure once the observer has seen no sign of it.
    """
    if exit.code in base.EXPECTED_EXITS:
        return False  # it has given the reason itself
    if exit.requeue_reason:
        state.reason = exit.requeue_reason
    elif exit.code < 0:
        state.reason = f"its process was ended by {signal.Signals(-exit.code).name}"
    elif exit.code != 1 or not state.reason:  # 1: an exception, the last line of its log
        state.reason = f"its process ended with code {exit.code}"
    with (
        suppress(OSError),
        open(open_append(state.folder / base.LOG_FILE), "a", encoding="utf-8") as log,
    ):
        log.write(f"{state.reason}\n")  # for other readers
    if not has_crashed(exit):
        return False
    reason = "out of memory" if exit.out_of_memory else state.reason
    # With a full disk, or where another launcher trains it, the run stays interrupted.
    with suppress(AlreadyRunning, LeaseLost, UserError, OSError):
        config = manifest.config_of(state.run)
        data = _find_parent_data(config, manifest.arms[state.run.arm].parent_data)
        planned = plan_run(config, remote=is_remote, data=data)
        if planned.run.id != exit.id:  # this machine would compute it in another way
            return False
        record_failure(
            planned, reason, out_of_memory=exit.out_of_memory, packed=packed, observer=observer
        )
        return True
    return False


if __name__ == "__main__":
    main()
