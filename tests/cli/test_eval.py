"""`qkablate eval` as a user types it."""

import json
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import qkablate as api
from qkablate.cli import main
from qkablate.data import Corpus, find_data
from qkablate.runs.records import read_config
from qkablate.training.recorders import run_evaluation
from qkablate.training.warm_start.restore import restore
from tests.cli.helpers import assert_refused, train_on_pairs
from tests.conftest import TINY


def run_command(*words):
    with pytest.raises(SystemExit) as exit_:
        main([*words])
    assert exit_.value.code == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with two runs on the same documents, and a translator of a task."""
    folder = tmp_path_factory.mktemp("eval")
    (folder / "texts").mkdir()
    for i in range(80):
        (folder / "texts" / f"{i}.txt").write_text(f"{i} the cat sat on the mat\n" * (5 + i % 7))
    (folder / "other.txt").write_text("two dogs ran, and the cat saw a mat\n" * 200)
    data = ["data=text", f"data.path={folder}/texts", f"data.cache={folder}/cache"]
    for variant in ("standard", "no_q"):
        run_command("train", *TINY, *data, f"variant={variant}", f"out={folder}/outputs")
    task = ["model=nano_translator", "data=reverse", "data.val_tokens=64", "data.test_tokens=64"]
    sizes = [word for word in TINY if not word.startswith("model.context")]
    run_command("train", *sizes, *task, f"out={folder}/tasks")
    return folder


@pytest.fixture
def evaluate(qkablate, folder):
    """Return a function that runs the command on the runs of the folder."""

    def run(*words):
        return qkablate("eval", *words, f"out={folder}/outputs", f"data.cache={folder}/cache")

    return run


def find(folder, name, out="outputs"):
    (found,) = (folder / out / "runs").glob(f"{name}-*")
    return found


def result_of(run):
    return json.loads((run / "result.json").read_text())


def first(done):
    assert done.code == 0, done.err
    return json.loads(done.out)["evaluations"][0]


def naive_documents(run, folder, split):
    """Return losses, hits and tokens by document, in a loop over tokens in fp64."""
    restored = restore(run)
    config = restored.config
    config.data.cache = str(folder / "cache")
    data = find_data(config.data, config.model, restored.identity["data_fingerprint"])
    assert isinstance(data, Corpus)
    tokens, context = data.split(split).astype(np.int64), config.model.context
    documents = np.searchsorted(data.document_ends(split), np.arange(len(tokens)), side="right")
    losses, hits, counts = (np.zeros(documents[-1] + 1) for _ in range(3))
    model = restored.model.double()
    for start in range(0, len(tokens) - 1, context):
        window = torch.from_numpy(tokens[start : start + context + 1])
        logits = model(window[None, :-1])[0].detach()
        for i in range(len(window) - 1):
            document, target = documents[start + i + 1], window[i + 1]
            losses[document] += float(F.cross_entropy(logits[i], target))
            hits[document] += int(logits[i].argmax() == target)
            counts[document] += 1
    return losses, hits, counts


def leave_one_out(sums, counts):
    """Return the jackknife's error of a ratio of sums, by its definition."""
    n = len(counts)
    ratios = [np.delete(sums, i).sum() / np.delete(counts, i).sum() for i in range(n)]
    return math.sqrt((n - 1) / n * sum((r - sums.sum() / counts.sum()) ** 2 for r in ratios))


@pytest.mark.parametrize("split", ["val", "test"])
def test_own_data_gives_the_result_of_training_to_the_last_bit(evaluate, folder, split):
    run = find(folder, "standard")
    before = sorted(path.stat().st_mtime_ns for path in run.rglob("*"))
    found, result = first(evaluate("standard", "--split", split, "--json")), result_of(run)
    assert found["loss"] == result["loss"][split]
    assert found["bits_per_byte"] == result["bits_per_byte"][split]
    assert sorted(path.stat().st_mtime_ns for path in run.rglob("*")) == before


@pytest.mark.parametrize("split", ["val", "test"])
def test_all_numbers_are_those_of_a_loop_over_documents(evaluate, folder, split):
    losses, hits, counts = naive_documents(find(folder, "no_q"), folder, split)
    found = first(evaluate("no_q", "tokens=all", "precision=fp32", "--split", split, "--json"))
    assert (found["answers"], found["documents"]) == (counts.sum(), len(counts))
    assert len(counts) > 2
    assert found["loss"] == pytest.approx(losses.sum() / counts.sum(), rel=1e-6)
    assert found["loss_se"] == pytest.approx(leave_one_out(losses, counts), rel=1e-4)
    assert found["perplexity"] == pytest.approx(math.exp(losses.sum() / counts.sum()), rel=1e-5)
    assert found["accuracy"] == pytest.approx(hits.sum() / counts.sum())
    assert found["accuracy_se"] == pytest.approx(leave_one_out(hits, counts))
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2))  # tokens are bytes


