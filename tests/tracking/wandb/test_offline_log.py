"""The parts of W&B's log format that qkablate parses. The logs are written by W&B."""

import struct
import subprocess
import sys

import pytest

from qkablate.tracking.wandb.offline_log import (
    find_logs,
    is_complete,
    read_log,
    read_records,
    synced_mark,
    unsent_mark,
)
from tests.tracking.wandb import log_reader

RECORD = """
import sys
from pathlib import Path
from qkablate.config import TrackingConfig
from qkablate.tracking.wandb.run import RunIdentity, WandbRun

for rows in map(int, sys.argv[2:]):
    folder = Path(sys.argv[1]) / str(rows)
    folder.mkdir()
    identity = RunIdentity(f"id-{rows}", "a run", "", "", ())
    wandb_run = WandbRun(TrackingConfig(), identity, folder, {}, print)
    for step in range(rows):
        wandb_run.log({"step": step, "train/loss": 1.5})
    wandb_run.close({}, 0)
"""


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """Return a log shorter than a block, and a log of many blocks, by their rows."""
    folder = tmp_path_factory.mktemp("logs")
    words = [sys.executable, "-c", RECORD, str(folder), "3", "700"]
    subprocess.run(words, check=True, capture_output=True, timeout=120)
    return {rows: find_logs(folder / str(rows))[0] for rows in (3, 700)}


@pytest.mark.slow
def test_a_log_describes_its_run(logs):
    for rows, file in logs.items():
        log = read_log(file)
        assert (log.id, log.name, log.ended) == (f"id-{rows}", "a run", True)
        assert is_complete(file)


def test_a_truncated_log_is_not_complete(logs, tmp_path):
    for file in logs.values():
        content = file.read_bytes()
        cut = tmp_path / "cut.wandb"
        for size in [*range(0, len(content), 997), *range(len(content) - 40, len(content))]:
            cut.write_bytes(content[:size])
            assert not is_complete(cut), size


def test_a_record_with_an_empty_first_chunk_is_read(logs, tmp_path):
    """Read a record for which a block has room for its header only."""
    content = bytearray(logs[3].read_bytes())
    _, length, kind = struct.unpack_from("<IHB", content, 7)
    assert kind == log_reader.FULL
    path = tmp_path / "log.wandb"
    first = struct.pack("<IHB", 0, 0, log_reader.FIRST)
    content[7:14] = first + struct.pack("<IHB", 0, length, log_reader.LAST)
    path.write_bytes(content)
    kinds = [
        [r.WhichOneof("record_type") for r in read_records(file, 0)] for file in (path, logs[3])
    ]
    assert kinds[0] == kinds[1]


def test_logs_of_runs_are_not_rejected(logs, tmp_path):
    for file in logs.values():
        assert read_log(file).rejection == ""
        cut = tmp_path / "cut.wandb"
        for size in range(2000, file.stat().st_size, 997):
            cut.write_bytes(file.read_bytes()[:size])
            assert read_log(cut).rejection == ""


def test_other_files_are_not_logs(tmp_path):
    path = tmp_path / "no.wandb"
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="not a log"):
        read_log(path)
    path.write_bytes(bytes(range(256)) * 400)
    assert read_log(path).rejection.startswith("it is damaged: no record begins at byte")
    assert not is_complete(path)
    assert not is_complete(tmp_path / "nothing.wandb")


def test_offline_and_unsent_logs_are_found(tmp_path):
    def make(name):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.touch()
        return path

    second = make("wandb/offline-run-20260102_000000-b/run-b.wandb")
    first = make("attempts/1/wandb/offline-run-20260101_000000-a/run-a.wandb")
    online = make("wandb/run-20260103_000000-b/run-b.wandb")
    (tmp_path / "elsewhere").mkdir()
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    (outside / "run-c.wandb").touch()
    (tmp_path / "wandb" / "offline-run-20260104_000000-c").symlink_to(outside)
    assert find_logs(tmp_path) == [first, second]
    unsent_mark(online).touch()
    assert find_logs(tmp_path) == [first, second, online]
    assert synced_mark(online).name == "run-b.wandb.synced"
