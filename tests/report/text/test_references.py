"""Accuracy with chance, and n-grams with a compressor, beside the loss in every view."""

import pytest

from qkablate.cli.results import print_tables
from qkablate.dashboard.sweep_run import make_sweep_tables
from qkablate.report.page import render_page
from qkablate.report.rows import COLUMNS, make_verdict_rows, verdict_columns
from qkablate.report.text.page import render_markdown
from qkablate.report.text.summary import summarize
from qkablate.report.text.tables import make_tables
from qkablate.sweeps.running.results import print_arms, result_rows
from qkablate.sweeps.running.state import SweepState

PAIR = ("variant=standard,no_q", "seed=range(2)")
REFERENCES = {"tokens": 2_097_152, "ngram": [3.1, 2.4, 1.9, 1.62, 1.7], "lzma": 1.51}
LINE = "4-gram 1.62, lzma 1.51 nats per token, learned from 2,097,152 tokens"


def is_arm(run):
    return run.arm.startswith("no_q")


def finish(world, **more):
    def outcome(run):
        loss = 1.7 if is_arm(run) else 1.6 + run.changes["seed"] / 100
        losses = {"train": loss, "val": loss, "test": loss}
        chosen = {k: v(run) if callable(v) else v for k, v in more.items()}
        return {"loss": losses, **chosen}

    return world(*PAIR).finish(outcome)


@pytest.fixture
def on_text(world):
    return finish(world, text_references=REFERENCES)


@pytest.fixture
def on_task(world):
    def accuracy(run):
        return {"val": 0.5, "test": 0.25 if is_arm(run) else 0.975}

    return finish(world, accuracy=accuracy, chance=0.03125)


def state_of(world):
    sweep_state = SweepState(world.manifest)
    sweep_state.refresh()
    return sweep_state


def test_every_view_of_a_text_names_the_references(on_text, section_of, capsys):
    section = section_of(on_text)
    arm = next(entry.name for entry in section.study.entries if entry.name.startswith("no_q"))
    expected = f"without attention: {LINE}; runs that do not beat the best n-gram: {arm} (2/2)"
    print_tables(make_tables(section.summary))
    assert expected in capsys.readouterr().out
    print_arms(state_of(on_text))
    assert expected in capsys.readouterr().out
    for page in (render_markdown([section]), render_page([section], "page")):
        assert LINE in page
    for row in result_rows(state_of(on_text)):
        assert row["beats_ngrams"] is (not row["variant"].startswith("no_q"))
        assert (row["best_ngram_loss"], row["lzma_loss"]) == (1.62, 1.51)


@pytest.mark.parametrize("best", [1.5, 1.61])
def test_verdict_on_a_baseline_behind_the_ngrams_says_so(world, section_of, capsys, best):
    references = REFERENCES | {"ngram": [3.1, best]}
    study = world("variant=standard,no_q", "seed=range(3)").finish(
        lambda run: {
            "loss": dict.fromkeys(("train", "val", "test"), 1.6 + 0.1 * is_arm(run)),
            "text_references": references,
        }
    )
    is_behind = best < 1.6
    section = section_of(study)
    (gap,) = section.summary.gaps
    assert gap.before_attention == is_behind
    assert gap.verdict.endswith("before the model beats an n-gram") == is_behind
    print_tables(make_tables(section.summary))
    texts = [capsys.readouterr().out, render_markdown([section]), render_page([section], "page")]
    sentence = summarize(section)[0]
    for text in [*texts, sentence]:
        assert ("before the model beats an n-gram" in text) == is_behind
    reason = "before the model beats an n-gram: standard does not beat the best n-gram."
    assert sentence.endswith(reason) == is_behind


@pytest.mark.parametrize("seeds", [1, 2])
def test_baseline_behind_the_ngrams_is_named_without_a_verdict(world, section_of, seeds):
    study = world("variant=standard,no_q", f"seed=range({seeds})").finish(
        lambda run: {"text_references": REFERENCES | {"ngram": [3.1, 1.5]}}
    )
    assert summarize(section_of(study))[0].endswith("; standard does not beat the best n-gram.")


def test_every_view_of_a_task_has_accuracy_and_chance(on_task, section_of, capsys):
    section = section_of(on_task)
    print_tables(make_tables(section.summary))
    out = capsys.readouterr().out
    assert "97.5 %" in out
    assert "3.1 %" in out
    print_arms(state_of(on_task))
    out = capsys.readouterr().out
    assert "25.0%" in out
    assert "3.1%" in out
    assert verdict_columns(section) == [*COLUMNS, "accuracy (chance)"]
    cells = {row[0].text.split("-")[0]: row[-1] for row in make_verdict_rows(section)}
    assert cells["no_q"].text == "25.0 % (3.1 %)"
    assert cells["standard"].key == pytest.approx(0.975)
    for page in (render_markdown([section]), render_page([section], "page")):
        assert "25.0 % (3.1 %)" in page.replace("\u00a0", " ")
    assert all(row["chance"] == 0.03125 for row in result_rows(state_of(on_task)))


def test_table_of_verdicts_in_wandb_has_the_accuracy_of_a_task(on_task):
    pytest.importorskip("vl_convert")
    columns, rows = make_sweep_tables(on_task.folder, print).tables["verdicts"]
    assert columns[-1] == "accuracy (chance)"
    assert {len(row) for row in rows} == {len(columns)}


def test_nothing_is_shown_of_results_without_either(finished, section_of, capsys):
    section = section_of(finished)
    print_tables(make_tables(section.summary))
    print_arms(state_of(finished))
    out = capsys.readouterr().out
    assert "accuracy" not in out
    assert "without attention" not in out
    assert verdict_columns(section) == COLUMNS
