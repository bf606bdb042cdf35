"""`qkablate reproduce` as a user types it, with made-up runs and with trained ones."""

import json
import re
import shutil
from pathlib import Path

import pytest

from qkablate.analysis.claims.claim import Claim
from qkablate.analysis.publication import unpack
from qkablate.analysis.publication.archive import read_archive
from qkablate.strict_json import from_json
from tests.cli.conftest import LENGTH, write_runs
from tests.cli.helpers import GAPS, SIZES, assert_refused


@pytest.fixture
def published(qkablate, outputs):
    """Publish the finished claim, whose runs are made up; return the keys of its data."""
    assert qkablate("publish", "mine", "-o", "shared").code == 0
    claim = json.loads(next(outputs.glob("claims/*/claim.json")).read_text())["claim"]
    shutil.rmtree(outputs)
    path = Path(claim["words"]["data.path"])
    return [f"data.path={path}", f"data.cache={path.parent / 'cache'}"]


@pytest.fixture
def made_up(monkeypatch):
    monkeypatch.setattr("qkablate.sweeps.running.launcher.Launcher.run", write_runs)


def test_help(qkablate):
    done = qkablate("reproduce", "--help")
    assert (done.code, done.err) == (0, "")
    for text in ("--check [N]", "--seeds N", "Exit codes: 0 everything agrees"):
        assert text in done.out


@pytest.mark.parametrize("name", ["mine", "mine.yaml", "all"])
def test_equal_truth_agrees(qkablate, published, made_up, name):
    """The runs have seeds that no published run has."""
    done = qkablate("reproduce", name, "--from", "shared", *published)
    assert done.code == 0, done.err
    line = next(line for line in done.out.splitlines() if line.startswith("within "))
    assert line.count("[") == 3
    assert line.endswith("agrees")
    assert done.out.count("n = 3") == 2
    (manifest,) = Path("outputs").glob("sweeps/reproduce-mine-*/manifest.json")
    seeds = {run["changes"]["seed"] for run in json.loads(manifest.read_text())["runs"]}
    shown = qkablate("claim", "show", "mine", "--json", "out=shared").out
    assert len(seeds) == 3
    runs = qkablate("ls", "out=shared").out
    assert not [seed for seed in seeds if f"-s{seed}-" in runs]
    assert json.loads(shown)["seeds"] == 3


def test_dry_run_shows_the_plan_and_trains_nothing(qkablate, published):
    done = qkablate("reproduce", "mine", "--from", "shared", *published, "--dry-run")
    assert done.code == 0, done.err
    assert "9 runs of 3 arms" in done.out
    assert "cost " in done.out
    assert not Path("outputs/runs").exists()
    assert_refused(
        qkablate("reproduce", "mine", "--from", "shared", "--check", "--dry-run"),
        "--dry-run has no meaning with --check",
    )


def test_other_truth_disagrees(qkablate, published, made_up, monkeypatch):
    monkeypatch.setitem(GAPS, "no_q", 0.2)
    done = qkablate("reproduce", "mine", "--from", "shared", *published, "--seeds", "4")
    assert done.code == 1
    assert re.search(r"(?m)^within .*n = 3 .*n = 4 .*DISAGREES$", done.out)


def test_unfinished_reproduction_does_not_pass(qkablate, published, monkeypatch):
    monkeypatch.setattr("qkablate.sweeps.running.launcher.Launcher.run", lambda launcher: 1)
    done = qkablate("reproduce", "mine", "--from", "shared", *published)
    assert done.code == 1
    assert "agrees" not in done.out


def test_claim_without_a_published_verdict_does_not_pass(qkablate, outputs, made_up):
    next(outputs.glob("runs/no_q-*/result.json")).unlink()
    for path in outputs.glob("runs/standard-d16-h2-s*/result.json"):
        path.unlink()
    assert qkablate("publish", "mine", "-o", "shared").code == 0
    done = qkablate("reproduce", "mine", "--from", "shared")
    assert done.code == 1
    assert "there is no published verdict" in done.err


def test_check_finds_runs_that_nobody_has_trained(qkablate, published):
    """The published losses are made up; one run is trained here, and differs."""
    done = qkablate("reproduce", "mine", "--from", "shared", *published, "--check", "1")
    assert done.code == 1, done.err
    assert re.search(r"(?m)^\S+-d16-h2-s\d+-\w{12} .*DISAGREES$", done.out)
    assert "not bit for bit: cpu None there" in done.out


