"""Runs that begin from a trained one."""

import dataclasses
import json
import shutil
import signal
from pathlib import Path

import pytest
import safetensors.torch
import torch

from qkablate.config import (
    Config,
    DataConfig,
    InitFromConfig,
    ModelConfig,
    VariantConfig,
    resolve,
    variants,
)
from qkablate.data import open_task
from qkablate.data.batches import IGNORE, PAD
from qkablate.models.build import build_model
from qkablate.runs.records import read_config
from qkablate.runs.run import ENCODER_PROJECTION, PROJECTION, identity, label, run_id
from qkablate.training.warm_start.restore import restore
from qkablate.training.warm_start.start import (
    TOKENS,
    CannotProject,
    check_parent,
    project_parent,
)
from tests.diagnostics.test_panel import moved
from tests.pretrained.random_runs import random_run
from tests.training.helpers import (
    assert_identical,
    interrupt_after,
    read_rows,
    replace_file,
    wait_for,
    weights_of,
)

SIZES = ["model.layers=2", "model.d_model=16", "model.heads=2", "model.context=16"]


@pytest.fixture
def parent(qkablate, tiny, tmp_path):
    """Train the parent."""
    assert qkablate("train", *tiny, "seed=3").code == 0
    (folder,) = (tmp_path / "outputs" / "runs").glob("standard-*")
    return folder


def child_folder(tmp_path, out="outputs", name="finetuned-*"):
    (folder,) = (tmp_path / out / "runs").glob(name)
    return folder


def weights(folder):
    return safetensors.torch.load_file(folder / "weights.safetensors")


def make_identity(base=None, **init_from):
    facts = {"data_fingerprint": "f", "vocabulary": 256, "device": "cpu", "kernel": "flash"}
    config = dataclasses.replace(base or Config(), init_from=InitFromConfig(**init_from))
    config = resolve(config)
    return identity(config, **facts, circuits_from_outside={})


def test_identity_omits_init_from_of_fresh_runs():
    assert "init_from" not in make_identity()
    assert run_id(make_identity()) == "96be8fe44c22"


def test_identity_holds_parent_but_not_its_path():
    fields = {"id": "a" * 12, "weights": "b" * 64, "step": 12}
    first, second = (make_identity(run=run, **fields) for run in ("here", "/elsewhere"))
    assert first == second
    assert first["init_from"] == fields | {"projection": PROJECTION}
    encoder = Config(model=ModelConfig(form="encoder"))
    assert make_identity(encoder, run="here", **fields)["init_from"] == fields | {
        "projection": ENCODER_PROJECTION
    }
    changed = [{"id": "c" * 12}, {"weights": "d" * 64}, {"step": 13}]
    ids = {run_id(make_identity(run="here", **(fields | change))) for change in ({}, *changed)}
    assert len(ids) == 4
    config = dataclasses.replace(Config(), init_from=InitFromConfig(run="here"))
    assert (label(config), label(Config())) == (
        "finetuned-standard-d128-h4-s0",
        "standard-d128-h4-s0",
    )


@pytest.mark.parametrize("variant", ["standard", "merged_w"])
def test_exact_projection_starts_at_parents_loss(qkablate, tiny, tmp_path, parent, variant):
    words = [*tiny, "seed=3", f"variant={variant}", f"init_from.run={parent.name}", "optim.lr=1e-4"]
    done = qkablate("train", *words)
    assert done.code == 0, done.err
    folder = child_folder(tmp_path)
    parent_loss = json.loads((parent / "result.json").read_text())["loss"]["val"]
    first = read_rows(folder)[0]
    assert first["step"] == 0
    assert first["val/loss"] == pytest.approx(parent_loss, rel=1e-6)
    result = json.loads((folder / "result.json").read_text())
    assert result["init_from"]["id"] == parent.name.rpartition("-")[2]
    assert result["init_from"]["step"] == 12
    assert "after 12 steps" in done.err
    if variant == "standard":
        first = folder / "start" / "step-00000000"
        kept, trained = weights(first), weights(parent / "checkpoints" / "step-00000012")
        assert all(torch.equal(kept[name], trained[name]) for name in trained)


