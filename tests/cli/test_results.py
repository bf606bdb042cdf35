"""`qkablate results` as a user types it: tables, their formats, and errors."""

import csv
import io
import json
import re
import shutil
import subprocess
import sys

import pytest

from qkablate.screen import Screen
from tests.cli.helpers import GAPS, assert_refused, complete, proposed_commands

WORDS = [
    *("sweep.name=small", "variant=standard,no_q,shared_qk", "seed=range(5)", "workers=1"),
    "sweep.floor=false",
    *("model.layers=1", "model.d_model=16", "model.heads=2", "model.context=16", "threads=1"),
    *("train.steps=12", "train.batch_size=2", "tracking.wandb=disabled", "data=text"),
]


@pytest.fixture(scope="module")
def finished(finished_study, tmp_path_factory):
    """Return the outputs of the sweep, whose runs have results but no metrics and no configs."""
    outputs = tmp_path_factory.mktemp("results") / "outputs"
    shutil.copytree(finished_study, outputs, symlinks=True)
    for file in [*outputs.glob("runs/*/metrics.jsonl"), *outputs.glob("runs/*/config.yaml")]:
        file.unlink()
    return outputs


def unfinish(outputs, count=1):
    for path in sorted(outputs.glob("runs/no_q-*/result.json"))[:count]:
        path.unlink()


def test_help(qkablate):
    done = qkablate("results", "--help")
    assert (done.code, done.err) == (0, "")
    assert done.out == qkablate("results", "-h").out
    assert "Exit codes: 0 every run is done or has diverged · 1 some are not · 2" in done.out
    for flag in ("--margin", "--format", "--times"):
        assert flag in done.out


