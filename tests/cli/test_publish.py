"""`qkablate publish` as a user types it, and every command that reads what it has written."""

import fcntl
import json
import re
import shutil
from pathlib import Path

import pytest

from qkablate.analysis.publication.publish import collect
from qkablate.runs.document_losses import DocumentLossesHeader, write_document_losses
from qkablate.sweeps.running.state import link_run
from tests.cli.conftest import LENGTH
from tests.cli.helpers import SIZES, assert_refused, proposed_commands

ALONE = re.compile(r"(?m)^(?:runs  |  qkablate ).*\n|out=\S+")  # lines with the folder


@pytest.fixture
def published(qkablate, outputs, tmp_path):
    """Publish the finished claim, whose runs have losses by document; return the folder."""
    for path in outputs.glob("runs/*/result.json"):
        result = json.loads(path.read_text())
        header = DocumentLossesHeader(result["id"], result["data_fingerprint"])
        losses = [100 * result["loss"]["test"], 70.5, 31.25]
        write_document_losses(path.parent, header, losses, [50, 30, 20])
    done = qkablate("publish", "mine", "-o", "shared")
    assert (done.code, done.err) == (0, "")
    assert "9 runs, 9 of them new" in done.out
    assert "Next\n  qkablate report shared\n" in done.out
    return tmp_path / "shared"


def words(outputs):
    """Return the words that made the claim of the finished study."""
    folder = Path(
        json.loads(next(outputs.glob("claims/*/claim.json")).read_text())["claim"]["words"][
            "data.path"
        ]
    ).parent
    paths = [f"data.path={folder}/corpus.txt", f"data.cache={folder}/cache"]
    return [str(folder / "mine.yaml"), "data=text", *paths, *SIZES, *LENGTH]


def test_help(qkablate):
    done = qkablate("publish", "--help")
    assert (done.code, done.err) == (0, "")
    assert "Exit codes: 0 published" in done.out


def test_archives_are_read_as_the_runs_are(qkablate, published, outputs):
    for command in (
        ["claim", "show", "mine"],
        ["claim", "show", "mine", "--json"],
        ["results", "claim-mine"],
    ):
        before, after = qkablate(*command), qkablate(*command, "out=shared")
        assert after.code == before.code == 0
        assert ALONE.sub("", after.out) == ALONE.sub("", before.out)
    before, after = (
        json.loads(qkablate("results", "claim-mine", "--json", *out).out)["gaps"]
        for out in ([], ["out=shared"])
    )
    for key in ("mean", "interval", "p", "bca", "audit", "unpaired"):
        assert [gap[key] for gap in after] == [gap[key] for gap in before]
    errors = [[gap["document_error"]["se"] for gap in gaps] for gaps in (before, after)]
    assert errors[1] == pytest.approx(errors[0], abs=1e-5)
    assert min(errors[0]) > 1e-4
    assert "mine · INSENSITIVE" in qkablate("claim", "list", "out=shared").out
    assert "no_q-d16-h2" in qkablate("ls", "out=shared").out
    runs = json.loads(qkablate("ls", "out=shared", "--json").out)["runs"]
    for seed in {run["config"]["seed"] for run in runs}:  # those of tuning, and the others
        found = json.loads(qkablate("ls", f"seed={seed}", "out=shared", "--json").out)["sweeps"]
        assert [sweep["name"].partition("-")[0] for sweep in found] == ["claim"]
    (archive,) = published.glob("*.json.gz")
    for word in ("shared", str(archive)):
        assert qkablate("results", word).out.startswith(qkablate("results", "claim-mine").out[:200])
    assert "Next\n  qkablate results shared --" in qkablate("results", "shared").out
    by_claim = qkablate("results", "mine", "out=shared")
    assert by_claim.out.startswith(qkablate("results", "claim-mine").out[:200])
    shown = qkablate("claim", "show", "mine", "out=shared")
    assert all("out=shared" in words for words in proposed_commands(shown))  # as it was typed
    run = json.loads(qkablate("ls", "out=shared", "--json").out)["runs"][0]["name"]
    assert_refused(qkablate("inspect", run, "out=shared"), "is a published run, without weights")
    assert qkablate("report", "shared", "-o", "page.html").code == 0
    assert "claim mine (small)" in Path("page.html").read_text(encoding="utf-8")
    assert qkablate("report", "shared").out.startswith("report.html  ")


