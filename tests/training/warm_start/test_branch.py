"""Runs that branch off a longer one, or extend a shorter one, equal those trained alone."""

import pytest

from qkablate.compose.configs import compose_jobs
from qkablate.runs.prefix import Branching, branch_path, find_branch, find_prefix
from qkablate.runs.records import read_json
from qkablate.training.resolve import plan_run
from qkablate.training.session import train_run
from tests.sweeps.run_checks import assert_same, final_state
from tests.training.helpers import read_rows

CLOCKS = ("seconds", "tokens_per_second", "peak_memory_bytes", "ended", "metrics_sha256", "sha256")
HORIZONS = (9, 14, 30)


@pytest.fixture
def words(tiny):
    """Return the words of wsd runs whose lengths have the same settings."""
    return [
        *(word for word in tiny if not word.startswith(("train.steps", "out="))),
        *("optim.schedule=wsd", "optim.warmup=2", "train.eval_every=3", "model.dropout=0.1"),
        *("train.checkpoint_every=5", "train.eval_tokens=64", "diagnostics.every=2"),
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
