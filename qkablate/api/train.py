"""Train one run: for `qkablate.train` and `qkablate train`."""

from typing import TYPE_CHECKING, Any, Never

from qkablate.api.words import format_words, reject_unnamed
from qkablate.compose.configs import compose_jobs
from qkablate.config import Config
from qkablate.errors import UserError
from qkablate.runs.lease_wait import observe_leases
from qkablate.runs.prefix import NO_BRANCHING, Branching
from qkablate.training.distributed.ranks import SINGLE_PROCESS, Ranks
from qkablate.training.signals import Stopped

if TYPE_CHECKING:
    from qkablate.analysis.study.study import Record
    from qkablate.training.resolve import RunPlan
    from qkablate.training.session import Outcome


def train(*unnamed: Never, rerun: bool = False, extend: bool = False, **keys: Any) -> "Record":
    """Train one run, as `qkablate train` does, and return its record.

    A run with the same values is the same run: the second call returns the result of the first, and
    a call that was interrupted goes on from the last checkpoint. `rerun` trains again; `extend`
    goes on from the stable phase of a shorter wsd run. A run that fails or diverges raises no
    exception: check `record.status` and `record.reason`.

    >>> run = train(variant="merged_w", seed=1, **{"train.steps": 300})
    """
    from qkablate.api.read import load_runs
    from qkablate.data.corpus import check_available

    reject_unnamed("train", unnamed)
    jobs = compose_jobs(format_words(keys), resolved=not extend)
    if len(jobs) > 1:
        raise UserError("these are several runs; qkablate.sweep trains a grid")
    check_available(jobs[0].config.data)
    try:
        plan, outcome = train_config(jobs[0].config, rerun=rerun, extend=extend)
    except Stopped as stopped:
        raise make_interrupt(stopped.exit_code) from None
    if outcome.signal:  # too late to stop this run, but not what follows it
        raise make_interrupt(128 + outcome.signal)
    (record,) = load_runs(plan.run.folder)
    return record


def train_config(
    config: Config, *, rerun: bool = False, extend: bool = False, ranks: Ranks = SINGLE_PROCESS
) -> tuple["RunPlan", "Outcome"]:
    """Plan and train a run, or return the result that it has; errors are those of `train_run`.

    To `extend` a shorter run, the config must not be resolved.
    """
    from qkablate.analysis.publication.archive import refuse_archives
    from qkablate.training.resolve import plan_run
    from qkablate.training.vmapped.program import train_planned
    from qkablate.training.warm_start.extension import find_extension

    refuse_archives(config.out)
    branching = NO_BRANCHING
    if extend:
        config, branch = find_extension(config)
        branching = Branching(start=branch, extends=True)
    plan = plan_run(config)
    observer = observe_leases([plan.run.folder])
    outcome = train_planned(plan, rerun=rerun, observer=observer, ranks=ranks, branching=branching)
    return plan, outcome


def make_interrupt(exit_code: int) -> BaseException:
    """Return what a signal raises in a program of the user: KeyboardInterrupt for Ctrl-C."""
    if exit_code == 130:
        return KeyboardInterrupt("the same call resumes from the last checkpoint")
    return SystemExit(exit_code)