@pytest.mark.parametrize("verb", ["results", "compare", "claim"])
def test_help_needs_no_torch_and_no_scipy(verb):
    code = (
        "import sys, qkablate.cli\n"
        f"try: qkablate.cli.main(['{verb}', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(str({'torch', 'scipy'} & set(sys.modules) or '') or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_table_has_every_arm_every_run_and_every_gap(qkablate, sweep):
    done = qkablate("results", "--all")
    assert (done.code, done.err) == (0, "")
    losses = re.split(r"\n\n(?=\S.*\n\n)", done.out)[0]
    assert losses.startswith("test loss")
    for arm in ("standard-d16-h2", "no_q-d16-h2", "shared_qk-d16-h2"):
        (row,) = [line for line in losses.splitlines() if line.startswith(f"{arm} ")]
        assert "5/5" in row
    assert "2.0000 2.1000 2.2000 2.3000 2.4000" in losses  # every run of the baseline
    rows = {line.split()[0]: line for line in done.out.splitlines() if "[" in line}
    assert "+0.0500" in rows["no_q-d16-h2"]
    assert "worse" in rows["no_q-d16-h2"]
    assert "no difference found" in rows["shared_qk-d16-h2"]
    assert done.out.count("gaps to standard-d16-h2, paired by seed") == 1
    assert done.out.count("sweep.tune=true tunes both") == 2  # one of each arm's rates
    assert "neither was tuned" in done.out  # what the audit says


def test_answer_is_last_and_fits_one_screen(qkablate, sweep):
    done = qkablate("results")
    assert (done.code, done.err) == (0, "")
    table, answer, _ = done.out.rsplit("\n\n", 2)
    assert table.startswith("gaps to standard-d16-h2, paired by seed")
    rows = {line.split()[0]: line for line in table.splitlines()[2:]}
    assert "worse" in rows["no_q-d16-h2"]
    assert "  worse at this rate (not tuned): no_q-d16-h2" in table
    assert "baseline" in rows["standard-d16-h2"]
    assert answer.startswith(
        "Compared with standard on the same data and seeds, no_q (by 0.0500 nats) did worse"
    )
    assert len(done.out.splitlines()) < 40
    everything = qkablate("results", "--all").out
    assert len(everything) > 2 * len(done.out)
    assert everything.index("Pareto") < everything.index(answer)


@pytest.mark.parametrize("words", [[], ["--margin", "0.01"], ["--all"], ["--all", "--margin=0.01"]])
@pytest.mark.parametrize("width", [80, 120])
def test_output_is_no_wider_than_the_terminal(qkablate, sweep, monkeypatch, words, width):
    wide = qkablate("results", *words).out
    screen = Screen(width, has_color=True)
    monkeypatch.setattr("qkablate.table.find_screen", lambda stream: screen)
    colored = qkablate("results", *words).out
    assert "\x1b[31mworse" in colored
    answer = colored[colored.index("\nCompared with") : colored.index("\x1b[1mNext")]
    assert "\x1b" not in answer  # it is prose
    lines = re.sub(r"\x1b\[\d+m", "", colored).splitlines()
    assert max(map(len, lines)) <= width
    assert {*wide.split()} <= {*" ".join(lines).split()}  # no word is broken


def test_all_is_only_for_the_tables(qkablate, sweep):
    refused = qkablate("results", "--all", "--json")
    assert_refused(refused, "--all: --format json shows everything already")


def test_json_is_complete(qkablate, sweep):
    done = qkablate("results", "--format", "json")
    assert (done.code, done.err) == (0, "")
    output = json.loads(done.out, parse_constant=pytest.fail)
    assert output["sweep"] == sweep.name
    assert output["complete"] is True
    assert {arm["arm"] for arm in output["arms"]} == {
        *("standard-d16-h2", "no_q-d16-h2", "shared_qk-d16-h2")
    }
    assert all(len(arm["runs"]) == arm["n"] == 5 for arm in output["arms"])
    gaps = {gap["arm"]: gap for gap in output["gaps"]}
    assert len(gaps) == 2
    for name, gap in gaps.items():
        true = GAPS[name.partition("-")[0]]
        assert gap["mean"] == pytest.approx(true, abs=1e-9)
        low, high = gap["interval"]
        # t of 4 degrees of freedom; the numbers of SPREAD have a variance of 2.5e-6.
        half = 2.776445 * (2.5e-6 / 5) ** 0.5
        assert (low, high) == pytest.approx((true - half, true + half), abs=1e-8)
        assert [pair["seeds"]["seed"] for pair in gap["pairs"]] == [0, 1, 2, 3, 4]
        assert gap["margin"] is None
        assert {check["state"] for check in gap["audit"]} <= {"ok", "note", "warning"}


def test_csv_has_a_row_per_gap_with_the_numbers_of_the_json(qkablate, sweep):
    done = qkablate("results", "--format=csv")
    assert (done.code, done.err) == (0, "")
    rows = list(csv.DictReader(io.StringIO(done.out)))
    gaps = json.loads(qkablate("results", "--format", "json").out)["gaps"]
    assert [row["arm"] for row in rows] == [gap["arm"] for gap in gaps]
    for row, gap in zip(rows, gaps, strict=True):
        assert float(row["mean"]) == gap["mean"]
        assert [float(row["low"]), float(row["high"])] == gap["interval"]
        assert [float(row["bca_low"]), float(row["bca_high"])] == gap["bca"]
        assert float(row["p_holm"]) == gap["p_holm"]
        assert int(row["n"]) == 5
        assert "warning: learning rate" in row["audit"]
        assert row["unpaired"] == ""


def read_markdown(text):
    """Tables by title: a list of rows, the head first."""
    found = {}
    for block in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        title, *rest = block.splitlines()
        lines = [line for line in rest if line.startswith("|")]
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        assert all(set(cell) <= {"-", ":"} for cell in rows.pop(1))
        assert len({len(row) for row in rows}) == 1, title
        found[title] = rows
    return found


def test_markdown_has_the_tables_to_paste(qkablate, sweep):
    done = qkablate("results", "--format", "md")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"# {sweep.name}\n")
    tables = read_markdown(done.out)
    head, *rows = tables["gaps to standard-d16-h2, paired by seed"]
    by_arm = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    assert by_arm["no_q-d16-h2"]["gap"] == "+0.0500"
    assert by_arm["no_q-d16-h2"]["n"] == "5"
    assert by_arm["no_q-d16-h2"]["decision"] == "worse"
    assert "- worse at this rate (not tuned): no_q-d16-h2" in done.out
    assert by_arm["shared_qk-d16-h2"]["gap"] == "+0.0000"
    head, *rows = next(rows for title, rows in tables.items() if title.startswith("test loss"))
    assert [row[head.index("done")] for row in rows] == ["5/5"] * 3
    assert "Next" not in done.out


