"""`qkablate ls`: runs and sweeps, filtered and sorted; and what an ambiguous name leads to."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import yaml

from tests.cli.helpers import assert_refused, complete, proposed_commands, run_in

SIZE = [
    *("model.layers=1", "model.d_model=16", "model.heads=2", "model.context=16"),
    *("train.steps=12", "train.batch_size=2", "train.eval_every=6", "tracking.wandb=disabled"),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the outputs of a sweep of two runs and of two runs beside it."""
    folder = tmp_path_factory.mktemp("ls")
    run_in(folder, "sweep", "sweep.name=small", "variant=standard,no_q", "sweep.floor=false", *SIZE)
    run_in(folder, "train", "variant=merged_w", "optim.lr=2e-3", *SIZE)
    return run_in(folder, "train", "variant=merged_w", "optim.lr=5e-3", *SIZE)


@pytest.fixture
def outputs(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "outputs", symlinks=True)


def listed(qkablate, *words):
    """Return the names of the runs and of the sweeps in the list."""
    done = qkablate("ls", *words, "--json")
    assert (done.code, done.err) == (0, "")
    content = json.loads(done.out)
    return [[row["name"] for row in content[kind]] for kind in ("runs", "sweeps")]


def test_named_data_is_found_by_all_its_settings(qkablate, outputs):
    """The config has the source and the settings of a named set, and not its name."""
    run = next((outputs / "runs").iterdir())
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["data"] |= {"source": "induction", "vocab_size": 32, "segment": 8, "tokenizer": None}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert listed(qkablate, "data=induction_short")[0] == [run.name]
    assert listed(qkablate, "data=induction")[0] == [run.name]  # the source
    config["data"]["segment"] = 4
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert listed(qkablate, "data=induction_short")[0] == []


def test_folder_that_does_not_exist_is_a_mistake(qkablate):
    assert_refused(qkablate("ls", "out=nowhere"), "out: 'nowhere' does not exist")
    for quoted in ('"no (1)"', "'no (1)'"):  # as `qkablate train` needs it
        assert_refused(qkablate("ls", f"out={quoted}"), "out: 'no (1)' does not exist")
    Path("file").touch()
    assert_refused(qkablate("ls", "out=file"), "out: 'file' is a file")
    assert qkablate("ls").code == 0  # there are no runs yet


def test_newest_first_with_data_rate_and_losses(qkablate, outputs):
    for age, run in enumerate(sorted((outputs / "runs").iterdir())):
        for file in run.iterdir():
            os.utime(file, (1e9 - age, 1e9 - age))
    done = qkablate("ls")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert "small-" in lines[1]
    assert "2/2" in lines[1]
    # The age of the sweep may be 12 s, so the number of steps does not tell which lines are runs.
    runs = [line.split() for line in lines if line.split()[1:3] == ["done", "text"]]
    assert [row[0][:8] for row in runs] == ["merged_w", "merged_w", "no_q-d16", "standard"]
    assert {row[3] for row in runs[:2]} == {"0.002", "0.005"}
    assert {row[4] for row in runs} == {"12"}
    sweep = next((outputs / "sweeps").iterdir())
    assert f"  qkablate results {sweep.name}" in lines
    assert qkablate("inspect", runs[0][0]).code == 0  # the shown name is enough


@pytest.mark.parametrize(
    ("words", "runs", "sweeps"),
    [
        (["merged_w"], 2, 0),
        (["merged*s0"], 2, 0),
        (["small"], 0, 1),
        (["variant=standard,no_q"], 2, 1),
        (["lr=2e-3"], 1, 0),
        (["model.d_model=16", "status=done"], 4, 1),
        (["data=text", "merged_w", "lr=0.005"], 1, 0),
        (["optim.betas=[0.9,0.95]"], 4, 1),
        (["optim.betas=[0.8,0.9],[0.9,0.95]"], 4, 1),
        (["status=failed"], 0, 0),
    ],
)
def test_words_filter_by_name_and_config(qkablate, outputs, words, runs, sweeps):
    assert [len(names) for names in listed(qkablate, *words)] == [runs, sweeps]
    assert "\n\n\n" not in qkablate("ls", *words).out


def test_sort_and_limit(qkablate, outputs):
    by_name, _ = listed(qkablate, "--sort", "name")
    assert by_name == sorted(by_name)
    assert listed(qkablate, "--sort", "name", "--limit", "1")[0] == by_name[:1]
    assert "and 3 more (--all)" in qkablate("ls", "--limit", "1").out
    rates = json.loads(qkablate("ls", "merged_w", "--sort", "lr", "--json").out)["runs"]
    assert [row["config"]["optim.lr"] for row in rates] == [0.002, 0.005]
    losses = json.loads(qkablate("ls", "--sort", "loss", "--json").out)["runs"]
    assert [row["test_loss"] for row in losses] == sorted(row["test_loss"] for row in losses)


@pytest.mark.parametrize("value", ["2024-02-30", "0x_", "{a", "!!int ''"])
def test_value_that_is_no_yaml_is_a_text(qkablate, outputs, value):
    done = qkablate("ls", f"data.path={value}", "--json")
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out)["runs"] == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.d_modle=16"], "model.d_modle: there is no such key (nearest: model.d_model)"),
        (["lr="], "lr: a value is missing"),
        (["steps=abc"], "steps: 'abc' is not auto, or 1 or more"),
        (["model.position=rop"], "model.position: 'rop' (nearest: rope) is not one of"),
        (["status=finished"], "status: 'finished' (nearest: done) is not one of done"),
        (["status=dnoe"], "status: 'dnoe' (nearest: done) is not one of done, diverged, failed"),
        (["--sort", "los"], "--sort: 'los' (nearest: loss) is not one of loss"),
        (["--all", "--limit", "2"], "--all and --limit: give one of the two"),
    ],
)
def test_mistakes_are_one_line(qkablate, outputs, words, message):
    done = qkablate("ls", *words)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"qkablate: {message}")
    assert done.err.count("\n") == 1


