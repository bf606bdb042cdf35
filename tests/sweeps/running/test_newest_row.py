"""The newest row of a run that is under way, also behind diagnostics of many numbers."""

import json

import pytest

from qkablate.sweeps.running.state import newest_row


@pytest.mark.parametrize("numbers", [1, 1_000, 50_000])
@pytest.mark.parametrize("after", [0, 1, 40])
def test_diagnostics_hide_no_progress(tmp_path, numbers, after):
    rows = [{"step": step, "train/loss": 3.0 + step / 100} for step in range(100)]
    rows.append({"step": 99, "val/loss": 2.5})
    rows += [{"step": 99, "mechanism": {"qk": {"nuclear": [[1.5] * numbers]}}}]
    rows += [{"step": 100 + step, "train/loss": 2.0} for step in range(after)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = newest_row(tmp_path)
    assert found["step"] == 99 + after
    assert found["train/loss"] == (2.0 if after else 3.99)
    assert found.get("val/loss") == 2.5
    assert "mechanism" not in found


def test_a_half_written_row_is_passed_over(tmp_path):
    path = tmp_path / "metrics.jsonl"
    text = json.dumps({"step": 7, "mechanism": {"ov": [0.5] * 9_000}})
    path.write_text(json.dumps({"step": 7, "train/loss": 2.0}) + "\n" + text[:20_000])
    assert newest_row(tmp_path) == {"step": 7, "train/loss": 2.0}
    assert newest_row(tmp_path / "none") == {}
