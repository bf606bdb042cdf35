"""Records of the test split: losses by document, n-grams, compressor, accuracy; predictions."""

import json
import signal

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from qkablate.config import Config, ModelConfig
from qkablate.data import IGNORE, EvalMetrics, sources
from qkablate.data.batches import Batch, evenly_spaced, spread_windows
from qkablate.runs import predictions
from qkablate.runs.document_losses import FILE_NAME, read_document_losses
from qkablate.training.recorders import evaluation
from qkablate.training.recorders.evaluation import (
    PendingLosses,
    eval_tokens,
    find_answer_positions,
)
from qkablate.training.result import summarize
from qkablate.training.warm_start import restore
from tests.training.helpers import run_folder, wait_for


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


TRANSLATOR = ["model=nano_translator", "model.source=96", "model.context=97", "data=stdlib_pairs"]
TAGGER = ["model=nano_encoder", "model.context=16", "data=stdlib_tags", "data.vocab_size=257"]


@pytest.mark.parametrize(
    ("model", "limit"), [(TRANSLATOR, "all"), (TRANSLATOR, 485), (TAGGER, "all"), (TAGGER, 80)]
)
def test_losses_of_pairs_are_recorded_by_file(qkablate, tiny, tmp_path, monkeypatch, model, limit):
    library = tmp_path / "library"
    library.mkdir()
    for i in range(64):
        signs = f"{i:06b}".replace("0", "+").replace("1", "-")
        lines = [f"function_{j}(x, {signs}name)\n" for j in range(i % 7 + 1)]
        (library / f"{i}.py").write_text("".join(lines))
    monkeypatch.setattr(sources, "_stdlib_files", lambda: sorted(library.iterdir()))
    size = [word for word in tiny if not word.startswith(("data", "model.context"))]
    words = [*size, *model, f"data.cache={tmp_path / 'cache'}", f"train.test_tokens={limit}"]
    assert qkablate("train", *words).code == 0
    folder = run_folder(tmp_path)
    result = json.loads((folder / "result.json").read_text())
    found = read_document_losses(folder)
    assert found.losses.sum() / found.tokens.sum() == pytest.approx(result["loss"]["test"])
    count = len(found.tokens)
    files = len({*np.fromfile(next((tmp_path / "cache").glob("*/test.files.bin")), np.uint64)})
    assert (result["test_tokens"] is None) == (limit == "all")
    assert count == files if limit == "all" else 2 <= count <= 5  # of as many pairs


def test_new_attempt_archives_the_losses(qkablate, tiny, tmp_path):
    text = make_documents(tmp_path / "texts", [10] * 80)
    assert qkablate("train", *tiny, text).code == 0
    assert qkablate("train", *tiny, text, "--rerun").code == 0
    folder = run_folder(tmp_path)
    assert (folder / FILE_NAME).exists()
    assert (folder / "attempts" / "1" / FILE_NAME).exists()


def test_result_has_the_losses_of_ngrams_and_a_compressor(qkablate, tiny, tmp_path):
    done = qkablate("train", *tiny)
    result = json.loads((run_folder(tmp_path) / "result.json").read_text())
    references = result["text_references"]
    assert references["tokens"] == result["tokens"] == 12 * 2 * 16
    assert len(references["ngram"]) == 5
    assert references["lzma"] > 0
    assert min(references["ngram"]) < result["loss"]["test"]  # after twelve steps
    assert "; this run does not beat the best n-gram" in done.out
    assert "-gram" in done.out


def test_masked_text_has_an_accuracy_and_no_ngrams(qkablate, tiny, tmp_path):
    text = make_documents(tmp_path / "texts", [400] * 80)
    done = qkablate("train", *tiny, text, "model.form=encoder", "data.objective=mlm")
    assert "nats per masked token" in done.out
    assert "n-gram" not in done.out
    assert "per byte" not in done.out
    result = json.loads((run_folder(tmp_path) / "result.json").read_text())
    assert result["text_references"] is result["bits_per_byte"]["test"] is None
    assert 0 <= result["accuracy"]["test"] <= 1
    assert result["loss"]["test"] == pytest.approx(np.log(257), abs=1)  # after twelve steps
    assert (run_folder(tmp_path) / FILE_NAME).exists()


def test_tuning_run_compares_nothing(qkablate, tiny, tmp_path):
    """It never reads the test split."""
    assert qkablate("train", *tiny, "train.evaluate_test=false").code == 0
    result = json.loads((run_folder(tmp_path) / "result.json").read_text())
    assert result["text_references"] is None
    assert not [*(tmp_path / "cache").glob("*/references-*")]


