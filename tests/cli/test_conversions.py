"""`qkablate project` with several variants, as a user types it."""

import importlib.util
import json
import math
import os
import shutil
from pathlib import Path

import pytest

from qkablate.runs.records import read_config
from tests.cli.helpers import copy_outputs, run_in, train_on_pairs
from tests.pretrained.published import write_published

SIZES = ["model.layers=2", "model.d_model=16", "model.heads=2", "model.context=16", "threads=1"]
LENGTH = ["train.steps=30", "train.batch_size=4", "train.eval_every=10", "tracking.wandb=disabled"]
RUNS = "standard-d16-h2-s0", "standard-d16-h2-s1"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the outputs of standard with two seeds."""
    folder = tmp_path_factory.mktemp("conversions")
    for seed in (0, 1):
        run_in(folder, "train", *SIZES, *LENGTH, f"seed={seed}")
    return folder / "outputs"


@pytest.fixture
def outputs(trained, tmp_path, monkeypatch):
    """Return outputs whose data is prepared in the user's own cache."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    return copy_outputs(trained, tmp_path)


def converted(qkablate, *words):
    done = qkablate("project", *words, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out, parse_constant=pytest.fail)


def losses(outputs, label):
    (folder,) = (outputs / "runs").glob(f"{label}-*")
    return json.loads((folder / "result.json").read_text())["loss"]


@pytest.mark.slow
def test_every_number_comes_from_the_runs(qkablate, outputs):
    words = [*RUNS, "variant=no_q,merged_w", "finetune.steps=8"]
    output = converted(qkablate, *words)
    assert output["steps"] == 8
    by_variant = {row["variant"]: row for row in output["variants"]}
    assert set(by_variant) == {"no_q", "merged_w"}
    for name, row in by_variant.items():
        gaps = [
            losses(outputs, f"finetuned-{name}-d16-h2-s{seed}")["test"]
            - losses(outputs, f"finetuned-standard-d16-h2-s{seed}")["test"]
            for seed in (0, 1)
        ]
        assert row["test_gap"]["n"] == 2
        assert row["test_gap"]["mean"] == pytest.approx(sum(gaps) / 2, abs=1e-9)
    assert max(by_variant["merged_w"]["errors"].values()) < 1e-6  # it holds every B_h
    assert abs(by_variant["merged_w"]["gap_before_finetuning"]["mean"]) < 1e-5
    assert 0 < by_variant["no_q"]["errors"]["qk_scores"] < 1
    assert by_variant["no_q"]["params_percent"] < 100
    parents = [
        json.loads((outputs / "runs" / name / "result.json").read_text())["loss"]["val"]
        for name in (path.name for path in sorted((outputs / "runs").glob("standard-*")))
    ]
    assert output["trained"]["val_before_finetuning"]["mean"] == pytest.approx(
        sum(parents) / 2, rel=1e-6
    )


