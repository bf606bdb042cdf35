"""Runs that begin from a trained one: what they keep, what they survive, what they refuse."""

import dataclasses
import json
import shutil
import signal

import pytest
import safetensors.torch
import torch

from qkablate.config import Config, StartConfig, resolve
from qkablate.runs.records import read_config
from qkablate.runs.run import PROJECTION, identity, label, run_id
from qkablate.training.warm_start.restore import restore
from tests.training.test_session import assert_identical, interrupted_after, rows, wait_for

SIZES = ["model.layers=2", "model.d_model=16", "model.heads=2", "model.context=16"]


@pytest.fixture
def parent(qkablate, tiny, tmp_path):
    """A trained run, in the folder of the others."""
    assert qkablate("train", *tiny, "seed=3").code == 0
    (folder,) = (tmp_path / "outputs" / "runs").glob("standard-*")
    return folder


def begun(tmp_path, out="outputs", name="healed-*"):
    (folder,) = (tmp_path / out / "runs").glob(name)
    return folder


def weights(folder):
    return safetensors.torch.load_file(folder / "weights.safetensors")


def of_start(**start):
    facts = {"data_fingerprint": "f", "vocabulary": 256, "device": "cpu", "kernel": "flash"}
    config = resolve(dataclasses.replace(Config(), start=StartConfig(**start)))
    return identity(config, **facts, circuits_from_outside={})


def test_the_identity_of_other_runs_knows_nothing_of_it():
    assert "start" not in of_start()
    assert run_id(of_start()) == "f5d55e95fb46"


def test_what_a_run_began_with_is_part_of_its_identity_and_not_where_it_lay():
    known = {"id": "a" * 12, "weights": "b" * 64, "step": 12}
    one, other = (of_start(run=run, **known) for run in ("here", "/elsewhere"))
    assert one == other
    assert one["start"] == known | {"projection": PROJECTION}
    changed = [{"id": "c" * 12}, {"weights": "d" * 64}, {"step": 13}]
    ids = {run_id(of_start(run="here", **(known | change))) for change in ({}, *changed)}
    assert len(ids) == 4
    begun = dataclasses.replace(Config(), start=StartConfig(run="here"))
    assert (label(begun), label(Config())) == ("healed-standard-d128-h4-s0", "standard-d128-h4-s0")


@pytest.mark.parametrize("variant", ["standard", "merged_w"])
def test_from_a_form_that_holds_it_training_goes_on_where_it_stood(
    qkablate, tiny, tmp_path, parent, variant
):
    words = [*tiny, "seed=3", f"variant={variant}", f"start.run={parent.name}", "optim.lr=1e-4"]
    done = qkablate("train", *words)
    assert done.code == 0, done.err
    folder = begun(tmp_path)
    told = json.loads((parent / "result.json").read_text())["loss"]["val"]
    first = rows(folder)[0]
    assert first["step"] == 0
    assert first["val/loss"] == pytest.approx(told, rel=1e-6)
    result = json.loads((folder / "result.json").read_text())
    assert result["start"]["id"] == parent.name.rpartition("-")[2]
    assert result["start"]["step"] == 12
    assert "after 12 steps" in done.err
    if variant == "standard":
        first = folder / "start" / "step-00000000"
        kept, trained = weights(first), weights(parent / "checkpoints" / "step-00000012")
        assert all(torch.equal(kept[name], trained[name]) for name in trained)


def test_batches_go_on_where_the_parent_stopped(qkablate, tiny, tmp_path, parent, monkeypatch):
    from qkablate.data.batches import Windows

    seen = []

    def step(self, step, original=Windows.step):
        seen.append(step)
        return original(self, step)

    monkeypatch.setattr(Windows, "step", step)
    assert qkablate("train", *tiny, "seed=3", f"start.run={parent.name}").code == 0
    assert seen == [*range(12, 24)]
    seen.clear()
    word = begun(tmp_path).name
    assert qkablate("train", *tiny, "seed=3", f"start.run={word}", "train.steps=3").code == 0
    assert seen == [24, 25, 26]  # of a child of a child


