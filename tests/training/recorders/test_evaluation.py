"""Losses of the test split by document, from training to the run's folder."""

import json

import pytest

from qkablate.runs.document_losses import FILE_NAME, read_document_losses
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