def test_gap_of_two_runs_is_paired_by_document(evaluate, folder):
    (a, _, counts), (b, _, _) = (
        naive_documents(find(folder, name), folder, "val") for name in ("no_q", "standard")
    )
    done = evaluate("no_q", "standard", "tokens=all", "precision=fp32", "--json")
    (gap,) = json.loads(done.out)["gaps"]
    assert gap["gap"] == pytest.approx((a - b).sum() / counts.sum(), abs=1e-6)
    assert gap["se"] == pytest.approx(leave_one_out(a - b, counts), abs=1e-6)
    low, high = gap["interval"]
    assert (low + high) / 2 == pytest.approx(gap["gap"])
    shown = evaluate("no_q", "standard", "tokens=all")
    assert "95 % interval" in shown.out
    assert "  qkablate compare no_q standard" in shown.out


def test_another_text_is_read_by_the_tokenizer_of_the_run(evaluate, folder):
    found = first(evaluate("no_q", "data=text", f"data.path={folder}/other.txt", "--json"))
    assert found["documents"] == 1
    assert found["loss_se"] is None
    assert found["data_fingerprint"] != result_of(find(folder, "no_q"))["data_fingerprint"]
    own = first(evaluate("no_q", "data=text", f"data.path={folder}/texts", "--json"))
    assert own["loss"] == result_of(find(folder, "no_q"))["loss"]["val"]


def test_learned_tokenizer_encodes_another_text(qkablate, train, tmp_path):
    run = train(tmp_path, "data.tokenizer=chars", "train.steps=2")
    cache, text = f"data.cache={tmp_path}/cache", tmp_path / "other.txt"
    text.write_text("the mat sat on the cat\n" * 200)
    found = first(qkablate("eval", str(run), "data=text", f"data.path={text}", cache, "--json"))
    assert 0 < found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2))
    text.write_text("the mat zat on the Cat\n" * 200)
    done = qkablate("eval", str(run), "data=text", f"data.path={text}", cache)
    assert_refused(done, "data.tokenizer: these chars have no token for 'z', 'C'")


@pytest.mark.parametrize("own", [{}, {"path": None, "name": "owner/name", "subset": "de-en"}])
def test_other_pairs_are_read_in_the_columns_of_the_run(qkablate, tmp_path, own):
    run = train_on_pairs(tmp_path)
    config = read_config(run)
    (run / "config.yaml").write_text(json.dumps(config | {"data": config["data"] | own}))
    cache, pairs = f"data.cache={tmp_path}/cache", tmp_path / "pairs.tsv"
    found = first(qkablate("eval", str(run), f"data.path={pairs}", cache, "--json"))
    assert found["data_fingerprint"] == config["identity"]["data_fingerprint"]
    assert found["loss"] == result_of(run)["loss"]["val"]
    pairs.write_text(pairs.read_text().replace("a\tb", "x\ty"))
    words = [f"data.path={pairs}", "data.source_field=x", "data.target_field=y", cache, "--json"]
    assert first(qkablate("eval", str(run), *words))["loss"] == found["loss"]
    line = "data.source_field: line 2 of "
    assert_refused(qkablate("eval", str(run), f"data.path={pairs}", cache), line)


def test_translator_has_accuracy_and_exact_match(qkablate, folder):
    run = find(folder, "standard", "tasks")
    found, result = first(qkablate("eval", str(run), "--json")), result_of(run)
    for name in ("loss", "accuracy", "exact"):
        assert found[name] == result[name]["val"]
    assert found["documents"] == 8  # sequences
    assert found["loss_se"] > 0
    assert found["bits_per_byte"] is None
    assert "document" not in "".join(found["measures"])
    done = qkablate("eval", str(run), "data=sort", "data.val_tokens=32")
    assert done.code == 0
    assert "val of sort, 4" in done.out