def test_kill_9_costs_nothing_but_time(qkablate, spawn, tiny, tmp_path, parent):
    """At several moments, also before the first checkpoint; and with the parent gone at the end."""
    words = [
        *tiny, "seed=3", "variant=no_q", f"start.run={parent}", "model.dropout=0.1",
        "train.checkpoint_every=5", "track.log_every=3",
    ]  # fmt: skip
    assert qkablate("train", *words, "out=calm").code == 0
    calm = begun(tmp_path, "calm")
    start = tmp_path / "rough" / "runs" / calm.name / "start"
    lines = start.parent / "metrics.jsonl"
    process = spawn("train", *words, "out=rough")
    wait_for(lambda: start.exists(), process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    for moment in (1, 4):
        process = spawn("train", *words, "out=rough")
        wait_for(
            lambda moment=moment: lines.exists() and lines.read_bytes().count(b"\n") >= moment,
            process,
        )
        process.send_signal(signal.SIGKILL)
        process.wait()
    shutil.rmtree(parent)
    known = read_config(start.parent)["start"]
    assert qkablate("train", *words, "out=rough").code == 2  # there is none of that name any more
    given = [f"start.{key}={known[key]}" for key in ("id", "weights", "step")]
    done = qkablate("train", *words, *given, "out=rough")
    assert done.code == 0, done.err
    assert_identical(calm, begun(tmp_path, "rough"))


def test_a_parent_that_goes_on_changes_no_run_that_began_from_it(
    qkablate, tiny, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        interrupted_after(patch, 12)
        assert qkablate("train", *tiny, "seed=3").code == 143
    parent = begun(tmp_path, name="standard-*")
    words = [*tiny, "seed=3", "variant=no_q", f"start.run={parent.name}"]
    with monkeypatch.context() as patch:
        interrupted_after(patch, 6)
        assert qkablate("train", *words).code == 143
    first = begun(tmp_path)
    known = read_config(first)["start"]
    kept = (first / "start" / "step-00000000" / "SHA256SUMS").read_text()
    assert qkablate("train", *tiny, "seed=3").code == 0
    assert qkablate("train", *words).code == 0  # from where the parent is now: another run
    assert len([*first.parent.glob("healed-*")]) == 2
    assert not (first / "result.json").exists()
    given = [f"start.{key}={known[key]}" for key in ("id", "weights", "step")]
    assert qkablate("train", *words, *given).code == 0
    assert (first / "start" / "step-00000000" / "SHA256SUMS").read_text() == kept
    assert (first / "result.json").exists()
    # Its weights are kept: a rerun needs no parent either.
    shutil.rmtree(parent)
    before = rows(first)
    assert qkablate("train", *words, *given, "--rerun").code == 0
    assert rows(first) == before


def test_a_damaged_start_is_made_again_from_the_parent(qkablate, tiny, tmp_path, parent):
    words = [*tiny, "seed=3", "variant=no_q", f"start.run={parent.name}"]
    assert qkablate("train", *words).code == 0
    folder = begun(tmp_path)
    before = rows(folder)
    (folder / "start" / "step-00000000" / "weights.safetensors").write_bytes(b"x")
    done = qkablate("train", *words, "--rerun")
    assert done.code == 0
    assert "step-00000000 is damaged" in done.err
    assert rows(folder) == before


def test_the_projection_is_computed_as_the_run_is(qkablate, tiny, tmp_path, parent, monkeypatch):
    """With the threads and the products of the run, whatever the process has; also when a start is
    made again later, with the threads that the run began with.
    """
    from qkablate.attention.kernels import matmul
    from qkablate.training.warm_start import start

    seen = []

    def project_layer(*pair, original=start.project_layer):
        seen.append((torch.get_num_threads(), matmul.chosen()))
        return original(*pair)

    monkeypatch.setattr(start, "project_layer", project_layer)
    words = [
        *tiny,
        "seed=3",
        "variant=no_q",
        f"start.run={parent.name}",
        "products=onednn",
        "precision=fp32",
    ]
    torch.set_num_threads(3)
    with monkeypatch.context() as patch:
        interrupted_after(patch, 2)
        assert qkablate("train", *words, "threads=2").code == 143
    assert {*seen} == {(2, "onednn")}
    assert (torch.get_num_threads(), matmul.chosen()) == (3, "torch")
    seen.clear()
    folder = begun(tmp_path)
    for made in ("checkpoints", "start"):
        shutil.rmtree(folder / made)
    assert qkablate("train", *words, "threads=1").code == 0
    assert {*seen} == {(2, "onednn")}
    assert json.loads((folder / "result.json").read_text())["threads"] == 2


def test_nothing_is_written_through_a_link(qkablate, tiny, tmp_path, parent):
    words = [*tiny, "seed=3", "variant=no_q", f"start.run={parent.name}"]
    assert qkablate("train", *words).code == 0
    start = begun(tmp_path) / "start"
    shutil.rmtree(start)
    start.symlink_to(tmp_path / "home")
    done = qkablate("train", *words, "--rerun")
    assert done.code == 2
    assert "is a link" in done.err
    assert not [*(tmp_path / "home").glob("step-*")]


def test_its_weights_can_be_read_as_any_run_s(qkablate, tiny, tmp_path, parent):
    assert qkablate("train", *tiny, "seed=3", "variant=no_q", f"start.run={parent.name}").code == 0
    found = restore(begun(tmp_path))
    assert (found.step, found.config.variant.name) == (12, "no_q")
    assert qkablate("sample", begun(tmp_path).name, "tokens=5").code == 0
    assert qkablate("verify", begun(tmp_path).name).code == 0


REFUSED = [
    (["start.run=nope"], "start.run: there is no run 'nope'"),
    (["start.run=''"], "start.run: give a run"),
    (["start.id=abc"], "start.id: 'abc' is not 12 digits from 0 to f"),
    (["start.step=3"], "start.step: is that of a run to begin from; give start.run, too"),
    (["start.weights=" + "0" * 64], "start.weights: is that of a run to begin from"),
    (["PARENT", "start.id=" + "0" * 12], f"start.id: {'0' * 12} given, and of 'standard"),
    (["PARENT", "start.weights=" + "0" * 64], "has no weights of sha256 000000000000… any more"),
    (["PARENT", "model.d_model=32"], "model.d_model: 32 given, and 'standard-d16-h2-s3"),
    (["PARENT", "model.layers=3"], "model.layers: 3 given, and"),
    (["PARENT", "data.tokenizer=chars"], "was trained on other data"),
    (["PARENT", "variant=static_scores"], "the scores do not depend on x (possible: standard, "),
    (["PARENT", "variant=tied_kv"], "cannot be put into the form of tied_kv: TiedOV cannot be set"),
    (["PARENT", "variant=qk_norm"], "a norm stands between the weights and the scores"),
    (["PARENT", "variant=nope"], "variant: 'nope' is not one of"),
]


@pytest.mark.parametrize(("words", "line"), REFUSED, ids=lambda x: str(x)[:40])
def test_mistakes(qkablate, tiny, parent, words, line):
    """One line, exit code 2, and no run was begun."""
    given = [f"start.run={parent.name}" if word == "PARENT" else word for word in words]
    done = qkablate("train", *tiny, "seed=3", *given)
    assert done.code == 2
    assert line in done.err
    assert done.err.count("\n") == 1
    assert not [*parent.parent.glob("healed-*")]


def test_a_parent_without_a_checkpoint(qkablate, tiny, parent):
    shutil.rmtree(parent / "checkpoints")
    done = qkablate("train", *tiny, "seed=3", f"start.run={parent.name}")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert f"start.run: '{parent}' has no checkpoint yet" in done.err


def test_a_sweep_begins_from_fresh_weights(qkablate, tiny, parent):
    done = qkablate("sweep", *tiny, f"start.run={parent.name}", "sweep.name=x")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "start.run: the runs of a sweep begin from fresh weights" in done.err
