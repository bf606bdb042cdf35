"""results.csv and results.parquet: a row per run, rebuilt from the runs at any time."""

import csv
import json
from pathlib import Path

import pytest
from pyarrow import parquet

from qkablate.sweeps.running.results import print_failures
from qkablate.sweeps.running.state import SweepState

# Users read columns by name: columns may be added, but not renamed.
COLUMNS = [
    *("id", "label", "arm", "baseline", "variant", "control", "tuning", "d_model", "heads"),
    *("layers", "context", "mlp_width", "data", "seed", "lr", "circuit_lr", "planned_steps"),
    "status",
    *("train_loss", "val_loss", "test_loss", "val_bits_per_byte", "test_bits_per_byte"),
    *("val_accuracy", "test_accuracy", "chance", "val_exact", "test_exact"),
    *("best_ngram_loss", "lzma_loss", "beats_ngrams"),
    *("params", "params_with_embeddings", "mismatch"),
    *("flops_per_token", "steps", "tokens", "seconds", "tokens_per_second", "packed"),
    *("program_runs", "threads"),
    *("peak_memory_bytes", "attempt", "diverged_at", "precision", "matmul", "device", "kernel"),
    *("folder", "error"),
]
# Columns copied from the result under the same name.
SAME = [
    *("id", "label", "variant", "seed", "d_model", "heads", "layers", "context", "steps"),
    *("tokens", "seconds", "tokens_per_second", "packed", "program_runs", "threads"),
    *("peak_memory_bytes", "attempt", "precision", "matmul", "device", "kernel", "flops_per_token"),
]


@pytest.fixture
def sweep(qkablate, tmp_path):
    """Return a function that runs a sweep and returns its folder."""

    def run(*words: str, code: int = 0) -> Path:
        done = qkablate("sweep", "sweep.floor=false", *words)
        assert done.code == code, done.err
        (folder,) = tmp_path.glob("outputs/sweeps/*/")
        return folder

    return run


def read(folder: Path) -> list[dict]:
    """Return the rows, which are the same in both files."""
    with (folder / "results.csv").open(newline="", encoding="utf-8") as file:
        texts = list(csv.DictReader(file))
    rows = parquet.read_table(folder / "results.parquet").to_pylist()
    assert len(texts) == len(rows)
    for text, row in zip(texts, rows, strict=True):
        assert list(text) == list(row)
        assert text == {key: "" if value is None else str(value) for key, value in row.items()}
    return rows


def result_of(row: dict) -> dict:
    return json.loads(Path(row["folder"], "result.json").read_text())


