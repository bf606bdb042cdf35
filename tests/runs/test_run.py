"""A run: its id, its lease, its files."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from qkablate.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    TrackingConfig,
    TrainConfig,
    VariantConfig,
    resolve,
)
from qkablate.runs import run as runs
from qkablate.runs.lease import AlreadyRunning
from qkablate.runs.records import read_json, write_json
from qkablate.runs.run import (
    CUDA_NUMERICS,
    Run,
    describe_environment,
    identity,
    label,
    run_id,
)


def id_of(config=None, **other):
    base = {"data_fingerprint": "f", "vocabulary": 256, "device": "cpu", "kernel": "flash"}
    base["circuits_from_outside"] = {}
    return run_id(identity(resolve(config or Config()), **(base | other)))


def change(**parts):
    return dataclasses.replace(Config(), **parts)


def test_settings_that_can_change_the_result_change_the_id():
    ids = [
        id_of(),
        id_of(change(seed=1)),
        id_of(change(variant=VariantConfig(qk="merged"))),
        id_of(change(variant=VariantConfig(init="naive"))),
        id_of(change(variant=VariantConfig(lr="same"))),
        id_of(change(optim=OptimConfig(lr=2e-3))),
        id_of(change(train=TrainConfig(eval_every=7))),
        id_of(change(precision="bf16")),
        id_of(change(compile=True)),
        id_of(data_fingerprint="g"),
        id_of(kernel="math"),
        id_of(device="cuda"),
    ]
    assert len(set(ids)) == len(ids)


def test_other_settings_do_not_change_the_id():
    assert id_of() == id_of(
        change(
            out="elsewhere",
            threads=7,
            tracking=TrackingConfig(wandb="disabled", tags=["x"], group="g", log_every=3),
            data=DataConfig(path="/somewhere", cache="/else"),
            train=TrainConfig(checkpoint_every=5, checkpoint_activations=True, fsdp=True),
            variant=VariantConfig(name="mine"),
        ),
        device="cpu",
    )


def test_the_id_is_stable():
    """A changed id would train everything anew: it moves only when it must (see NUMERICS)."""
    assert id_of() == "96be8fe44c22"
    assert label(Config()) == "standard-d128-h4-s0"


def test_numerics_of_gpus_are_in_the_ids_of_their_runs_alone():
    facts = {"data_fingerprint": "", "vocabulary": 3, "kernel": "math", "circuits_from_outside": {}}
    of_cpu, of_gpu = (identity(Config(), device=device, **facts) for device in ("cpu", "cuda"))
    assert of_gpu == of_cpu | {"device": "cuda", "cuda_numerics": CUDA_NUMERICS}


@pytest.mark.parametrize(
    ("train", "is_same"),
    [({"test_tokens": "all"}, True), ({"test_tokens": 65_536}, True), ({"test_tokens": 99}, False)],
)
def test_runs_that_read_the_whole_test_split_keep_the_ids_of_earlier_ones(train, is_same):
    assert (id_of(Config(train=TrainConfig(**train))) == id_of()) == is_same
    # A tuning run reads none of it.
    plain, other = (TrainConfig(**t, evaluate_test=False) for t in ({}, train))
    assert id_of(Config(train=plain)) == id_of(Config(train=other))


def test_sizes_of_readings_of_whole_splits_have_one_id():
    whole = {
        id_of(Config(train=TrainConfig(eval_tokens=val, test_tokens=test)))
        for val in ("all", 65_536, 65_537, 10**9)
        for test in ("auto", "all", 65_536, 65_537, 10**9)
    }
    assert len(whole) == 1
    part = Config(train=TrainConfig(eval_tokens=65_535))
    assert id_of(part) not in whole


@pytest.mark.parametrize(
    ("source", "grad_accum", "is_same"),
    [("stdlib", 4, True), ("recall", 1, True), ("recall", 4, False), ("stdlib_pairs", 4, False)],
)
def test_weights_by_answers_change_the_ids_that_they_concern(source, grad_accum, is_same):
    """Micro-batches of unequally many answers had equal weights before."""
    config = Config(data=DataConfig(source=source), train=TrainConfig(grad_accum=grad_accum))
    facts = {"data_fingerprint": "", "vocabulary": 3, "device": "cpu", "kernel": "math"}
    found = identity(config, **facts, circuits_from_outside={})
    assert ("micro_batches" not in found) == is_same


def test_one_process_trains_a_run(tmp_path):
    run = Run(tmp_path, "label", "id")
    assert not run.is_leased
    holder = f"process {os.getpid()} on"
    with (
        run.hold_lease(),
        pytest.raises(AlreadyRunning, match=holder),
        Run(tmp_path, "label", "id").hold_lease(),
    ):
        pass
    assert not run.is_leased
    with run.hold_lease():
        assert run.is_leased


def test_killed_process_frees_the_run(tmp_path):
    code = (
        "import sys, time; from qkablate.runs.run import Run\n"
        f"with Run({str(tmp_path)!r}, 'label', 'id').hold_lease():\n"
        "    print('mine', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "mine\n"
    run = Run(tmp_path, "label", "id")
    with pytest.raises(AlreadyRunning, match=f"process {process.pid} on"), run.hold_lease():
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    with run.hold_lease():
        pass


def test_restart_keeps_existing_files(tmp_path):
    run = Run(tmp_path, "label", "id")
    with run.hold_lease():
        run.freeze(Config(), {"a": 1})
        run.metrics.write_text("{}\n")
        write_json(run.folder / "result.json", {"status": "done"})
        assert run.attempt == 1
        run.restart()
        assert run.result is None
        assert run.attempt == 2
    kept = run.folder / "attempts" / "1"
    assert read_json(kept / "result.json") == {"status": "done"}
    assert (kept / "metrics.jsonl").read_text() == "{}\n"


def test_attempts_may_be_deleted(tmp_path):
    run = Run(tmp_path, "label", "id")
    for attempt in (1, 2, 3):
        with run.hold_lease():
            run.freeze(Config(), {})
            assert run.attempt == attempt
            run.restart()
    shutil.rmtree(run.folder / "attempts" / "1")
    with run.hold_lease():
        run.freeze(Config(), {})
        run.restart()
    assert run.attempt == 5


def test_the_id_decides_not_the_label(tmp_path):
    run = Run(tmp_path, "label", "id")
    run.folder.mkdir(parents=True)
    assert Run(tmp_path, "other", "id").folder == run.folder


def test_interrupted_restart_is_completed_by_the_next_process(tmp_path):
    run = Run(tmp_path, "label", "id")
    with run.hold_lease():
        run.freeze(Config(), {})
        run.metrics.write_text("{}\n")
    (run.folder / "attempt-1.tmp").mkdir()  # killed after its first step
    with run.hold_lease():
        assert not run.metrics.exists()
        assert run.attempt == 2


def test_environment_holds_no_secret(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "planted-secret-key")
    found = describe_environment(Config(), {"device": "cpu"})
    assert "planted-secret-key" not in json.dumps(found)
    assert found["versions"]["torch"]
    assert found["machine"]["cpu"]


def test_a_key_in_the_code_that_runs_is_not_kept(tmp_path, monkeypatch):
    """The key is in a file that is not committed."""
    (tmp_path / "qkablate").mkdir()
    (tmp_path / "conf").mkdir()
    file = tmp_path / "conf" / "train.yaml"
    file.write_text("a: 1\n")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "conf"], ["commit", "-q", "-m", "a"]):
        subprocess.run([*git, *words], check=True)
    file.write_text(f"a: 2  # WANDB_API_KEY={'0123456789' * 4}\n")
    monkeypatch.setattr(runs, "__file__", str(tmp_path / "qkablate" / "runs" / "run.py"))
    diff = describe_environment(Config(), {})["code"]["diff"]
    assert "+a: 2  # WANDB_API_KEY=***" in diff


# The frozen config, read again.


@pytest.mark.parametrize(
    ("changes", "is_same"),
    [
        ({}, True),
        ({"tied": True, "embedding_width": None}, True),
        ({"tied": False}, False),
        ({"embedding_width": 128}, False),
        ({"form": "decoder", "encoder_layers": None, "source": None}, True),
        ({"encoder_d_model": None}, True),
        ({"encoder_d_model": 64}, False),
        ({"form": "encoder"}, False),
        ({"form": "encoder_decoder"}, False),
    ],
)
def test_younger_keys_of_the_model_keep_the_ids_of_earlier_runs(changes, is_same):
    facts = {"data_fingerprint": "", "vocabulary": 3, "device": "cpu", "kernel": "math"}
    facts["circuits_from_outside"] = {}
    plain, changed = (
        identity(Config(model=ModelConfig(**keys)), **facts) for keys in ({}, changes)
    )
    assert (run_id(plain) == run_id(changed)) == is_same
    younger = {"tied", "form", "encoder_layers", "encoder_d_model", "source"}
    assert not younger & {*plain["model"]}
    assert "sites" not in plain["variant"]
