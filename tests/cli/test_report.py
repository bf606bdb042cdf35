"""`qkablate report` as a user types it: pages, text and charts of sweeps, claims and runs."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from qkablate.analysis.claims.registry import read_registration
from qkablate.cli.names import find_sources
from qkablate.report.study.questions import rank_claim
from qkablate.runs.lease import hold_lease
from tests.cli.helpers import assert_refused, complete, proposed_commands

CLAIM = {
    "says": "Keys alone are enough.",
    "source": "a comment",
    "seeds": 3,
    "tuning_seeds": 0,
    "grid": {"variant": "standard,no_q"},
    "parts": {"within": {"arm": "no_q", "kind": "noninferior", "margin": 3}},
}
PUBLISHED = Path(__file__).parents[2] / "docs" / "study" / "results"
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def claim(outputs):
    (folder,) = (outputs / "claims").glob("mine-*")
    return folder


@pytest.fixture
def run_of(outputs):
    """Return the folder of one run of the sweep."""

    def find(variant, seed):
        (folder,) = outputs.glob(f"runs/{variant}-d16-h2-s{seed}-*")
        return folder

    return find


@pytest.fixture
def text(qkablate, outputs, tmp_path):
    """Return the report as text."""

    def read(*words):
        done = qkablate("report", *map(str, words), "-o", "text.md")
        assert (done.code, done.err) == (0, ""), done
        return (tmp_path / "text.md").read_text(encoding="utf-8")

    return read


def change(folder, **more):
    """Let the run's result say something else."""
    path = folder / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))


def written(done):
    """Return the printed files with their sizes."""
    lines = done.out.partition("\nNext")[0].strip().splitlines()
    return [Path(line.rpartition("  ")[0]) for line in lines]


def tree(*folders):
    return {p: p.lstat().st_mtime_ns for folder in folders for p in folder.rglob("*")}


def chapters(text):
    return re.findall(r"^# (.*)", text, flags=re.MULTILINE)


def visible(page):
    """Return the page as a reader sees it, without the scripts."""
    body = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL)
    return re.sub(r"<[^>]*>", " ", body)


# Help.


def test_help(qkablate):
    done = qkablate("report", "--help")
    assert (done.code, done.err) == (0, "")
    assert done.out == qkablate("report", "-h").out
    assert done.out.count("\n  qkablate report") >= 4
    for word in ("-o FILE", "--format html|md|png|svg", "--margin", "out=", "Exit codes"):
        assert word in done.out


