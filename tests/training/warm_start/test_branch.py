"""Runs that branch off a longer one, or extend a shorter one, equal those trained alone."""

import shutil

import pytest

from qkablate.compose.configs import compose_jobs
from qkablate.disk import make_folder
from qkablate.runs.prefix import Branching, branch_path, find_branch, find_prefix
from qkablate.runs.records import read_json
from qkablate.training import environment
from qkablate.training.resolve import plan_run
from qkablate.training.session import train_run
from qkablate.training.signals import Stopped
from qkablate.training.warm_start.branch import start_from_branch
from tests.sweeps.run_checks import assert_same, final_state
from tests.tracking.wandb import log_reader
from tests.training.helpers import interrupt_after, read_rows

CLOCKS = ("seconds", "tokens_per_second", "peak_memory_bytes", "ended", "metrics_sha256", "sha256")
HORIZONS = (9, 14, 30)


@pytest.fixture
def words(tiny):
    """Return the words of wsd runs whose lengths have the same settings."""
    return [
        *(word for word in tiny if not word.startswith(("train.steps", "out="))),
        *("optim.schedule=wsd", "optim.warmup=2", "train.eval_every=3", "model.dropout=0.1"),
        *("train.checkpoint_every=5", "train.eval_tokens=64", "diagnostics.every=1"),
    ]


def plan(words, steps, out, *others):
    (job,) = compose_jobs([*words, f"train.steps={steps}", f"out={out}", *others])
    return plan_run(job.config)


def train(words, steps, out, *others, **branching):
    """Train one run and return its folder."""
    planned = plan(words, steps, out, *others)
    outcome = train_run(planned, branching=Branching(**branching))
    assert outcome.result["status"] == "done"
    return planned.run.folder


def branch_for(words, steps, out, folder):
    planned = plan(words, steps, out)
    return find_branch([folder], find_prefix(planned.config, planned.identity))


def assert_equal_runs(one, other):
    """Check that all that two runs have written is equal, but for clocks."""
    assert one.name == other.name
    assert_same(final_state(one), final_state(other))
    assert read_rows(one) == read_rows(other)
    results = [read_json(folder / "result.json") for folder in (one, other)]
    for result in results:
        for key in CLOCKS:
            del result[key]
    assert results[0] == results[1]
    for pattern in ("predictions/*", "attention_map*", "document_losses*"):
        files = [{f.name: f.read_bytes() for f in folder.glob(pattern)} for folder in (one, other)]
        assert files[0] == files[1]


def test_branched_runs_equal_those_trained_alone(words, tmp_path):
    longest = train(words, HORIZONS[-1], "shared", horizons=HORIZONS[:-1])
    assert_equal_runs(train(words, HORIZONS[-1], "alone"), longest)
    for steps in HORIZONS[:-1]:
        branch = branch_for(words, steps, "shared", longest)
        begun = int(branch.name.removeprefix("step-"))
        assert begun == steps - round(0.2 * steps)
        folder = train(words, steps, "shared", start=branch)
        assert read_json(folder / "environment.json")["branch"]["step"] == begun
        assert_equal_runs(train(words, steps, "alone"), folder)


def test_extended_run_equals_one_trained_alone(words, tmp_path):
    shorter = train(words, 14, "shared")
    branch = branch_for(words, 30, "shared", shorter)
    assert branch == branch_path(shorter, 11)
    assert_equal_runs(train(words, 30, "alone"), train(words, 30, "shared", start=branch))


@pytest.fixture
def longest(words, tmp_path):
    """Return a run with branches for all horizons."""
    return train(words, HORIZONS[-1], "shared", horizons=HORIZONS)


def spoil(branch, name):
    """Damage one part of a branch, or of what is beside it."""
    path = branch / name
    if name == "predictions":
        path = branch.parents[1] / "predictions" / "step-00000002.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] + b"x" + content[len(content) // 2 + 1 :])