def test_margin_is_tested(qkablate, sweep):
    gaps = {}
    for margin in ("0.01", "0.1"):
        done = qkablate("results", "--format", "json", "--margin", margin)
        assert done.code == 0
        gaps[margin] = {gap["arm"]: gap["margin"] for gap in json.loads(done.out)["gaps"]}
    assert gaps["0.01"]["shared_qk-d16-h2"]["nats"] == 0.01
    assert gaps["0.01"]["shared_qk-d16-h2"]["p_noninferior"] < 0.05
    assert gaps["0.01"]["shared_qk-d16-h2"]["p_equivalent"] < 0.05
    assert gaps["0.01"]["no_q-d16-h2"]["p_noninferior"] > 0.95
    assert gaps["0.1"]["no_q-d16-h2"]["p_noninferior"] < 0.05
    done = qkablate("results", "--margin=0.01", "--all")
    assert "p (gap ≥ 0.01)" in done.out
    assert "seeds for ± 0.01 if the gap is 0" in done.out
    # There is no floor.
    assert "no verdict: insensitive: shared_qk-d16-h2" in done.out
    # The margin that was asked for is kept.
    shown = [words for words in proposed_commands(done) if {"results", "report"} & {*words}]
    assert len(shown) == 2
    assert all("--margin" in words for words in shown)


def test_proposed_command_works(qkablate, sweep):
    done = qkablate("results")
    commands = proposed_commands(done)
    settle, *others = commands
    assert settle[:2] == ["qkablate", "sweep"]
    assert settle[-1] == "--dry-run"
    assert "sweep.tune=true" in settle
    assert "sweep.name=small-tuned" in settle
    assert "sweep.name=small" not in settle
    verbs = ["results", "results", "report", "results"]
    assert [words[:3] for words in others] == [["qkablate", verb, sweep.name] for verb in verbs]
    assert others[0][-2:] == ["--margin", "0.004"]
    assert others[1][-1] == "--all"
    assert others[3][-1] == "--json"
    for words in commands:
        assert qkablate(*words[1:]).code == 0


def test_proposed_command_works_with_another_out(qkablate, finished, tmp_path):
    done = qkablate("results", "small", f"out={finished}")
    commands = proposed_commands(done)
    assert len(commands) == 5
    for words in commands:
        assert f"out={finished}" in words
        assert qkablate(*words[1:]).code == 0


def test_proposed_command_works_for_a_given_folder(qkablate, finished):
    (folder,) = finished.glob("sweeps/small-*")
    done = qkablate("results", str(folder))
    assert done.code == 0
    for words in proposed_commands(done):
        assert qkablate(*words[1:]).code == 0


def test_sweep_is_found_by_its_folder_name_or_id(qkablate, sweep):
    whole = qkablate("results", "--format", "json").out
    id = sweep.name.rpartition("-")[2]
    for word in (sweep.name, "small", id[:5], str(sweep), f"outputs/sweeps/{sweep.name}/"):
        assert qkablate("results", word, "--format", "json").out == whole


def test_unfinished_sweep_is_shown_as_far_as_possible(qkablate, outputs, sweep):
    unfinish(outputs, 2)
    done = qkablate("results", "--all")
    assert (done.code, done.err) == (1, "")
    assert "(waiting)" in done.out
    (row,) = [x for x in qkablate("results").out.splitlines() if x.startswith("no_q-d16-h2 ")]
    assert "3/5" in row
    manifest = json.loads((sweep / "manifest.json").read_text())
    kept = [word for word in manifest["command"] if not word.startswith("out=")]
    assert proposed_commands(done)[0] == kept  # the sweep was moved to the default folder
    for form in ("json", "csv", "md"):
        assert qkablate("results", "--format", form).code == 1
    output = json.loads(qkablate("results", "--format", "json").out)
    assert output["complete"] is False
    (gap,) = [gap for gap in output["gaps"] if gap["arm"].startswith("no_q")]
    assert gap["n"] == 3
    assert len(gap["unpaired"]) == 2


def test_sweep_without_any_result_is_shown(qkablate, outputs):
    for path in outputs.glob("runs/*/result.json"):
        path.unlink()
    for form in ("table", "json", "csv", "md"):
        done = qkablate("results", "--format", form, "--margin", "0.01")
        assert (done.code, done.err) == (1, ""), form
    output = json.loads(qkablate("results", "--format", "json").out, parse_constant=pytest.fail)
    assert all(gap["n"] == 0 and gap["mean"] is None for gap in output["gaps"])


def test_retry_of_failed_runs_is_proposed(qkablate, outputs):
    path = next(outputs.glob("runs/no_q-*-s0-*/result.json"))  # not one of the claim
    result = json.loads(path.read_text()) | {"status": "failed", "error": "ValueError: no"}
    path.write_text(json.dumps(result))
    done = qkablate("results")
    assert done.code == 1
    assert proposed_commands(done)[0][-2:] == ["--retry", "failed"]


