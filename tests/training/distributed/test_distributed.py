"""One run on several processes: the same run up to the order of sums."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from qkablate.config import Config, TrainConfig
from qkablate.errors import UserError
from qkablate.runs import attention_map
from qkablate.runs.document_losses import read_document_losses
from qkablate.training.checkpoint import TrainProgress
from qkablate.training.distributed.ranks import Ranks
from tests.training.helpers import count_rows, read_rows, run_folder, wait_for

SHARED = ("train.grad_accum=4", "model.dropout=0.1", "train.steps=60", "tracking.log_every=1")
SHARED += ("train.eval_every=30", "train.checkpoint_every=7", "optim.warmup=0", "precision=fp32")


@pytest.fixture
def torchrun():
    """`torchrun -m qkablate train` with two processes."""
    started = []

    def start(*words):
        launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone")
        command = (*launcher, "--nproc-per-node=2", "-m", "qkablate", "train", *words)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.terminate()  # which it passes on
        process.communicate()


@pytest.fixture(scope="module")
def runs_folder(tmp_path_factory):
    """Return a folder for the runs that several tests compare with."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def alone(runs_folder, qkablate, tiny):
    """Train the run in one process, once for all tests."""
    if not (runs_folder / "alone").exists():
        assert qkablate("train", *tiny, *SHARED, f"out={runs_folder / 'alone'}").code == 0
    return run_folder(runs_folder, "alone")


@pytest.fixture
def both(runs_folder, torchrun, tiny):
    """Train the run in two processes, once for all tests; return its folder, stdout and stderr."""
    if not (runs_folder / "both").exists():
        process = torchrun(*tiny, *SHARED, f"out={runs_folder / 'both'}")
        out, err = process.communicate()
        assert process.returncode == 0, err
        (runs_folder / "out").write_text(out)
        (runs_folder / "err").write_text(err)
    return (
        run_folder(runs_folder, "both"),
        (runs_folder / "out").read_text(),
        (runs_folder / "err").read_text(),
    )


def read(folder: Path, name: str) -> dict:
    return json.loads((folder / name).read_text())


def content(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and "lease" not in path.parts]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def assert_close(one: Path, other: Path) -> None:
    """Every row, training and validation, to 1e-5."""
    first, second = ([r for r in read_rows(f) if "diagnostics" not in r] for f in (one, other))
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert a.keys() == b.keys()
        assert all(b[key] == pytest.approx(a[key], rel=1e-5) for key in a if "norm" not in key)


def diagnosed(folder: Path) -> list[dict]:
    return [row for row in read_rows(folder) if "diagnostics" in row]


def assert_identical(one: Path, other: Path) -> None:
    assert read_rows(one) == read_rows(other)
    assert read(one, "result.json")["loss"] == read(other, "result.json")["loss"]
    ends = [next(folder.glob("checkpoints/step-*60")) for folder in (one, other)]
    weights, other_weights = ((end / "weights.safetensors").read_bytes() for end in ends)
    assert weights == other_weights


def after_rows(process: subprocess.Popen, tmp_path: Path, out: str, count: int) -> None:
    wait_for(lambda: count_rows(tmp_path, out) >= count, process, seconds=120)


def ranks_of(process: subprocess.Popen, folder: Path) -> tuple[int, int]:
    """Return the pids of the two ranks; the first one holds the lease."""
    first = json.loads(max((folder / "lease").iterdir()).read_bytes().split(b"\n")[0])["pid"]
    listed = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
    (other,) = {int(word) for word in listed.stdout.split()} - {first}
    return first, other


@pytest.mark.slow
def test_two_processes_train_the_same_run_as_one(torchrun, tiny, alone, both, runs_folder):
    both, out, err = both
    assert alone.name == both.name  # the id does not know how many they were
    assert_close(alone, both)
    # The first process alone looks at the model, and sees what one would.
    assert [row["step"] for row in diagnosed(alone)] == [0, 30, 60]
    for a, b in zip(diagnosed(alone), diagnosed(both), strict=True):
        for part, measure in (("qk", "nuclear"), ("ov", "moved"), ("attention", "entropy")):
            for first, second in zip(
                *(r["diagnostics"][part][measure] for r in (a, b)), strict=True
            ):
                assert first == pytest.approx(second, rel=1e-3)
    (_, tokens, first), (_, same, second) = (
        attention_map.read_attention_map(f / attention_map.FILE_NAME) for f in (alone, both)
    )
    assert tokens.tolist() == same.tolist()
    assert np.abs(first.astype(int) - second).max() <= 2
    results = [read(folder, "result.json") for folder in (alone, both)]
    for split in ("train", "val", "test"):
        assert results[1]["loss"][split] == pytest.approx(results[0]["loss"][split], rel=1e-5)
    # The first process alone writes and speaks.
    assert content(alone).keys() == content(both).keys()
    assert (err.count("machine  "), out.count(": done")) == (1, 1)
    assert "2 processes" in err
    for name in ("result.json", "environment.json"):
        assert [read(folder, name)["processes"] for folder in (alone, both)] == [1, 2]
    before = content(both)
    process = torchrun(*tiny, *SHARED, f"out={runs_folder / 'both'}")
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert out.count("this run ended before") == 1
    assert content(both) == before


