"""The state of a sweep: its launchers, and the latest metrics of a running run."""

import json
import os
from types import SimpleNamespace

import pytest

from qkablate.runs import lease
from qkablate.runs.lease import hold_lease
from qkablate.sweeps.running.state import SweepState, latest_metrics


def test_only_killed_launchers_are_removed(tmp_path):
    """A launcher whose folder has no lease yet is about to take it."""
    coming, killed = (tmp_path / "launchers" / name for name in ("there-1", "there-2"))
    (coming / "lease").mkdir(parents=True)
    if not (child := os.fork()):
        hold_lease(killed).__enter__()
        os._exit(0)
    os.waitpid(child, 0)
    assert any((killed / "lease").iterdir())
    sweep_state = SweepState(SimpleNamespace(folder=tmp_path, out=str(tmp_path), runs=[]))
    assert not sweep_state.is_running()
    with sweep_state.register_launcher():
        assert sweep_state.is_running()
        assert coming.exists()
        assert not killed.exists()
    assert not sweep_state.is_running()


def test_launchers_of_before_a_reboot_are_removed_when_another_ends(tmp_path, monkeypatch):
    """Only their silence tells that they are gone."""
    record = tmp_path / "launchers" / "there-1" / "lease" / "00000001"
    record.parent.mkdir(parents=True)
    holder = {"token": "t", "host": "h", "pid": 7, "boot": "before", "device": 1, "since": "then"}
    record.write_text(json.dumps(holder) + "\n...")
    sweep_state = SweepState(SimpleNamespace(folder=tmp_path, out=str(tmp_path), runs=[]))
    assert sweep_state.is_running()
    with sweep_state.register_launcher():
        assert record.exists()
        monkeypatch.setattr(lease, "TIMEOUT", 0.0)
    assert not record.exists()
    assert not sweep_state.is_running()


@pytest.mark.parametrize("numbers", [1, 1_000, 50_000])
@pytest.mark.parametrize("after", [0, 1, 40])
def test_diagnostics_do_not_hide_the_latest_metrics(tmp_path, numbers, after):
    rows = [{"step": step, "train/loss": 3.0 + step / 100} for step in range(100)]
    rows.append({"step": 99, "val/loss": 2.5})
    rows += [{"step": 99, "diagnostics": {"qk": {"nuclear": [[1.5] * numbers]}}}]
    rows += [{"step": 100 + step, "train/loss": 2.0} for step in range(after)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = latest_metrics(tmp_path)
    assert found["step"] == 99 + after
    assert found["train/loss"] == (2.0 if after else 3.99)
    assert found.get("val/loss") == 2.5
    assert "diagnostics" not in found


def test_half_written_row_is_skipped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    text = json.dumps({"step": 7, "diagnostics": {"ov": [0.5] * 9_000}})
    path.write_text(json.dumps({"step": 7, "train/loss": 2.0}) + "\n" + text[:20_000])
    assert latest_metrics(tmp_path) == {"step": 7, "train/loss": 2.0}
    assert latest_metrics(tmp_path / "none") == {}


def test_time_left_counts_the_steps_of_a_branch_that_are_trained(plan_grid):
    """Runs of 10 and 20 steps, beside one of 40, train their cooldowns of 2 and 4 steps alone."""
    manifest = plan_grid("optim.schedule=wsd", "optim.warmup=2", "train.steps=10,20,40")
    sweep_state = SweepState(manifest)
    lengths = {
        int(manifest.arms[state.run.arm].config.train.steps): state
        for state in sweep_state.states.values()
    }
    longest = manifest.arms[lengths[40].run.arm]
    tokens_per_step = longest.tokens / 40
    lengths[40].status = "running"
    lengths[40].metrics = {"step": 20, "perf/tokens_per_second": tokens_per_step}
    assert sweep_state.seconds_left() == pytest.approx(20 + 4 + 2)
    lengths[40].status, lengths[40].metrics = "done", None
    lengths[40].result = {"tokens": longest.tokens, "seconds": 40.0}
    lengths[20].status, lengths[20].metrics = "running", {"step": 18}
    assert sweep_state.seconds_left() == pytest.approx(2 + 2)
    lengths[20].status, lengths[20].metrics = "done", None  # its result has the shared steps, too
    lengths[20].result = {"tokens": longest.tokens / 2, "seconds": 20.0}
    lengths[10].status, lengths[10].metrics = "running", {"step": 9}
    assert sweep_state.seconds_left() == pytest.approx(1)
