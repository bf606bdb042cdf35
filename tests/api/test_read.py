"""Runs, curves and gaps read from disk."""

import re
import shutil
from pathlib import Path

import pytest

import qkablate as api
from qkablate.analysis.publication.archive import read_archive
from tests.api.helpers import as_keys
from tests.conftest import TINY

PUBLISHED = Path(__file__).parents[2] / "docs" / "study" / "results"
COLUMNS = [
    *("run", "arm", "variant", "d_model", "heads", "seed", "lr"),
    *("step", "tokens", "metric", "value"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the outputs of one run of each of two variants."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text("the cat sat on the mat\n" * 2000, encoding="utf-8")
    data = {"data": "text", "data.path": folder / "text.txt", "data.cache": folder / "cache"}
    for name in ("standard", "no_q"):
        api.train(variant=name, out=folder / "outputs", **as_keys(TINY), **data)
    return folder / "outputs"


@pytest.fixture
def two(trained, tmp_path):
    """Return the two runs, standard first, in a copy of the outputs."""
    shutil.copytree(trained, tmp_path / "outputs")
    return api.load_runs(sorted((tmp_path / "outputs" / "runs").iterdir(), reverse=True))


def test_runs_are_found_in_outputs_and_by_folder(two, tmp_path, monkeypatch):
    ids = [run.run.id for run in two]
    assert sorted(run.run.id for run in api.load_runs(tmp_path / "outputs")) == sorted(ids)
    assert sorted(run.run.id for run in api.load_runs()) == sorted(ids)  # outputs
    assert [run.run.id for run in api.load_runs(two[1].folder)] == ids[1:]
    assert {run.run.id for run in api.load_runs([run.folder for run in two])} == {*ids}


def test_published_runs_are_read_from_archives(tmp_path):
    """One claim, or all of a folder, each run once."""
    folder = tmp_path / "results"
    folder.mkdir()
    for name in ("one_projection_untuned", "qq_worse"):
        (path,) = PUBLISHED.glob(f"{name}-*.json.gz")
        shutil.copy(path, folder)
    paths = sorted(folder.glob("*.json.gz"))
    runs = api.load_runs(paths[0])
    assert {*(run.run.id for run in runs)} == {*read_archive(paths[0]).runs}
    assert len({run.run.id for run in runs}) == len(runs)
    assert len(api.load_runs(folder)) > len(runs)
    study = api.load_sweep(paths[0])
    assert {run.run.id for run in study.all_records} <= {run.run.id for run in runs}
    assert study.is_complete
    assert api.gaps(study)
    with pytest.raises(
        api.UserError, match=rf"holds {len(paths)} claims; give .*{paths[0].name[:9]}"
    ):
        api.load_sweep(folder)


def test_archive_without_runs_is_rejected(tmp_path):
    archive = read_archive(sorted(PUBLISHED.glob("*.json.gz"))[0])
    for look in archive.looks.values():
        look["manifest"]["runs"] = []
    archive.write(tmp_path / "empty")
    with pytest.raises(
        api.UserError, match="is not an archive of runs, or is damaged: a sweep has no"
    ):
        api.load_runs(tmp_path / "empty")


def test_another_folder_is_rejected(tmp_path):
    with pytest.raises(api.UserError, match=r"'nowhere' is not a run, .*load_sweep\(name, out\)"):
        api.load_runs("nowhere")


def test_a_record_is_one_line(two):
    run = two[0]
    assert repr(run) == f"<Record {run.folder.name}: done, val {run.val:.4f}, test {run.test:.4f}>"


def test_a_damaged_run_is_skipped_and_named(two, tmp_path, capsys):
    (two[0].folder / "config.yaml").write_text("{", encoding="utf-8")
    assert [run.run.id for run in api.load_runs(tmp_path / "outputs")] == [two[1].run.id]
    assert two[0].folder.name in capsys.readouterr().err


def test_curves_are_a_long_table(two):
    table = api.load_curves(two)
    assert table.column_names == COLUMNS
    rows = table.to_pylist()
    assert {row["run"] for row in rows} == {run.run.id for run in two}
    assert {"train/loss", "val/loss", "train/lr"} <= {row["metric"] for row in rows}
    assert not {"step", "tokens", "crc32"} & {row["metric"] for row in rows}
    val = [r for r in rows if r["run"] == two[0].run.id and r["metric"] == "val/loss"]
    assert [row["step"] for row in val] == [0, 6, 12]
    assert [row["tokens"] for row in val] == [0, 6 * 32, 12 * 32]
    assert val[-1]["value"] == two[0].val
    first = rows[0]
    assert (first["variant"], first["d_model"], first["heads"]) == ("standard", 16, 2)
    assert (first["seed"], first["lr"]) == (0, 1e-3)


def test_metrics_can_be_chosen(two):
    table = api.load_curves(two, ["val/loss"])
    assert set(table["metric"].to_pylist()) == {"val/loss"}
    assert api.load_curves([], ["val/loss"]).column_names == COLUMNS


def test_unknown_metric_is_rejected(two):
    with pytest.raises(api.UserError, match=r"no run has logged 'val/los' \(nearest: val/loss\)"):
        api.load_curves(two, ["val/loss", "val/los"])


def test_metric_can_be_one_name(two):
    assert set(api.load_curves(two, "val/loss")["metric"].to_pylist()) == {"val/loss"}


@pytest.mark.parametrize("margin", [0, -1, float("nan")])
def test_margin_is_positive(two, margin):
    with pytest.raises(api.UserError, match="is not a positive number of nats"):
        api.gaps(two, margin)


@pytest.mark.parametrize("read", [api.load_curves, api.gaps])
def test_names_in_place_of_runs_are_rejected(read):
    with pytest.raises(api.UserError, match=r"is a name; load_sweep\('lookup'\) reads that sweep"):
        read("lookup")
    with pytest.raises(
        api.UserError, match="is not a list of records; pass what load_runs returns"
    ):
        read(["lookup"])


def test_one_run_is_enough_for_curves(two):
    assert set(api.load_curves(two[0])["run"].to_pylist()) == {two[0].run.id}


def test_gaps_of_single_runs_are_paired_with_standard(two):
    (gap,) = api.gaps(two)
    assert gap.arm.startswith("no_q-")
    assert gap.baseline.startswith("standard-")
    assert gap.n == 1
    assert re.fullmatch(rf"<GapSummary {gap.arm} to {gap.baseline}: \S+ \(n = 1\), .*>", repr(gap))
    assert gap.mean == pytest.approx(two[1].test - two[0].test)
    assert gap.interval is None
    assert gap.verdict == "too few pairs (under 3)"
