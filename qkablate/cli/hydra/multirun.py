"""Multirun: every job is checked before the first one starts, and read from disk at the end."""

import math
import shlex
import traceback
from pathlib import Path
from typing import Any, ClassVar

from hydra.experimental.callback import Callback

from qkablate.compose.configs import for_each_job, make_config
from qkablate.compose.words import expand_words, split_words
from qkablate.errors import UserError, print_stderr
from qkablate.runs.run import LABEL_KEYS, Run


class CheckEveryJob(Callback):
    """Plan all jobs of Hydra's basic sweeper, and stop the multirun if one is a mistake."""

    jobs: ClassVar[list[list[str]]] = []  # the overrides of each
    runs: ClassVar[list[Run]] = []  # of each, in the same order
    folder: ClassVar[Path | None] = None  # of a sweeper that chooses its jobs as it goes

    def on_multirun_start(self, config: Any, **kwargs: Any) -> None:
        from qkablate.training.resolve import plan_run

        def plan(job: list[str]) -> Run:
            return plan_run(make_config(split_words(job), kwargs["config_name"])).run

        try:
            jobs = _expand(config)
            CheckEveryJob.runs = for_each_job(jobs, plan)
            CheckEveryJob.jobs = jobs
            CheckEveryJob.folder = None if jobs else Path(config.hydra.sweep.dir)
        except UserError as error:
            # Hydra turns an Exception of a callback into a warning, and would go on.
            print_stderr(f"qkablate: {error}")
            raise SystemExit(2) from None
        except Exception:
            traceback.print_exc()
            raise SystemExit(1) from None


def _expand(config: Any) -> list[list[str]]:
    """Return the overrides of each job, as Hydra's basic sweeper will expand them."""
    sweeper = config.hydra.sweeper
    if not sweeper._target_.endswith(".BasicSweeper"):
        return []  # a sweeper that chooses its jobs as it goes
    words = [f"{key}={value}" for key, value in (sweeper.params or {}).items()]
    return expand_words([*words, *config.hydra.overrides.task])


def read_outcomes() -> list[dict[str, Any]]:
    """Return the result of each job, whatever process it ran in."""
    outcomes = []
    common = set.intersection(*map(set, CheckEveryJob.jobs))
    for planned, job in zip(CheckEveryJob.runs, CheckEveryJob.jobs, strict=True):
        # Another job may have made the same run under another label.
        run = Run(planned.folder.parent.parent, planned.label, planned.id)
        status = "running" if run.is_leased else "failed"
        result = run.result or {"status": status, "loss": {}, "seconds": None}
        varied = [
            word for word in job if word not in common and word.partition("=")[0] not in LABEL_KEYS
        ]
        outcomes.append({**result, "folder": run.folder, "varied": " ".join(varied)})
    return outcomes


def read_search() -> list[str]:
    """Return lines on what a sweeper has chosen, if one did: it writes a file at its end."""
    folder = CheckEveryJob.folder
    file = folder and folder / "optimization_results.yaml"
    if not file or not file.is_file():
        return []
    from omegaconf import OmegaConf

    content: Any = OmegaConf.to_container(OmegaConf.load(file))
    best = content.get("best_params") if isinstance(content, dict) else None
    if not isinstance(best, dict):  # a sweeper with another format, or with several objectives
        return [f"search   {file}"]
    if not math.isfinite(content["best_value"]):
        return [f"search   no run has a validation loss: {file}"]
    words = shlex.join(f"{key}={value}" for key, value in best.items())
    return [f"best     val {content['best_value']:.4f} at {words}", f"search   {file}"]