def test_help_needs_no_torch_and_no_scipy():
    code = (
        "import sys, qkablate.cli\n"
        "try: qkablate.cli.main(['report', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'scipy', 'vl_convert', 'jinja2'}\n"
        "sys.exit(str(heavy & set(sys.modules) or '') or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_torch_is_never_imported(sweep, claim, run_of):
    runs = [str(run_of(variant, 0)) for variant in ("no_q", "standard")]
    every = ["report", sweep.name, claim.name, *runs, "-o", "all.md"]
    code = (
        "import sys, qkablate.cli\n"
        f"for words in ({every!r}, ['report', {runs[0]!r}, '-o', 'one.svg']):\n"
        "    try: qkablate.cli.main(words)\n"
        "    except SystemExit as done: assert done.code == 0\n"
        "sys.exit('torch is there' if 'torch' in sys.modules else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Path("all.md").is_file()
    assert Path("one-losses.svg").is_file()


# The page.


@pytest.mark.slow
def test_newest_sweep_is_a_page_in_its_folder(qkablate, sweep):
    done = qkablate("report")
    assert (done.code, done.err) == (0, "")
    target = sweep / "report.html"
    (path,) = written(done)
    assert path.resolve() == target
    assert re.match(r"\S+/report\.html  \d[\d.,]* [kM]B\n", done.out)
    page = target.read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    told = visible(page)
    assert sweep.name in told
    for name in ("standard-d16-h2", "no_q-d16-h2", "shared_qk-d16-h2"):
        assert name in told
    assert "15 runs: 15 done" in told
    assert "worse" in told
    assert "+0.05" in told
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page.partition("<script")[0])
    assert [file.name for file in sweep.iterdir() if file.name.startswith(".")] == []
    commands = proposed_commands(done)
    assert ["qkablate", "results", sweep.name] in commands
    assert any(words[1] == "report" and words[-2:] == ["--format", "svg"] for words in commands)


def test_sweeps_claims_and_runs_are_sections_of_one_page(qkablate, outputs, sweep, claim, run_of):
    runs = [str(run_of("no_q", 1)), str(run_of("standard", 1))]
    done = qkablate("report", "small", "mine", *runs, "--margin", "0.01", "-o", "all.html")
    assert (done.code, done.err) == (0, "")
    page = Path("all.html").read_text(encoding="utf-8")
    assert len(re.findall(r"<article\b", page)) == 3
    told = visible(page)
    assert "INSENSITIVE" in told
    assert "Keys alone are enough." in told
    assert "margin: 0.01 nats" in told  # that was asked for
    for folder in (sweep, *map(Path, runs)):
        assert folder.name in told


@pytest.mark.parametrize("form", ["html", "md"])
def test_control_characters_and_elements_are_not_printed(qkablate, run_of, form):
    """Text of any kind in the files of a run is escaped."""
    odd = "\x1b[31mred\x07\x9b1m\u202e<b>bold</b>"
    change(run_of("no_q", 0), status="failed", error=f"ValueError: {odd}", device=odd)
    change(run_of("shared_qk", 0), version=odd)
    done = qkablate("report", "small", "-o", f"odd.{form}")
    assert (done.code, done.err) == (0, "")
    content = Path(f"odd.{form}").read_text(encoding="utf-8")
    own = re.sub(r"<script>.*?</script>", "", content, flags=re.DOTALL)
    assert "[31mred" in own  # it is told, and does nothing
    assert {c for c in own if not c.isprintable()} <= {"\n", "\t", "\xa0"}
    assert "<b>bold" not in own


# What is named.


def test_sweep_is_found_by_its_folder_name_or_id(text, sweep):
    id = sweep.name.rpartition("-")[2]
    whole = text(sweep.name)
    assert chapters(whole) == [sweep.name]
    assert text() == text("small") == text(id[:6]) == whole
    for folder in (sweep, "outputs/sweeps/" + sweep.name + "/"):
        assert chapters(text(folder)) == [sweep.name]


def test_other_out_folder_is_searched(qkablate, finished, sweep):
    done = qkablate("report", "small", f"out={finished}", "-o", "other.md")
    assert (done.code, done.err) == (0, "")
    assert chapters(Path("other.md").read_text()) == [sweep.name]


@pytest.mark.parametrize("form", ["md", "html"])
def test_proposed_command_works_with_another_out(qkablate, finished, form):
    done = qkablate("report", "small", f"out={finished}", "-o", f"other.{form}")
    commands = proposed_commands(done)
    assert commands
    for words in commands:
        more = ["-o", "pictures.svg"] if words[1] == "report" else []
        again = qkablate(*words[1:], *more)
        assert (again.code, again.err) == (0, ""), words


def test_proposed_command_works_for_a_given_folder(qkablate, finished):
    for place in ("sweeps/small-*", "claims/mine-*"):
        (folder,) = finished.glob(place)
        done = qkablate("report", str(folder), "-o", "other.md")
        assert done.code == 0
        for words in proposed_commands(done):
            again = qkablate(*words[1:])
            assert (again.code, again.err) == (0, ""), words


def test_next_is_printed_only_with_a_command(qkablate, run_of):
    done = qkablate("report", str(run_of("no_q", 0)), "-o", "one.md")
    assert done.code == 0
    assert proposed_commands(done) or "Next" not in done.out


def test_claim_is_found_by_its_name_or_folder(text, claim):
    whole = text("mine")
    assert chapters(whole) == ["claim mine (small)"]
    assert "**INSENSITIVE**" in whole
    assert "no_q is not worse than standard by 3" in whole
    for word in (claim.name, claim, "mine.yaml"):
        assert "**INSENSITIVE**" in text(word)


def test_claim_is_written_in_its_folder(qkablate, claim):
    done = qkablate("report", "mine", "--format", "md")
    assert done.code == 0
    assert [path.resolve() for path in written(done)] == [claim / "report.md"]
    assert qkablate("claim", "show", "mine").code == 0  # it stands in nobody's way


def test_runs_that_are_named_are_paired_by_seed(text, run_of):
    folders = [run_of(variant, seed) for variant in ("no_q", "standard") for seed in (0, 1, 2)]
    told = text(*folders)
    assert len(chapters(told)) == 1
    assert "6 runs: 6 done" in told
    assert "| standard-d16-h2 | – | baseline |" in told
    assert "n = 3" in told
    for folder in folders:
        assert folder.name in told


def test_runs_are_found_by_name_or_id(text, run_of):
    one, other = run_of("no_q", 3), run_of("standard", 3)
    told = text(one.name.rpartition("-")[0], other.name.rpartition("-")[2])
    assert "2 runs: 2 done" in told
    assert one.name in told
    assert other.name in told


def test_single_run_is_reported(qkablate, run_of):
    folder = run_of("no_q", 0)
    done = qkablate("report", folder.name, "--format", "md")
    assert (done.code, done.err) == (0, "")
    assert [path.resolve() for path in written(done)] == [folder / "report.md"]
    told = (folder / "report.md").read_text()
    assert chapters(told) == [folder.name]
    assert "2.0480" in told
    assert "1 run: 1 done" in told


def test_run_named_twice_counts_once(text, run_of):
    folder = run_of("no_q", 0)
    assert "1 run: 1 done" in text(folder, folder.name, folder)


def test_sweep_named_twice_is_one_section(text, sweep):
    assert chapters(text("small", sweep.name, sweep)) == [sweep.name]


def test_run_copied_to_a_second_folder_is_shown_once_and_named(text, outputs, run_of):
    folder = run_of("no_q", 0)
    copy = outputs / "runs" / "again-0123456789ab"
    shutil.copytree(folder, copy)
    told = text(str(folder), str(copy))
    assert told.startswith("# 2 runs\n\n")
    assert "\n\n1 run: 1 done" in told
    assert f"{copy}: the same run as {folder}, which is shown" in told


def test_several_reports_are_written_side_by_side(qkablate, outputs, run_of):
    one, other = run_of("no_q", 0), run_of("standard", 0)
    done = qkablate("report", one.name, other.name, "--format", "md")
    assert done.code == 0
    assert [path.resolve() for path in written(done)] == [outputs / "report.md"]


DAMAGE = {
    "missing": None,
    "empty": "",
    "half": "variant:\n  name: no_q\n  qk: [",
    "a list": "- a",
    "deep": "[" * 5_000,
    "binary": "\0\1\2",
    "not complete": "seed: 0\n",
    "an alias": "a: &a [1]\nb: *a\n",
    "code": "!!python/object/apply:os.mkdir ['made']",
}


@pytest.mark.parametrize("content", DAMAGE.values(), ids=DAMAGE)
def test_unreadable_runs_are_named_and_affect_nothing(text, run_of, content):
    bad, *good = [run_of("no_q", 0), run_of("no_q", 1), run_of("standard", 1)]
    path = bad / "config.yaml"
    path.unlink()
    if content is not None:
        path.write_text(content)
    told = text(bad, *good)
    (line,) = [line for line in told.splitlines() if "could not be read" in line]
    assert bad.name in line
    assert "config.yaml" in line
    assert "2 runs: 2 done" in told
    assert "| standard-d16-h2 | – | baseline |" in told
    assert not Path("made").exists()


CHANGES = {
    "a seed that is no number": ("seed: 0", "seed: many"),
    "an infinite seed": ("seed: 0", "seed: .inf"),
    "a seed that is nothing": ("seed: 0", 'seed: !!int ""'),
    "a seed that is a date": ("seed: 0", "seed: !!timestamp soon"),
    "a rate that is no float": ("  lr: 0.001", f"  lr: {10**400}"),
    "a list for a rate": ("  lr: 0.001", "  lr: [1]"),
    "an unknown key": ("seed: 0", "seed: 0\nsede: 1"),
    "a kind that is none": ("  position: learned", "  position: [a, b]"),
    "lists in lists": ("  position: learned", "  position: " + "[" * 300 + "]" * 300),
    "steps that are no number": ("  steps: 12", "  steps: all"),
}


@pytest.mark.parametrize(("old", "new"), CHANGES.values(), ids=CHANGES)
def test_invalid_config_is_named_and_affects_nothing(text, run_of, old, new):
    bad, *good = [run_of("no_q", 0), run_of("no_q", 1), run_of("standard", 1)]
    path = bad / "config.yaml"
    content = path.read_text()
    assert f"\n{old}\n" in content
    path.write_text(content.replace(f"\n{old}\n", f"\n{new}\n"))
    told = text(*good, bad)
    (line,) = [line for line in told.splitlines() if "could not be read" in line]
    assert bad.name in line
    assert "2 runs: 2 done" in told


def test_run_that_has_just_started_affects_nothing(text, outputs, run_of):
    """Report on a wildcard that includes a run which has just started."""
    folder = outputs / "runs" / "no_q-d16-h2-s9-0123456789ab"
    with hold_lease(folder):
        told = text(folder, run_of("no_q", 1), run_of("standard", 1))
    assert "2 runs: 2 done" in told
    assert f"could not be read: {folder.name}" in told


def test_unreadable_runs_alone_make_a_report(text, run_of):
    folder = run_of("no_q", 0)
    (folder / "config.yaml").write_text("[")
    told = text(folder)
    assert f"could not be read: {folder.name}" in told


# How far it is.


def test_unfinished_sweep_reports_what_is_missing(text, run_of, sweep):
    for variant, seed in (("no_q", 0), ("shared_qk", 3)):
        shutil.rmtree(run_of(variant, seed))
    (run_of("no_q", 4) / "result.json").unlink()
    (run_of("no_q", 3) / "result.json").unlink()
    with hold_lease(run_of("no_q", 3)):
        told = text()
    assert chapters(told) == [sweep.name]
    output = next(line for line in told.splitlines() if line.startswith("15 runs: "))
    for count in ("11 done", "2 waiting", "1 running", "1 interrupted"):
        assert count in output
    assert "11 of 15 runs have ended" in told
    assert "4 without a result yet" in output


def test_sweep_without_any_result_makes_a_report(text, outputs):
    for path in outputs.glob("runs/*"):
        shutil.rmtree(path)
    told = text("small")
    assert "15 runs: 15 waiting" in told
    assert "0 of 15 runs have ended" in told


def test_failed_and_diverged_runs_are_named(text, run_of):
    nothing = {"train": None, "val": None, "test": None}
    failed, diverged = run_of("no_q", 0), run_of("no_q", 1)
    change(failed, status="failed", error="ValueError: no", loss=nothing)
    change(diverged, status="diverged", diverged_at=3, loss=nothing)
    told = text("small")
    rows = {line.split("|")[1].strip(): line for line in told.splitlines() if "|" in line}
    assert "failed: ValueError: no" in rows[failed.name]
    assert "diverged: not finite at step 3" in rows[diverged.name]
    output = next(line for line in told.splitlines() if line.startswith("15 runs: "))
    assert "13 done" in output
    assert "1 failed" in output
    assert "1 diverged" in output


def test_reason_of_several_lines_stays_in_its_row(text, run_of):
    folder = run_of("no_q", 0)
    change(folder, status="failed", error="ValueError: one\ntwo | three\r\nfour")
    told = text("small")
    (row,) = [line for line in told.splitlines() if line.startswith(f"| {folder.name} ")]
    for word in ("one", "two", "three", "four"):
        assert word in row
    assert row.count("|") == 8


def test_margin_appears_in_the_text(text):
    assert "0.123" not in text("small")
    told = text("small", "--margin", "0.123")
    assert "margin: 0.123 nats" in told
    assert "equivalent" in told


# Forms.


def test_suffix_selects_the_format(qkablate, sweep):
    for name in ("some.md", "SOME.MD"):
        assert qkablate("report", "-o", name).code == 0
        assert Path(name).read_text(encoding="utf-8").startswith(f"# {sweep.name}\n")
    assert not list(sweep.glob("report*"))


def test_markdown_in_the_sweeps_folder(qkablate, sweep):
    done = qkablate("report", "--format=md")
    assert (done.code, done.err) == (0, "")
    assert [path.resolve() for path in written(done)] == [sweep / "report.md"]
    told = (sweep / "report.md").read_text(encoding="utf-8")
    for block in told.split("\n\n"):
        lines = [line for line in block.splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in lines}) <= 1
    for words in proposed_commands(done):
        assert qkablate(*words[1:]).code == 0


