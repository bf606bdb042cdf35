"""Logs that an export reads from run folders."""

import os
import shutil

import pytest

from qkablate.errors import UserError
from qkablate.tracking.export.run_log import read_run_log


@pytest.fixture(scope="module")
def folder(train, tmp_path_factory):
    return train(tmp_path_factory.mktemp("run"), "train.steps=4", "train.eval_every=2")


def test_log_has_config_rows_and_result(folder):
    log = read_run_log(folder)
    assert log.config["optim.lr"] == 0.001
    assert log.config["variant.name"] == "standard"
    assert [row.step for row in log.rows if "val/loss" in row.metrics] == [0, 2, 4]
    assert log.final["final/val_loss"] == log.rows[-1].metrics.get(
        "val/loss", log.result["loss"]["val"]
    )
    assert log.tags == {"variant": "standard", "data": "text", "seed": "0", "status": "done"}
    assert log.skipped == 0


def test_rows_hold_numbers_only(folder):
    log = read_run_log(folder)
    assert all(type(x) in (int, float) for row in log.rows for x in row.metrics.values())
    assert "qk/stable_rank/L0" in {name for row in log.rows for name in row.metrics}


def test_log_starts_with_the_first_session(folder):
    """Every session writes the config anew."""
    began = (folder / "environment.json").stat().st_mtime
    os.utime(folder / "config.yaml", (began + 3600, began + 3600))
    assert read_run_log(folder).start == began


def test_log_names_its_attempt(folder):
    """Each is a run of its own in the tools that it is exported to."""
    assert read_run_log(folder).attempt == 1
    (folder / "attempts" / "1").mkdir(parents=True)
    try:
        assert read_run_log(folder).attempt == 2
    finally:
        shutil.rmtree(folder / "attempts")


def test_damaged_rows_are_counted(folder):
    before = read_run_log(folder)
    content = before.folder / "metrics.jsonl"
    kept = content.read_bytes()
    content.write_bytes(kept + b'{"step": 5, "val/loss": 1.0, "crc32": "00000000"}\n[1]\n{"a": 1')
    try:
        log = read_run_log(folder)
    finally:
        content.write_bytes(kept)
    assert (log.skipped, log.rows) == (3, before.rows)
    assert log.digest != before.digest


def test_damaged_config_is_an_error(tmp_path):
    (tmp_path / "config.yaml").write_text("[1, 2]")
    with pytest.raises(UserError, match=r"is not a run that can be read: .* not a map"):
        read_run_log(tmp_path)


def test_config_without_an_id_is_an_error(tmp_path):
    (tmp_path / "config.yaml").write_text("{seed: 1}")
    with pytest.raises(UserError, match="it has no id"):
        read_run_log(tmp_path)
