"""Diagnostics in metrics.jsonl, and the attention map that a run records at its end."""

import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from qkablate.diagnostics import attention_weights, circuits
from qkablate.diagnostics.panel import ATTENTION_MEASURES
from qkablate.runs import attention_map
from qkablate.training.warm_start import restore
from tests.training.helpers import interrupt_after, read_rows, run_folder, wait_for


def diagnostics_rows(folder: Path) -> list[dict]:
    return [row for row in read_rows(folder) if "diagnostics" in row]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (last,) = (folder / "checkpoints").glob("step-*12")
    return safetensors.torch.load_file(last / "weights.safetensors")


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        ([], [0, 6, 12]),  # with every evaluation
        (["diagnostics.every=5"], [0, 5, 10, 12]),
        (["diagnostics.every=100"], [0, 12]),
        (["diagnostics.every=0"], []),
    ],
)
def test_diagnostics_are_logged_at_their_steps(qkablate, tiny, tmp_path, words, steps):
    assert qkablate("train", *tiny, *words).code == 0
    rows = diagnostics_rows(run_folder(tmp_path, "outputs"))
    assert [row["step"] for row in rows] == steps
    for row in rows:
        assert set(row) == {"step", "tokens", "flops", "diagnostics"}
        mechanism = row["diagnostics"]
        assert tuple(mechanism["qk"]) == tuple(mechanism["ov"]) == circuits.MEASURES
        assert tuple(mechanism["attention"]) == ATTENTION_MEASURES
        assert all(len(heads) == 2 for heads in mechanism["attention"]["entropy"])
    if steps:
        moved = [row["diagnostics"]["qk"]["moved"] for row in rows]
        assert moved[0] == [[0.0, 0.0]] * 2
        assert all(value > 0 for heads in moved[-1] for value in heads)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["variant=merged_w", "model.dropout=0.2"],
        ["precision=bf16", "model.dropout=0.1", "train.checkpoint_activations=true"],
        [
            "data=recall",
            "data.pairs=4",
            "model.context=32",
            "data.val_tokens=320",
            "data.test_tokens=320",
        ],
    ],
    ids=["dropout", "bf16", "task"],
)
def test_diagnostics_change_no_bit_of_training(qkablate, tiny, tmp_path, words):
    if words[0] == "data=recall":
        tiny = [word for word in tiny if not word.startswith("data")]
    for out, every in (("with", 1), ("without", 0)):
        done = qkablate("train", *tiny, *words, f"diagnostics.every={every}", f"out={out}")
        assert done.code == 0, done.err
    one, other = run_folder(tmp_path, "with"), run_folder(tmp_path, "without")
    assert one.name == other.name  # it is the same run
    assert len(diagnostics_rows(one)) == 13
    assert [row for row in read_rows(one) if "diagnostics" not in row] == read_rows(other)
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    results = [json.loads((folder / "result.json").read_text()) for folder in (one, other)]
    assert results[0]["loss"] == results[1]["loss"]


@pytest.mark.slow
def test_every_row_is_logged_once_wherever_the_run_stops(qkablate, tiny, tmp_path, monkeypatch):
    words = [*tiny, "diagnostics.every=2"]
    assert qkablate("train", *words, "out=calm").code == 0
    for checks in range(1, 12):  # of a session, in evaluations and between steps
        with monkeypatch.context() as patch:
            interrupt_after(patch, checks)
            if qkablate("train", *words, "out=rough").code == 0:
                break
    else:
        assert qkablate("train", *words, "out=rough").code == 0
    calm, rough = run_folder(tmp_path, "calm"), run_folder(tmp_path, "rough")
    assert read_rows(calm) == read_rows(rough)
    assert [row["step"] for row in diagnostics_rows(rough)] == [0, 2, 4, 6, 8, 10, 12]


@pytest.mark.slow
def test_row_without_checkpoint_is_logged_again(qkablate, tiny, tmp_path, monkeypatch):
    """Kill a run after a row and before the next checkpoint."""
    from qkablate.training import loop

    words = [*tiny, "diagnostics.every=3"]
    assert qkablate("train", *words, "out=calm").code == 0
    step, calls = loop.Trainer._step, 0

    def killed(self, number):
        nonlocal calls
        calls += 1
        if calls == 7:  # after the rows of step 6, two steps behind the last checkpoint
            raise KeyboardInterrupt
        return step(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "_step", killed)
        assert qkablate("train", *words, "out=rough").code == 130
    assert [row["step"] for row in diagnostics_rows(run_folder(tmp_path, "rough"))] == [0, 3, 6]
    assert qkablate("train", *words, "out=rough").code == 0
    assert read_rows(run_folder(tmp_path, "calm")) == read_rows(run_folder(tmp_path, "rough"))


@pytest.mark.slow
def test_invalid_interval_is_rejected(qkablate, tiny):
    for value, line in (
        ("often", "diagnostics.every: 'often' is not auto, or 0 or more"),
        ("-1", "diagnostics.every: -1 is not auto, or 0 or more"),
    ):
        done = qkablate("train", *tiny, f"diagnostics.every={value}")
        assert (done.code, done.err.count("\n")) == (2, 1)
        assert line in done.err
    done = qkablate("train", *tiny, "diagnos.every=1")
    assert "(nearest: diagnostics.every)" in done.err or "diagnostics" in done.err


def test_diagnostics_do_not_change_divergence(qkablate, tiny, tmp_path):
    words = [*tiny, "optim.lr=1000", "optim.warmup=0", "optim.clip=0", "train.steps=30"]
    codes = []
    for every in (1, 0):
        codes.append(qkablate("train", *words, f"diagnostics.every={every}", f"out=d{every}").code)
    one, other = run_folder(tmp_path, "d1"), run_folder(tmp_path, "d0")
    assert codes[0] == codes[1]
    ends = [json.loads((folder / "result.json").read_text()) for folder in (one, other)]
    assert ends[0]["status"] == ends[1]["status"]
    assert ends[0].get("diverged_at") == ends[1].get("diverged_at")


@pytest.mark.slow
def test_moved_is_measured_from_the_projected_weights(qkablate, tiny, tmp_path):
    assert qkablate("train", *tiny, "diagnostics.every=0").code == 0
    parent = run_folder(tmp_path, "outputs")
    words = [*tiny, f"init_from.run={parent}", "variant=no_q", "out=child"]
    assert qkablate("train", *words).code == 0
    folder = run_folder(tmp_path, "child")
    moved = [row["diagnostics"]["qk"]["moved"] for row in diagnostics_rows(folder)]
    assert moved[0] == [[0.0, 0.0]] * 2
    assert all(value > 0 for heads in moved[-1] for value in heads)
    done = qkablate("inspect", str(folder), "--json", f"data.cache={tmp_path / 'cache'}")
    assert done.code == 0
    for first, second in zip(json.loads(done.out)["qk"]["moved"], moved[-1], strict=True):
        assert first == pytest.approx(second, rel=1e-3)
    shutil.rmtree(folder / "start")
    done = qkablate("inspect", str(folder), "--json", f"data.cache={tmp_path / 'cache'}")
    assert (done.code, done.err.count("\n")) == (0, 1)
    assert "does not hold the initial weights of the run" in done.err
    report = json.loads(done.out)
    assert report["qk"]["moved"] == report["ov"]["moved"] == [None, None]
    assert report["qk"]["nuclear"][0]


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
    expected = torch.stack(attention_weights(model, torch.from_numpy(tokens_T))).numpy()
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