def test_file_without_a_suffix_has_the_given_format(qkablate, sweep):
    assert qkablate("report", "-o", "README", "--format", "md").code == 0
    assert Path("README").read_text(encoding="utf-8").startswith(f"# {sweep.name}\n")


def test_charts_keep_a_name_with_a_dot(qkablate, sweep):
    written(qkablate("report", "--format", "svg", "-o", "lr0.01"))
    assert Path("lr0.01-gaps.svg").is_file()


def test_charts_are_separate_files(qkablate, sweep):
    done = qkablate("report", "--format", "svg")
    assert (done.code, done.err) == (0, "")
    files = sorted(path.resolve() for path in written(done))
    assert files == sorted(sweep.glob("*.svg"))
    assert {f"report-{name}.svg" for name in ("gaps", "losses")} <= {path.name for path in files}
    for path in files:
        content = path.read_bytes()
        assert ElementTree.fromstring(content).tag.endswith("svg")
        assert b"var(--" not in content
        assert b"<script" not in content
    assert not list(sweep.glob("report.*"))


def test_charts_are_written_as_png(qkablate, run_of):
    folder = run_of("no_q", 0)
    done = qkablate("report", folder.name, "--format", "png")
    assert (done.code, done.err) == (0, "")
    files = [path.resolve() for path in written(done)]
    assert folder / "report-losses.png" in files
    assert sorted(files) == sorted(folder.glob("*.png"))
    assert all(path.read_bytes().startswith(PNG) for path in files)