@pytest.mark.slow
def test_batches_continue_after_parents_last_step(qkablate, tiny, tmp_path, parent, monkeypatch):
    from qkablate.data.batches import RandomWindows

    seen = []

    def step(self, step, original=RandomWindows.step):
        seen.append(step)
        return original(self, step)

    monkeypatch.setattr(RandomWindows, "step", step)
    assert qkablate("train", *tiny, "seed=3", f"init_from.run={parent.name}").code == 0
    assert seen == [*range(12, 24)]
    seen.clear()
    word = child_folder(tmp_path).name
    assert qkablate("train", *tiny, "seed=3", f"init_from.run={word}", "train.steps=3").code == 0
    assert seen == [24, 25, 26]  # of a child of a child


@pytest.mark.slow
def test_killed_run_resumes_bit_identically_without_parent(qkablate, spawn, tiny, tmp_path, parent):
    """Kill a run, also before its first checkpoint, and delete the parent before the end."""
    words = [
        *tiny, "seed=3", "variant=no_q", f"init_from.run={parent}", "model.dropout=0.1",
        "train.checkpoint_every=5", "tracking.log_every=3",
    ]  # fmt: skip
    assert qkablate("train", *words, "out=calm").code == 0
    calm = child_folder(tmp_path, "calm")
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
    fields = read_config(start.parent)["init_from"]
    assert qkablate("train", *words, "out=rough").code == 2  # there is none of that name any more
    given = [f"init_from.{key}={fields[key]}" for key in ("id", "weights", "step")]
    done = qkablate("train", *words, *given, "out=rough")
    assert done.code == 0, done.err
    assert_identical(calm, child_folder(tmp_path, "rough"))


@pytest.mark.slow
def test_training_the_parent_further_changes_no_child(qkablate, tiny, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_after(patch, 12)
        assert qkablate("train", *tiny, "seed=3").code == 143
    parent = child_folder(tmp_path, name="standard-*")
    words = [*tiny, "seed=3", "variant=no_q", f"init_from.run={parent.name}"]
    with monkeypatch.context() as patch:
        interrupt_after(patch, 6)
        assert qkablate("train", *words).code == 143
    first = child_folder(tmp_path)
    fields = read_config(first)["init_from"]
    kept = (first / "start" / "step-00000000" / "SHA256SUMS").read_text()
    assert qkablate("train", *tiny, "seed=3").code == 0
    assert qkablate("train", *words).code == 0  # from where the parent is now: another run
    assert len([*first.parent.glob("finetuned-*")]) == 2
    assert not (first / "result.json").exists()
    given = [f"init_from.{key}={fields[key]}" for key in ("id", "weights", "step")]
    assert qkablate("train", *words, *given).code == 0
    assert (first / "start" / "step-00000000" / "SHA256SUMS").read_text() == kept
    assert (first / "result.json").exists()
    # Its weights are kept: a rerun needs no parent either.
    shutil.rmtree(parent)
    before = read_rows(first)
    assert qkablate("train", *words, *given, "--rerun").code == 0
    assert read_rows(first) == before


@pytest.mark.slow
def test_damaged_start_is_projected_again(qkablate, tiny, tmp_path, parent):
    words = [*tiny, "seed=3", "variant=no_q", f"init_from.run={parent.name}"]
    assert qkablate("train", *words).code == 0
    folder = child_folder(tmp_path)
    before = read_rows(folder)
    (folder / "start" / "step-00000000" / "weights.safetensors").write_bytes(b"x")
    done = qkablate("train", *words, "--rerun")
    assert done.code == 0
    assert "step-00000000 is damaged" in done.err
    assert read_rows(folder) == before


@pytest.mark.slow
def test_projection_uses_threads_and_matmul_of_the_run(
    qkablate, tiny, tmp_path, parent, monkeypatch
):
    """Also a repeated projection uses the threads of the first session."""
    from qkablate.attention.kernels import matmul
    from qkablate.training.warm_start import start

    seen = []

    def project_layer(*pair, original=start.project_layer):
        seen.append((torch.get_num_threads(), matmul.get_backend()))
        return original(*pair)

    monkeypatch.setattr(start, "project_layer", project_layer)
    words = [
        *tiny,
        "seed=3",
        "variant=no_q",
        f"init_from.run={parent.name}",
        "matmul=onednn",
        "precision=fp32",
    ]
    torch.set_num_threads(3)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 2)
        assert qkablate("train", *words, "threads=2").code == 143
    assert {*seen} == {(2, "onednn")}
    assert (torch.get_num_threads(), matmul.get_backend()) == (3, "torch")
    seen.clear()
    folder = child_folder(tmp_path)
    for name in ("checkpoints", "start"):
        shutil.rmtree(folder / name)
    assert qkablate("train", *words, "threads=1").code == 0
    assert {*seen} == {(2, "onednn")}
    assert json.loads((folder / "result.json").read_text())["threads"] == 2