def test_summary_in_wandb_has_references_and_chance():
    base = {"status": "done", "tokens": 1, "seconds": 1.0, "tokens_per_second": 1.0}
    base |= {"params": {"total": 1}, "flops_per_token": 1.0, "data_fingerprint": "a"}
    loss = {"train": 1.0, "val": 1.0, "test": 1.7}
    other = {"val": None, "test": None}
    references = {"tokens": 5, "ngram": [3.0, 1.6], "lzma": 1.5}
    text = {**base, "loss": loss, "bits_per_byte": other, "accuracy": other, "chance": None}
    summary = summarize(text | {"text_references": references})
    assert summary["text/ngram_2"] == 1.6
    assert summary["text/lzma"] == 1.5
    assert summary["text/beats_ngrams"] is False
    assert "final/chance_accuracy" not in summary
    task = text | {"accuracy": {"val": 0.5, "test": 0.4}, "chance": 0.1, "text_references": None}
    assert summarize(task)["final/test_accuracy"] == 0.4
    assert summarize(task)["final/chance_accuracy"] == 0.1
    assert "text/lzma" not in summarize(task)


def contents(folder):
    return {step: path.read_bytes() for step, path in predictions.find_predictions(folder).items()}


def course(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    clocks = ("seconds", "perf/tokens_per_second", "perf/mfu", "crc32")
    return [{k: v for k, v in row.items() if k not in clocks} for row in rows]


def test_predictions_are_recorded_at_evaluations(qkablate, tiny, tmp_path):
    assert qkablate("train", *tiny).code == 0
    files = predictions.find_predictions(run_folder(tmp_path))
    assert [*files] == [0, 6, 12]
    for step, path in files.items():
        about, _ = predictions.read_predictions(path)
        assert (about.step, about.run) == (step, run_folder(tmp_path).name.rpartition("-")[2])


def test_predictions_are_the_models_log_probabilities(qkablate, tiny, tmp_path):
    """Compare with the weights of the last checkpoint, window by window."""
    assert qkablate("train", *tiny, "model.dropout=0.3", "precision=fp32").code == 0
    folder = run_folder(tmp_path)
    about, log_PV = predictions.read_predictions(predictions.find_predictions(folder)[12])
    model = restore.restore(folder).model
    tokens = next((tmp_path / "cache").glob("*/val.bin"))
    data = np.fromfile(tokens, dtype=np.uint8 if model_fits(model) else np.uint16)
    windows = (len(data) - 1) // 16
    count = min(64, windows)
    firsts = [16 * ((2 * i + 1) * windows // (2 * count)) for i in range(count)]
    every = [(first, position) for first in firsts for position in range(16)]
    answers = [every[(2 * i + 1) * len(every) // (2 * 1024)] for i in range(1024)]
    assert about.positions == 1024
    for row in range(0, 1024, 37):
        first, position = answers[row]
        window = torch.from_numpy(data[first : first + position + 1].astype(np.int64))[None]
        with torch.no_grad():
            expected = F.log_softmax(model(window)[0, -1], dim=-1).numpy()
        assert log_PV[row] == pytest.approx(expected, abs=2e-5)


def model_fits(model):
    return model.token_embedding.num_embeddings <= 256


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_recording_changes_no_numbers(qkablate, tiny, tmp_path, precision):
    words = [*tiny, "model.dropout=0.1", f"precision={precision}"]
    for every in ("0", "1", "5", "auto"):
        assert qkablate("train", *words, f"diagnostics.every={every}", f"out=e{every}").code == 0
    folders = {every: run_folder(tmp_path, f"e{every}") for every in ("0", "1", "5", "auto")}
    assert [*predictions.find_predictions(folders["0"])] == []
    assert not (folders["0"] / "predictions").exists()
    assert [*predictions.find_predictions(folders["5"])] == [0, 5, 10, 12]
    assert [*predictions.find_predictions(folders["1"])] == [*range(13)]
    assert len({folder.name for folder in folders.values()}) == 1  # the same run
    for other in folders.values():
        losses = [row for row in course(other) if "diagnostics" not in row]
        assert losses == [row for row in course(folders["0"]) if "diagnostics" not in row]
        weights = [
            (folder / "checkpoints/step-00000012/weights.safetensors").read_bytes()
            for folder in (other, folders["0"])
        ]
        assert weights[0] == weights[1]
    both = contents(folders["1"])
    assert {**both, **contents(folders["auto"])} == both


@pytest.mark.slow
@pytest.mark.parametrize("data", [[], ["data=recall", "data.pairs=3", "data.vocab_size=20"]])
def test_positions_depend_on_data_and_context_only(qkablate, tiny, tmp_path, data):
    words = [*(word for word in tiny if "data" not in word or not data), *data, "out=o"]
    for changed in (["seed=1"], ["variant=merged_w", "train.batch_size=4"], ["model.d_model=8"]):
        assert qkablate("train", *words, *changed).code == 0
    assert qkablate("train", *words, "model.context=12", "out=other").code == 0
    abouts = [
        predictions.read_predictions(predictions.find_predictions(folder)[12])[0]
        for folder in (tmp_path / "o" / "runs").iterdir()
    ]
    assert len(abouts) == 3
    shared = {(a.positions_sha256, a.data_fingerprint, a.positions, a.context) for a in abouts}
    assert len(shared) == 1
    other, _ = predictions.read_predictions(
        predictions.find_predictions(run_folder(tmp_path, "other"))[12]
    )
    assert other.positions_sha256 != abouts[0].positions_sha256


@pytest.mark.slow
def test_killed_run_writes_the_same_files(qkablate, spawn, tiny, tmp_path):
    words = [*tiny, "variant=merged_w", "model.dropout=0.1", "train.checkpoint_every=5"]
    words += ["diagnostics.every=1"]
    assert qkablate("train", *words, "out=calm").code == 0
    expected = contents(run_folder(tmp_path, "calm"))
    assert len(expected) == 13
    files = (tmp_path / "rough").glob
    for moment in (1, 4, 8):
        process = spawn("train", *words, "out=rough")
        wait_for(
            lambda moment=moment: len([*files("runs/*/predictions/step-*")]) >= moment, process
        )
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert qkablate("train", *words, "out=rough").code == 0
    folder = run_folder(tmp_path, "rough")
    assert contents(folder) == expected
    assert len([*(folder / "predictions").iterdir()]) == 13


@pytest.mark.slow
def test_rerun_keeps_predictions_of_earlier_attempt(qkablate, tiny, tmp_path):
    assert qkablate("train", *tiny).code == 0
    before = contents(run_folder(tmp_path))
    assert qkablate("train", *tiny, "--rerun").code == 0
    folder = run_folder(tmp_path)
    assert contents(folder / "attempts" / "1") == before == contents(folder)


def test_linked_file_is_refused(qkablate, tiny, tmp_path):
    assert qkablate("train", *tiny).code == 0
    folder = run_folder(tmp_path)
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
def test_evenly_spaced_is_sorted_and_centered(count, among):
    positions = [*evenly_spaced(count, among)]
    assert len(positions) == min(count, among)
    assert positions == sorted({*positions})
    assert all(0 <= position < among for position in positions)
    if positions:
        assert abs((positions[0] + positions[-1]) / 2 - (among - 1) / 2) <= 1


def test_windows_are_those_of_an_evaluation():
    data = np.arange(1000)
    batch = spread_windows(data, count=5, context=7)
    assert batch.tokens_NT.shape == batch.targets_NA.shape == (5, 7)
    assert (batch.tokens_NT[:, 0] % 7 == 0).all()
    assert torch.equal(batch.tokens_NT + 1, batch.targets_NA)
    assert spread_windows(data, count=10**6, context=7).tokens_NT.shape == (999 // 7, 7)
    assert spread_windows(data[:8], count=3, context=7).tokens_NT.tolist() == [[*range(7)]]


def test_positions_are_those_of_counted_answers():
    targets = torch.tensor([[1, IGNORE, 2], [IGNORE, IGNORE, 3]])
    batch = Batch((torch.zeros(2, 9),), targets, torch.tensor([[4, 0, 7], [0, 0, 8]]))
    assert [one.tolist() for one in find_answer_positions(batch, 10)] == [[0, 0, 1], [4, 7, 8]]
    rows, columns = find_answer_positions(batch._replace(positions_NA=None), 2)
    assert [rows.tolist(), columns.tolist()] == [[0, 1], [0, 2]]


@pytest.mark.parametrize(
    "words", [["model.form=decoder"], ["model.form=encoder", "data.objective=mlm"]]
)
def test_results_that_are_read_together_are_those_of_each_batch(
    qkablate, tiny, tmp_path, monkeypatch, words
):
    results = []
    for out, most in (("each", 1), ("together", 2**22)):
        monkeypatch.setattr(evaluation, "MAX_PENDING", most)
        assert qkablate("train", *tiny, *words, f"out={out}").code == 0
        result = json.loads((run_folder(tmp_path, out) / "result.json").read_text())
        results.append(result["measures"])
    assert results[0] == results[1]


def test_batches_of_several_shapes_are_read_together():
    totals, pending = EvalMetrics(), PendingLosses()
    for answers in (3, 5):
        targets = torch.tensor([[1] * (answers - 1) + [IGNORE]] * 2)
        batch = Batch((targets,), targets, slices={"kind": np.zeros((2, answers), int)})
        losses = torch.full((2, answers), float(answers))
        pending.append(batch, losses, torch.tensor([[True], [False]]).expand(2, answers))
    pending.add_to(totals)
    pending.add_to(totals)  # nothing is left
    assert totals.all.count == 2 * 2 + 2 * 4
    assert totals.all.loss == 4 * 3.0 + 8 * 5.0
    assert totals.all.hits == 2 + 4
    assert totals.sequences.hits == 2


@pytest.mark.parametrize(
    ("device", "sizes", "tokens"),
    [
        ("cpu", (128, 4, 64), 4096),
        ("cuda", (128, 4, 64), 65_536),  # small: the GPU would wait for the host
        ("cuda:1", (768, 12, 1024), 8192),
        ("mps", (128, 4, 64), 8192),
    ],
)
def test_small_models_read_more_at_once_on_a_gpu(device, sizes, tokens):
    d_model, heads, context = sizes
    model = ModelConfig(d_model=d_model, heads=heads, context=context)
    assert eval_tokens(Config(device=device, model=model)) == tokens
