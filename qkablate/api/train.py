"""Train one run: for `qkablate.train` and `qkablate train`."""

from typing import TYPE_CHECKING, Any, Never

from qkablate.api.words import format_words, reject_unnamed
from qkablate.compose.configs import compose_jobs
from qkablate.config import Config
from qkablate.errors import UserError
from qkablate.runs.lease_wait import observe_leases
from qkablate.training.distributed.ranks import SINGLE_PROCESS, Ranks
from qkablate.training.signals import Stopped

if TYPE_CHECKING:
    from qkablate.analysis.study.study import Record
    from qkablate.training.resolve import RunPlan
    from qkablate.training.session import Outcome


def train(*unnamed: Never, rerun: bool = False, **keys: Any) -> "Record":
    """Train one run, as `qkablate train` does, and return its record.

    A run with the same values is the same run: the second call returns the result of the first, and
    a call that was interrupted goes on from the last checkpoint. `rerun` trains again. A run that
    fails or diverges raises nothing: `record.status` and `record.reason` tell.

    >>> run = train(variant="merged_w", seed=1, **{"train.steps": 300})
    """
    from qkablate.api.read import load_runs
    from qkablate.data.corpus import check_available

    reject_unnamed("train", unnamed)
    jobs = compose_jobs(format_words(keys))
    if len(jobs) > 1:
        raise UserError("these are several runs; qkablate.sweep trains a grid")
    check_available(jobs[0].config.data)
    try:
        plan, outcome = train_config(jobs[0].config, rerun=rerun)
    except Stopped as stopped:
        raise make_interrupt(stopped.exit_code) from None
    if outcome.signal:  # too late to stop this run, but not what follows it
        raise make_interrupt(128 + outcome.signal)
    (record,) = load_runs(plan.run.folder)
    return record


def train_config(
    config: Config, *, rerun: bool = False, ranks: Ranks = SINGLE_PROCESS
) -> tuple["RunPlan", "Outcome"]:
    """Plan and train a run, or return the result that it has; errors are those of `train_run`."""
    from qkablate.training.resolve import plan_run
    from qkablate.training.session import train_run

    plan = plan_run(config)
    observer = observe_leases([plan.run.folder])
    return plan, train_run(plan, rerun=rerun, observer=observer, ranks=ranks)


def make_interrupt(exit_code: int) -> BaseException:
    """Return what a signal raises in a program of the user: KeyboardInterrupt for Ctrl-C."""
    if exit_code == 130:
        return KeyboardInterrupt("the same call resumes from the last checkpoint")
    return SystemExit(exit_code)
