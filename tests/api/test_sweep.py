"""`qkablate.sweep` as a user calls it."""

import json
import subprocess
import sys
import threading

import pytest

import qkablate as api
from tests.api.helpers import as_keys

GRID = {"sweep.floor": False, "workers": 2}


@pytest.fixture
def keys(tiny):
    return as_keys(tiny) | GRID


MISTAKES = [
    ({}, r"give sweep='quick', or axes .*variant=\['standard', 'merged_w'\], seed=range\(3\)"),
    (
        {"variant": ["standard", "mergd_w"]},
        "variant: 'mergd_w' \\(nearest: merged_w\\) is not one of",
    ),
    ({"sweep": "quik"}, "nearest: quick"),
    ({"variant": ["standard", "no_q"], "seed": range(10_000)}, "20,000 runs.* --yes"),
    ({"variant": "no_q", "workers": 0}, "workers: 0 is not auto"),
]


@pytest.mark.parametrize(("mistake", "message"), MISTAKES)
def test_a_mistake_is_one_line_before_any_work(tmp_path, mistake, message):
    with pytest.raises(api.UserError, match=message) as caught:
        api.sweep(**mistake)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "outputs" / "sweeps").exists()


def test_name_without_its_key_is_rejected():
    with pytest.raises(
        api.UserError, match=r"sweep: 'quick' needs its key, .*sweep\(sweep='quick'"
    ):
        api.sweep("quick")


def test_name_of_a_sweep_that_exists_is_read_by_load_sweep(keys, monkeypatch):
    monkeypatch.setattr("qkablate.sweeps.running.launcher.Launcher.run", lambda self: 1)
    study = api.sweep(seed=range(2), **keys)
    with pytest.raises(api.UserError, match=rf"load_sweep\('{study.name}'\) reads it"):
        api.sweep(study.name, out=keys["out"])


def test_there_may_be_no_sweep(tmp_path):
    with pytest.raises(api.UserError, match="there is no sweep in 'outputs'"):
        api.load_sweep()


@pytest.mark.slow
def test_a_sweep_is_that_of_the_command(keys, tiny, qkablate, tmp_path):
    study = api.sweep(variant=["standard", "no_q"], seed=range(3), **keys)
    assert study.is_complete
    assert len(study.records) == 6
    grid = ["variant=standard,no_q", "seed=range(3)", "sweep.floor=false", "workers=2"]
    again = qkablate("sweep", *tiny, *grid)
    assert again.code == 0
    (folder,) = (tmp_path / "outputs" / "sweeps").iterdir()
    assert study.name == folder.name
    assert repr(study) == f"<Study {study.name}: 2 arms, 6 of 6 runs ended>"
    name = study.name.partition("-")[0]
    assert len(api.load_runs(name)) == len(api.load_runs(folder)) == 6
    done = qkablate("results", "--json")
    (gap,) = api.gaps(study)
    (printed,) = json.loads(done.out)["gaps"]
    assert (gap.n, gap.mean, [*gap.interval]) == (3, printed["mean"], printed["interval"])
    assert (gap.decision, gap.verdict) == (printed["decision"], printed["verdict"])
    (with_margin,) = api.gaps(api.load_sweep(), margin=0.5)
    assert with_margin.margin.nats == 0.5
    assert {run.run.id for run in api.load_runs(folder)} == {r.run.id for r in study.records}
    assert set(api.load_curves(study)["seed"].to_pylist()) == {0, 1, 2}
    # The command that the sweep remembers repeats it.
    manifest = json.loads((folder / "manifest.json").read_text())
    assert qkablate(*manifest["command"][1:]).code == 0
    assert len([*folder.parent.iterdir()]) == 1


@pytest.mark.exhaustive
def test_a_script_needs_no_main_guard(keys, tmp_path):
    """Its lines run once: the processes of the runs do not import it."""
    (tmp_path / "script.py").write_text(
        "import qkablate\n"
        "print('once')\n"
        f"study = qkablate.sweep(variant='no_q', seed=range(2), **{keys})\n"
        "print(study.is_complete)\n",
        encoding="utf-8",
    )
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["once", "True"]


@pytest.mark.slow
def test_a_sweep_in_a_thread_works(keys):
    studies = []
    target = threading.Thread(target=lambda: studies.append(api.sweep(seed=range(2), **keys)))
    target.start()
    target.join()
    assert studies[0].is_complete


def test_a_stopped_sweep_raises_and_a_later_call_resumes_it(keys, monkeypatch):
    monkeypatch.setattr("qkablate.sweeps.running.launcher.Launcher.run", lambda self: 130)
    with pytest.raises(KeyboardInterrupt):
        api.sweep(seed=range(2), **keys)
    study = api.load_sweep(out=keys["out"])
    assert not study.is_complete
    monkeypatch.setattr("qkablate.sweeps.running.launcher.Launcher.run", lambda self: 1)
    assert api.sweep(seed=range(2), **keys).name == study.name