@pytest.mark.slow
def test_killed_and_stopped_run_resumes_bit_identically(qkablate, torchrun, tiny, both, tmp_path):
    words = (*tiny, *SHARED)
    # One of them is killed: that is no result.
    process = torchrun(*words, "out=rough")
    after_rows(process, tmp_path, "rough", 12)
    folder = run_folder(tmp_path, "rough")
    os.kill(ranks_of(process, folder)[1], signal.SIGKILL)
    _, err = process.communicate()
    assert process.returncode != 0
    message = "another of the 2 processes has ended; the same command resumes"
    assert err.count(message) == 1, err
    assert not (folder / "result.json").exists()
    assert not (folder / "error.txt").exists()
    # A stop request to one rank stops all of them at the same step.
    process = torchrun(*words, "out=rough")
    after_rows(process, tmp_path, "rough", 20)
    os.kill(ranks_of(process, folder)[1], signal.SIGTERM)
    _, err = process.communicate()
    assert process.returncode != 0
    assert err.count("stopped; run again, it resumes from here") == 1
    assert "exitcode  : 143" in err
    assert not (folder / "result.json").exists()
    newest = max((folder / "checkpoints").glob("step-*"))
    assert int(newest.name[5:]) == max(row["step"] for row in read_rows(folder))
    # It goes on with the same number of processes, or with another.
    shutil.copytree(tmp_path / "rough", tmp_path / "fewer")
    process = torchrun(*words, "out=rough")
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert_identical(both[0], folder)
    done = qkablate("train", *words, "out=fewer")
    assert done.code == 0
    assert "this run began with 2 processes and resumes with 1" in done.err
    assert_close(folder, run_folder(tmp_path, "fewer"))
    assert read(run_folder(tmp_path, "fewer"), "result.json")["processes"] == 1


@pytest.mark.exhaustive
def test_sharded_run_equals_unsharded(qkablate, torchrun, tiny, alone, tmp_path):
    """Checkpoints are unsharded: a sharded run resumes bit-identically, or in one process."""
    words = (*tiny, *SHARED)
    sharded = ("train.fsdp=true", "train.checkpoint_activations=true")
    process = torchrun(*words, *sharded, "out=calm")
    _, err = process.communicate()
    assert process.returncode == 0, err
    calm = run_folder(tmp_path, "calm")
    assert alone.name == calm.name
    assert_close(alone, calm)
    assert "no diagnostics: with train.fsdp=true no process has all of the weights" in err
    assert not diagnosed(calm)
    assert not (calm / attention_map.FILE_NAME).exists()
    process = torchrun(*words, *sharded, "out=rough")
    after_rows(process, tmp_path, "rough", 12)
    process.terminate()
    _, err = process.communicate()
    assert "stopped; run again, it resumes from here" in err
    shutil.copytree(tmp_path / "rough", tmp_path / "whole")
    process = torchrun(*words, *sharded, "out=rough")
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert "resuming from step" in err
    assert_identical(calm, run_folder(tmp_path, "rough"))
    assert qkablate("train", *words, "out=whole").code == 0
    assert_close(alone, run_folder(tmp_path, "whole"))


TRANSLATOR = ("model=nano_translator", "model.layers=1", "model.d_model=16", "model.heads=2")
TRANSLATOR += ("data.val_tokens=640", "data.test_tokens=640", "train.batch_size=2", "threads=1")
TRANSLATOR += ("variant=no_q", "variant.sites=encoder+cross", "tracking.wandb=disabled")
COMMANDS = ("data=commands", "model.source=12", "model.context=49")  # padded
PAIRS = ("data=pairs", "data.path=pairs.tsv", "data.source_field=en", "data.target_field=de")
PAIRS += ("model.source=12", "model.context=12")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "data",
    [("data=reverse", "optim=muon"), ("data=sort", "variant=uniform"), COMMANDS, PAIRS],
    ids=lambda w: w[0][5:],
)
def test_translator_on_two_processes_equals_one(qkablate, torchrun, tmp_path, data):
    """Micro-batches of padded pairs have unequally many answers."""
    rows = "".join(f"source {i}\t{'y' * (i % 9 + 1)}\n" for i in range(200))
    (tmp_path / "pairs.tsv").write_text(f"en\tde\n{rows}")
    words = (*TRANSLATOR, *data, *SHARED)
    assert qkablate("train", *words, "out=alone").code == 0
    process = torchrun(*words, "out=both")
    _, err = process.communicate()
    assert process.returncode == 0, err
    alone, both = run_folder(tmp_path, "alone"), run_folder(tmp_path, "both")
    assert alone.name == both.name
    assert_close(alone, both)
    results = [read(folder, "result.json") for folder in (alone, both)]
    for part in ("loss", "accuracy", "exact"):
        assert results[1][part] == pytest.approx(results[0][part], rel=1e-5)
    if data is PAIRS:
        by_one, by_two = map(read_document_losses, (alone, both))
        assert len(by_one.losses) > 1
        assert by_two.losses == pytest.approx(by_one.losses, rel=1e-4)
        assert by_two.tokens.tolist() == by_one.tokens.tolist()


