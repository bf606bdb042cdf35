"""`qkablate import` as a user types it."""

import json
from pathlib import Path

import pytest

from tests.cli.helpers import assert_refused
from tests.pretrained.published import write_published

PUBLISHED = Path(__file__).parents[2] / "docs" / "study" / "results"


def test_imported_run_is_read_by_the_other_verbs(qkablate, tmp_path):
    write_published(tmp_path / "mine", vocabulary=256)
    done = qkablate("import", "mine", "as=small")
    assert done.code == 0, done.err
    assert "standard, 2 layers, d 16, 4 heads" in done.out
    assert "(it was imported before)" in qkablate("import", "mine", "as=small").out
    content = json.loads(qkablate("ls", "--json").out)
    assert [run["status"] for run in content["runs"]] == ["imported"]
    inspected = qkablate("inspect", "small")
    assert inspected.code == 0, inspected.err
    assert "an imported run has no data of its own" in inspected.err
    assert "moved" not in inspected.out
    assert qkablate("verify", "small").code == 0
    reported = qkablate("report", "small", "--format", "md")
    assert reported.code == 0, reported.err
    page = next(tmp_path.glob("outputs/runs/*/report.md")).read_text()
    assert "could not be read" not in page
    assert "qkablate inspect small-" in page
    assert qkablate("inspect", "small", "--variants").code == 0
    assert qkablate("report", "small", "--format", "md").code == 0
    page = next(tmp_path.glob("outputs/runs/*/report.md")).read_text()
    assert "merged_w" in page
    assert_refused(qkablate("sample", "small"), "imported with a tokenizer of its own")
    assert_refused(qkablate("eval", "small"), "was imported and has no data; give data=NAME")
    assert_refused(
        qkablate("eval", "small", "data=reverse"), "256 others; its own tokenizer was not imported"
    )


def test_tokens_of_another_number_are_refused(qkablate, tmp_path):
    """A vocabulary that is made from the text has its default size, also where the run has none."""
    write_published(tmp_path / "mine", vocabulary=300)
    assert qkablate("import", "mine", "as=small").code == 0
    (tmp_path / "book.txt").write_text("the cat sat on the mat, and a dog ran\n" * 400)
    words = ["data=text", "data.path=book.txt", f"data.cache={tmp_path / 'cache'}"]
    for verb in ("eval", "inspect"):
        done = qkablate(verb, "small", *words, "data.tokenizer=bpe")
        assert (done.code, done.out) == (2, "")
        assert "and this run was trained on 300 others" in done.err


def test_imported_run_is_projected_with_data_of_choice(qkablate, tmp_path, tiny):
    write_published(tmp_path / "mine", vocabulary=256)
    assert qkablate("import", "mine", "as=small").code == 0
    words = [word for word in tiny if word.startswith(("data", "tracking."))]
    done = qkablate("project", "small", "variant=no_q", "finetune.steps=2", *words)
    assert done.code == 0, done.err
    assert "no_q from small-" in done.out
    refused = qkablate("project", "small", "variant=no_q", "data=induction", "data.segment=4")
    assert_refused(refused, "256 tokens, and the data")


def test_imported_run_is_evaluated_and_inspected_on_text(qkablate, train, tmp_path):
    """The loss is that of the run that was exported."""
    run = train(tmp_path, "variant=no_q", "train.steps=2")
    assert qkablate("export", str(run), "hf").code == 0
    assert qkablate("import", "hf", "as=back").code == 0
    (tmp_path / "other.txt").write_text("two dogs ran, and the cat saw a mat\n" * 400)
    data = ["data=text", "data.path=other.txt", f"data.cache={tmp_path / 'cache'}"]
    done = qkablate("eval", "back", str(run), *data, "precision=fp32", "--json")
    assert done.code == 0, done.err
    assert "has no result yet" not in done.err
    back, own = json.loads(done.out)["evaluations"]
    assert back["loss"] == pytest.approx(own["loss"], rel=1e-6)
    on_text = qkablate("inspect", "back", *data, "--variants", "--json")
    assert on_text.code == 0, on_text.err
    assert "random tokens" not in on_text.err
    content = json.loads(on_text.out)
    assert content["tokens"]["of"] == "the validation split of other.txt"
    random = json.loads(qkablate("inspect", "back", "--json").out)
    assert content["attention"] != random["attention"]
    (kept,) = tmp_path.glob("outputs/runs/back-*/inspection.json")
    assert json.loads(kept.read_text())["tokens_of_forms"] == "the validation split of other.txt"
    of_run = json.loads(qkablate("inspect", str(run), *data, "--json").out)
    assert of_run["attention"]["entropy"] == content["attention"]["entropy"]
    (tmp_path / "short.txt").write_text("a b\n" * 60)
    data[1] = "data.path=short.txt"
    assert_refused(qkablate("inspect", "back", *data), "the validation split of short.txt has")


@pytest.mark.parametrize(
    ("words", "reasons"),
    [
        (["gtp2"], ["'gtp2' (nearest: gpt2)", "OWNER/NAME"]),
        (["../up/x"], ["is neither a folder nor a name on the Hub"]),
        (["."], ["it has no config.json"]),
        ([], ["no model given: write qkablate import MODEL"]),
        ([".", "revision=main"], ["revision: only a model on the Hub has one"]),
        (["gpt2", "context=0"], ["context: '0' is not a whole number"]),
        (["m\udcf6del"], ["it is not UTF-8 text"]),
        (["gpt2", f"out={PUBLISHED}"], ["has archives of published runs, which are read only"]),
    ],
)
def test_mistakes_are_one_line(qkablate, words, reasons):
    assert_refused(qkablate("import", *words), *reasons)


def test_hub_out_of_reach_is_one_line_within_seconds(qkablate, monkeypatch, tmp_path):
    monkeypatch.setattr("qkablate.pretrained.repository.is_reachable", lambda address: False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert_refused(qkablate("import", "gpt2"), "openai-community/gpt2 cannot be reached", "HF_HOME")


def test_cache_of_the_hub_is_read_without_a_network(qkablate, monkeypatch, tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--owner--name"
    (repository / "snapshots").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    write_published(repository / "snapshots" / commit)
    monkeypatch.setattr("qkablate.pretrained.repository.is_reachable", lambda address: False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    done = qkablate("import", "owner/name", "--json")
    assert done.code == 0, done.err
    origin = json.loads(done.out)["origin"]
    assert (origin["repository"], origin["revision"]) == ("owner/name", commit)
