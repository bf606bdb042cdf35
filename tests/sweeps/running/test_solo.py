"""Arms measured alone: in turns, once each, resumed after a kill."""

import json
import subprocess
import sys

import pytest

from qkablate.runs.lease import hold_lease
from qkablate.sweeps.running.solo import measure_arms
from qkablate.sweeps.running.solo_results import FILE, read_measurements, read_solo
from tests.analysis.worlds import corpus, world

__all__ = ["corpus", "world"]
pytestmark = pytest.mark.slow


@pytest.fixture
def made(world, monkeypatch):
    monkeypatch.setattr("qkablate.sweeps.running.solo.LIMIT", 60.0)
    return world("variant=standard,no_q", "seed=range(3)", "tracking.wandb=disabled")


ARMS = ["standard-d16-h2", "no_q-d16-h2"]


def test_arms_take_turns_and_are_measured_once(made):
    measure_arms(made.manifest, ARMS, 2)
    found = read_solo(made.folder)
    order = [(row.arm, row.repetition) for row in found.rows]
    assert order == [(ARMS[0], 0), (ARMS[1], 0), (ARMS[1], 1), (ARMS[0], 1)]
    assert all(row.seconds > 0 and row.memory > 0 for row in found.rows)
    measure_arms(made.manifest, ARMS, 2)
    assert read_solo(made.folder) == found
    # A kill costs one measurement: the others are kept.
    content = json.loads((made.folder / FILE).read_text())
    del content["rows"][2]
    (made.folder / FILE).write_text(json.dumps(content))
    measure_arms(made.manifest, ARMS, 2)
    again = read_solo(made.folder)
    assert [row for row in found.rows if row in again.rows] == [
        row for number, row in enumerate(found.rows) if number != 2
    ]
    counts = {arm: len(rows) for arm, rows in read_measurements(made.folder).items()}
    assert counts == dict.fromkeys(ARMS, 2)


def test_another_machine_is_measured_anew(made, capsys):
    measure_arms(made.manifest, ARMS[:1], 1)
    content = json.loads((made.folder / FILE).read_text())
    content["machine"]["cpu"] = "another CPU"
    (made.folder / FILE).write_text(json.dumps(content))
    measure_arms(made.manifest, ARMS[:1], 1)
    assert "measured on another machine" in capsys.readouterr().err
    assert len(read_solo(made.folder).rows) == 1


def test_nothing_is_measured_beside_a_run(made, monkeypatch, capsys):
    run = made.runs()[0]
    folder = made.run_folder(run)
    folder.mkdir(parents=True)

    def sleep(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr("qkablate.sweeps.running.solo.time.sleep", sleep)
    with hold_lease(folder), pytest.raises(KeyboardInterrupt):
        measure_arms(made.manifest, ARMS, 1)
    assert f"waiting for {folder.name} to end" in capsys.readouterr().err
    assert read_solo(made.folder) is None


def test_larger_activations_take_more_memory(world):
    words = ["variant=standard", "seed=range(3)", "tracking.wandb=disabled"]
    made = world(*words, "model.context=256", "train.batch_size=4,64", "attention.kernel=math")
    small, large = made.manifest.arms
    measure_arms(made.manifest, [small, large], 1)
    memory = {arm: rows[0].memory for arm, rows in read_measurements(made.folder).items()}
    assert memory[large] > 3 * memory[small]


def test_measurements_are_read_without_torch():
    code = "import qkablate.sweeps.running.solo_results, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
