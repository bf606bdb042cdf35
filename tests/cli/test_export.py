"""`qkablate export` as a user types it."""

import json

import pytest

from tests.cli.helpers import assert_refused


def test_trained_run_is_exported_and_imported_again(qkablate, train, tmp_path):
    run = train(tmp_path, "variant=no_q", "train.steps=2")
    done = qkablate("export", str(run), "to=hf", "hf")
    assert done.code == 0, done.err
    assert "as gpt2" in done.out
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["n_layer"] == 2
    assert qkablate("import", "hf").code == 0
    assert_refused(qkablate("export", str(run), "hf"), "exists and is not an empty folder")


def test_variant_without_standard_form_is_refused(qkablate, train, tmp_path):
    run = train(tmp_path, "variant=merged_w", "train.steps=2")
    assert_refused(qkablate("export", str(run), "hf"), "merged_w cannot be written as standard")
    assert not (tmp_path / "hf").exists()
    # A folder may be called like a run, of which there is none here.
    assert_refused(qkablate("export", "a", "a"), "there is no run 'a'")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["a"], "give a run and a folder"),
        (["a", "b", "to=gguf"], "to: 'gguf' is not one of hf"),
        (["a", "b"], "there is no run 'a'"),
    ],
)
def test_mistakes_are_one_line(qkablate, words, reason):
    assert_refused(qkablate("export", *words), reason)
