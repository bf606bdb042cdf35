"""Diagnostics while training: rows at their steps, once, and nothing else is another for them."""

import json
import shutil
import signal
from pathlib import Path

import pytest
import safetensors.torch
import torch

from qkablate.diagnostics import circuits, patterns

CLOCKS = {"seconds", "perf/tokens_per_second", "perf/mfu", "crc32"}  # of these, too


def folder_of(tmp_path: Path, out: str) -> Path:
    (folder,) = (tmp_path / out / "runs").iterdir()
    return folder


def rows(folder: Path) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in CLOCKS} for line in lines]


def mechanisms(folder: Path) -> list[dict]:
    return [row for row in rows(folder) if "mechanism" in row]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (last,) = (folder / "checkpoints").glob("step-*12")
    return safetensors.torch.load_file(last / "weights.safetensors")


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        ([], [0, 6, 12]),  # with every evaluation
        (["diagnose.every=5"], [0, 5, 10, 12]),
        (["diagnose.every=100"], [0, 12]),
        (["diagnose.every=0"], []),
    ],
)
def test_rows_at_their_steps(qkablate, tiny, tmp_path, words, steps):
    assert qkablate("train", *tiny, *words).code == 0
    found = mechanisms(folder_of(tmp_path, "outputs"))
    assert [row["step"] for row in found] == steps
    for row in found:
        assert set(row) == {"step", "tokens", "flops", "mechanism"}
        mechanism = row["mechanism"]
        assert tuple(mechanism["qk"]) == tuple(mechanism["ov"]) == circuits.MEASURES
        assert tuple(mechanism["attention"]) == patterns.MEASURES
        assert all(len(heads) == 2 for heads in mechanism["attention"]["entropy"])
    if steps:
        moved = [row["mechanism"]["qk"]["moved"] for row in found]
        assert moved[0] == [[0.0, 0.0]] * 2
        assert all(value > 0 for heads in moved[-1] for value in heads)


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
def test_training_is_the_same_to_the_bit(qkablate, tiny, tmp_path, words):
    if words[0] == "data=recall":
        tiny = [word for word in tiny if not word.startswith("data")]
    for out, every in (("with", 1), ("without", 0)):
        done = qkablate("train", *tiny, *words, f"diagnose.every={every}", f"out={out}")
        assert done.code == 0, done.err
    one, other = folder_of(tmp_path, "with"), folder_of(tmp_path, "without")
    assert one.name == other.name  # it is the same run
    assert len(mechanisms(one)) == 13
    assert [row for row in rows(one) if "mechanism" not in row] == rows(other)
    mine, theirs = weights(one), weights(other)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    results = [json.loads((folder / "result.json").read_text()) for folder in (one, other)]
    assert results[0]["loss"] == results[1]["loss"]


def test_stopped_at_any_moment_every_row_is_there_once(qkablate, tiny, tmp_path, monkeypatch):
    from qkablate.training import session

    words = [*tiny, "diagnose.every=2"]
    assert qkablate("train", *words, "out=calm").code == 0
    for looks in range(1, 12):  # of a sitting, in an evaluation and between two steps
        with monkeypatch.context() as patch:
            seen = 0

            def received(self, looks=looks):
                nonlocal seen
                seen += 1
                if seen > looks:
                    self.received = signal.SIGTERM
                return bool(self.received)

            patch.setattr(session.Signals, "__bool__", received)
            if qkablate("train", *words, "out=rough").code == 0:
                break
    else:
        assert qkablate("train", *words, "out=rough").code == 0
    calm, rough = folder_of(tmp_path, "calm"), folder_of(tmp_path, "rough")
    assert rows(calm) == rows(rough)
    assert [row["step"] for row in mechanisms(rough)] == [0, 2, 4, 6, 8, 10, 12]


def test_killed_between_a_row_and_its_checkpoint(qkablate, tiny, tmp_path, monkeypatch):
    """What the row says is not believed before a checkpoint says that it is written."""
    from qkablate.training import loop

    words = [*tiny, "diagnose.every=3"]
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
    assert [row["step"] for row in mechanisms(folder_of(tmp_path, "rough"))] == [0, 3, 6]
    assert qkablate("train", *words, "out=rough").code == 0
    assert rows(folder_of(tmp_path, "calm")) == rows(folder_of(tmp_path, "rough"))


def test_mistakes(qkablate, tiny):
    for value, line in (
        ("often", "diagnose.every: 'often' is not auto, or 0 or more"),
        ("-1", "diagnose.every: -1 is not auto, or 0 or more"),
    ):
        done = qkablate("train", *tiny, f"diagnose.every={value}")
        assert (done.code, done.err.count("\n")) == (2, 1)
        assert line in done.err
    done = qkablate("train", *tiny, "diagnos.every=1")
    assert "(nearest: diagnose.every)" in done.err or "diagnose" in done.err


def test_a_diverged_run_ends_as_it_would(qkablate, tiny, tmp_path):
    words = [*tiny, "optim.lr=1000", "optim.warmup=0", "optim.clip=0", "train.steps=30"]
    codes = []
    for every in (1, 0):
        codes.append(qkablate("train", *words, f"diagnose.every={every}", f"out=d{every}").code)
    one, other = folder_of(tmp_path, "d1"), folder_of(tmp_path, "d0")
    assert codes[0] == codes[1]
    ends = [json.loads((folder / "result.json").read_text()) for folder in (one, other)]
    assert ends[0]["status"] == ends[1]["status"]
    assert ends[0].get("diverged_at") == ends[1].get("diverged_at")


def test_a_run_that_began_from_another_has_moved_from_there(qkablate, tiny, tmp_path):
    assert qkablate("train", *tiny, "diagnose.every=0").code == 0
    parent = folder_of(tmp_path, "outputs")
    begun = [*tiny, f"start.run={parent}", "variant=no_q", "out=begun"]
    assert qkablate("train", *begun).code == 0
    folder = folder_of(tmp_path, "begun")
    moved = [row["mechanism"]["qk"]["moved"] for row in mechanisms(folder)]
    assert moved[0] == [[0.0, 0.0]] * 2
    assert all(value > 0 for heads in moved[-1] for value in heads)
    done = qkablate("inspect", str(folder), "--json", f"data.cache={tmp_path / 'cache'}")
    assert done.code == 0
    for mine, theirs in zip(json.loads(done.out)["qk"]["moved"], moved[-1], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3)
    shutil.rmtree(folder / "start")
    done = qkablate("inspect", str(folder), "--json", f"data.cache={tmp_path / 'cache'}")
    assert (done.code, done.err.count("\n")) == (0, 1)
    assert "does not hold what the run began with" in done.err
    found = json.loads(done.out)
    assert found["qk"]["moved"] == found["ov"]["moved"] == [None, None]
    assert found["qk"]["nuclear"][0]
