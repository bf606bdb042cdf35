"""Records of the test split: losses by document, n-grams and compressor, accuracy."""

import json

import pytest

from qkablate.runs.document_losses import FILE_NAME, read_document_losses
from qkablate.training.result import summarize
from tests.training.helpers import run_folder


def make_documents(folder, lengths):
    folder.mkdir()
    for i, length in enumerate(lengths):
        (folder / f"{i}.txt").write_text(f"{i} the cat sat on the mat\n" * length)
    return f"data.path={folder}"


def test_losses_by_document_sum_to_the_test_loss(qkablate, tiny, tmp_path):
    text = make_documents(tmp_path / "texts", [10] * 80)
    assert qkablate("train", *tiny, text).code == 0
    folder = run_folder(tmp_path)
    result = json.loads((folder / "result.json").read_text())
    found = read_document_losses(folder)
    assert found.header.run == result["id"]
    assert found.header.data_fingerprint == result["data_fingerprint"]
    assert len(found.tokens) == 4  # 5 % of eighty
    assert found.losses.sum() / found.tokens.sum() == pytest.approx(result["loss"]["test"])


def test_one_document_has_no_losses_by_document(qkablate, tiny, tmp_path):
    assert qkablate("train", *tiny).code == 0
    assert not (run_folder(tmp_path) / FILE_NAME).exists()


def test_new_attempt_archives_the_losses(qkablate, tiny, tmp_path):
    text = make_documents(tmp_path / "texts", [10] * 80)
    assert qkablate("train", *tiny, text).code == 0
    assert qkablate("train", *tiny, text, "--rerun").code == 0
    folder = run_folder(tmp_path)
    assert (folder / FILE_NAME).exists()
    assert (folder / "attempts" / "1" / FILE_NAME).exists()


def test_result_has_the_losses_of_ngrams_and_a_compressor(qkablate, tiny, tmp_path):
    done = qkablate("train", *tiny)
    result = json.loads((run_folder(tmp_path) / "result.json").read_text())
    references = result["text_references"]
    assert references["tokens"] == result["tokens"] == 12 * 2 * 16
    assert len(references["ngram"]) == 5
    assert references["lzma"] > 0
    assert min(references["ngram"]) < result["loss"]["test"]  # after twelve steps
    assert "runs that do not beat the best n-gram: this run" in done.out
    assert "-gram" in done.out


def test_tuning_run_compares_nothing(qkablate, tiny, tmp_path):
    """It never reads the test split."""
    assert qkablate("train", *tiny, "train.evaluate_test=false").code == 0
    result = json.loads((run_folder(tmp_path) / "result.json").read_text())
    assert result["text_references"] is None
    assert not [*(tmp_path / "cache").glob("*/references-*")]


def test_summary_in_wandb_has_references_and_chance():
    base = {"status": "done", "tokens": 1, "seconds": 1.0, "tokens_per_second": 1.0}
    base |= {"params": {"total": 1}, "flops_per_token": 1.0, "data_fingerprint": "a"}
    loss = {"train": 1.0, "val": 1.0, "test": 1.7}
    other = {"val": None, "test": None}
    references = {"tokens": 5, "ngram": [3.0, 1.6], "lzma": 1.5}
    text = {**base, "loss": loss, "bits_per_byte": other, "accuracy": other, "chance": None}
    summary = summarize(text | {"text_references": references})
    assert summary["text/ngram_2"] == 1.6
    assert summary["text/lzma"] == 1.5
    assert summary["text/beats_ngrams"] is False
    assert "final/chance_accuracy" not in summary
    task = text | {"accuracy": {"val": 0.5, "test": 0.4}, "chance": 0.1, "text_references": None}
    assert summarize(task)["final/test_accuracy"] == 0.4
    assert summarize(task)["final/chance_accuracy"] == 0.1
    assert "text/lzma" not in summarize(task)