def test_check_without_training_does_not_pass(qkablate, published, monkeypatch):
    monkeypatch.setattr("qkablate.sweeps.running.launcher.Launcher.run", lambda launcher: 0)
    done = qkablate("reproduce", "mine", "--from", "shared", *published, "--check", "1")
    assert done.code == 1
    assert "not trained" in done.out


def test_check_of_no_runs_does_not_pass(qkablate, outputs):
    for path in outputs.glob("runs/*/result.json"):
        result = json.loads(path.read_text()) | {"status": "diverged", "diverged_at": 3}
        path.write_text(json.dumps(result))
    assert qkablate("publish", "mine", "-o", "shared").code == 0
    done = qkablate("reproduce", "all", "--from", "shared", "--check")
    assert_refused(done, "no published run is done")


def test_trained_run_is_repeated_bit_for_bit(qkablate, outputs, monkeypatch):
    """One run of the claim is really trained, published, and trained again."""
    lost = sorted(outputs.glob("runs/no_q-d16-h2-s*"))
    (registration,) = outputs.glob("claims/*/claim.json")
    manifest = json.loads(next(outputs.glob("claims/*/n3/manifest.json")).read_text())
    run = next(run for run in manifest["runs"] if run["arm"].startswith("no_q"))
    shutil.rmtree(next(path for path in lost if path.name.endswith(run["id"])))
    folder = Path(json.loads(registration.read_text())["claim"]["words"]["data.path"]).parent
    paths = [f"data.path={folder}/corpus.txt", f"data.cache={folder}/cache"]
    words = [str(folder / "mine.yaml"), "data=text", *paths, *SIZES, *LENGTH]
    assert qkablate("claim", "run", *words).code == 0
    assert qkablate("publish", "mine", "-o", "shared").code == 0
    monkeypatch.setattr("qkablate.api.reproduce.sample_runs", lambda archive, count: [run["id"]])
    done = qkablate("reproduce", "mine", "--from", "shared", *paths, "--check", "1")
    assert done.code == 0, done.out + done.err
    assert re.search(rf"(?m)^\S+{run['id']} +0  0, bit for bit  agrees$", done.out)


def test_mistakes_are_one_line(qkablate, published):
    assert_refused(qkablate("reproduce", "mie", "--from", "shared"), "'mie' (nearest: mine)")
    assert_refused(
        qkablate("reproduce", "mine", "--check", "x", "--from", "shared"),
        "--check: 'x' is not a whole number",
    )
    shared = ["--from", "shared"]
    for words, message in (
        ([], "give one claim, or all"),
        (["mine", "--from", "none"], "'none' holds no archive of runs"),
        (["other", *shared], "'shared' has no runs of 'other'; it has mine"),
        (["mine", *shared, "train.steps=3"], "train.steps: another value would be another claim"),
        (["mine", *shared, "stepz=3"], "stepz"),
        (["mine", *shared, "--check", "0"], "--check: '0' is not a whole number from 1"),
        (["mine", *shared, "--check", "--seeds", "4"], "--seeds has no meaning with --check"),
        (
            ["mine", *shared, "--check", "workers=2"],
            "workers: --check takes keys of",
        ),
    ):
        assert_refused(qkablate("reproduce", *words), message)


@pytest.mark.parametrize(
    ("place", "settings", "message"),
    [
        ("grid", {"variant": "standard,no_q,{evil}"}, "grid: variant names a file"),
        ("grid", {"variant.file": "{evil}"}, "grid: variant.file names a file"),
        ("grid", {"+variant.file": "{evil}"}, "grid: +variant.file: there is no such key"),
        ("grid", {"out": "elsewhere"}, "grid: out is not part of a claim"),
        ("grid", {"init_from.run": "mine"}, "grid: init_from.run names a file"),
        ("tasks", {"recall": {"variant.file": "{evil}"}}, "tasks.recall: variant.file names"),
        ("tasks", {"recall": {"tracking.entity": "x"}}, "tasks.recall: tracking.entity is not"),
        ("baseline", {"variant.file": "{evil}"}, "baseline: variant.file names a file"),
        ("grid", {"data.name": "x/$\\{oc.env:HOME\\}"}, "data.name has an interpolation"),
        ("grid", {"data": "../../../tmp/evil"}, "grid: data names a file (allowed: add"),
        ("tasks", {"recall": {"data": "a/b"}}, "tasks.recall: data names a file"),
        (
            "grid",
            {"data.files": "https://x/${oc.env:HOME}"},
            "grid: data.files has an interpolation",
        ),
    ],
)
def test_claim_of_a_stranger_runs_no_code_and_sets_no_key_of_the_machine(
    qkablate, published, made_up, tmp_path, place, settings, message
):
    """The archive is whole: its author has written it so."""
    evil = tmp_path / "evil.py"
    evil.write_text("open('ran', 'w').close()\n")
    text = json.dumps(settings).replace("{evil}", str(evil))
    (path,) = Path("shared").glob("*.json.gz")
    archive = read_archive(path)
    content = archive.registration["claim"]
    content[place] = json.loads(text) if place == "baseline" else content[place] | json.loads(text)
    claim = from_json(Claim, content | {"source": archive.registration["source"]})
    archive.registration["hash"] = claim.hash
    archive.write(Path("hostile"))
    done = qkablate("reproduce", "mine", "--from", "hostile", *published)
    assert_refused(done, message)
    assert not Path("ran").exists()
    assert not Path("outputs/sweeps").exists()
    assert not Path("elsewhere").exists()


