"""MLflow's database, read back with MLflow's own client."""

import os
from dataclasses import replace

import pytest

from qkablate.errors import UserError
from qkablate.tracking.export.mlflow import DATABASE, MlflowStore
from qkablate.tracking.export.run_log import Row, RunLog

if not os.environ.get("QKABLATE_NEEDS_EXPORT"):
    pytest.importorskip("mlflow")
    pytest.importorskip("alembic")
pytestmark = pytest.mark.slow  # MLflow takes seconds to start


@pytest.fixture
def log(tmp_path):
    folder = tmp_path / "no_q-0123456789ab"
    folder.mkdir()
    (folder / "config.yaml").write_text("seed: 0\n")
    config = {"id": "0123456789ab", "optim.lr": 0.01, "variant.name": "no_q", "seed": 0}
    rows = [Row(step, 100.0 + step, {"val/loss": 3.0 - step / 10}) for step in range(1500)]
    result = {"status": "done", "loss": {"val": 2.6, "test": 2.7}, "seconds": 4.0}
    return RunLog(folder, 1, 100.0, config, rows, 0, result, "d" * 64)


def read_runs(store):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=store.uri, registry_uri=store.uri)
    experiment = client.get_experiment_by_name("qkablate")
    return client, client.search_runs([experiment.experiment_id])


def test_export_is_read_back_once_and_replaced(log, tmp_path):
    store = MlflowStore(tmp_path / "into")
    first = replace(log, rows=log.rows[:2], result=None, digest="e" * 64)
    assert store.write(first)
    _, (run,) = read_runs(store)
    assert run.info.status == "RUNNING"
    assert store.write(log)
    assert not MlflowStore(tmp_path / "into").write(log)
    client, (run,) = read_runs(store)
    assert (run.info.run_name, run.info.status) == (log.name, "FINISHED")
    assert run.data.params["optim.lr"] == "0.01"
    assert run.data.tags["variant"] == "no_q"
    assert run.data.metrics["final/test_loss"] == 2.7
    history = client.get_metric_history(run.info.run_id, "val/loss")
    assert [(m.step, m.value, m.timestamp) for m in history[:2]] == [
        (0, 3.0, 100_000),
        (1, 2.9, 101_000),
    ]
    assert len(history) == 1500
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["config.yaml"]
    assert (tmp_path / "into" / "artifacts").is_dir()


def test_damaged_database_is_one_line(tmp_path):
    (tmp_path / DATABASE).write_text("this is no database " * 100)
    with pytest.raises(UserError, match=r"mlflow\.db' cannot be read by MLflow") as error:
        MlflowStore(tmp_path)
    assert "\n" not in str(error.value)


def test_refused_name_is_one_line(log, tmp_path):
    row = Row(0, 100.0, {"a\nb": 1.0})
    with pytest.raises(UserError, match="is refused by MLflow") as error:
        MlflowStore(tmp_path / "into").write(replace(log, rows=[row]))
    assert "\n" not in str(error.value)
