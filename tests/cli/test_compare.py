"""`qkablate compare`: two runs side by side."""

import json
import os
import re
import shutil
import sys

import pytest

from qkablate.table import format_nats
from tests.cli.helpers import SIZES, assert_refused, proposed_commands, run_in

LENGTH = ["train.steps=12", "train.batch_size=2", "train.eval_every=6", "tracking.wandb=disabled"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the outputs of three runs: standard with two seeds, no_q with one of them."""
    folder = tmp_path_factory.mktemp("compare")
    for words in (["seed=0"], ["seed=1"], ["variant=no_q", "seed=0"]):
        run_in(folder, "train", *SIZES, *LENGTH, *words)
    return folder / "outputs"


@pytest.fixture
def runs(outputs):
    """Their folders: standard, standard with another seed, no_q."""
    found = sorted(outputs.glob("runs/*"))
    by_name = {path.name.rpartition("-")[0]: path for path in found}
    return [by_name[f"{name}"] for name in ("standard-d16-h2-s0", "standard-d16-h2-s1")] + [
        by_name["no_q-d16-h2-s0"]
    ]


def result(folder):
    """Return the result without its checksum, so that it may be changed."""
    found = json.loads((folder / "result.json").read_text())
    return {key: value for key, value in found.items() if key != "sha256"}


def compared(qkablate, *words):
    done = qkablate("compare", *map(str, words), "--json")
    assert (done.code, done.err) == (0, ""), done
    return json.loads(done.out, parse_constant=pytest.fail)


def test_help(qkablate):
    done = qkablate("compare", "--help")
    assert (done.code, done.err) == (0, "")
    assert "Usage: qkablate compare RUN BASELINE" in done.out
    assert qkablate("compare", "-h").out == done.out


@pytest.mark.slow
def test_pair(qkablate, runs):
    standard, _, no_q = runs
    output = compared(qkablate, no_q.name, standard.name)
    assert output["runs"] == [no_q.name, standard.name]
    assert output["status"] == ["done", "done"]
    assert output["paired"] is True
    losses = [result(folder)["loss"] for folder in (no_q, standard)]
    for split in ("train", "val", "test"):
        assert output["loss"][split] == [one[split] for one in losses]
        if losses[0][split] is not None:
            gap = losses[0][split] - losses[1][split]
            assert output["gap"][split] == pytest.approx(gap)
    counts = [result(folder)["params"] for folder in (no_q, standard)]
    assert output["total_params"] == [count["total"] for count in counts]
    assert output["params"] == [count["total"] - count["embedding"] for count in counts]
    assert output["params"][0] < output["params"][1]
    assert output["differ"]["variant.name"] == ["no_q", "standard"]
    assert not any(key.startswith(("seed", "train", "model", "data")) for key in output["differ"])
    assert output["unlike"] == {}
    readings = {row["tokens"]: row["gap"] for row in output["val_gap"]}
    assert list(readings) == sorted(readings)
    assert readings[12 * 2 * 16] == pytest.approx(output["gap"]["val"], abs=1e-6)
    # The other way round it has the other sign.
    back = compared(qkablate, standard.name, no_q.name)
    assert back["gap"]["val"] == -output["gap"]["val"]


def test_pair_as_a_table(qkablate, runs):
    standard, _, no_q = runs
    done = qkablate("compare", "no_q", "standard-d16-h2-s0")
    assert (done.code, done.err) == (0, "")
    title, _, head, *rows = done.out.splitlines()
    assert title == f"{no_q.name[:-8]} compared with {standard.name[:-8]}"
    assert head.split() == ["no_q", "standard", "no_q", "−", "standard"]
    gap = result(no_q)["loss"]["test"] - result(standard)["loss"]["test"]
    (test,) = [row for row in rows if row.startswith("test loss")]
    assert f" {format_nats(gap)} (" in test
    sizes = {row.split("  ")[0]: row for row in rows}
    ratio = result(no_q)["flops_per_token"] / result(standard)["flops_per_token"]
    assert sizes["FLOPs/token"].endswith(f"ratio {ratio:.3f}")
    assert {"params", "with embeddings"} <= {*sizes}
    assert "they differ in  variant.name: no_q · standard" in done.out
    assert "no pair" not in done.out
    assert "one pair gives a number, not a verdict" in done.out
    assert "validation gap by tokens" in done.out


def test_of_several_runs_the_newest_pair_trained_alike_is_compared(qkablate, outputs, runs):
    standard, other, no_q = runs
    for newest in (standard, other):  # seed 1 has no run of no_q
        os.utime(newest / "config.yaml")
        assert compared(qkablate, "no_q", "standard")["runs"] == [no_q.name, standard.name]
    shutil.copytree(standard, outputs / "runs" / "standard-d16-h2-s0-abcdef012345")
    os.utime(outputs / "runs" / "standard-d16-h2-s0-abcdef012345" / "config.yaml")
    output = compared(qkablate, "standard", "no_q")
    assert output["runs"] == ["standard-d16-h2-s0-abcdef012345", no_q.name]
    assert output["paired"] is True


def test_ambiguous_word_is_said_to_be_so(qkablate, runs):
    done = qkablate("compare", "no_q", "standard")
    note = "'standard' matches 2 runs: the newest two trained alike are compared"
    assert done.out.splitlines()[0] == note
    assert "matches" not in qkablate("compare", "no_q", runs[0].name).out


def test_sweep_is_not_a_run_and_leads_to_its_results(qkablate, outputs, runs):
    for name in ("first-abcdef012345", "second-abcdef012345"):
        (outputs / "sweeps" / name).mkdir(parents=True)
        (outputs / "sweeps" / name / "manifest.json").write_text("{}")
    for word in ("first", str(outputs / "sweeps" / "first-abcdef012345")):
        line = f"'{word}' is a sweep, not a run: qkablate results {word}\n"
        assert_refused(qkablate("compare", word, "second"), line)
        assert_refused(qkablate("compare", "no_q", word), line)


def test_name_of_a_variant_is_not_the_beginning_of_another(qkablate, outputs, runs):
    longer = outputs / "runs" / "no_qk-d16-h2-s0-abcdef012345"
    shutil.copytree(runs[2], longer)
    assert compared(qkablate, "no_q", "standard")["runs"][0] == runs[2].name


def test_runs_with_other_seeds_are_not_a_pair(qkablate, runs):
    standard, other, no_q = runs
    output = compared(qkablate, standard.name, other.name)
    assert output["paired"] is False
    assert output["differ"]["seed"] == [0, 1]
    done = qkablate("compare", standard.name, other.name)
    assert "not a pair: their seeds or data differ" in done.out
    assert compared(qkablate, no_q.name, other.name)["paired"] is False


def test_runs_on_other_data_are_not_a_pair(qkablate, outputs, runs):
    standard, _, no_q = runs
    other = result(no_q) | {"data_fingerprint": "another"}
    (no_q / "result.json").write_text(json.dumps(other))
    output = compared(qkablate, no_q.name, standard.name)
    assert output["paired"] is False
    assert output["unlike"]["data_fingerprint"][0] == "another"
    assert output["gap"] == {}
    assert output["val_gap"] == []
    done = qkablate("compare", "no_q", standard.name)
    assert "no gaps: the two were trained on different data" in done.out
    assert (
        "and in          data_fingerprint: another"
        in qkablate("compare", "no_q", standard.name).out
    )


def test_accuracies_of_a_task_are_compared(qkablate, runs):
    for run, share in zip(runs, (0.5, 0.25, 0.75), strict=True):
        changed = result(run) | {"accuracy": {"val": None, "test": share}}
        (run / "result.json").write_text(json.dumps(changed))
    done = qkablate("compare", runs[0].name, runs[2].name)
    assert re.search(r"^test accuracy +50\.0% +75\.0%$", done.out, re.MULTILINE)
    assert "exact" not in done.out
    output = compared(qkablate, runs[0].name, runs[2].name)
    assert output["test"] == {"accuracy": [0.5, 0.75]}


def test_run_compared_with_itself_does_not_differ(qkablate, runs):
    output = compared(qkablate, runs[0].name, runs[0])
    assert output["differ"] == output["unlike"] == {}
    assert output["gap"]["test"] == 0
    assert output["paired"] is True
    assert qkablate("compare", runs[0].name, runs[0].name).code == 0


def test_run_is_found_by_its_folder_name_or_id(qkablate, runs, finished):
    one, _, other = runs
    whole = compared(qkablate, one, other)
    ids = [folder.name.rpartition("-")[2] for folder in (one, other)]
    for words in ([one.name, other.name], ids, ["standard-d16-h2-s0", "no_q"], [ids[0][:6], "no"]):
        assert compared(qkablate, *words) == whole
    there = compared(qkablate, *ids, f"out={finished}")
    assert there == whole
    assert compared(qkablate, f"out={finished}", *ids) == whole


@pytest.mark.parametrize("how", ["no result", "half a result", "no metrics", "no environment"])
def test_incomplete_run_is_shown_as_far_as_possible(qkablate, runs, how):
    one, _, other = runs
    path = one / "result.json"
    if how == "no result":
        path.unlink()
    elif how == "half a result":
        path.write_text(path.read_text()[:60])
    else:
        name = "metrics.jsonl" if how == "no metrics" else "environment.json"
        (one / name).unlink()
    output = compared(qkablate, one.name, other.name)
    done = qkablate("compare", one.name, other.name)
    assert (done.code, done.err) == (0, "")
    if "result" in how:
        assert output["status"] == ["no result", "done"]
        assert output["gap"] == {}
        assert output["loss"]["val"][0] is None
        assert output["val_gap"]  # of the evaluations of both
        assert output["paired"] is True
        assert output["unlike"] == {}
        assert "no gaps" not in done.out
        assert "no result" in done.out
        assert "+" not in next(row for row in done.out.splitlines() if row.startswith("val loss"))
    else:
        assert output["status"] == ["done", "done"]
        assert "val" in output["gap"]


def test_run_that_diverged_has_no_gap(qkablate, runs):
    one, _, other = runs
    nothing = {"train": None, "val": None, "test": None}
    diverged = result(one) | {"status": "diverged", "diverged_at": 3, "loss": nothing}
    (one / "result.json").write_text(json.dumps(diverged))
    output = compared(qkablate, one.name, other.name)
    assert output["status"] == ["diverged", "done"]
    assert output["gap"] == {}
    assert qkablate("compare", one.name, other.name).code == 0


def test_tiny_gap_keeps_its_magnitude_and_no_zero_a_sign(qkablate, runs):
    one, _, other = runs
    losses = dict.fromkeys(("train", "val"), 2.0) | {"test": 2.0 - 3e-6}
    for folder, loss in ((one, losses), (other, losses | {"test": 2.0})):
        (folder / "result.json").write_text(json.dumps(result(folder) | {"loss": loss}))
    done = qkablate("compare", one.name, other.name)
    assert "-3e-06 (perplexity +0.00 %)" in done.out
    assert "-0.00" not in done.out.replace("-3e-06", "")


def test_validation_gap_is_left_out_where_evaluations_differ(qkablate, runs):
    one, _, other = runs
    text = (one / "config.yaml").read_text()
    (one / "config.yaml").write_text(re.sub(r"eval_tokens: \d+", "eval_tokens: 5", text))
    done = qkablate("compare", one.name, other.name)
    assert "no validation gap: the two evaluations differ in train.eval_tokens" in done.out
    assert "validation gap by tokens" not in done.out


def test_test_gap_is_left_out_where_other_parts_were_read(qkablate, runs):
    one, _, other = runs
    text = json.dumps(result(one) | {"test_tokens": 64})
    (one / "result.json").write_text(text)
    done = qkablate("compare", one.name, other.name)
    assert "no test gap: their test losses are of 64 tokens and of the whole split" in done.out


@pytest.mark.parametrize("pair", [("no_q", "standard-d16-h2-s0"), ("standard-d16-h2-s1", "no_q")])
def test_proposed_sweep_has_the_runs_that_were_compared(qkablate, runs, pair):
    (words,) = proposed_commands(qkablate("compare", *pair))
    assert words[-1] == "--dry-run"
    planned = qkablate(*words[1:])
    assert planned.code == 0, planned
    assert re.search(r"done +3 runs already", planned.out)  # not the floor, which was not trained


MISTAKES = [
    ([], "give two runs, not 0: qkablate compare RUN BASELINE"),
    (["no_q"], "give two runs, not 1"),
    (["no_q", "standard", "no_q"], "give two runs, not 3"),
    (["standard", "standard"], "'standard' matches 2 runs: standard-d16-h2-s"),
    (["standard", "standard"], "; give more of one of these names"),
    (["no_q", "standrd-d16-h2-s0"], "there is no run 'standrd-d16-h2-s0'"),
    (["no_q", "standrd-d16-h2-s0"], "(nearest: standard-d16-h2-s0"),
    (["no_q", ""], "give a run: its folder"),
    (
        ["no_q", "no_q", "out=nowhere"],
        "there is no run 'no_q' in 'nowhere', which does not exist; start one: ",
    ),
    (["no_q", "outputs"], "'outputs' is not a run: it has no config.yaml"),
    (["no_q", "--jso"], "(nearest: --json)"),
    (["--json=1", "no_q", "no_q"], "--json takes no value"),
    (["no_q", "\x1b[31mred"], "there is no run '�[31mred'"),
]


@pytest.mark.parametrize(("words", "line"), MISTAKES, ids=[" ".join(w)[:30] for w, _ in MISTAKES])
def test_mistakes(qkablate, runs, words, line):
    assert_refused(qkablate("compare", *words), line)


@pytest.mark.parametrize(
    "text", ["", "[", "- a", "3", "!!python/object/apply:os.mkdir ['made']", "[" * 20_000, "a: *b"]
)
def test_damaged_config_is_reported_and_runs_nothing(qkablate, runs, tmp_path, text):
    one, _, other = runs
    (one / "config.yaml").write_text(text)
    assert_refused(qkablate("compare", one.name, other.name), "config.yaml' cannot be read: ")
    assert not (tmp_path / "made").exists()


def test_config_with_a_numeric_key_is_reported(qkablate, runs):
    one, _, other = runs
    with (one / "config.yaml").open("a") as file:
        file.write("7: 8\n")
    assert qkablate("compare", one.name, other.name).code in (0, 2)


def test_nothing_is_written(qkablate, outputs, runs):
    def tree():
        return {path: path.lstat().st_mtime_ns for path in outputs.rglob("*")}

    before = tree()
    compared(qkablate, runs[0].name, runs[2].name)
    assert tree() == before


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(qkablate, monkeypatch, runs, shell):
    monkeypatch.setenv("COMP_LINE", "qkablate comp")
    monkeypatch.setattr(sys, "argv", ["qkablate"])
    assert qkablate("-sc", f"query={shell}").out.split() == ["compare"]


def test_completion_offers_the_runs(qkablate, monkeypatch, runs):
    monkeypatch.setenv("COMP_LINE", "qkablate compare no")
    monkeypatch.setattr(sys, "argv", ["qkablate"])
    assert qkablate("-sc", "query=bash").out.split() == [runs[2].name]
