"""What a run keeps of its predictions: the same of every run of the same data, and no say in it."""

import json
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from qkablate.data import IGNORE
from qkablate.data.batches import Batch, evenly, spread
from qkablate.runs import predictions
from qkablate.training.recorders.predictions import places
from qkablate.training.warm_start import restore


def run_of(tmp_path: Path, out="outputs") -> Path:
    (folder,) = (tmp_path / out / "runs").iterdir()
    return folder


def contents(folder):
    return {step: path.read_bytes() for step, path in predictions.kept(folder).items()}


def course(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    clocks = ("seconds", "perf/tokens_per_second", "perf/mfu", "crc32")
    return [{k: v for k, v in row.items() if k not in clocks} for row in rows]


def test_a_run_keeps_its_predictions_at_first_at_last_and_between(qkablate, tiny, tmp_path):
    assert qkablate("train", *tiny).code == 0
    found = predictions.kept(run_of(tmp_path))
    assert [*found] == [0, 6, 12]
    for step, path in found.items():
        about, _ = predictions.read(path)
        assert (about.step, about.run) == (step, run_of(tmp_path).name.rpartition("-")[2])


def test_they_are_what_the_model_says_there(qkablate, tiny, tmp_path):
    """Against the weights of the last checkpoint, one window after the other."""
    assert qkablate("train", *tiny, "model.dropout=0.3", "precision=fp32").code == 0
    folder = run_of(tmp_path)
    about, log_PV = predictions.read(predictions.kept(folder)[12])
    model = restore.restore(folder).model
    tokens = next((tmp_path / "cache").glob("*/val.bin"))
    data = np.fromfile(tokens, dtype=np.uint8 if model_fits(model) else np.uint16)
    whole = (len(data) - 1) // 16
    count = min(512, whole)
    firsts = [16 * ((2 * i + 1) * whole // (2 * count)) for i in range(count)]
    every = [(first, place) for first in firsts for place in range(16)]
    own = [every[(2 * i + 1) * len(every) // (2 * 1024)] for i in range(1024)]
    assert about.positions == 1024
    for row in range(0, 1024, 37):
        first, place = own[row]
        window = torch.from_numpy(data[first : first + place + 1].astype(np.int64))[None]
        with torch.no_grad():
            expected = F.log_softmax(model(window)[0, -1], dim=-1).numpy()
        assert log_PV[row] == pytest.approx(expected, abs=2e-5)


def model_fits(model):
    return model.token_embedding.num_embeddings <= 256


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_keeping_them_changes_nothing(qkablate, tiny, tmp_path, precision):
    words = [*tiny, "model.dropout=0.1", f"precision={precision}"]
    for every in ("0", "1", "5", "auto"):
        assert qkablate("train", *words, f"diagnose.every={every}", f"out=e{every}").code == 0
    folders = {every: run_of(tmp_path, f"e{every}") for every in ("0", "1", "5", "auto")}
    assert [*predictions.kept(folders["0"])] == []
    assert not (folders["0"] / "predictions").exists()
    assert [*predictions.kept(folders["5"])] == [0, 5, 10, 12]
    assert [*predictions.kept(folders["1"])] == [*range(13)]
    assert len({folder.name for folder in folders.values()}) == 1  # the same run
    for own in folders.values():
        losses = [row for row in course(own) if "mechanism" not in row]
        assert losses == [row for row in course(folders["0"]) if "mechanism" not in row]
        weights = [
            (folder / "checkpoints/step-00000012/weights.safetensors").read_bytes()
            for folder in (own, folders["0"])
        ]
        assert weights[0] == weights[1]
    both = contents(folders["1"])
    assert {**both, **contents(folders["auto"])} == both


@pytest.mark.parametrize("data", [[], ["data=recall", "data.pairs=3", "data.vocab_size=20"]])
def test_all_runs_of_the_same_data_and_context_keep_the_same_positions(
    qkablate, tiny, tmp_path, data
):
    words = [*(word for word in tiny if "data" not in word or not data), *data, "out=o"]
    for own in (["seed=1"], ["variant=merged_w", "train.batch_size=4"], ["model.d_model=8"]):
        assert qkablate("train", *words, *own).code == 0
    assert qkablate("train", *words, "model.context=12", "out=other").code == 0
    abouts = [
        predictions.read(predictions.kept(folder)[12])[0]
        for folder in (tmp_path / "o" / "runs").iterdir()
    ]
    assert len(abouts) == 3
    shared = {(a.positions_sha256, a.data_fingerprint, a.positions, a.context) for a in abouts}
    assert len(shared) == 1
    other, _ = predictions.read(predictions.kept(run_of(tmp_path, "other"))[12])
    assert other.positions_sha256 != abouts[0].positions_sha256


def test_killed_and_gone_on_it_has_the_same_files(qkablate, spawn, tiny, tmp_path):
    words = [*tiny, "variant=merged_w", "model.dropout=0.1", "train.checkpoint_every=5"]
    words += ["diagnose.every=1"]
    assert qkablate("train", *words, "out=calm").code == 0
    expected = contents(run_of(tmp_path, "calm"))
    assert len(expected) == 13
    for moment in (1, 4, 8):
        process = spawn("train", *words, "out=rough")
        end = time.monotonic() + 60
        while len([*(tmp_path / "rough").glob("runs/*/predictions/step-*")]) < moment:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert qkablate("train", *words, "out=rough").code == 0
    folder = run_of(tmp_path, "rough")
    assert contents(folder) == expected
    assert len([*(folder / "predictions").iterdir()]) == 13


def test_an_earlier_attempt_takes_its_own_along(qkablate, tiny, tmp_path):
    assert qkablate("train", *tiny).code == 0
    before = contents(run_of(tmp_path))
    assert qkablate("train", *tiny, "--rerun").code == 0
    folder = run_of(tmp_path)
    assert contents(folder / "attempts" / "1") == before == contents(folder)


def test_nothing_is_written_through_a_link(qkablate, tiny, tmp_path):
    assert qkablate("train", *tiny).code == 0
    folder = run_of(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    for path in (folder / "predictions").iterdir():
        path.unlink()
    (folder / "predictions" / "step-00000000.safetensors").symlink_to(tmp_path / "elsewhere/x")
    done = qkablate("train", *tiny)
    assert done.code == 2
    assert "is a link" in done.err
    assert not [*(tmp_path / "elsewhere").iterdir()]


# Positions


@pytest.mark.parametrize(("count", "among"), [(1, 1), (3, 10), (10, 10), (20, 10), (4, 0)])
def test_evenly_is_so_many_in_order_and_centred(count, among):
    found = [*evenly(count, among)]
    assert len(found) == min(count, among)
    assert found == sorted({*found})
    assert all(0 <= one < among for one in found)
    if found:
        assert abs((found[0] + found[-1]) / 2 - (among - 1) / 2) <= 1


def test_windows_are_those_that_an_evaluation_reads():
    data = np.arange(1000)
    batch = spread(data, count=5, context=7)
    assert batch.tokens_NT.shape == batch.targets_NA.shape == (5, 7)
    assert (batch.tokens_NT[:, 0] % 7 == 0).all()
    assert torch.equal(batch.tokens_NT + 1, batch.targets_NA)
    assert spread(data, count=10**6, context=7).tokens_NT.shape == (999 // 7, 7)
    assert spread(data[:8], count=3, context=7).tokens_NT.tolist() == [[*range(7)]]


def test_places_are_answers_that_count():
    targets = torch.tensor([[1, IGNORE, 2], [IGNORE, IGNORE, 3]])
    batch = Batch(torch.zeros(2, 9), targets, torch.tensor([[4, 0, 7], [0, 0, 8]]))
    assert [one.tolist() for one in places(batch, 10)] == [[0, 0, 1], [4, 7, 8]]
    rows, columns = places(batch._replace(where_NA=None), 2)
    assert [rows.tolist(), columns.tolist()] == [[0, 1], [0, 2]]
