"""Multirun: every job is looked at before the first one starts, and read from disk at the end."""

import sys
import traceback
from typing import Any, ClassVar

from hydra.experimental.callback import Callback

from qkablate.cli.hydra_app import one_line
from qkablate.config import load
from qkablate.errors import UserError


class CheckEveryJob(Callback):
    """Plans all jobs of Hydra's basic sweeper; stops the multirun if one makes no sense."""

    runs: ClassVar[list[Any]] = []  # what was planned, in order

    def on_multirun_start(self, config: Any, **kwargs: Any) -> None:
        try:
            CheckEveryJob.runs = [self._plan(job, kwargs["config_name"]) for job in _jobs(config)]
        except UserError as error:
            # Hydra turns an Exception of a callback into a warning, and would go on.
            print(f"qkablate: {error}", file=sys.stderr)
            raise SystemExit(2) from None
        except Exception:
            traceback.print_exc()
            raise SystemExit(1) from None

    def _plan(self, job: list[str], config_name: str) -> Any:
        import hydra
        from hydra.errors import HydraException
        from omegaconf.errors import OmegaConfBaseException

        from qkablate.training.plan import plan

        try:
            return plan(load(hydra.compose(config_name, job))).run
        except (UserError, HydraException, OmegaConfBaseException) as error:
            raise UserError(f"{one_line(error)} (in job {' '.join(job)})") from None


def _jobs(config: Any) -> list[list[str]]:
    """The overrides of each job, as Hydra's basic sweeper will expand them."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.utils import get_class

    sweeper = config.hydra.sweeper
    if not sweeper._target_.endswith(".BasicSweeper"):
        return []  # a sweeper that chooses its jobs as it goes
    basic: Any = get_class(sweeper._target_)
    words = [f"{key}={value}" for key, value in (sweeper.params or {}).items()]
    words += config.hydra.overrides.task
    (jobs,) = basic.split_arguments(OverridesParser.create().parse_overrides(words), None)
    return list(jobs)


def results(runs: list[Any]) -> list[dict[str, Any]]:
    """What became of each, whatever process it ran in."""

    def result(run: Any) -> dict[str, Any]:
        status = "running" if run.is_owned else "failed"
        return run.result or {"status": status, "loss": {}, "seconds": None}

    return [{**result(run), "folder": run.folder} for run in runs]
