"""The attention map that a run records at its end."""

import json
import signal

import numpy as np
import pytest
import torch

from qkablate.diagnostics import attention_weights
from qkablate.runs import attention_map
from qkablate.training.warm_start import restore
from tests.training.helpers import run_folder, wait_for


def weights_of(folder):
    return (folder / "checkpoints/step-00000012/weights.safetensors").read_bytes()


@pytest.mark.parametrize("more", [[], ["model.dropout=0.3"], ["variant=no_q", "precision=bf16"]])
def test_map_is_the_models_attention_on_the_first_validation_tokens(qkablate, tiny, tmp_path, more):
    assert qkablate("train", *tiny, *more).code == 0
    folder = run_folder(tmp_path)
    about, tokens_T, a_LHTT = attention_map.read_attention_map(folder / attention_map.FILE_NAME)
    assert (about.run, about.step) == (folder.name.rpartition("-")[2], 12)
    (split,) = (tmp_path / "cache").glob("*/val.bin")
    assert tokens_T.tolist() == np.fromfile(split, np.uint8)[: len(tokens_T)].tolist()
    model = restore.restore(folder).model
    expected = attention_weights(model, torch.from_numpy(tokens_T)).numpy()
    assert a_LHTT.shape == expected.shape
    assert np.abs(a_LHTT / 255 - expected).max() <= 0.5 / 255 + 1e-5


@pytest.mark.slow
def test_task_runs_share_their_tokens(qkablate, tiny, tmp_path):
    words = [word for word in tiny if "data" not in word]
    words += ["data=recall", "data.pairs=3", "data.vocab_size=20"]
    for variant in ("variant=standard", "variant=no_q"):
        assert qkablate("train", *words, variant, f"out={variant[8:]}").code == 0
    tokens = [
        attention_map.read_attention_map(run_folder(tmp_path, name) / attention_map.FILE_NAME)[1]
        for name in ("standard", "no_q")
    ]
    assert tokens[0].tolist() == tokens[1].tolist()


@pytest.mark.slow
def test_recording_changes_no_weights_and_needs_diagnostics(qkablate, tiny, tmp_path):
    for every in ("0", "5", "auto"):
        words = (*tiny, "model.dropout=0.1", f"diagnostics.every={every}", f"out=e{every}")
        assert qkablate("train", *words).code == 0
    folders = [run_folder(tmp_path, f"e{every}") for every in ("0", "5", "auto")]
    assert not (folders[0] / attention_map.FILE_NAME).exists()
    kept = [(folder / attention_map.FILE_NAME).read_bytes() for folder in folders[1:]]
    assert kept[0] == kept[1]
    assert len({weights_of(folder) for folder in folders}) == 1


@pytest.mark.slow
def test_killed_run_writes_the_same_file(qkablate, spawn, tiny, tmp_path):
    words = [*tiny, "variant=merged_w", "train.checkpoint_every=5", "diagnostics.every=1"]
    assert qkablate("train", *words, "out=calm").code == 0
    expected = (run_folder(tmp_path, "calm") / attention_map.FILE_NAME).read_bytes()
    process = spawn("train", *words, "out=rough")
    files = (tmp_path / "rough").glob
    wait_for(lambda: len([*files("runs/*/predictions/step-*")]) >= 7, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert qkablate("train", *words, "out=rough").code == 0
    assert (run_folder(tmp_path, "rough") / attention_map.FILE_NAME).read_bytes() == expected
    # Killed once more, after it was written and before the result was.
    folder = run_folder(tmp_path, "rough")
    (folder / "result.json").unlink()
    (folder / ".attention_map.safetensors.dead.tmp").write_bytes(b"half")
    assert qkablate("train", *words, "out=rough").code == 0
    assert (folder / attention_map.FILE_NAME).read_bytes() == expected


def test_rerun_keeps_map_of_earlier_attempt(qkablate, tiny, tmp_path):
    assert qkablate("train", *tiny).code == 0
    before = (run_folder(tmp_path) / attention_map.FILE_NAME).read_bytes()
    assert qkablate("train", *tiny, "--rerun").code == 0
    folder = run_folder(tmp_path)
    for path in (folder, folder / "attempts" / "1"):
        assert (path / attention_map.FILE_NAME).read_bytes() == before


def test_linked_file_is_refused(qkablate, tiny, tmp_path):
    assert qkablate("train", *tiny).code == 0
    folder, elsewhere = run_folder(tmp_path), tmp_path / "precious"
    elsewhere.write_text("mine")
    (folder / attention_map.FILE_NAME).unlink()
    (folder / attention_map.FILE_NAME).symlink_to(elsewhere)
    done = qkablate("train", *tiny, "--rerun")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "is a link" in done.err
    assert elsewhere.read_text() == "mine"


def test_diverged_run_records_no_map(qkablate, tiny, tmp_path):
    done = qkablate("train", *tiny, "optim.lr=1000", "optim.clip=0", "model.norm=none")
    folder = run_folder(tmp_path)
    result = json.loads((folder / "result.json").read_text())
    assert (done.code, result["status"]) == (3, "diverged")
    assert not (folder / attention_map.FILE_NAME).exists()