@pytest.mark.slow
def test_linked_start_folder_is_refused(qkablate, tiny, tmp_path, parent):
    words = [*tiny, "seed=3", "variant=no_q", f"init_from.run={parent.name}"]
    assert qkablate("train", *words).code == 0
    start = child_folder(tmp_path) / "start"
    shutil.rmtree(start)
    start.symlink_to(tmp_path / "home")
    done = qkablate("train", *words, "--rerun")
    assert done.code == 2
    assert "is a link" in done.err
    assert not [*(tmp_path / "home").glob("step-*")]


@pytest.mark.slow
def test_child_can_be_sampled_and_verified(qkablate, tiny, tmp_path, parent):
    assert (
        qkablate("train", *tiny, "seed=3", "variant=no_q", f"init_from.run={parent.name}").code == 0
    )
    child = restore(child_folder(tmp_path))
    assert (child.step, child.config.variant.name) == (12, "no_q")
    assert qkablate("sample", child_folder(tmp_path).name, "tokens=5").code == 0
    assert qkablate("verify", child_folder(tmp_path).name).code == 0


REFUSED = [
    (["init_from.run=nope"], "init_from.run: there is no run 'nope'"),
    (["init_from.run=''"], "init_from.run: give a run"),
    (["init_from.id=abc"], "init_from.id: 'abc' is not 12 digits from 0 to f"),
    (
        ["init_from.step=3"],
        "init_from.step: needs the run to start from; give init_from.run",
    ),
    (["init_from.weights=" + "0" * 64], "init_from.weights: needs the run to start from"),
    (
        ["PARENT", "init_from.id=" + "0" * 12],
        f"init_from.id: {'0' * 12} given, but that of 'standard",
    ),
    (
        ["PARENT", "init_from.weights=" + "0" * 64],
        "no longer has weights with the sha256 000000000000…",
    ),
    (["PARENT", "model.d_model=32"], "model.d_model: 32 given, but 'standard-d16-h2-s3"),
    (["PARENT", "model.layers=3"], "model.layers: 3 given, but"),
    (["PARENT", "data.tokenizer=chars"], "was trained on other data"),
    (["PARENT", "variant=static_scores"], "the scores do not depend on x (possible: standard, "),
    (["PARENT", "variant=no_qk"], "cannot be projected to no_qk: its scores cannot be set"),
    (["PARENT", "variant=qk_norm"], "the queries or keys are normalized"),
    (["PARENT", "variant=nope"], "variant: 'nope' is not one of"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("words", "line"), REFUSED, ids=lambda x: str(x)[:40])
def test_impossible_parents_are_rejected(qkablate, tiny, parent, words, line):
    """Print one line and exit with 2 without creating a run."""
    given = [f"init_from.run={parent.name}" if word == "PARENT" else word for word in words]
    done = qkablate("train", *tiny, "seed=3", *given)
    assert done.code == 2
    assert line in done.err
    assert done.err.count("\n") == 1
    assert not [*parent.parent.glob("finetuned-*")]


def test_parent_with_weights_of_other_shapes_is_rejected(qkablate, tiny, parent, monkeypatch):
    """Reject it when the run is planned, before its data is opened."""
    tensors = safetensors.torch.load_file(weights_of(parent))
    tensors["blocks.0.attention.ov.w_o"] = torch.zeros(8, 16)
    replace_file(weights_of(parent), safetensors.torch.save(tensors))
    monkeypatch.setattr("qkablate.training.resolve.open_data", None)
    done = qkablate("train", *tiny, "seed=3", f"init_from.run={parent.name}")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert f"init_from.run: the weights in '{parent}' do not fit its config.yaml" in done.err
    assert "blocks.0.attention.ov.w_o is (8, 16), and (16, 16) is expected" in done.err
    assert not [*parent.parent.glob("finetuned-*")]


def test_parent_without_checkpoint_is_rejected(qkablate, tiny, parent):
    shutil.rmtree(parent / "checkpoints")
    done = qkablate("train", *tiny, "seed=3", f"init_from.run={parent.name}")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert f"init_from.run: '{parent}' has no checkpoint yet" in done.err


@pytest.mark.slow
def test_sweep_rejects_init_from(qkablate, tiny, parent):
    done = qkablate("sweep", *tiny, f"init_from.run={parent.name}", "sweep.name=x")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "init_from.run: the runs of a sweep begin from fresh weights" in done.err


WIDTHS = {"encoder": {}, "encoder_decoder": {"encoder_d_model": 24}}


def project(form, length, name="low_rank_w"):
    """Project a model of sums that are filled up to a length; return losses and batches read."""
    sizes = {"layers": 1, "d_model": 16, "heads": 4, "context": 40, "position": "none"}
    data = DataConfig(source="add", digits=5, extra_digits=0, val_tokens=40, test_tokens=40)
    model = ModelConfig(form=form, **sizes, **WIDTHS[form])
    variant = VariantConfig(**variants()[name])
    config = resolve(
        Config(model=model, data=data, variant=variant, device="cpu", threads=1, matmul="torch")
    )
    task = open_task(data, dataclasses.replace(config.model, context=length, source=length))
    standard = resolve(dataclasses.replace(config, variant=VariantConfig())).variant
    parent, child = (
        build_model(config.model, v, 13, padding=True).init_(0) for v in (standard, config.variant)
    )
    read, batches = [], task.batches

    class Recorded:
        def __init__(self, **options):
            self.batches = batches(**options)

        def step(self, step):
            read.extend(batch := self.batches.step(step))
            return batch

    task.batches = Recorded
    return project_parent(moved(parent).eval(), child, config, task), read


@pytest.mark.parametrize("form", ["encoder", "encoder_decoder"])
@pytest.mark.parametrize("name", ["low_rank_w", "no_v"])
def test_padding_changes_no_error_of_the_projection(form, name):
    (short, _), (long, _) = (project(form, length, name) for length in (12, 40))
    assert len(short) == (1 if form == "encoder" else 3)
    for one, other in zip(short, long, strict=True):
        assert other.heads == one.heads
        assert other.qk_scores == pytest.approx(one.qk_scores, rel=1e-4)
        assert other.ov_output == pytest.approx(one.ov_output, rel=1e-4)
        assert max(one.qk_scores, one.ov_output) > 0.01


def test_both_streams_are_read_until_their_moments_are_known():
    """Padding is not counted, and the encoder is wider than the decoder."""
    _, read = project("encoder_decoder", 40)

    def count(batches):
        sources = sum(int((batch.inputs[0] != PAD).sum()) for batch in batches)
        return sources, sum(int((batch.targets_NA != IGNORE).sum()) for batch in batches)

    sources, targets = count(read)
    assert sources >= TOKENS * 24
    assert targets >= TOKENS * 16
    sources, targets = count(read[:-1])
    assert sources < TOKENS * 24 or targets < TOKENS * 16


@pytest.mark.parametrize("sites", ["all", "cross", "decoder"])
def test_possible_variants_hold_the_layers_of_all_sites(sites):
    """A circuit of one width cannot be used by attention between streams of two."""
    sizes = {"form": "encoder_decoder", "source": 12, "encoder_d_model": 24}
    parent = random_run(Path("unused"), "standard", **sizes)
    parent = dataclasses.replace(parent, identity={"data_fingerprint": "f"})
    variant = VariantConfig(**variants()["static_scores"], sites=sites)
    config = resolve(dataclasses.replace(parent.config, variant=variant))
    model = build_model(config.model, config.variant, 61)
    with pytest.raises(CannotProject) as error:
        check_parent(parent, config, model, "f")
    possible = str(error.value).partition("possible: ")[2].rstrip(")").split(", ")
    assert {"merged_w", "no_q"} <= {*possible}
    assert ("shared_qk" in possible) == (sites == "decoder")