@pytest.mark.slow
def test_every_run_has_a_row_with_its_result(sweep, tiny, tmp_path):
    words = [
        *tiny,
        "variant=standard,no_q",
        "sweep.floor=false",
        "seed=3,1",
        "control=none,params",
        "optim.lr=2e-3",
    ]
    folder = sweep(*words)
    rows = read(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert [row["id"] for row in rows] == [run["id"] for run in manifest["runs"]]
    assert len(rows) == 6
    for row in rows:
        assert list(row) == COLUMNS
        result, arm = result_of(row), manifest["arms"][row["arm"]]
        assert {key: row[key] for key in SAME} == {key: result[key] for key in SAME}
        for split in ("train", "val", "test"):
            assert row[f"{split}_loss"] == result["loss"][split]
        assert row["params_with_embeddings"] == result["params"]["total"]
        assert row["params"] == arm["params"] < row["params_with_embeddings"]
        assert (row["lr"], row["planned_steps"], row["data"]) == (2e-3, 12, "text")
        assert (row["status"], row["error"], row["tuning"]) == ("done", None, False)
        assert row["val_bits_per_byte"] == result["bits_per_byte"]["val"] > 0
        assert row["val_accuracy"] is None
        assert row["baseline"] == ("standard-d16-h2" if row["variant"] == "no_q" else None)
        assert (folder / "runs" / Path(row["folder"]).name).resolve() == Path(row["folder"])
    by_arm = {row["arm"]: row for row in rows}
    assert by_arm["standard-d16-h2"]["control"] == "none,params"
    assert by_arm["no_q-d16-h2"]["control"] == "none"
    paying = by_arm["no_q-d16-h2-params"]
    assert paying["control"] == "params"
    assert paying["mlp_width"] > by_arm["no_q-d16-h2"]["mlp_width"] == 64
    assert abs(paying["mismatch"]) < 0.01
    assert by_arm["no_q-d16-h2"]["mismatch"] is None


@pytest.mark.slow
def test_deleted_results_are_rebuilt_without_training(sweep, tiny, tmp_path):
    words = [*tiny, "variant=standard", "seed=0,1", "workers=2"]
    folder = sweep(*words)
    names = ("results.csv", "results.parquet")
    before = {name: (folder / name).read_bytes() for name in names}
    trained = {path: path.stat().st_mtime_ns for path in tmp_path.glob("outputs/runs/**/*")}
    for name in names:
        (folder / name).unlink()
    assert sweep(*words) == folder
    assert {name: (folder / name).read_bytes() for name in names} == before
    after = {path: path.stat().st_mtime_ns for path in tmp_path.glob("outputs/runs/**/*")}
    assert after == trained


@pytest.mark.slow
def test_unfinished_runs_have_rows(sweep, tiny, circuit):
    files = ",".join(str(circuit(name)) for name in ("diverges", "raises"))
    words = [*tiny, f"variant.file={files}", "seed=0,1", "sweep.baseline=null"]
    folder = sweep(*words, "workers=1", "on_failure=stop", code=1)
    rows = {(row["variant"], row["seed"]): row for row in read(folder)}
    assert {run: row["status"] for run, row in rows.items()} == {
        ("diverges", 0): "diverged",
        ("diverges", 1): "diverged",
        ("raises", 0): "failed",
        ("raises", 1): "waiting",
    }
    for row in rows.values():
        assert list(row) == COLUMNS
        assert row["baseline"] is None
        assert row["val_loss"] is row["test_loss"] is row["val_bits_per_byte"] is None
    failed, waiting = rows["raises", 0], rows["raises", 1]
    assert failed["error"] == result_of(failed)["error"] == "ValueError: no queries today"
    assert waiting["error"] is None
    assert waiting["steps"] is waiting["seconds"] is waiting["attempt"] is None
    for seed in (0, 1):
        row = rows["diverges", seed]
        assert row["diverged_at"] == result_of(row)["diverged_at"] > 0
        assert row["error"] == f"not finite at step {row['diverged_at']}"


@pytest.mark.slow
def test_tuned_task_has_accuracies_and_tuning_rows(sweep, tiny):
    """Tasks have accuracies instead of bits per byte; tuning runs have rows beside the others."""
    own = [word for word in tiny if not word.startswith("data")]
    task = ["data=recall", "data.vocab_size=16", "data.pairs=2", "train.steps=4"]
    task += ["data.val_tokens=128", "data.test_tokens=128"]
    tune = ["sweep.tune=true", "sweep.tuning_seeds=[7]", "seed=0,1", "variant=standard"]
    folder = sweep(*own, *task, *tune, "workers=2")
    rows = read(folder)
    tuning = [row for row in rows if row["tuning"]]
    finals = [row for row in rows if not row["tuning"]]
    assert {row["seed"] for row in tuning} == {7}
    assert len(tuning) == len({(row["lr"], row["circuit_lr"]) for row in tuning}) >= 15
    assert [row["seed"] for row in finals] == [0, 1]
    (search,) = json.loads((folder / "lr_search.json").read_text())
    assert {(row["lr"], row["circuit_lr"]) for row in finals} == {(*search["chosen"].values(),)}
    for row in rows:
        assert (row["status"], row["data"]) == ("done", "recall")
        assert row["val_accuracy"] == result_of(row)["accuracy"]["val"]
        assert 0 <= row["val_accuracy"] <= 1
        assert row["val_bits_per_byte"] is None
        evaluate_test = not row["tuning"]
        assert (row["test_loss"] is not None) == (row["test_accuracy"] is not None) == evaluate_test


def test_some_of_many_interrupted_runs_are_listed_and_all_that_failed(plan_grid, capsys):
    sweep_state = SweepState(plan_grid("seed=range(9)", "sweep.baseline=null"))
    states = [*sweep_state.states.values()]
    for state in states:
        state.status, state.reason = "interrupted", "stopped; run again, it resumes from here"
    print_failures(sweep_state)
    printed = capsys.readouterr().out
    assert printed.count("qkablate train") == 5
    assert f"and {len(states) - 5} more" in printed
    for state in states:
        state.status = "failed"
    print_failures(sweep_state)
    assert capsys.readouterr().out.count("qkablate train") == len(states)
