"""Event files, read back with TensorBoard's own reader."""

import os
from dataclasses import replace

import pytest

from qkablate.tracking.export.run_log import Row, RunLog
from qkablate.tracking.export.tensorboard import write_events

if not os.environ.get("QKABLATE_NEEDS_EXPORT"):
    pytest.importorskip("tensorboard")


@pytest.fixture
def log(tmp_path):
    config = {"id": "0123456789ab", "optim.lr": 0.01, "variant.name": "no_q", "seed": 0}
    rows = [Row(step, 100.0 + step, {"val/loss": 3.0 - step / 10}) for step in (0, 2, 4)]
    result = {"status": "done", "loss": {"val": 2.6, "test": 2.7}, "seconds": 4.0}
    return RunLog(tmp_path / "no_q-0123456789ab", 1, 100.0, config, rows, 0, result, "d" * 64)


def read_scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder))
    reader.Reload()
    return {
        tag: [
            (event.step, pytest.approx(event.value), event.wall_time)
            for event in reader.Scalars(tag)
        ]
        for tag in reader.Tags()["scalars"]
    }


def test_reader_of_tensorboard_finds_the_metrics(log, tmp_path):
    assert write_events(log, tmp_path / "into")
    scalars = read_scalars(tmp_path / "into" / log.name)
    assert scalars["val/loss"] == [(0, 3.0, 100.0), (2, 2.8, 102.0), (4, 2.6, 104.0)]
    assert scalars["final/test_loss"] == [(4, 2.7, 104.0)]


def test_config_is_there_as_hyperparameters(log, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    write_events(log, tmp_path / "into")
    reader = EventAccumulator(str(tmp_path / "into" / log.name))
    reader.Reload()
    (content,) = reader.PluginTagToContent("hparams").values()
    values = HParamsPluginData.FromString(content).session_start_info.hparams
    assert values["optim.lr"].number_value == 0.01
    assert values["variant.name"].string_value == "no_q"


def test_second_export_writes_nothing(log, tmp_path):
    assert write_events(log, tmp_path / "into")
    assert not write_events(log, tmp_path / "into")
    assert len(list((tmp_path / "into").rglob("events*"))) == 1


def test_longer_log_replaces_the_earlier_one(log, tmp_path):
    write_events(replace(log, rows=log.rows[:2], result=None, digest="e" * 64), tmp_path / "into")
    assert write_events(log, tmp_path / "into")
    assert len(read_scalars(tmp_path / "into" / log.name)["val/loss"]) == 3
    assert len(list((tmp_path / "into").rglob("events*"))) == 1


def test_leftovers_of_a_killed_export_are_removed(log, tmp_path):
    left = tmp_path / "into" / f".unfinished-{log.name}" / "new" / "events.out.tfevents.1"
    left.parent.mkdir(parents=True)
    left.touch()
    write_events(log, tmp_path / "into")
    assert [path.name for path in (tmp_path / "into").iterdir()] == [log.name]


def test_files_of_others_stay(log, tmp_path):
    other = tmp_path / "into" / log.name / "events.out.tfevents.1.other"
    other.parent.mkdir(parents=True)
    other.touch()
    write_events(log, tmp_path / "into")
    assert other.exists()