@pytest.mark.exhaustive
def test_imported_run_is_converted_on_several_orders_of_the_data(qkablate, tmp_path, monkeypatch):
    """Its errors are those that `inspect --variants` measures on the same text."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    write_published(tmp_path / "mine", vocabulary=256)
    assert qkablate("import", "mine", "as=small").code == 0
    (tmp_path / "book.txt").write_text("the cat sat on the mat, and a dog ran\n" * 400)
    data = ["data=text", "data.path=book.txt", f"data.cache={tmp_path / 'cache'}"]
    words = ["small", "variant=no_q,merged_w", "seed=range(2)", "finetune.steps=3", *data]
    output = converted(qkablate, *words, "train.batch_size=4")
    rows = {row["variant"]: row for row in output["variants"]}
    for name, row in rows.items():
        gaps = [
            losses(tmp_path / "outputs", f"finetuned-{name}-d16-h4-s{seed}")["test"]
            - losses(tmp_path / "outputs", f"finetuned-standard-d16-h4-s{seed}")["test"]
            for seed in (0, 1)
        ]
        assert row["test_gap"]["n"] == 2
        assert row["test_gap"]["mean"] == pytest.approx(sum(gaps) / 2, abs=1e-9)
    done = qkablate("inspect", "small", *data, "--variants", "--json")
    held = {form["variant"]: form for form in json.loads(done.out)["forms"]["forms"]}
    assert max(rows["merged_w"]["errors"].values()) < 1e-6
    found = rows["no_q"]["errors"]["qk_scores"]
    assert found == pytest.approx(held["no_q"]["scores"], abs=0.05)
    assert 0.1 < found < 1


@pytest.mark.slow
def test_same_runs_as_of_single_projections(qkablate, outputs):
    """The table and the decomposition of one variant share their runs."""
    single = qkablate("project", RUNS[0], "variant=no_q", "finetune.steps=4", "--json")
    folders = json.loads(single.out)["runs"][0]["folders"]
    before = sorted(path.name for path in (outputs / "runs").glob("finetuned-*"))
    assert before == sorted([folders["continued"], folders["projected"]])
    converted(qkablate, RUNS[0], "variant=no_q", "finetune.steps=4", "--table")
    assert sorted(path.name for path in (outputs / "runs").glob("finetuned-*")) == before


@pytest.mark.exhaustive
@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None and not os.environ.get("QKABLATE_NEEDS_RAY"),
    reason="Ray is not installed",
)
def test_conversions_on_a_cluster_are_those_of_this_machine(qkablate, outputs, tmp_path):
    """Trained there, they have the same losses to the last bit, in one table."""
    words = [RUNS[0], "variant=no_q,merged_w", "finetune.steps=4"]
    other = shutil.copytree(outputs, tmp_path / "other", symlinks=True)
    here = converted(qkablate, *words)
    there = converted(qkablate, *words, "engine=ray", f"out={other}")
    assert there["variants"] == here["variants"]
    assert len({*other.glob("runs/finetuned-*/result.json")}) == 3


@pytest.mark.slow
def test_command_given_again_trains_nothing(qkablate, outputs):
    words = [RUNS[0], "variant=no_q,no_k", "finetune.steps=3"]
    first = converted(qkablate, *words)
    times = {p: p.stat().st_mtime_ns for p in (outputs / "runs").glob("finetuned-*/result.json")}
    assert len(times) == 3
    assert converted(qkablate, *words) == first
    assert times == {path: path.stat().st_mtime_ns for path in times}


@pytest.mark.slow
def test_commands_of_failed_runs_train_the_same_run(qkablate, outputs):
    """The words that repeat a run name its parent, and make its id."""
    output = converted(
        qkablate, RUNS[1], "variant=low_rank_w", "variant.rank=3", "--table", "finetune.steps=2"
    )
    from qkablate.analysis.study.study import read_study

    study = read_study(outputs / "sweeps" / output["sweep"])
    for record in study.all_records:
        before = record.folder.joinpath("result.json").stat().st_mtime_ns
        done = qkablate("train", *study.overrides_of(record.run), "tracking.wandb=disabled")
        assert done.code == 0, done.err
        assert record.run.id in done.out + done.err
        assert record.folder.joinpath("result.json").stat().st_mtime_ns == before


@pytest.mark.slow
def test_uniform_loses_every_score_and_keeps_the_outputs(qkablate, outputs):
    (row,) = converted(qkablate, RUNS[0], "variant=uniform", "--table", "finetune.steps=2")[
        "variants"
    ]
    assert row["errors"]["qk_scores"] == pytest.approx(1)
    assert row["errors"]["ov_output"] == 0


@pytest.mark.slow
def test_impossible_variants_are_named_with_the_reason(qkablate, outputs):
    done = qkablate("project", RUNS[0], "variant=no_q,static_scores,no_qk", "finetune.steps=2")
    assert done.code == 0, done.err
    assert "left out: static_scores: the scores do not depend on x" in done.out
    assert "left out: no_qk: its scores cannot be set from a given B_h" in done.out
    assert "n = 1: no interval" in done.out
    name = next((outputs / "sweeps").iterdir()).name
    assert f"qkablate report {name}" in done.out
    report = qkablate("report", name, "--format", "svg", "-o", "page.svg")
    assert report.code == 0, report.err
    assert "page-conversions.svg" in report.out
    text = Path("page-conversions.svg").read_text()
    assert "2 fine-tuning steps" in text
    results = qkablate("results", name)
    assert "sweep.tune=true" not in results.out  # a tuned sweep is no conversion


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("words", "is_prepared"),
    [(["variant=no_q,merged_w"], True), (["variant=no_q", "--table"], False)],
)
def test_translator_of_pairs_is_converted(
    qkablate, tmp_path, tmp_path_factory, monkeypatch, words, is_prepared
):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    folder = tmp_path_factory.mktemp("pairs")
    outputs = copy_outputs(train_on_pairs(folder).parent.parent, tmp_path)
    place = [f"data.cache={tmp_path}/none", f"data.path={folder}/pairs.tsv"]
    more = [] if is_prepared else place
    output = converted(qkablate, "standard", *words, "finetune.steps=2", *more)
    by_variant = {row["variant"]: row for row in output["variants"]}
    assert {*by_variant} == {word for word in ("no_q", "merged_w") if word in words[0]}
    for name, row in by_variant.items():
        gap = losses(outputs, f"finetuned-{name}")["test"]
        gap -= losses(outputs, "finetuned-standard")["test"]
        assert row["test_gap"]["mean"] == pytest.approx(gap, abs=1e-9)
    assert by_variant["no_q"]["errors"]["qk_scores"] > 0
    if "merged_w" in by_variant:
        assert max(by_variant["merged_w"]["errors"].values()) < 1e-6


def test_all_variants_are_planned(qkablate, outputs):
    done = qkablate("project", *RUNS, "variant=all", "finetune.steps=1", "--dry-run", "--json")
    assert done.code == 0, done.err
    plan = json.loads(done.out)
    arms = {arm["arm"] for arm in plan["arms"]}
    assert {"standard-d16-h2", "uniform-d16-h2", "merged_w-d16-h2"} <= arms
    assert not any((outputs / "runs").glob("finetuned-*"))
    assert not any((outputs / "sweeps").glob("project-*"))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["variant=no_q", "engine=slurm"], "engine=slurm: is for sweeps; add --table"),
        (["variant=no_q", "--dry-run"], "--dry-run: is for sweeps; add --table"),
        (["variant=no_q,no_k", "optim.lr=1e-3,1e-4"], "optim.lr: give one value"),
        (["variant=no_q,al"], "'al' is not one of"),
        (["variant=static_scores", "--table"], "no variant is left: static_scores: the scores"),
        (["variant=no_q,no_k", "train.steps=3"], "write finetune.steps=200"),
        (["variant=no_q,no_k", "model.layers=3"], "model.layers: is fixed by the trained run"),
        (["variant=no_q,no_k", "seed=3"], "seed: is fixed by the trained run"),
        (["variant=no_q,no_k", "sweep.tune=true"], "sweep.tune"),
        (["variant=standard", "--table"], "the runs are standard already; give another one"),
        (["variant=all,no_q"], "variant: 'all' stands alone"),
    ],
)
def test_mistakes_are_one_line(qkablate, outputs, words, reason):
    done = qkablate("project", RUNS[0], *words)
    assert done.code == 2
    assert reason in done.err
    assert done.err.count("\n") == 1
    assert not any((outputs / "runs").glob("finetuned-*"))


@pytest.mark.exhaustive
def test_data_is_found_by_its_fingerprint(qkablate, tmp_path, monkeypatch):
    """No path in a run's folder is read, here or in the processes of a sweep."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    Path("book.txt").write_text("the cat sat on the mat, and the dog lay under it.\n\n" * 900)
    cache = f"data.cache={tmp_path}/texts"  # that of the processes, whichever home they know
    words = [*SIZES, *LENGTH, "data=text", "data.path=book.txt", "variant=merged_w", cache]
    done = qkablate("train", *words)
    assert done.code == 0, done.err
    Path("book.txt").unlink()
    output = converted(qkablate, "merged_w", "variant=standard,uniform", "finetune.steps=2", cache)
    assert output["trained"]["arm"] == "merged_w-d16-h2"
    assert [row["test_gap"]["n"] for row in output["variants"]] == [1, 1]


