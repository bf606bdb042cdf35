"""`qkablate status`: progress is derived from run folders, which stay unchanged."""

import contextlib
import csv
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from qkablate.runs.lease import hold_lease
from qkablate.sweeps.running.results import COLUMNS
from tests.cli.helpers import run_in

WORDS = [
    *("sweep.name=small", "variant=standard,no_q", "seed=0,1", "workers=2", "sweep.floor=false"),
    *("model.layers=2", "model.d_model=16", "model.heads=2", "model.context=16"),
    *("train.steps=12", "train.batch_size=2", "train.eval_every=6", "tracking.wandb=disabled"),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the outputs of a small finished sweep."""
    return run_in(tmp_path_factory.mktemp("status"), "sweep", *WORDS)


def tree(folder):
    """Every file and folder with its content and its time."""
    return {
        path: (path.lstat().st_mtime_ns, path.is_file() and path.read_bytes())
        for path in [folder, *folder.rglob("*")]
    }


@pytest.mark.slow
def test_state_of_the_sweep_is_printed(qkablate, sweep):
    done = qkablate("status")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0] == f"{sweep.name}  4 runs: 4 done"
    assert [line.split()[2] for line in lines if line.startswith(("standard", "no_q"))] == [
        "2/2"
    ] * 2
    assert any(line.startswith("results ") for line in lines)
    assert lines[-1] == f"  qkablate results {sweep.name}"


def test_json(qkablate, sweep):
    done = qkablate("status", "--json")
    assert done.code == 0
    output = json.loads(done.out)
    assert output["sweep"] == sweep.name
    assert Path(output["folder"]).resolve() == sweep.resolve()
    assert (output["runs"], output["done"], output["seconds_left"]) == (4, 4, 0.0)
    for status in ("running", "waiting", "interrupted", "diverged", "failed"):
        assert output.get(status, 0) == 0
    manifest = json.loads((sweep / "manifest.json").read_text())
    assert [state["id"] for state in output["states"]] == [run["id"] for run in manifest["runs"]]
    for state in output["states"]:
        assert list(state) == list(COLUMNS)
        assert state["status"] == "done"
        result = json.loads(Path(state["folder"], "result.json").read_text())
        assert state["val_loss"] == result["loss"]["val"]
        assert state["seed"] == result["seed"]


def test_csv_is_results_csv(qkablate, finished):
    (folder,) = (finished / "sweeps").glob("small-*")
    done = qkablate("status", str(folder), "--csv")
    assert (done.code, done.err) == (0, "")
    assert done.out == (folder / "results.csv").read_text()
    assert len(list(csv.DictReader(io.StringIO(done.out)))) == 4


def test_sweep_is_found_by_its_folder_name_or_id(qkablate, sweep, tmp_path):
    elsewhere = shutil.copytree(tmp_path / "outputs", tmp_path / "elsewhere", symlinks=True)
    id = sweep.name.rpartition("-")[2]
    first = f"{sweep.name}  4 runs: 4 done\n"
    ways = [sweep.name, "small", "sma", id, id[:4], str(sweep), f"outputs/sweeps/{sweep.name}/"]
    for way in ways:
        assert qkablate("status", way).out.startswith(first)
        assert qkablate("status", way, "out=elsewhere").out.startswith(first)
    shutil.rmtree(tmp_path / "outputs")
    assert qkablate("status").code == 2
    assert qkablate("status", "out=elsewhere").out.startswith(first)
    assert qkablate("status", f"{elsewhere}/sweeps/{sweep.name}").out.startswith(first)


def test_default_is_the_newest_sweep(qkablate, outputs, sweep, tiny):
    copy = shutil.copytree(sweep, outputs / "sweeps" / "older-0123456789ab", symlinks=True)
    manifest = copy / "manifest.json"
    os.utime(manifest, (1, 1))
    assert json.loads(qkablate("status", "--json").out)["sweep"] == sweep.name
    os.utime(sweep / "manifest.json", (0, 0))
    assert json.loads(qkablate("status", "--json").out)["sweep"] == copy.name


MISTAKES = [
    (["smal-0"], "there is no sweep 'smal-0' in 'outputs' (nearest: small"),
    (["nope", "out=nowhere"], "there is no sweep 'nope' in 'nowhere', which does not exist; start"),
    (["out=nowhere"], "there is no sweep in 'nowhere', which does not exist; start one: qkablate"),
    (["one", "two"], "'two': one sweep at a time, and 'one' was given"),
    (["--json", "--csv"], "--csv and --json: give one of them"),
    (["--json", "--watch"], "--json and --watch: give one of them"),
    (["--jsn"], "(nearest: --json)"),
    (["~nobody-of-this-name"], "there is no sweep '~nobody-of-this-name'"),
    (["a" * 300], f"there is no sweep '{'a' * 300}'"),
    (["\x1b[31mred"], "there is no sweep '�[31mred'"),
]


@pytest.mark.parametrize(("words", "line"), MISTAKES, ids=[w[0][0][:20] for w in MISTAKES])
def test_mistakes(qkablate, sweep, words, line):
    done = qkablate("status", *words)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("qkablate: ")
    assert line in done.err
    assert done.err.count("\n") == 1


def test_nearest_name_is_offered_for_how_it_begins(qkablate, sweep):
    """Accept what a user types: the name without the id."""
    assert "(nearest: small)" in qkablate("status", "smalll").err


def test_ambiguous_name_is_refused(qkablate, outputs, sweep):
    shutil.copytree(sweep, outputs / "sweeps" / "small-0123456789ab", symlinks=True)
    done = qkablate("status", "small")
    assert done.code == 2
    assert "'small' matches 2 sweeps: " in done.err
    assert "small-0123456789ab" in done.err


def test_damaged_manifest_is_reported(qkablate, sweep):
    path = sweep / "manifest.json"
    path.write_text(path.read_text()[:-9])
    done = qkablate("status")
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "manifest.json' is damaged" in done.err


@pytest.mark.parametrize("flags", [[], ["--json"], ["--csv"], ["--watch"]])
def test_nothing_is_written(qkablate, outputs, flags):
    shutil.rmtree(next((outputs / "runs").glob("no_q-*")))
    before = tree(outputs)
    assert qkablate("status", *flags).code == 1
    assert tree(outputs) == before


def test_deleted_runs_are_waiting(qkablate, outputs, sweep):
    gone = sorted((outputs / "runs").glob("no_q-*"))
    for folder in gone:
        shutil.rmtree(folder)
    done = qkablate("status")
    assert done.code == 1
    assert done.out.startswith(f"{sweep.name}  4 runs: 2 done · 2 waiting\n")
    command = json.loads((sweep / "manifest.json").read_text())["command"]
    assert done.out.rstrip().splitlines()[-2].startswith("  qkablate sweep ")
    assert all(word in done.out for word in command if not word.startswith("out="))
    assert "out=" not in done.out  # the sweep was moved to the default folder
    assert "2 runs that results.csv lists as done are not in 'outputs/runs'" in done.out
    output = json.loads(qkablate("status", "--json").out)
    assert (output["runs"], output["done"], output["waiting"]) == (4, 2, 2)
    assert output["seconds_left"] is None  # nobody is at work
    states = {Path(state["folder"]).name: state["status"] for state in output["states"]}
    assert {name for name, status in states.items() if status == "waiting"} == {
        folder.name for folder in gone
    }
    shutil.rmtree(outputs / "runs")
    assert json.loads(qkablate("status", "--json").out)["waiting"] == 4


def test_killed_run_is_interrupted(qkablate, outputs):
    run = next((outputs / "runs").glob("no_q-*"))
    (run / "result.json").unlink()
    output = json.loads(qkablate("status", "--json").out)
    assert (output["done"], output["interrupted"]) == (3, 1)


@contextlib.contextmanager
def at_work(outputs):
    """One of the runs is trained by someone who is at its eighth step of twelve."""
    run = next((outputs / "runs").glob("no_q-*"))
    (run / "result.json").unlink()
    row = {"step": 8, "train/loss": 4.5, "perf/tokens_per_second": 250.0}
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    with hold_lease(run):
        yield run


def test_run_trained_by_another_process_is_running(qkablate, outputs):
    with at_work(outputs):
        done = qkablate("status")
        output = json.loads(qkablate("status", "--json").out)
    assert done.code == 1
    assert "4 runs: 3 done · 1 running" in done.out
    assert "step 8/12" in done.out
    assert "loss 4.5000" in done.out
    assert (output["done"], output["running"]) == (3, 1)
    assert output["seconds_left"] > 0


def test_a_sweep_whose_launcher_is_starting_is_not_to_be_started_again(qkablate, outputs, sweep):
    shutil.rmtree(next(outputs.glob("runs/*")))
    assert "  qkablate sweep " in qkablate("status").out
    with hold_lease(sweep / "launchers" / "here-1"):
        done = qkablate("status")
    assert "3 done · 1 waiting" in done.out
    assert "  its launcher is starting or waiting for runs\n" in done.out
    assert f"Next\n  qkablate status {sweep.name} --watch\n" in done.out
    assert "qkablate sweep" not in done.out


def test_watch_ends_when_nothing_runs(qkablate, outputs, sweep, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    waits = []
    with contextlib.ExitStack() as work:
        work.enter_context(at_work(outputs))

        def wait(seconds):
            waits.append(seconds)
            if len(waits) == 3:  # the run's process is killed
                work.close()

        monkeypatch.setattr("qkablate.cli.status.time.sleep", wait)
        done = qkablate("status", "--watch")
    assert len(waits) == 3
    assert done.code == 1
    assert done.err.count(sweep.name) == 4
    assert done.err.count("1 running") == 3
    assert "3 done · 1 interrupted" in done.err


@pytest.mark.parametrize("live", [True, False])
def test_watch_of_a_finished_sweep_prints_once(qkablate, outputs, sweep, monkeypatch, live):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: live)
    monkeypatch.setenv("NO_COLOR", "1")
    done = qkablate("status", sweep.name, "--watch")
    assert done.code == 0
    assert (done.out + done.err).count(f"{sweep.name}  4 runs: 4 done") == 1


@pytest.mark.parametrize("is_there", [True, False])
def test_watch_waits_on_a_terminal_for_a_sweep_to_start(
    qkablate, outputs, sweep, monkeypatch, is_there
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    elsewhere = outputs / "elsewhere"
    if not is_there:
        sweep.rename(elsewhere)
    waits = []
    with contextlib.ExitStack() as launcher:

        def wait(seconds):
            waits.append(seconds)
            assert len(waits) < 9
            if len(waits) == 2:  # it is started
                if not is_there:
                    elsewhere.rename(sweep)
                launcher.enter_context(hold_lease(sweep / "launchers" / "here-1"))
            if len(waits) == 4:
                launcher.close()

        monkeypatch.setattr("qkablate.cli.status.time", SimpleNamespace(sleep=wait))
        done = qkablate("status", "small", "--watch")
    assert len(waits) == 4
    assert done.err.count("waiting for a sweep to start (Ctrl-C ends this)") == 1
    reason = f"{sweep.name} is finished" if is_there else "there is no sweep"
    assert reason in done.err.splitlines()[0]
    assert "4 runs: 4 done" in done.err.splitlines()[1]


def test_no_torch_is_imported(sweep):
    code = (
        "import sys, qkablate.cli\n"
        "try: qkablate.cli.main(['status'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'wandb', 'datasets', 'pyarrow'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(sweep.name)