def test_charts_of_several_sections_have_distinct_names(qkablate, claim, run_of):
    done = qkablate("report", "mine", str(run_of("no_q", 0)), "-o", "all.svg")
    assert done.code == 0
    names = [str(path) for path in written(done)]
    assert len(names) == len({*names})
    assert {"all-1-parts.svg", "all-1-losses.svg", "all-2-losses.svg"} <= {*names}
    assert all(Path(name).is_file() for name in names)
    assert "claim mine" in Path("all-1-losses.svg").read_text()
    assert "no_q-d16-h2-s0" in Path("all-2-losses.svg").read_text()


@pytest.mark.slow
def test_control_characters_are_in_no_chart(run_of):
    """Run in a subprocess, because the renderer may crash."""
    folder = run_of("no_q", 0)
    path = folder / "config.yaml"
    path.write_text(path.read_text().replace("name: no_q\n", 'name: "odd\\x1b[31m"\n', 1))
    words = [sys.executable, "-m", "qkablate", "report", str(folder), "-o", "odd.svg"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "qkablate: there is nothing to draw yet: no run has been evaluated\n"
    assert not Path("odd-losses.svg").exists()


# Writing.


def no_space(*_, **__):
    raise OSError(28, "No space left on device")


def test_earlier_report_is_replaced(qkablate, sweep):
    target = sweep / "report.md"
    target.write_text("earlier")
    assert qkablate("report", "--format", "md").code == 0
    assert target.read_text().startswith(f"# {sweep.name}\n")


@pytest.mark.parametrize("act", ["write_bytes", "replace"])
def test_earlier_report_survives_a_failed_write(qkablate, sweep, monkeypatch, act):
    target = sweep / "report.md"
    target.write_text("earlier")
    before = tree(sweep)
    with monkeypatch.context() as patch:
        patch.setattr(Path, act, no_space)
        done = qkablate("report", "--format", "md")
    assert_refused(done, "No space left on device")
    assert "report.md" in done.err
    assert target.read_text() == "earlier"
    assert tree(sweep) == before


@pytest.mark.parametrize("form", ["html", "svg"])
def test_unwritable_folder_is_reported(qkablate, run_of, monkeypatch, form):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    folder = run_of("no_q", 0)
    before = tree(folder)
    with monkeypatch.context() as patch:
        patch.setattr("vl_convert.javascript_bundle", lambda *_: "")  # it takes seconds
        patch.setattr(Path, "write_bytes", refuse)
        done = qkablate("report", folder.name, "--format", form)
    assert_refused(done, "cannot be written: Permission denied")
    assert tree(folder) == before


def test_invalid_file_name_is_reported(qkablate, sweep):
    assert_refused(qkablate("report", "-o", "a" * 300 + ".md"), "-o: ")


def test_unknown_home_is_reported(qkablate, sweep):
    done = qkablate("report", "-o", "~nobody-of-this-name/report.md")
    assert_refused(done, "~nobody-of-this-name")


def test_control_characters_in_a_name_are_not_printed(qkablate, sweep):
    done = qkablate("report", "-o", "\x1b[31mred.md")
    assert done.code in (0, 2)
    assert "\x1b" not in done.out + done.err


@pytest.mark.slow
def test_closed_pipe_is_no_error(run_of):
    words = ["report", str(run_of("no_q", 0)), "-o", "some.md"]
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "qkablate", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), error) == (0, "")
    assert Path("some.md").is_file()