@pytest.mark.exhaustive
def test_sharded_translator_resumes_bit_identically(qkablate, torchrun, tmp_path):
    words = (*TRANSLATOR, *COMMANDS, *SHARED, "optim=muon")
    sharded = ("train.fsdp=true", "train.checkpoint_activations=true")
    assert qkablate("train", *words, "out=alone").code == 0
    process = torchrun(*words, *sharded, "out=calm")
    _, err = process.communicate()
    assert process.returncode == 0, err
    calm = run_folder(tmp_path, "calm")
    assert_close(run_folder(tmp_path, "alone"), calm)
    process = torchrun(*words, *sharded, "out=rough")
    after_rows(process, tmp_path, "rough", 12)
    process.terminate()
    process.communicate()
    process = torchrun(*words, *sharded, "out=rough")
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert "resuming from step" in err
    assert_identical(calm, run_folder(tmp_path, "rough"))


@pytest.mark.exhaustive
def test_ranks_diverge_at_the_same_step(qkablate, torchrun, tiny, tmp_path):
    words = (*tiny, *SHARED, "optim.lr=1000", "optim.clip=0", "model.norm=none")
    assert qkablate("train", *words, "out=alone").code == 3
    process = torchrun(*words, "out=both")
    out, err = process.communicate()
    assert process.returncode != 0
    assert "exitcode  : 3" in err
    assert out.count("the loss became non-finite") == 1
    results = [read(run_folder(tmp_path, name), "result.json") for name in ("alone", "both")]
    assert results[0]["diverged_at"] == results[1]["diverged_at"]
    assert results[1]["status"] == "diverged"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["train.grad_accum=3"],
            "train.grad_accum: 3 passes a step cannot be shared by 2 processes; give a multiple"
            " of 2",
        ),
        (
            ["train.grad_accum=2", "device=cuda:1"],
            "device: cuda:1 is one device, and there are 2 processes (allowed: auto, cpu, cuda)",
        ),
        (
            ["train.grad_accum=2", "train.fsdp=true", "compile=true"],
            "train.fsdp: true needs compile=false",
        ),
        (
            ["train.grad_accum=2", "compile=graphs"],
            "compile: graphs needs one process, since graphs hold no communication (allowed:"
            " auto, true, false)",
        ),
        (["-m", "seed=0,1"], "-m: several processes train one run together; without torchrun, -m"),
        (["trian.steps=1"], "trian.steps: there is no such key"),
    ],
)
def test_unsupported_settings_are_rejected(qkablate, tiny, monkeypatch, words, line):
    here = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}
    for name, value in (here | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}).items():
        monkeypatch.setenv(name, str(value))  # as torchrun does, but there is nobody to meet
    done = qkablate("train", *tiny, *words)
    assert done.code == 2
    assert done.err.startswith(f"qkablate: {line}")
    assert done.err.count("\n") == 1


@pytest.mark.slow
def test_errors_are_printed_once(torchrun, tiny, tmp_path):
    process = torchrun(*tiny, "train.grad_accum=3")
    out, err = process.communicate()
    assert process.returncode != 0
    assert (out, err.count("cannot be shared by 2 processes")) == ("", 1)
    assert "exitcode  : 2" in err
    assert err.count("Traceback") == 1  # torchrun's own
    assert not (tmp_path / "outputs").exists()


def test_cores_are_divided_among_local_ranks(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(9)), raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    config = Config(device="cpu", train=TrainConfig(grad_accum=8))
    assert Ranks(0, 8, 0, 4).resolve(config).threads == 2
    assert (
        Ranks(0, 32, 0, 16).resolve(Config(device="cpu", train=TrainConfig(grad_accum=32))).threads
        == 1
    )
    assert Ranks().resolve(config).threads == "auto"  # torch knows


def test_every_rank_has_its_own_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    config = Config(train=TrainConfig(grad_accum=6))
    assert Ranks(3, 6, 1, 2).resolve(config).device == "cuda:1"
    with pytest.raises(UserError, match="3 processes on this machine need a GPU each"):
        Ranks(0, 6, 0, 3).resolve(config)


def test_eval_items_are_divided_equally():
    dealt = [list(Ranks(rank, 3).shard_eval("abcdefg")) for rank in range(3)]
    assert [[item for item, counts in share if counts] for share in dealt] == [
        ["a", "d", "g"],
        ["b", "e"],
        ["c", "f"],
    ]
    assert [len(share) for share in dealt] == [3, 3, 3]


def test_loss_sum_resumes_with_other_rank_counts():
    progress = TrainProgress(loss_sum=6.0, loss_shares=[1.0, 2.0, 3.0])
    assert [progress.initial_loss_sum(rank, 3) for rank in range(3)] == [1, 2, 3]
    assert [progress.initial_loss_sum(rank, 2) for rank in range(2)] == [6, 0]
    assert progress.initial_loss_sum(0, 1) == 6