def test_run_that_went_on_elsewhere_is_published_with_both_machines(qkablate, outputs):
    environment = {"versions": {"torch": "2"}, "machine": {"cpu": "a CPU"}}
    elsewhere = environment | {"machine": {"cpu": "another CPU"}}
    for folder in outputs.glob("runs/*"):
        resumed = [elsewhere] if folder.name.startswith("no_q") else []
        (folder / "environment.json").write_text(json.dumps({**environment, "resumed": resumed}))
    assert qkablate("publish", "mine", "-o", "shared").code == 0
    found = []
    for out in ([], ["out=shared"]):
        shown = json.loads(qkablate("results", "claim-mine", "--json", *out).out)
        found.append([check for gap in shown["gaps"] for check in gap["audit"]])
    assert found[0] == found[1]
    warned = [check["message"] for check in found[0] if check["name"] == "machine"]
    assert any("a CPU, then another CPU)" in message for message in warned), warned


def test_publishing_again_changes_no_byte(qkablate, published):
    before = {path.name: path.read_bytes() for path in published.iterdir()}
    done = qkablate("publish", "claims/mine.yaml", "-o", "shared")
    assert "9 runs, 0 of them new" in done.out
    assert {path.name: path.read_bytes() for path in published.iterdir()} == before


def test_runs_are_added_as_they_end(qkablate, published, outputs):
    """The archive is that of all runs published at once, byte for byte."""
    (archive,) = published.glob("*.json.gz")
    whole = archive.read_bytes()
    moved = sorted(outputs.glob("runs/no_q-d16-h2-s*"))[1:]
    (published.parent / "kept").mkdir()
    for path in moved:
        path.rename(published.parent / "kept" / path.name)
    archive.unlink()
    assert qkablate("publish", "mine", "-o", "shared").code == 0
    assert archive.read_bytes() != whole
    status = qkablate("status", "claim-mine", "out=shared")
    assert (status.code, "results.csv" in status.out) == (1, False)
    for command in (["claim", "show", "mine", "out=shared"], ["results", "shared"]):
        done = qkablate(*command)
        assert (done.code, "There is no verdict" in done.out or "INCOMPLETE" in done.out) == (1, 1)
        resumed = proposed_commands(done)[0]
        assert resumed[:3] == ["qkablate", "claim", "run"]
        assert resumed[-2:] == ["--from", "shared"]
        assert not any(word.startswith("out=") for word in resumed)
    for path in moved:
        (published.parent / "kept" / path.name).rename(path)
    done = qkablate("publish", "mine", "-o", "shared")
    assert "9 runs, 3 of them new" in done.out  # all of no_q
    assert archive.read_bytes() == whole


def test_publishers_take_turns(qkablate, published, monkeypatch):
    """Nobody else adds to the archive between its reading and its writing."""
    alone = []

    def collect_locked(*arguments):
        with (published / ".lock").open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        alone.append(True)
        return collect(*arguments)

    monkeypatch.setattr("qkablate.analysis.publication.publish.collect", collect_locked)
    assert qkablate("publish", "mine", "-o", "shared").code == 0
    assert alone


def test_other_figures_are_refused_and_nothing_is_written(qkablate, published, outputs):
    before = {path.name: path.read_bytes() for path in published.iterdir()}
    id = change_loss(outputs).parent.name.rpartition("-")[2]
    assert_refused(qkablate("publish", "mine", "-o", "shared"), f"run {id} is published with loss")
    assert {path.name: path.read_bytes() for path in published.iterdir()} == before


def change_loss(outputs):
    """Change the loss of a run of the claim a little, and return the path of its result."""
    id = json.loads(next(outputs.glob("claims/*/n3/manifest.json")).read_text())["runs"][0]["id"]
    path = next(outputs.glob(f"runs/*-{id}/result.json"))
    result = json.loads(path.read_text())
    result["loss"]["test"] += 1e-9
    path.write_text(json.dumps(result))
    return path


def test_archives_among_the_outputs_hide_no_runs(qkablate, outputs):
    """A second time, too, when there are archives that the first one has written."""
    for new in (9, 0):
        done = qkablate("publish", "mine", "-o", "outputs")
        assert f"9 runs, {new} of them new" in done.out
    assert qkablate("results", "small").code == 0  # a sweep of no claim