def test_only_the_printed_files_are_written(qkablate, outputs, tmp_path):
    before = {*tree(tmp_path)}
    assert qkablate("report", "small", "mine", "-o", "all.md").code == 0
    assert {*tree(tmp_path)} - before == {tmp_path / "all.md"}


# Mistakes.

MISTAKES = [
    (["--format", "htm"], "--format: 'htm' (nearest: html) is not one of html, md, png, svg"),
    (["--format", "pdf"], "--format: 'pdf' (nearest: svg) is not one of html, md, png, svg"),
    (["--format"], "--format: a value is missing"),
    (["--format="], "--format: a value is missing"),
    (["--format", "svg", "-o", "a.md"], "-o: 'a.md' ends in .md, and --format is svg"),
    (["-o", "a.htm"], "'htm' (nearest: html) is not one of html, md, png, svg"),
    (["-o", "a.pdf"], "'pdf' (nearest: svg) is not one of html, md, png, svg"),
    (["-o", "a"], "is not one of html, md, png, svg"),
    (["-o"], "-o: a value is missing"),
    (["--format", "text"], "--format: 'text' is what `qkablate results` prints"),
    (["-o", "nowhere/a.html"], "-o: there is no folder 'nowhere'"),
    (["-o", "folder.md"], "-o: 'folder.md' is a folder; give a file"),
    (["-o", "a.md", "-o", "b.md"], "-o"),
    (["--format", "md", "--format", "svg"], "--format"),
    (["--margin", "1", "--margin", "2", "-o", "a.md"], "--margin"),
    (["smalll"], "there is no sweep, claim or run 'smalll' in 'outputs' (nearest: small)"),
    (["miine"], "(nearest: mine"),
    (["no_q-d16-h2-s9x"], "(nearest: no_q-d16-h2-s"),
    ([""], "there is no sweep, claim or run ''"),
    (["~nobody-of-this-name"], "there is no sweep, claim or run '~nobody-of-this-name'"),
    (["\x1b[31mred"], "there is no sweep, claim or run '�[31mred'"),
    (["small", "nothing-here"], "there is no sweep, claim or run 'nothing-here'"),
    (["no_q"], "'no_q' matches 8 runs"),
    (["out=nowhere"], "there is no sweep in 'nowhere', which does not exist; start one: qkablate"),
    (
        ["small", "out=nowhere"],
        "there is no sweep, claim or run 'small' in 'nowhere', which does not exist",
    ),
    (
        ["--margin", "some"],
        "--margin: 'some' is not a number of nats above 0 and below 100, such as 0.01",
    ),
    (["--margin", "0"], "--margin: '0' is not a number of nats above 0"),
    (["--margin", "-0.01"], "--margin: '-0.01' is not a number of nats above 0"),
    (["--margin", "nan"], "--margin: 'nan' is not a number of nats above 0"),
    (["--margin"], "--margin: a value is missing"),
    (["--fromat", "md"], "'--fromat' (nearest: --format) is not one of "),
    (["--fromat", "md"], "(nearest: --format)"),
    (["--jsn"], "'--jsn' is not one of "),
    (["--help=1"], "--help takes no value"),
    (["out=" + 5000 * "x"], "cannot be a folder: File name too long"),
    (["out=a\0b"], "out: 'a�b' cannot be a folder: embedded null byte"),
]


