"""A gap split in two, from the files of four runs."""

import json
from pathlib import Path

import pytest

from qkablate.analysis.comparison.projection_gap import (
    PARTS,
    ProjectionGap,
    decompose_gap,
    equally_tuned,
    mean_gaps,
)
from qkablate.analysis.stats import Estimate
from qkablate.errors import UserError
from qkablate.runs.records import seal_result


def write(folder, val, test, first=None, status="done"):
    folder.mkdir()
    rows = [{"step": 0, "val/loss": first}] if first is not None else []
    rows.append({"step": 4, "val/loss": val})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = {"status": status, "tokens": 1, "seconds": 1.0, "loss": {"val": val, "test": test}}
    if status == "diverged":
        result["diverged_at"] = 3
    (folder / "result.json").write_text(json.dumps(seal_result(result, folder / "metrics.jsonl")))
    return folder


@pytest.fixture
def four(tmp_path):
    return {
        "parent": write(tmp_path / "parent", 2.0, 2.125),
        "continued": write(tmp_path / "continued", 1.75, 1.875, first=2.0),
        "projected": write(tmp_path / "projected", 1.875, 2.125, first=3.5),
        "scratch": write(tmp_path / "scratch", 2.5, 2.75),
    }


def test_parts(four):
    gap = decompose_gap(**four).gap
    assert gap["before_finetuning"] == {"val": 1.5, "test": None}
    assert gap["finetuned"] == {"val": 0.125, "test": 0.25}
    assert gap["scratch"] == {"val": 0.5, "test": 0.625}
    assert gap["training"] == {"val": 0.375, "test": 0.375}


def test_without_the_run_from_scratch_there_is_no_part_of_training(four):
    for scratch in (None, four["parent"].parent / "nothing"):
        gap = decompose_gap(**(four | {"scratch": scratch})).gap
        assert gap["finetuned"] == {"val": 0.125, "test": 0.25}
        assert gap["scratch"] == gap["training"] == {"val": None, "test": None}


def test_tuning_run_has_no_test_loss(four, tmp_path):
    other = write(tmp_path / "tuning", 2.25, None)
    gap = decompose_gap(**(four | {"scratch": other})).gap
    assert gap["scratch"] == {"val": 0.25, "test": None}


def test_diverged_run_has_no_loss(four, tmp_path):
    other = write(tmp_path / "diverged", 2.25, 2.5, status="diverged")
    assert decompose_gap(**(four | {"scratch": other})).gap["training"] == {
        "val": None,
        "test": None,
    }


def test_changed_metrics_are_rejected(four):
    (four["projected"] / "metrics.jsonl").write_text('{"step": 0, "val/loss": 2.0}\n')
    with pytest.raises(UserError, match=r"projected/metrics.jsonl' is damaged"):
        decompose_gap(**four)


def test_mean_over_seeds_has_students_interval():
    """Check 1, 2 and 3: a mean of 2, and 4.303 standard errors to both sides."""
    seeds = [
        ProjectionGap({}, {}, {part: {"val": value, "test": None} for part in PARTS})
        for value in (1.0, 2.0, 3.0)
    ]
    found = mean_gaps(seeds)["finetuned"]
    assert found["val"].n == 3
    assert found["val"].mean == 2
    assert found["val"].interval == pytest.approx((2 - 2.4841377, 2 + 2.4841377))
    assert found["test"] == Estimate(n=0, mean=None, sd=None, interval=None)
    assert mean_gaps(seeds[:1])["finetuned"]["val"] == Estimate(
        n=1, mean=1.0, sd=None, interval=None
    )


def test_run_from_scratch_has_no_more_rates_than_its_parent():
    scratch = {4e-3: Path("a"), 1e-3: Path("b"), 8e-3: Path("c")}  # the best first
    tuned = {1e-3: Path("d"), 4e-3: Path("e")}
    assert [*equally_tuned(scratch, tuned, 1e-3)] == [4e-3, 1e-3]  # the parent is the best of two
    assert [*equally_tuned(scratch, tuned, 4e-3)] == [4e-3]  # it was not chosen
    assert [*equally_tuned(scratch, {1e-3: Path("d")}, 1e-3)] == [1e-3]
    assert equally_tuned(scratch, {2e-3: Path("d")}, 2e-3) == {}