@pytest.mark.parametrize("words", [[], ["--check", "1"]], ids=["all", "check"])
def test_files_of_the_author_are_not_read(qkablate, published, made_up, words):
    """The claim names a file of this machine that exists, and only the user may name it."""
    path, cache = published
    done = qkablate("reproduce", "mine", "--from", "shared", cache, *words)
    assert_refused(done, path, "give your own copy: data.path=FILE")
    assert not Path("outputs/runs").exists()


@pytest.mark.parametrize("name", ["a file.txt", "ä.txt", "a,b*.txt"])
def test_path_that_needs_quotes_can_be_given(qkablate, published, made_up, tmp_path, name):
    """Hydra wants quotes around it; the value is compared without them."""
    path, cache = published
    (tmp_path / name).write_bytes(Path(path.removeprefix("data.path=")).read_bytes())
    given = [f'data.path="{tmp_path}/{name}"', cache]
    done = qkablate("reproduce", "mine", "--from", "shared", *given)
    assert done.code == 0, done.err
    done = qkablate("reproduce", "mine", "--from", "shared", *given, "--check", "1")
    assert "give your own copy" not in done.err
    assert (done.code, done.err) == (1, "")  # it is not refused; nothing is trained in this test
    assert "not trained" in done.out


def test_other_data_are_named(qkablate, published, made_up, tmp_path):
    """The user's copy has another content: it is trained on, and the difference is said."""
    (tmp_path / "mine.txt").write_text("the dog sat on the log, ähnlich ∑\n" * 200)
    given = [f"data.path={tmp_path}/mine.txt", f"data.cache={tmp_path}/own"]
    done = qkablate("reproduce", "mine", "--from", "shared", *given)
    assert "the data differ from the published ones" in done.err
    assert "no_q-d16-h2" in done.err
    done = qkablate("reproduce", "mine", "--from", "shared", *published)
    assert "differ" not in done.err


@pytest.mark.parametrize(("words", "expected"), [([], False), (["--retry", "failed"], True)])
def test_failed_runs_are_trained_again_on_request(
    qkablate, published, monkeypatch, words, expected
):
    asked = []

    def run_and_print(manifest, slots, request, *, retry):
        asked.append(retry)
        return 1

    monkeypatch.setattr("qkablate.cli.launch.run_and_print", run_and_print)
    assert qkablate("reproduce", "mine", "--from", "shared", *published, *words).code == 1
    assert asked == [expected]


@pytest.mark.parametrize("code", [130, 143])
def test_signal_stops_all_claims(qkablate, published, monkeypatch, code):
    calls = []
    stop = lambda launcher: calls.append(launcher) or code  # noqa: E731
    monkeypatch.setattr("qkablate.sweeps.running.launcher.Launcher.run", stop)
    read = unpack.unpacked_claims
    monkeypatch.setattr(unpack, "unpacked_claims", lambda root: 2 * [*read(root)])
    assert qkablate("reproduce", "all", "--from", "shared", *published).code == code
    assert len(calls) == 1


@pytest.mark.parametrize("code", [130, 143])
def test_check_that_a_signal_stops_tells_which(qkablate, published, monkeypatch, code):
    monkeypatch.setattr("qkablate.sweeps.running.launcher.Launcher.run", lambda launcher: code)
    words = ["--from", "shared", *published, "--check", "1"]
    assert qkablate("reproduce", "mine", *words).code == code
