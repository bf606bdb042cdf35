"""Runs in an MLflow database, which `mlflow ui` shows."""

import logging
import os
from pathlib import Path
from typing import Any

from qkablate.errors import UserError, sanitize
from qkablate.tracking.export.run_log import RunLog

EXPERIMENT = "qkablate"
DATABASE = "mlflow.db"
_BATCH = 1000  # metrics per call: MLflow's limit
_PARAMS = 100
_LONGEST = 6000  # characters of a parameter
_STATUS = {"done": "FINISHED", "diverged": "FAILED", "failed": "FAILED"}
_FILES = ("config.yaml", "environment.json", "metrics.jsonl", "result.json")


class MlflowStore:
    """An experiment in a database of a folder, with the runs' files beside it."""

    def __init__(self, into: Path) -> None:
        # MLflow's client reports to its makers otherwise.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        into.mkdir(parents=True, exist_ok=True)
        self.uri = f"sqlite:///{into.absolute() / DATABASE}"
        try:
            self._client: MlflowClient = MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)
            experiment = self._client.get_experiment_by_name(EXPERIMENT)
        except (MlflowException, SQLAlchemyError) as error:
            reason = sanitize(str(error).splitlines()[0])
            raise UserError(f"'{into / DATABASE}' cannot be read by MLflow: {reason}") from None
        if experiment is None:
            artifacts = (into.absolute() / "artifacts").as_uri()
            self._experiment = self._client.create_experiment(EXPERIMENT, artifacts)
        else:
            self._experiment = experiment.experiment_id

    def write(self, log: RunLog) -> bool:
        """Write a run; return False if it is there already. A longer log replaces it."""
        from mlflow.exceptions import MlflowException

        try:
            return self._write(log)
        except MlflowException as error:  # as of a name that MLflow does not allow
            reason = str(error).splitlines()[0]
            raise UserError(f"'{log.folder}' is refused by MLflow: {sanitize(reason)}") from None

    def _write(self, log: RunLog) -> bool:
        from mlflow.entities import Metric, Param

        mark = f"tags.`qkablate.run` = '{log.config['id']}-{log.attempt}'"
        earlier = self._client.search_runs([self._experiment], mark)
        if any(run.data.tags.get("qkablate.digest") == log.digest for run in earlier):
            return False
        tags = {"qkablate.run": f"{log.config['id']}-{log.attempt}", **log.tags}
        started = self._client.create_run(
            self._experiment, int(log.start * 1000), tags, run_name=log.name
        )
        id = started.info.run_id
        metrics = [
            Metric(name, value, int(row.time * 1000), row.step)
            for row in log.rows
            for name, value in row.metrics.items()
        ]
        end = log.rows[-1] if log.rows else None
        if end:
            at = int(end.time * 1000), end.step
            metrics += [Metric(name, value, *at) for name, value in log.final.items()]
        params = [Param(name, str(value)[:_LONGEST]) for name, value in log.config.items()]
        for batch in _split(metrics, _BATCH):
            self._client.log_batch(id, metrics=batch)
        for batch in _split(params, _PARAMS):
            self._client.log_batch(id, params=batch)
        for name in _FILES:
            file = log.folder / name
            if file.is_file() and not file.is_symlink():
                self._client.log_artifact(id, str(file))
        if status := _STATUS.get(log.tags["status"]):
            self._client.set_terminated(id, status, int(end.time * 1000) if end else None)
        # Written last: without it, an interrupted export is repeated.
        self._client.set_tag(id, "qkablate.digest", log.digest)
        for run in earlier:
            self._client.delete_run(run.info.run_id)
        return True


def _split(values: list[Any], size: int) -> list[list[Any]]:
    return [values[first : first + size] for first in range(0, len(values), size)]