def test_batches_are_halved_when_memory_runs_out(evaluate, folder, monkeypatch):
    sizes, read = [], run_evaluation.read_split

    def fail_twice(*args, **options):
        sizes.append(args[-1])
        if len(sizes) < 3:
            raise torch.OutOfMemoryError
        return read(*args, **options)

    monkeypatch.setattr(run_evaluation, "read_split", fail_twice)
    done = evaluate("standard", "--json")
    assert first(done)["loss"] == pytest.approx(result_of(find(folder, "standard"))["loss"]["val"])
    assert sizes == [sizes[0], sizes[0] // 2, sizes[0] // 4]
    assert f"again with {sizes[0] // 2} windows at a time" in done.err


def test_unfinished_run_is_evaluated_at_its_checkpoint(evaluate, folder, monkeypatch):
    monkeypatch.setattr("qkablate.api.evaluate.read_result", lambda _: None)
    done = evaluate("standard")
    assert done.code == 0
    assert "has no result yet: its checkpoint of step 12 is evaluated" in done.err


def test_failed_run_is_refused(evaluate, monkeypatch):
    monkeypatch.setattr("qkablate.api.evaluate.read_result", lambda _: {"status": "diverged"})
    assert_refused(evaluate("standard"), "has diverged: give step=N for a checkpoint of it")


MISTAKES = [
    ((), "no run given: write qkablate eval RUN"),
    (("standrd",), "there is no run 'standrd'", "nearest: standard"),
    (("standard", "data.tokeniser=gpt2"), "data.tokeniser: there is no such key", "data.tokenizer"),
    (("standard", "data.tokenizer=gpt2", "data=stdlib"), "gpt2 given, but this run reads bytes"),
    (("standard", "data=stdlb"), "data: 'stdlb' (nearest: stdlib)"),
    (("standard", "data=stdlib_pairs"), "data: stdlib_pairs has pairs of source and target"),
    (("standard", "data=text"), "data.path: data=text needs data.path=FILE_OR_FOLDER"),
    (("standard", "data=stdlib,stdlib_tags"), "data: these are several"),
    (("standard", "step=3"), "step: there is no checkpoint of step 3 (allowed: 12)"),
    (("standard", "tokens=few"), "tokens: 'few' is not a whole number from 2 or all"),
    (("standard", "threads=0"), "threads: '0' is not a whole number from 1"),
    (("standard", "device=tpu"), "device: 'tpu' (nearest: cuda) is not one of auto, cpu, cuda"),
    (("standard", "precision=fp16"), "precision: fp16 needs a CUDA device"),
    (("standard", "split=test"), "split: is a flag; write --split test"),
    (("standard", "--split", "train"), "--split: 'train' is not one of val, test"),
]


@pytest.mark.parametrize(("words", "lines"), [(m[0], m[1:]) for m in MISTAKES])
def test_mistake_is_one_line_before_any_work(evaluate, words, lines, monkeypatch):
    def refuse(*_):
        raise AssertionError("a model was evaluated")

    monkeypatch.setattr(run_evaluation, "read_split", refuse)
    assert_refused(evaluate(*words), *lines)


def test_accuracy_of_a_task_is_that_of_training(qkablate, tmp_path):
    """Training does not count what no model can know."""
    sizes = [word for word in TINY if not word.startswith("model.context")]
    data = ["data=induction_short", "data.val_tokens=512", "data.test_tokens=512"]
    assert qkablate("train", *sizes, *data, "model.context=32").code == 0
    run = find(tmp_path, "standard")
    done = qkablate("eval", str(run), "--split", "test", "--json", "threads=auto")
    (found,) = json.loads(done.out)["evaluations"]
    assert found["accuracy"] == result_of(run)["accuracy"]["test"]


def test_task_that_does_not_fit_is_refused(qkablate, folder):
    run = str(find(folder, "standard", "tasks"))
    done = qkablate("eval", run, "data=reverse", "data.copy_length=9")
    assert_refused(done, "model.context: 8 given, but an answer of data=reverse has")
    done = qkablate("eval", run, "data=reverse", "data.vocab_size=20")
    assert_refused(done, "data: reverse has")
    done = qkablate("eval", str(find(folder, "standard")), "data=recall")
    assert_refused(done, "data: recall given, but this run was trained on text (data=text)")


def test_large_task_is_generated_where_it_is_named(qkablate, folder, monkeypatch):
    monkeypatch.setattr("qkablate.training.recorders.diagnostics._MAX_TASK_TOKENS", 1)
    run = str(find(folder, "standard", "tasks"))
    done = qkablate("eval", run)
    assert_refused(done, "is large, or of another version", "is named: data=")
    words = done.err.strip().partition("is named: ")[2].split()
    assert qkablate("eval", run, *words).code == 0


def test_data_that_is_not_prepared_is_refused(qkablate, folder):
    done = qkablate("eval", str(find(folder, "standard")), f"data.cache={folder}/none")
    assert_refused(done, "is not prepared on this machine; data.cache=FOLDER names")


def test_api_returns_what_the_command_prints(folder):
    run = find(folder, "standard")
    found = api.evaluate(run, split="test", **{"data.cache": str(folder / "cache")})
    assert found.loss == result_of(run)["loss"]["test"]
    assert found.sums.counts.sum() == found.answers
    with pytest.raises(api.UserError, match=r"data\.tokeniser: there is no such key"):
        api.evaluate(run, **{"data.tokeniser": "gpt2"})
    with pytest.raises(api.UserError, match="split: 'train' is not one of val, test"):
        api.evaluate(run, split="train")