def test_nothing_is_written(qkablate, outputs):
    def tree():
        return {path: path.lstat().st_mtime_ns for path in outputs.rglob("*")}

    before = tree()
    for form in ("table", "json", "csv", "md"):
        assert qkablate("results", "--format", form).code == 0
    assert tree() == before


@pytest.fixture
def times(qkablate, tmp_path):
    """Return synthetic output of `cost --measure --json`."""
    sizes = [word for word in WORDS if word.startswith("model.")]
    done = qkablate("cost", "variant=standard,no_q,shared_qk", *sizes, "--json")
    rows = json.loads(done.out)
    for row, ms in zip(rows, (1.0, 3.0, 2.0), strict=True):
        row |= {"step_ms": ms, "step_ratio": ms, "step_rounds": 3}
    path = tmp_path / "times.json"
    path.write_text(json.dumps(rows))
    return path


def test_times_add_the_front_of_time(qkablate, sweep, times):
    output = json.loads(qkablate("results", "--times", str(times), "--format", "json").out)
    (front,) = [one for one in output["fronts"] if one["cost"] == "ms per step"]
    by_arm = {row["arm"]: row for row in front["arms"]}
    assert {arm: row["cost"] for arm, row in by_arm.items()} == {
        "standard-d16-h2": 1.0,
        "no_q-d16-h2": 3.0,
        "shared_qk-d16-h2": 2.0,
    }
    assert by_arm["standard-d16-h2"]["is_optimal"]
    assert not by_arm["no_q-d16-h2"]["is_optimal"]
    done = qkablate("results", "--times", str(times))
    assert done.code == 0
    assert "ms per step" in done.out
    assert "ms per step" not in qkablate("results").out.replace("qkablate cost --measure", "")


BAD_TIMES = ["", "[", "3", "{}", "[3]", "[{}]", '[{"step_ms": "fast"}]', "[[]]", "[" * 20_000]


@pytest.mark.parametrize("text", BAD_TIMES, ids=[text[:20] for text in BAD_TIMES])
def test_invalid_times_are_reported(qkablate, sweep, tmp_path, text):
    path = tmp_path / "times.json"
    path.write_text(text)
    done = qkablate("results", "--times", str(path))
    assert_refused(done, f"--times: '{path}' is not the output of `qkablate cost --measure --json`")


def test_missing_files_and_folders_are_said_to_be(qkablate, sweep):
    done = qkablate("results", "--times", "none.json")
    assert_refused(done, "--times: 'none.json' cannot be read: No such file or directory")
    assert_refused(qkablate("results", "out="), "out: a value is missing; write out=FOLDER")


def test_times_of_other_arms_are_reported(qkablate, sweep, times):
    rows = [row | {"d_model": 32} for row in json.loads(times.read_text())]
    times.write_text(json.dumps(rows))
    assert_refused(qkablate("results", "--times", str(times)), "has no arm of this sweep")
    assert_refused(qkablate("results", "--times", "nowhere.json"), "--times: 'nowhere.json'")


def test_json_is_a_flag_too(qkablate, sweep):
    assert qkablate("results", "--json").out == qkablate("results", "--format", "json").out
    assert_refused(qkablate("results", "--json", "--format", "md"), "--json and --format md")


MISTAKES = [
    (["--scaling", "--margin", "0.02"], "--margin: the scaling laws have none"),
    (["--times", "times.json", "--format", "csv"], "--times: --format csv has no front"),
    (["smal-0"], "there is no sweep or run 'smal-0' in 'outputs' (nearest: small"),
    (["smalll"], "(nearest: small)"),
    (["out=nowhere"], "there is no sweep in 'nowhere', which does not exist; start one: qkablate"),
    (["one", "two"], "no sweep or run 'one' in 'outputs'; `qkablate ls` lists them"),
    (["outputs/sweep/"], "there is no folder 'outputs/sweep/' (nearest: outputs/sweeps)"),
    (["nowhere/small"], "there is no folder 'nowhere/small'"),
    (["--jsn"], "'--jsn' (nearest: --json) is not one of "),
    (["--fromat", "md"], "(nearest: --format)"),
    (["--format", "jsno"], "--format: 'jsno' (nearest: json) is not one of table, csv, json, md"),
    (["--format"], "--format: a value is missing"),
    (["--format="], "--format: a value is missing"),
    (["--help=1"], "--help takes no value"),
    (["--margin", "0"], "--margin: '0' is not a number of nats above 0"),
    (["--margin", "-0.01"], "--margin: '-0.01' is not a number of nats above 0"),
    (["--margin", "nan"], "--margin: 'nan' is not a number of nats above 0"),
    (["--margin", "inf"], "--margin: 'inf' is not a number of nats above 0"),
    (["--margin", "1e-2 nats"], "--margin: '1e-2 nats' is not a number"),
    (
        ["--margin", "some"],
        "--margin: 'some' is not a number of nats above 0 and below 100, such as 0.01",
    ),
    (["--margin"], "--margin: a value is missing"),
    (["--times"], "--times: a value is missing"),
    (["~nobody-of-this-name"], "there is no sweep or run '~nobody-of-this-name'"),
    (["\x1b[31mred"], "there is no sweep or run '�[31mred'"),
]