@pytest.mark.parametrize(("words", "line"), MISTAKES, ids=[" ".join(w)[:30] for w, _ in MISTAKES])
def test_mistakes(qkablate, outputs, tmp_path, words, line):
    (tmp_path / "folder.md").mkdir()
    before = tree(tmp_path)
    assert_refused(qkablate("report", *words), line)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("place", ["claims", "runs"])
def test_ambiguous_name_is_reported(qkablate, outputs, sweep, claim, place):
    other = outputs / place / "small-scale-0123456789ab"
    shutil.copytree(claim if place == "claims" else next(outputs.glob("runs/no_q-*")), other)
    done = qkablate("report", "small")
    assert_refused(done, f"'small' is a sweep ({sweep.name}) and a {place[:-1]} ({other.name})")
    assert not list(sweep.glob("report*"))
    assert qkablate("report", str(sweep), "-o", "one.md").code == 0


def test_claim_that_was_never_run_is_reported(qkablate, outputs, tmp_path):
    from qkablate.analysis.claims.parse import load_claim
    from qkablate.analysis.claims.registry import register_claim

    (tmp_path / "other.yaml").write_text(yaml.safe_dump(CLAIM), encoding="utf-8")
    folder = register_claim(load_claim(str(tmp_path / "other.yaml")), "outputs").folder
    before = tree(outputs)
    for words in (["other"], [str(folder)], ["small", "other"]):
        assert_refused(qkablate("report", *words), "qkablate claim run other")
    assert tree(outputs) == before