def test_mistakes_are_one_line(qkablate, outputs):
    Path("file").write_text("")
    assert_refused(qkablate("publish"), "give a claim")
    assert_refused(qkablate("publish", "mien"), "'mien'")
    other = qkablate("publish", "one_haed", "out=new")
    assert_refused(other, "(nearest: one_head), and none has been run in 'new'")
    assert_refused(qkablate("publish", "mine", "-o", "file"), "'file' is not a folder")
    assert_refused(qkablate("results", "file.json.gz"), "file.json.gz")


def test_claim_without_ended_runs_is_not_published(qkablate, outputs):
    for path in outputs.glob("runs/*/result.json"):
        path.unlink()
    assert_refused(qkablate("publish", "mine", "-o", "new"), "no run of it has ended")
    assert not Path("new").exists()


@pytest.fixture
def trained(monkeypatch):
    """Record what a launcher would train, and train nothing."""
    started = []

    def run(launcher):
        launcher.sweep_state.refresh()
        states = launcher.sweep_state.states.values()
        started.extend(state.run.id for state in states if state.status != "done")
        for state in states:
            link_run(launcher.manifest, state)
        return int(bool(started))

    monkeypatch.setattr("qkablate.sweeps.running.launcher.Launcher.run", run)
    return started


@pytest.mark.parametrize("slow_fp32", [False, True])
def test_published_runs_are_not_trained_again(
    qkablate, published, outputs, trained, monkeypatch, slow_fp32
):
    """Also on a CPU for which this program would choose another matmul, and in a second session."""
    claim = words(outputs)
    shutil.rmtree(outputs)
    target = "qkablate.training.hardware.has_slow_fp32"
    monkeypatch.setattr(target, lambda: slow_fp32)
    for _ in range(2):
        done = qkablate("claim", "run", *claim, "--from", "shared")
        assert (done.code, trained) == (0, []), done.err
        assert "9 published runs of shared count as done" in done.out
        assert "\nINSENSITIVE\n" in done.out  # as published, and confirmatory as there
    shown = json.loads(qkablate("claim", "show", "mine", "--json").out)
    assert shown["verdict"] == "INSENSITIVE"
    assert shown["exploratory"] == []


def test_own_runs_with_other_figures_are_refused(qkablate, published, outputs, trained):
    """They could not be published with the runs that would be trained."""
    path = change_loss(outputs)
    done = qkablate("claim", "run", *words(outputs), "--from", "shared")
    assert_refused(done, f"{path.parent.name} has ended in 'outputs' with other figures than the")
    assert trained == []


def test_only_missing_runs_are_trained(qkablate, published, outputs, trained):
    claim = words(outputs)
    missing = sorted(outputs.glob("runs/no_q-d16-h2-s*"))
    content = json.loads(next(outputs.glob("claims/*/n3/manifest.json")).read_text())
    ids = {run["id"] for run in content["runs"]}
    lost = next(path for path in missing if path.name.rpartition("-")[2] in ids)
    shutil.rmtree(published)
    shutil.rmtree(lost)
    assert qkablate("publish", "mine", "-o", "shared").code == 0
    shutil.rmtree(outputs)
    assert qkablate("claim", "run", *claim, "--from", "shared").code == 1
    assert trained == [lost.name.rpartition("-")[2]]


def test_dry_run_counts_published_runs_and_writes_none(qkablate, published, outputs):
    claim = words(outputs)
    shutil.rmtree(outputs)
    done = qkablate("claim", "run", *claim, "--from", "shared", "--dry-run")
    assert "9 published runs count as done" in done.out
    assert not [*outputs.glob("runs/*")]


def test_runs_of_another_claim_do_not_count(qkablate, published, outputs):
    claim = words(outputs)
    other = [*claim, "train.steps=14"]
    assert_refused(
        qkablate("claim", "run", *other, "--from", "shared"), "'shared' has no runs of mine-small-"
    )
    assert_refused(qkablate("claim", "run", *claim, "--from", "none"), "'none' holds no archive")
    assert_refused(qkablate("claim", "show", *claim, "--from", "shared"), "--from has no meaning")
    corpus = Path(claim[2].partition("=")[2])
    text = corpus.read_text(encoding="utf-8")
    try:
        corpus.write_text(text + text, encoding="utf-8")
        done = qkablate("claim", "run", *claim, "--from", "shared")
    finally:
        corpus.write_text(text, encoding="utf-8")
    assert_refused(done, "none of the 9 published runs is of this plan: data_fingerprint is")
