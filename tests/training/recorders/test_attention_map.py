"""The attention of one text that a run keeps at its end: what the model does, and no say in it."""

import json
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from qkablate.diagnostics import attention_weights
from qkablate.runs import attention_map
from qkablate.training.warm_start import restore


def run_of(tmp_path: Path, out="outputs") -> Path:
    (folder,) = (tmp_path / out / "runs").iterdir()
    return folder


def weights_of(folder):
    return (folder / "checkpoints/step-00000012/weights.safetensors").read_bytes()


@pytest.mark.parametrize("more", [[], ["model.dropout=0.3"], ["variant=no_q", "precision=bf16"]])
def test_it_is_what_the_model_does_with_the_beginning_of_validation(qkablate, tiny, tmp_path, more):
    assert qkablate("train", *tiny, *more).code == 0
    folder = run_of(tmp_path)
    about, tokens_T, a_LHTT = attention_map.read(folder / attention_map.NAME)
    assert (about.run, about.step) == (folder.name.rpartition("-")[2], 12)
    (split,) = (tmp_path / "cache").glob("*/val.bin")
    assert tokens_T.tolist() == np.fromfile(split, np.uint8)[: len(tokens_T)].tolist()
    model = restore.restore(folder).model
    expected = attention_weights(model, torch.from_numpy(tokens_T)).numpy()
    assert a_LHTT.shape == expected.shape
    assert np.abs(a_LHTT / 255 - expected).max() <= 0.5 / 255 + 1e-5


def test_a_task_has_its_own(qkablate, tiny, tmp_path):
    words = [word for word in tiny if "data" not in word]
    words += ["data=recall", "data.pairs=3", "data.vocab_size=20"]
    for own in ("variant=standard", "variant=no_q"):
        assert qkablate("train", *words, own, f"out={own[8:]}").code == 0
    found = [
        attention_map.read(run_of(tmp_path, name) / attention_map.NAME)[1]
        for name in ("standard", "no_q")
    ]
    assert found[0].tolist() == found[1].tolist()


def test_keeping_it_changes_nothing_and_nobody_looking_keeps_none(qkablate, tiny, tmp_path):
    for every in ("0", "5", "auto"):
        words = (*tiny, "model.dropout=0.1", f"diagnose.every={every}", f"out=e{every}")
        assert qkablate("train", *words).code == 0
    folders = [run_of(tmp_path, f"e{every}") for every in ("0", "5", "auto")]
    assert not (folders[0] / attention_map.NAME).exists()
    kept = [(folder / attention_map.NAME).read_bytes() for folder in folders[1:]]
    assert kept[0] == kept[1]
    assert len({weights_of(folder) for folder in folders}) == 1


def test_killed_and_gone_on_it_is_the_same_file(qkablate, spawn, tiny, tmp_path):
    words = [*tiny, "variant=merged_w", "train.checkpoint_every=5", "diagnose.every=1"]
    assert qkablate("train", *words, "out=calm").code == 0
    expected = (run_of(tmp_path, "calm") / attention_map.NAME).read_bytes()
    process = spawn("train", *words, "out=rough")
    end = time.monotonic() + 60
    while len([*(tmp_path / "rough").glob("runs/*/predictions/step-*")]) < 7:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert qkablate("train", *words, "out=rough").code == 0
    assert (run_of(tmp_path, "rough") / attention_map.NAME).read_bytes() == expected
    # Killed once more, after it was written and before the result was.
    folder = run_of(tmp_path, "rough")
    (folder / "result.json").unlink()
    (folder / ".example.safetensors.dead.tmp").write_bytes(b"half")
    assert qkablate("train", *words, "out=rough").code == 0
    assert (folder / attention_map.NAME).read_bytes() == expected


def test_an_earlier_attempt_takes_its_own_along(qkablate, tiny, tmp_path):
    assert qkablate("train", *tiny).code == 0
    before = (run_of(tmp_path) / attention_map.NAME).read_bytes()
    assert qkablate("train", *tiny, "--rerun").code == 0
    folder = run_of(tmp_path)
    for own in (folder, folder / "attempts" / "1"):
        assert (own / attention_map.NAME).read_bytes() == before


def test_nothing_is_written_through_a_link(qkablate, tiny, tmp_path):
    assert qkablate("train", *tiny).code == 0
    folder, elsewhere = run_of(tmp_path), tmp_path / "precious"
    elsewhere.write_text("mine")
    (folder / attention_map.NAME).unlink()
    (folder / attention_map.NAME).symlink_to(elsewhere)
    done = qkablate("train", *tiny, "--rerun")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "is a link" in done.err
    assert elsewhere.read_text() == "mine"


def test_what_diverges_keeps_none(qkablate, tiny, tmp_path):
    done = qkablate("train", *tiny, "optim.lr=1000", "optim.clip=0", "model.norm=none")
    folder = run_of(tmp_path)
    result = json.loads((folder / "result.json").read_text())
    assert (done.code, result["status"]) == (3, "diverged")
    assert not (folder / attention_map.NAME).exists()