@pytest.mark.slow
def test_settings_of_a_variant_make_arms(qkablate, outputs):
    words = ["variant=low_rank_w", "variant.rank=2,64", "variant.init=naive,matched"]
    done = qkablate("project", RUNS[0], *words, "finetune.steps=1", "--dry-run", "--json")
    assert done.code == 0, done.err
    plan = json.loads(done.out)
    arms = {arm["arm"] for arm in plan["arms"]}
    assert {f"low_rank_w_r2-d16-h2-init={init}" for init in ("naive", "matched")} < arms
    assert {left["arm"] for left in plan["left_out"]} == {
        f"low_rank_w variant.rank=64 variant.init={init}" for init in ("naive", "matched")
    }


@pytest.mark.slow
def test_resumed_table_is_a_table(qkablate, outputs):
    done = qkablate("project", RUNS[0], "variant=no_q", "--table", "finetune.steps=2", "--dry-run")
    assert "variant=no_q finetune.steps=2 --table" in done.out


@pytest.mark.slow
def test_runs_have_the_parent_of_their_seed(qkablate, outputs):
    """Runs of one arm differ in their parents."""
    converted(qkablate, *RUNS, "variant=no_q", "--table", "finetune.steps=1")
    for seed in (0, 1):
        (folder,) = (outputs / "runs").glob(f"finetuned-no_q-d16-h2-s{seed}-*")
        config = read_config(folder)
        assert f"standard-d16-h2-s{seed}" in config["init_from"]["run"]
        assert config["seed"] == seed
    assert math.isfinite(losses(outputs, "finetuned-no_q-d16-h2-s1")["val"])