def test_claim_with_a_missing_sweep_is_reported(qkablate, claim):
    (link,) = claim.glob("n*")
    gone = link.resolve()
    gone.rename(gone.with_name("elsewhere"))
    assert_refused(qkablate("report", str(claim)), f"{gone.name}' is gone")


@pytest.mark.parametrize("kind", ["sweep", "claim"])
def test_damage_is_reported(qkablate, sweep, claim, kind):
    folder, name = (sweep, "manifest.json") if kind == "sweep" else (claim, "claim.json")
    (folder / name).write_text("{")
    assert_refused(qkablate("report", str(folder)), f"{name}' is damaged")
    assert not list(folder.glob("report*"))


def test_without_readings_there_is_no_chart(qkablate, outputs, sweep):
    for path in outputs.glob("runs/*"):
        shutil.rmtree(path)
    before = tree(outputs)
    assert_refused(qkablate("report", "--format", "svg"), "there is nothing to draw yet")
    assert tree(outputs) == before


# Completion.


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(qkablate, monkeypatch, sweep, claim, run_of, shell):
    assert complete(qkablate, monkeypatch, "qkablate repo", shell) == ["report"]
    offered = {*complete(qkablate, monkeypatch, "qkablate report ", shell)}
    assert {sweep.name, claim.name, run_of("no_q", 0).name} <= offered
    assert {"-o", "--format", "--margin", "out=", "html", "md", "png", "svg"} <= offered
    assert complete(qkablate, monkeypatch, "qkablate report sm", shell) == [sweep.name]
    assert complete(qkablate, monkeypatch, "qkablate report small --f", shell) == ["--format"]


@pytest.mark.exhaustive
def test_published_claims_are_in_the_order_of_the_questions():
    """An alphabetical page would begin anywhere."""
    sources = find_sources([str(PUBLISHED)], "outputs")
    names = [read_registration(folder).claim.name for _, (folder,) in sources]
    assert len(names) > 10
    assert names == sorted(names, key=rank_claim)
    assert names != sorted(names)