def test_empty_folder_names_the_first_command(qkablate):
    done = qkablate("ls")
    assert (done.code, done.err) == (0, "")
    assert done.out == "'outputs' has 0 runs and 0 sweeps\n\nNext\n  qkablate train\n"
    assert listed(qkablate) == [[], []]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["smal_"], "smal_ (nearest: small)"),
        (["mergd_w"], "mergd_w (nearest: merged_w)"),
        (["variant=mergd_w"], "variant=mergd_w (nearest: variant=merged_w)"),
        (["data=indction"], "data=indction (nearest: data=induction)"),
        (["merged_w", "seed=7"], "merged_w seed=7"),
        (["status=unfinished"], "status=unfinished"),
        (["merged_w", "small"], "merged_w small"),
    ],
)
def test_words_that_nothing_fits_have_a_nearest_one(qkablate, outputs, words, hint):
    done = qkablate("ls", *words)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"'outputs' has 4 runs and 1 sweep; none fits {hint}\n")


def test_proposed_pair_is_an_arm_and_its_baseline(qkablate, outputs):
    (*_, compare) = proposed_commands(qkablate("ls"))
    assert [word.split("-")[0] for word in compare[1:]] == ["compare", "no_q", "standard"]
    assert qkablate(*compare[1:]).code == 0
    for word in ("merged_w", "standard"):  # two rates, and a single run
        assert proposed_commands(qkablate("ls", word))[-1][1] == "inspect"


def test_damaged_rates_are_sorted_last(qkablate, outputs):
    config = next((outputs / "runs").glob("no_q*")) / "config.yaml"
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace("  lr: 0.001\n", "  lr: [1, 2]\n"), encoding="utf-8")
    assert config.read_text(encoding="utf-8") != text
    assert listed(qkablate, "--sort", "lr")[0][-1].startswith("no_q")


def test_damaged_files_are_listed_as_damaged(qkablate, outputs):
    run = next((outputs / "runs").glob("no_q*"))
    (run / "config.yaml").write_text("{", encoding="utf-8")
    (next((outputs / "sweeps").iterdir()) / "manifest.json").write_text("{", encoding="utf-8")
    done = qkablate("ls")
    assert (done.code, done.err) == (0, "")
    assert done.out.count("damaged") == 2


def test_ambiguous_name_lists_the_runs_and_says_how_to_list_all(qkablate, outputs):
    done = qkablate("inspect", "merged_w")
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "'merged_w' matches 2 runs: merged_w-d16-h2-s0-" in done.err
    assert "(lr 0.002, done, " in done.err
    assert "(lr 0.005, done, " in done.err
    assert "text" not in done.err  # equal data are not shown
    assert done.err.endswith("or list them: qkablate ls merged_w\n")


def test_results_and_report_take_runs_without_a_sweep(qkablate, outputs):
    runs = [str(folder) for folder in sorted((outputs / "runs").iterdir())]
    named = qkablate("results", *runs[2:])
    assert (named.code, named.err) == (0, "")
    assert "gaps to standard-d16-h2, paired by seed" in named.out
    assert proposed_commands(named)[0][1:4] == ["results", *runs[2:]]
    shutil.rmtree(outputs / "sweeps")
    done = qkablate("results")
    assert (done.code, done.err) == (0, "")
    assert all(name in done.out for name in ("merged_w-d16-h2", "no_q-d16-h2", "standard-d16-h2"))
    assert qkablate("report", "-o", "all.md").code == 0


def test_results_of_a_sweep_and_a_run_together_are_rejected(qkablate, outputs):
    done = qkablate("results", "small", "no_q")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "qkablate report small no_q" in done.err


def test_sweep_moved_without_its_runs_says_so_and_where_to_resume(qkablate, outputs):
    (outputs / "sweeps").rename(outputs.parent / "sweeps")
    moved = outputs.parent / "elsewhere"
    moved.mkdir()
    (outputs.parent / "sweeps").rename(moved / "sweeps")
    for verb in ("status", "results"):
        done = qkablate(verb, "out=elsewhere")
        assert (done.code, done.err) == (1, "")
        assert "2 runs that results.csv lists as done are not in 'elsewhere/runs'" in done.out
        assert proposed_commands(done)[0][-1] == "out=elsewhere"


def test_completion(qkablate, monkeypatch, outputs):
    offered = {*complete(qkablate, monkeypatch, "qkablate ls ", "bash")}
    assert {"status=", "--sort", "--limit", "--json", "out="} <= offered


def test_masked_text_is_told_from_causal_text(qkablate, outputs):
    for run in (outputs / "runs").glob("no_q-*"):
        config = run / "config.yaml"
        text, count = re.subn(r"objective: \w+", "objective: mlm", config.read_text())
        assert count == 1
        config.write_text(text)
    rows = [line for line in qkablate("ls").out.splitlines() if line.startswith("no_q")]
    assert rows
    assert all(", mlm" in row for row in rows)
