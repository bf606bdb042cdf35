import json

import pytest

from qkablate.runs.records import decode_row, encode_row
from qkablate.tracking import MetricsFile


def test_each_row_is_one_line_written_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics_file = MetricsFile(path)
    metrics_file.log({"step": 1, "train/loss": 2.5})
    assert path.read_bytes() == encode_row({"step": 1, "train/loss": 2.5}) + b"\n"
    metrics_file.log({"step": 2})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]
    metrics_file.close()


def test_rows_after_the_checkpoint_are_removed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path)
    first.log({"step": 1})
    end = first.sync()
    assert end == path.stat().st_size
    first.log({"step": 2, "word": "lost with the crash, also half of a line"})
    first.close()
    with path.open("a") as file:
        file.write('{"step": 3, "wo')

    second = MetricsFile(path, end=end)
    assert second.sync() == end  # what a checkpoint keeps that is written before the next row
    second.log({"step": 2})
    second.close()
    assert [decode_row(line)["step"] for line in path.read_bytes().splitlines()] == [1, 2]


def test_a_new_file_has_no_old_rows(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 9}\n')
    MetricsFile(path).close()
    assert path.read_text() == ""


def test_a_file_shorter_than_its_checkpoint_is_rejected(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match="shorter than its checkpoint"):
        MetricsFile(path, end=1000)
    assert path.read_text() == '{"step": 1}\n'


def test_nan_and_infinities_are_written_as_strings(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics_file = MetricsFile(path)
    metrics_file.log({"a": float("nan"), "b": float("inf"), "c": float("-inf"), "d": 1.0})
    metrics_file.close()

    def reject(name):
        raise AssertionError(f"{name} is not JSON")

    row = json.loads(path.read_text(), parse_constant=reject)
    del row["crc32"]
    assert row == {"a": "nan", "b": "inf", "c": "-inf", "d": 1.0}
