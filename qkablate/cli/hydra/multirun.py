"""Multirun: every job is looked at before the first one starts, and read from disk at the end."""

import traceback
from itertools import islice
from typing import Any, ClassVar

from hydra.experimental.callback import Callback

from qkablate.cli.hydra.app import one_line
from qkablate.config import load
from qkablate.errors import UserError, tell
from qkablate.runs.run import Run

MOST_JOBS = 10_000  # of one multirun: each is planned before the first one starts
# What a run's label tells already.
_IN_LABEL = {"variant", "model.d_model", "model.heads", "seed"}


class CheckEveryJob(Callback):
    """Plans all jobs of Hydra's basic sweeper; stops the multirun if one makes no sense."""

    jobs: ClassVar[list[list[str]]] = []  # the overrides of each
    runs: ClassVar[list[Run]] = []  # what they make, in the same order

    def on_multirun_start(self, config: Any, **kwargs: Any) -> None:
        try:
            CheckEveryJob.jobs = _jobs(config)
            planned = [self._plan(job, kwargs["config_name"]) for job in CheckEveryJob.jobs]
            CheckEveryJob.runs = planned
        except UserError as error:
            # Hydra turns an Exception of a callback into a warning, and would go on.
            tell(f"qkablate: {error}")
            raise SystemExit(2) from None
        except Exception:
            traceback.print_exc()
            raise SystemExit(1) from None

    def _plan(self, job: list[str], config_name: str) -> Any:
        from hydra.errors import HydraException
        from omegaconf.errors import OmegaConfBaseException

        from qkablate.training.resolve import plan

        try:
            return plan(load(_composed(config_name, job))).run
        except (UserError, HydraException, OmegaConfBaseException) as error:
            raise UserError(f"{one_line(error)} (in job {_varied(job, set())})") from None


def _jobs(config: Any) -> list[list[str]]:
    """The overrides of each job, as Hydra's basic sweeper will expand them."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from hydra.utils import get_class

    sweeper = config.hydra.sweeper
    if not sweeper._target_.endswith(".BasicSweeper"):
        return []  # a sweeper that chooses its jobs as it goes
    basic: Any = get_class(sweeper._target_)
    words = [f"{key}={value}" for key, value in (sweeper.params or {}).items()]
    words += config.hydra.overrides.task
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())
    try:
        overrides = parser.parse_overrides(words)
        count = 1
        for one in filter(lambda override: override.is_discrete_sweep(), overrides):
            count *= sum(1 for _ in islice(one.sweep_string_iterator(), MOST_JOBS + 1))
            if count > MOST_JOBS:
                raise UserError(f"-m: these are more than {MOST_JOBS:,} jobs")
        (jobs,) = basic.split_arguments(overrides, None)
    except (HydraException, ValueError) as error:  # interval(0,3), range(0,1,0)
        raise UserError(" ".join(str(error).split())) from None
    return list(jobs)


def _composed(config_name: str, job: list[str]) -> Any:
    import hydra

    try:
        return hydra.compose(config_name, job)
    except ValueError as error:  # variant=1
        raise UserError(one_line(error)) from None


def _varied(job: list[str], besides: set[str]) -> str:
    """What tells this job from the others, but for some keys."""
    everywhere = set.intersection(*map(set, CheckEveryJob.jobs))
    words = [word for word in job if word not in everywhere]
    return " ".join(word for word in words if word.partition("=")[0] not in besides)


def results() -> list[dict[str, Any]]:
    """What became of each job, whatever process it ran in."""
    found = []
    for planned, job in zip(CheckEveryJob.runs, CheckEveryJob.jobs, strict=True):
        # Looked up again: another job may have made the same run, under another label.
        run = Run(planned.folder.parent.parent, planned.label, planned.id)
        status = "running" if run.is_owned else "failed"
        result = run.result or {"status": status, "loss": {}, "seconds": None}
        found.append({**result, "folder": run.folder, "varied": _varied(job, _IN_LABEL)})
    return found