@pytest.mark.parametrize(("words", "line"), MISTAKES, ids=[" ".join(w)[:20] for w, _ in MISTAKES])
def test_mistakes(qkablate, sweep, words, line):
    assert_refused(qkablate("results", *words), line)


def test_damaged_manifest_is_reported(qkablate, sweep):
    (sweep / "manifest.json").write_text('{"format": 1}')
    assert_refused(qkablate("results"), "manifest.json' is damaged")


@pytest.mark.parametrize("words", [["results"], ["claim", "list"]])
def test_analysis_needs_no_extra(qkablate, sweep, monkeypatch, words):
    for module in ("jinja2", "vl_convert"):
        monkeypatch.setitem(sys.modules, module, None)
    done = qkablate(*words)
    assert (done.code, done.err) == (0, "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(qkablate, monkeypatch, sweep, shell):
    assert complete(qkablate, monkeypatch, "qkablate res", shell) == ["results"]
    offered = {*complete(qkablate, monkeypatch, "qkablate results ", shell)}
    assert {sweep.name, "--margin", "--format", "--times", "out="} <= offered
    assert {"table", "csv", "json", "md"} <= offered
    assert complete(qkablate, monkeypatch, "qkablate results sm", shell) == [sweep.name]
    assert complete(qkablate, monkeypatch, "qkablate results --m", shell) == ["--margin"]
    assert complete(qkablate, monkeypatch, "qkablate results small --format m", shell) == ["md"]


@pytest.mark.parametrize(
    ("detectable", "proposed"), [(0.0271, "0.03"), (7.4e-5, "8e-05"), (0.02, "0.02"), (None, None)]
)
def test_proposed_margin_can_be_shown(qkablate, sweep, monkeypatch, detectable, proposed):
    monkeypatch.setattr(
        "qkablate.analysis.comparison.gaps.Family.detectable", lambda self, gap: detectable
    )
    commands = [line for line in qkablate("results").out.splitlines() if "--margin" in line]
    assert [line.partition("--margin ")[2] for line in commands] == [proposed] * bool(proposed)


def test_scaling_is_refused_without_a_grid(qkablate, outputs):
    done = qkablate("results", "--scaling")
    assert (done.code, done.out) == (2, "")
    assert "has no arm that was trained, with its baseline, at several sizes" in done.err
    done = qkablate("results", "--scaling", "--all")
    assert (done.code, done.out) == (2, "")
    assert "--scaling: --all, --times and the other formats show it already" in done.err


def test_runs_of_a_claim_are_judged_as_the_claim(qkablate, outputs):
    done = qkablate("results", "claim-mine")
    assert done.code == 0
    assert "Judged as the claim mine (small) with 3 seeds: INSENSITIVE." in done.out
    assert "There is no baseline" not in done.out
    (registration,) = outputs.glob("claims/*/claim.json")
    assert ["qkablate", "report", registration.parent.name] in proposed_commands(done)
    assert "Judged as" not in qkablate("results", "small").out
    at_margin = qkablate("results", "claim-mine", "--margin=0.01").out
    assert "Compared with standard on the same data and seeds" in at_margin
    assert "Compared with standard" not in done.out
    registration.write_text("{")
    damaged = qkablate("results", "claim-mine")
    assert damaged.code == 0
    assert "not judged as a claim: " in damaged.out
    assert "no_q-d16-h2" in damaged.out
    registration.unlink()
    assert "judged as" not in qkablate("results", "claim-mine").out.lower()