FILES = ("weights.safetensors", "state.pt", "progress.json", "metrics.jsonl", "origin.json")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FILES, "SHA256SUMS", "predictions"])
def test_run_with_a_damaged_branch_trains_from_its_start(words, longest, capfd, name):
    branch = branch_for(words, 14, "shared", longest)
    spoil(branch, name)
    capfd.readouterr()
    folder = train(words, 14, "shared", start=branch)
    assert "is not used, and the run trained from its start" in capfd.readouterr().err
    assert "branch" not in read_json(folder / "environment.json")
    assert_equal_runs(train(words, 14, "alone"), folder)


@pytest.mark.parametrize(
    ("others", "step", "reason"),
    [
        (["optim.lr=2e-3"], 11, "it is not a part of this run"),
        (["tracking.log_every=3"], 11, "it is not a part of this run"),
        ([], 24, "it is not a part of this run"),
        (["threads=2"], 11, "it was computed with threads 1"),
        ([], 5, "No such file"),
    ],
)
def test_branch_that_is_no_part_of_the_run_is_not_used(words, longest, others, step, reason):
    planned = plan(words, 14, "other", *others)
    make_folder(planned.run.folder)
    environment.write(planned, 1)
    notes = []
    branching = Branching(start=branch_path(longest, step))
    assert start_from_branch(planned, branching, "cpu", notes.append) is None
    assert [reason in note for note in notes] == [True]
    assert {path.name for path in planned.run.folder.iterdir()} <= {
        *("config.yaml", "environment.json", "tokenizer.json")
    }


def test_stopped_run_resumes_after_its_branch(words, longest, monkeypatch):
    branch = branch_for(words, 14, "shared", longest)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 2)
        with pytest.raises(Stopped):
            train(words, 14, "shared", start=branch)
    shutil.rmtree(branch)
    folder = train(words, 14, "shared", start=branch)
    assert read_json(folder / "environment.json")["branch"]["step"] == 11
    assert_equal_runs(train(words, 14, "alone"), folder)


def test_resumed_run_keeps_the_branches_it_has(words, tmp_path, monkeypatch):
    """Stopped after the first branch, it keeps that one and adds the others."""
    with monkeypatch.context() as patch:
        interrupt_after(patch, 14)
        with pytest.raises(Stopped):
            train(words, 30, "shared", horizons=HORIZONS)
    (first,) = tmp_path.glob("shared/runs/*/branches/step-*")
    before = (first / "progress.json").read_bytes()
    folder = train(words, 30, "shared", horizons=HORIZONS)
    assert (first / "progress.json").read_bytes() == before
    steps = [path.name for path in sorted((folder / "branches").glob("step-*"))]
    assert steps == ["step-00000007", "step-00000011", "step-00000024"]
    assert_equal_runs(train(words, 30, "alone"), folder)


def test_rerun_of_a_run_keeps_new_branches(words, longest):
    planned = plan(words, 30, "shared")
    train_run(planned, rerun=True, branching=Branching(horizons=(9,)))
    assert [path.name for path in (longest / "branches").glob("step-*")] == ["step-00000007"]
    assert len([*(longest / "attempts" / "1" / "branches").glob("step-*")]) == 3


def test_rows_of_a_run_resumed_with_other_settings_are_not_used(words, monkeypatch, capfd):
    with monkeypatch.context() as patch:
        interrupt_after(patch, 5)
        with pytest.raises(Stopped):
            train(words, 30, "shared", horizons=HORIZONS)
    longest = train(words, 30, "shared", "tracking.log_every=1", horizons=HORIZONS)
    folder = train(words, 14, "shared", "tracking.log_every=1", start=branch_path(longest, 11))
    assert "metrics.jsonl has train/loss at other steps" in capfd.readouterr().err
    assert_equal_runs(train(words, 14, "alone", "tracking.log_every=1"), folder)


@pytest.mark.slow
def test_rows_before_the_branch_are_logged_to_wandb(words, longest):
    branch = branch_for(words, 14, "shared", longest)
    folder = train(words, 14, "shared", "tracking.wandb=offline", start=branch)
    (logged,) = folder.glob("wandb/offline-run-*")
    steps = [row["step"] for row in log_reader.read(logged).rows]
    assert steps == sorted({row["step"] for row in read_rows(folder)})
