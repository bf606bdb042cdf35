"""Hydra's own sweeper, after a look at every job: none starts before all make sense."""

import json
from pathlib import Path
from typing import Any, ClassVar

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser

from qkablate.config import load
from qkablate.errors import UserError


class CheckedSweeper(BasicSweeper):
    """What `-m` runs."""

    outcomes: ClassVar[list[dict[str, Any]]] = []  # of the last sweep in this process

    def sweep(self, arguments: list[str]) -> Any:
        from qkablate.training.plan import plan

        assert self.hydra_context is not None and self.config is not None
        loader = self.hydra_context.config_loader
        words = [*self._parse_config(), *arguments]
        overrides = OverridesParser.create(config_loader=loader).parse_overrides(words)
        (jobs,) = self.split_arguments(overrides, max_batch_size=None)
        for number, job in enumerate(jobs):
            try:
                plan(load(loader.load_sweep_config(self.config, job)))
            except UserError as error:
                raise UserError(f"job {number} ({' '.join(job)}): {error}") from None
        returns = super().sweep(arguments)
        outcomes = [job.return_value for batch in returns for job in batch]
        CheckedSweeper.outcomes = outcomes
        summary = Path(self.config.hydra.sweep.dir) / "jobs.json"
        summary.write_text(json.dumps(outcomes, indent=1) + "\n", encoding="utf-8")
        return returns

    def validate_batch_is_legal(self, batch: Any) -> None:
        """Done for all batches, and in more depth, in `sweep`."""
