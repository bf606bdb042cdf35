"""`qkablate export-logs` as a user types it."""

import os
import sys

import pytest

from tests.cli.helpers import assert_refused, complete

TENSORBOARD = ["--to", "tensorboard", "--into", "boards"]


@pytest.fixture
def tensorboard():
    if not os.environ.get("QKABLATE_NEEDS_EXPORT"):
        pytest.importorskip("tensorboard")


def test_every_run_is_written_once(qkablate, outputs, tensorboard, tmp_path):
    runs = {path.name for path in (outputs / "runs").iterdir()}
    done = qkablate("export-logs", *TENSORBOARD)
    assert (done.code, done.err) == (0, "")
    assert done.out == f"{len(runs)} runs written to 'boards'; 0 unchanged\n"
    assert {path.name for path in (tmp_path / "boards").iterdir()} == runs
    again = qkablate("export-logs", *TENSORBOARD)
    assert again.out == f"0 runs written to 'boards'; {len(runs)} unchanged\n"


def test_sweep_stands_for_its_runs(qkablate, outputs, tensorboard):
    assert qkablate("export-logs", "small", *TENSORBOARD).out.startswith("15 runs written")


def test_damaged_run_is_named_and_the_others_are_written(qkablate, outputs, tensorboard):
    first = sorted((outputs / "runs").iterdir())[0]
    (first / "config.yaml").write_text("[")
    done = qkablate("export-logs", *TENSORBOARD)
    assert done.code == 1
    assert first.name in done.err
    assert done.err.count("\n") == 1
    assert " runs written" in done.out


def test_folder_that_cannot_be_written_is_one_line(qkablate, outputs, tensorboard, tmp_path):
    (tmp_path / "file").touch()
    done = qkablate("export-logs", "--to", "tensorboard", "--into", "file/boards")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("qkablate: cannot write in 'file/boards': ")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "--to: give tensorboard or mlflow"),
        (
            ["--to", "tensorbord"],
            "'tensorbord' (nearest: tensorboard) is not one of tensorboard, mlflow",
        ),
        (["--to", "mlflow"], "--into: give a folder to write in"),
        (["--to", "mlflow", "--into", "corpus.txt"], "--into: 'corpus.txt' is not a folder"),
        (TENSORBOARD, "there is no run in 'outputs' yet; start one: qkablate train"),
        (["no_such", *TENSORBOARD], "there is no sweep or run 'no_such' in 'outputs'"),
        (["--too", *TENSORBOARD], "'--too' (nearest: --to) is not one of"),
    ],
)
def test_mistake_is_one_line(qkablate, text, words, line):
    assert_refused(qkablate("export-logs", *words), line)


@pytest.mark.parametrize("into", ["outputs/runs", "outputs/sweeps/new", "outputs/runs/RUN/logs"])
def test_folders_of_runs_are_no_target(qkablate, outputs, tensorboard, into):
    run = next((outputs / "runs").iterdir()).name
    done = qkablate("export-logs", "--to", "tensorboard", "--into", into.replace("RUN", run))
    assert_refused(done, "is in the folder of runs")


@pytest.mark.parametrize("tool", ["tensorboard", "mlflow"])
def test_missing_extra_is_one_line(qkablate, outputs, monkeypatch, tool):
    monkeypatch.setitem(sys.modules, tool, None)
    done = qkablate("export-logs", "--to", tool, "--into", "folder")
    assert_refused(done, f"of the extra '{tool}': pip install '.[{tool}]' in a clone")


def test_completion_knows_the_verb(qkablate, monkeypatch, outputs):
    assert complete(qkablate, monkeypatch, "qkablate exp") == ["export", "export-logs"]
    assert complete(qkablate, monkeypatch, "qkablate export-") == ["export-logs"]
    assert "--into" in complete(qkablate, monkeypatch, "qkablate export-logs --")
