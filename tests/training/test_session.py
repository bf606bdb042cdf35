"""Sessions of runs that are killed, interrupted, damaged, diverging or failing."""

import json
import math
import os
import shutil
import signal
from pathlib import Path

import pytest
import safetensors.torch
import torch

from qkablate.analysis.study.study import read_facts
from qkablate.data import sources
from qkablate.tracking import WandbRun
from qkablate.training.environment import describe_computation
from tests.training.helpers import (
    assert_identical,
    count_rows,
    final_state,
    interrupt_after,
    read_rows,
    run_folder,
    wait_for,
)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "moments"), [("fp32", (0, 3, 5, 7)), ("bf16", (5,))])
def test_killed_run_resumes_bit_identically(qkablate, spawn, tiny, tmp_path, precision, moments):
    """Kill a run at several moments; it must end like an uninterrupted one."""
    words = [
        *tiny, f"precision={precision}", "variant=merged_w", "model.dropout=0.1",
        "train.checkpoint_every=5", "tracking.log_every=3",
    ]  # fmt: skip
    assert qkablate("train", *words, "out=calm").code == 0
    # The moments: nothing written yet, before the first checkpoint, between two, at the end.
    for moment in moments:
        process = spawn("train", *words, "out=rough")
        wait_for(lambda moment=moment: count_rows(tmp_path, "rough") >= moment, process)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (run_folder(tmp_path, "rough") / "result.json").exists()
    done = qkablate("train", *words, "out=rough")
    assert done.code == 0
    assert_identical(run_folder(tmp_path, "calm"), run_folder(tmp_path, "rough"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGUSR2, 140)],
)
def test_stop_signal_writes_checkpoint(qkablate, spawn, tiny, tmp_path, number, code):
    words = [*tiny, "train.steps=12", "train.checkpoint_every=1000", "train.eval_every=1000"]
    assert qkablate("train", *words, "out=calm").code == 0
    process = spawn("train", *words, "out=rough")
    wait_for(lambda: count_rows(tmp_path, "rough") >= 1, process)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "stopped; run again, it resumes from here" in err
    assert "Traceback" not in err
    folder = run_folder(tmp_path, "rough")
    assert not (folder / "result.json").exists()
    assert len(list((folder / "checkpoints").glob("step-*"))) == 1
    assert qkablate("train", *words, "out=rough").code == 0
    assert_identical(run_folder(tmp_path, "calm"), folder)


def test_stopped_session_leaves_the_summary_in_wandb(qkablate, tiny, monkeypatch):
    """Another session may have written the final losses."""
    closed = []
    monkeypatch.setattr(WandbRun, "close", lambda self, summary, *_: closed.append(summary))
    with monkeypatch.context() as patch:
        interrupt_after(patch, 5)
        assert qkablate("train", *tiny).code == 143
    assert qkablate("train", *tiny).code == 0
    assert closed[0] == {}
    assert closed[1]["final/tokens"] > 0


@pytest.mark.slow
def test_nohup_ignores_sighup(spawn, tiny, tmp_path):
    process = spawn("train", *tiny, "out=rough", before=("nohup",))
    wait_for(lambda: count_rows(tmp_path, "rough") >= 1, process)
    process.send_signal(signal.SIGHUP)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err


@pytest.mark.slow
@pytest.mark.parametrize("grad_accum", [1, 2])
def test_stopping_at_any_check_resumes_bit_identically(
    qkablate, tiny, tmp_path, monkeypatch, grad_accum
):
    """Stop at every check in turn: in training, validation and the final evaluation."""
    words = [*tiny, f"train.grad_accum={grad_accum}", "model.dropout=0.1", "tracking.log_every=5"]
    assert qkablate("train", *words, "out=calm").code == 0
    stops = 0
    while True:
        with monkeypatch.context() as patch:
            interrupt_after(patch, 1)
            code = qkablate("train", *words, "out=rough").code
        if code == 0 or stops > 100:
            break
        assert code == 143
        stops += 1
        # Some sessions get further: an evaluation must complete in one session.
        if stops % 2:
            with monkeypatch.context() as patch:
                interrupt_after(patch, 4)
                code = qkablate("train", *words, "out=rough").code
            if code == 0:
                break
    assert stops > 3
    assert_identical(run_folder(tmp_path, "calm"), run_folder(tmp_path, "rough"))


TRANSLATOR = ("model=nano_translator", "data=reverse", "variant=merged_w", "variant.sites=cross")
MASKED = ("model=nano_encoder", "data=text", "data.path=corpus.txt", "data.objective=mlm")
TAGGED = (
    *("model=nano_encoder", "model.context=16", "data=stdlib_tags"),
    *("data.vocab_size=257", "data.cache=cache"),
)
PADDED_PAIRS = (
    *("model=nano_translator", "model.encoder_d_model=16", "train.grad_accum=2", "data=pairs"),
    *("data.path=pairs.tsv", "data.source_field=a", "data.target_field=b", "data.cache=cache"),
)
FORMS = {
    "translator": TRANSLATOR,
    "translator of padded pairs with a narrow encoder": PADDED_PAIRS,
    "masked text": MASKED,
    "tags": TAGGED,
}


def write_data_of_other_forms(folder, monkeypatch):
    """Write pairs of different lengths, and sources in place of the standard library's."""
    lines = [f"{i}{'a' * (i % 7)}\t{'b' * (i % 5)}{i}\n" for i in range(60)]
    (folder / "pairs.tsv").write_text("".join(["a\tb\n", *lines]))
    files = [folder / f"{i}.py" for i in range(60)]
    for i, file in enumerate(files):
        signs = f"{i:06b}".replace("0", "+").replace("1", "-")  # no two files are equal
        file.write_text(f"f(x, {signs}name_{i})\nrows = {signs}x + y[{i}]\n")
    real = sources.find_files
    monkeypatch.setattr(
        *(sources, "find_files"),
        lambda config: files if config.source == "stdlib_tags" else real(config),
    )


@pytest.mark.parametrize("kind", FORMS.values(), ids=FORMS)
def test_other_forms_resume_bit_identically(qkablate, text, tmp_path, monkeypatch, kind):
    """Stopped before the first checkpoint, between two, and in the final evaluation."""
    write_data_of_other_forms(tmp_path, monkeypatch)
    words = [
        *kind,
        *("model.layers=1", "model.d_model=32", "model.heads=2", "model.dropout=0.1"),
        *("train.steps=12", "train.batch_size=2", "train.eval_every=6", "tracking.log_every=2"),
        *("train.checkpoint_every=4", "data.val_tokens=64", "data.test_tokens=64"),
        *("tracking.wandb=disabled", "threads=1"),
    ]
    assert qkablate("train", *words, "out=calm").code == 0
    codes = []
    for calls in (2, 7, 9):
        with monkeypatch.context() as patch:
            interrupt_after(patch, calls)
            codes.append(qkablate("train", *words, "out=rough").code)
    assert codes[:2] == [143, 143]
    assert qkablate("train", *words, "out=rough").code == 0
    assert_identical(run_folder(tmp_path, "calm"), run_folder(tmp_path, "rough"))


@pytest.mark.slow
def test_damaged_checkpoint_is_named_and_older_one_used(qkablate, tiny, tmp_path, monkeypatch):
    assert qkablate("train", *tiny, "out=calm").code == 0
    with monkeypatch.context() as patch:
        # Stop between the last two checkpoints of 12 steps.
        from qkablate.training.loop import Trainer

        def stop(self, step, original=Trainer._step):
            if step == 10:
                raise KeyboardInterrupt
            return original(self, step)

        patch.setattr(Trainer, "_step", stop)
        assert qkablate("train", *tiny, "out=rough").code == 130
    folder = run_folder(tmp_path, "rough")
    newest = folder / "checkpoints" / "step-00000008"
    for name in ("weights.safetensors", "state.pt", "progress.json", "SHA256SUMS"):
        assert (newest / name).exists()
    content = bytearray((newest / "state.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (newest / "state.pt").write_bytes(content)
    done = qkablate("train", *tiny, "out=rough")
    assert done.code == 0
    assert f"{newest.name} is damaged (state.pt does not have its checksum): not used" in done.err
    assert "resuming from step 4" in done.err
    assert_identical(run_folder(tmp_path, "calm"), folder)


def test_training_restarts_if_all_checkpoints_are_damaged(qkablate, tiny, tmp_path, monkeypatch):
    assert qkablate("train", *tiny).code == 0
    folder = run_folder(tmp_path)
    before = read_rows(folder), final_state(folder)
    (folder / "result.json").unlink()
    for sums in folder.glob("checkpoints/*/SHA256SUMS"):
        sums.write_text("")
    done = qkablate("train", *tiny)
    assert done.code == 0
    assert "is damaged" in done.err
    assert read_rows(folder) == before[0]


@pytest.mark.slow
def test_lost_rows_are_trained_again(qkablate, tiny, tmp_path):
    """A checkpoint is not used without the rows that led to it."""
    assert qkablate("train", *tiny).code == 0
    folder = run_folder(tmp_path)
    before = read_rows(folder)
    (folder / "result.json").unlink()
    metrics = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").write_bytes(metrics[: len(metrics) // 3])
    done = qkablate("train", *tiny)
    assert done.code == 0
    assert "metrics.jsonl has lost rows since" in done.err
    assert read_rows(folder) == before


def test_new_checkpoints_replace_damaged_later_ones(qkablate, tiny, tmp_path, monkeypatch):
    """A damaged checkpoint of a later step must not count as the newest."""
    words = [*tiny, "train.checkpoint_every=2"]
    with monkeypatch.context() as patch:
        interrupt_after(patch, 10)
        assert qkablate("train", *words).code == 143
    folder = run_folder(tmp_path) / "checkpoints"
    damaged = sorted(path.name for path in folder.glob("step-*"))
    for name in damaged:
        (folder / name / "SHA256SUMS").write_text("")
    with monkeypatch.context() as patch:
        interrupt_after(patch, 4)
        assert qkablate("train", *words).code == 143
    kept = [path.name for path in folder.glob("step-*")]
    assert kept
    assert max(kept) < min(damaged)
    done = qkablate("train", *words)
    assert done.code == 0
    assert "resuming from step" in done.err


def test_finished_run_keeps_last_checkpoint(qkablate, tiny, tmp_path):
    assert qkablate("train", *tiny).code == 0
    assert [p.name for p in run_folder(tmp_path).glob("checkpoints/*")] == ["step-00000012"]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_compiled_run_resumes_bit_identically(qkablate, tiny, tmp_path, monkeypatch):
    words = [*tiny, "compile=true", "model.layers=1", "variant=merged_w"]
    assert qkablate("train", *words, "out=calm").code == 0
    with monkeypatch.context() as patch:
        interrupt_after(patch, 9)
        assert qkablate("train", *words, "out=rough").code == 143
    assert qkablate("train", *words, "out=rough").code == 0
    assert_identical(run_folder(tmp_path, "calm"), run_folder(tmp_path, "rough"))


@pytest.mark.slow
def test_closed_output_does_not_stop_training(spawn, tiny, tmp_path):
    """Close the output, as `qkablate train 2>&1 | head -2` does."""
    process = spawn("train", *tiny)
    process.stderr.readline()
    process.stderr.close()
    process.stdout.close()
    process.wait(timeout=60)
    assert json.loads((run_folder(tmp_path) / "result.json").read_text())["status"] == "done"


@pytest.mark.slow
def test_late_signal_stops_next_job(qkablate, tiny, tmp_path, monkeypatch):
    from qkablate.training import result as run_result

    def late(path, value, original=run_result.write_json_once):
        original(path, value)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(run_result, "write_json_once", late)
    assert qkablate("train", *tiny, "-m", "seed=0,1,2").code == 130
    assert len(list((tmp_path / "outputs" / "runs").glob("*/result.json"))) == 1
    assert qkablate("train", *tiny, "seed=5").code == 0  # alone, it has done what it should


def test_checkpoints_load_without_pickled_code(qkablate, tiny, tmp_path):
    assert qkablate("train", *tiny).code == 0
    for folder in run_folder(tmp_path).glob("checkpoints/*"):
        torch.load(folder / "state.pt", weights_only=True)
        safetensors.torch.load_file(folder / "weights.safetensors")
        assert os.system(f"cd '{folder}' && sha256sum --quiet -c SHA256SUMS") == 0


@pytest.mark.slow
def test_training_a_leased_run_names_its_process(qkablate, spawn, tiny, tmp_path):
    words = [*tiny, "train.steps=100000", "optim.warmup=0"]
    process = spawn("train", *words)
    wait_for(lambda: count_rows(tmp_path, "outputs") >= 1, process)
    done = qkablate("train", *words)
    assert done.code == 1
    assert f"is being trained by process {process.pid} on" in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(("log_every", "checkpoint_every"), [(1, 4), (5, 4), (100, 100)])
def test_divergence_is_a_result(qkablate, tiny, tmp_path, monkeypatch, log_every, checkpoint_every):
    from qkablate.models.gpt import GPT

    calls = 0

    def loss(self, *arguments, original=GPT.loss, **named):
        nonlocal calls
        calls += self.training
        return original(self, *arguments, **named) * (float("nan") if calls >= 7 else 1)

    monkeypatch.setattr(GPT, "loss", loss)
    often = [f"tracking.log_every={log_every}", f"train.checkpoint_every={checkpoint_every}"]
    words = [*tiny, *often, "train.eval_every=10"]
    done = qkablate("train", *words)
    assert done.code == 3
    result = json.loads((run_folder(tmp_path) / "result.json").read_text())
    assert (result["status"], result["diverged_at"]) == ("diverged", 7)
    assert (result["steps"], result["tokens"]) == (7, 7 * 2 * 16)
    assert result["loss"] == {"train": None, "val": None, "test": None}
    assert "became non-finite at step 7" in done.out
    again = qkablate("train", *words)  # it stands, as any other result
    assert again.code == 3
    assert "ended before" in again.out
    assert calls <= 10  # noticed at the next row, checkpoint or evaluation; not trained again


def test_high_learning_rate_diverges(qkablate, tiny, tmp_path):
    done = qkablate("train", *tiny, "optim.lr=1000", "optim.clip=0", "model.norm=none")
    assert done.code == 3
    for row in read_rows(run_folder(tmp_path)):
        assert math.isfinite(row.get("train/loss", 0.0)), row


@pytest.mark.slow
def test_failure_is_recorded_and_retried(qkablate, tiny, tmp_path, monkeypatch):
    from qkablate.training.loop import Trainer

    def step(self, step, original=Trainer._step):
        if step == 9:
            raise MemoryError("no room\nfor this")
        return original(self, step)

    assert qkablate("train", *tiny, "out=calm").code == 0
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", step)
        done = qkablate("train", *tiny, "out=rough")
    assert done.code == 1
    folder = run_folder(tmp_path, "rough")
    result = json.loads((folder / "result.json").read_text())
    assert (result["status"], result["error"]) == ("failed", "MemoryError: no room")
    assert "Traceback" in (folder / "error.txt").read_text()
    assert "Traceback" not in done.err
    done = qkablate("train", *tiny, "out=rough")
    assert done.code == 0
    assert "resuming from step 8" in done.err
    assert not (folder / "error.txt").exists()
    assert_identical(run_folder(tmp_path, "calm"), folder)


def content(*roots: Path) -> dict[Path, bytes]:
    files = [file for root in roots for file in (root, *root.rglob("*")) if file.is_file()]
    return {file: file.read_bytes() for file in files}


@pytest.mark.parametrize(
    ("moment", "woken"),
    [
        *(("starting", True), ("loading", True), ("step", True)),
        *(("step", False), ("reading", False), ("failing", False)),
    ],
)
def test_nothing_is_written_after_losing_the_lease(
    qkablate, tiny, tmp_path, monkeypatch, moment, woken
):
    """Let another machine take the run over and finish it in the middle of a session."""
    from qkablate.runs import lease
    from qkablate.training import session
    from qkablate.training.loop import Trainer

    assert qkablate("train", *tiny, "out=calm").code == 0
    plans, outcomes = [], []
    kernel = "one"
    observers_time = 0.0
    observer = lease.LeaseObserver(lambda: observers_time)

    def run(plan, original=session.train_run, **named):
        plans.append(plan)
        return original(plan, **named)

    def taken_over():
        nonlocal kernel, observers_time
        if len(plans) > 1:  # this is the new owner
            return
        kernel = "another"
        folder = plans[0].run.folder
        assert observer.is_leased(folder)
        observers_time += lease.TIMEOUT
        outcomes.append(session.train_run(plans[0], observer=observer))
        left.update(content(*kept(folder.absolute())))
        if woken:
            monkeypatch.setattr(lease, "now", lambda now=lease.now: now() + 3600)
        if moment == "failing":
            raise MemoryError

    def start(plan, original=session._load_start):
        if moment == "starting":  # before it writes anything
            taken_over()
        return original(plan)

    def load(*args, original=session.checkpoint.load_newest):
        found = original(*args)
        if moment == "loading":
            taken_over()
        return found

    def step(self, step, original=Trainer._step):
        if step == 7 and moment in ("step", "failing"):  # a row is due after it, and a checkpoint
            taken_over()
        return original(self, step)

    def evaluate(self, split, original=Trainer.evaluate):
        if split == "test" and moment == "reading":  # all that is missing is the result
            taken_over()
        return original(self, split)

    def kept(folder: Path) -> list[Path]:
        names = ["result.json", "error.txt", "checkpoints"] + ["metrics.jsonl"] * woken
        return [folder / name for name in names]

    left: dict[Path, bytes] = {}
    monkeypatch.setattr(lease, "HEARTBEAT", 1000.0)
    monkeypatch.setattr(lease, "_lock_scope", lambda descriptor: {"boot": kernel, "device": 1})
    monkeypatch.setattr(session, "train_run", run)
    monkeypatch.setattr(session, "_load_start", start)
    monkeypatch.setattr(session.checkpoint, "load_newest", load)
    monkeypatch.setattr(Trainer, "_step", step)
    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    done = qkablate("train", *tiny, "out=rough")
    folder = run_folder(tmp_path, "rough")
    assert done.code == 1
    last = done.err.splitlines()[-1]
    assert last.startswith(f"qkablate: rough/runs/{folder.name} was taken over by process")
    assert last.endswith("; this process stopped")
    assert "Traceback" not in done.err
    assert content(*kept(folder)) == left
    result = json.loads((folder / "result.json").read_text())
    assert {key: result[key] for key in outcomes[0].result} == outcomes[0].result
    assert not (folder / "error.txt").exists()
    if moment != "step" or woken:
        assert_identical(run_folder(tmp_path, "calm"), folder)


def test_result_is_never_overwritten(qkablate, tiny, tmp_path, monkeypatch):
    """Publish another result between the last check of the lease and the result."""
    from qkablate.training import result as run_result

    def publish(path, value, original=run_result.write_json_once):
        path.write_text('{"status": "failed", "by": "another"}')
        original(path, value)

    monkeypatch.setattr(run_result, "write_json_once", publish)
    done = qkablate("train", *tiny)
    assert done.code == 1
    assert "has another process's result; this process stopped" in done.err
    assert '"another"' in (run_folder(tmp_path) / "result.json").read_text()


@pytest.mark.slow
def test_run_resumes_after_lease_of_stopped_machine_expires(qkablate, tiny, tmp_path, monkeypatch):
    from qkablate.runs import lease

    with monkeypatch.context() as patch:
        interrupt_after(patch, 8)
        assert qkablate("train", *tiny).code == 143
    claim = {"token": "t", "host": "h", "pid": 7, "boot": "before", "device": 1, "since": "then"}
    (run_folder(tmp_path) / "lease" / "00000002").write_text(json.dumps(claim) + "\n...")
    monkeypatch.setattr(lease, "TIMEOUT", 0.0)
    done = qkablate("train", *tiny)
    assert done.code == 0
    assert "for a heartbeat of process 7 on h since then" in done.err
    assert "resuming from step" in done.err


def test_threads_of_first_session_are_kept(qkablate, tiny, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_after(patch, 8)
        assert qkablate("train", *tiny).code == 143
    done = qkablate("train", *tiny, "threads=2")
    assert done.code == 0
    assert "threads: 1, as this run began, not 2" in done.err
    assert json.loads((run_folder(tmp_path) / "result.json").read_text())["threads"] == 1


def test_process_state_is_restored(qkablate, tiny):
    torch.set_num_threads(1)
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    assert qkablate("train", *tiny, "threads=2", "deterministic=true").code == 0
    assert torch.get_num_threads() == 1
    assert not torch.are_deterministic_algorithms_enabled()
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints", "attempts", "attempt-1.tmp"])
def test_links_in_run_folder_are_refused(qkablate, tiny, tmp_path, name):
    assert qkablate("train", *tiny).code == 0
    folder, outside = run_folder(tmp_path), tmp_path / "outside"
    outside.mkdir()
    (outside / "step-00000001").mkdir()
    shutil.rmtree(folder / name, ignore_errors=True)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(outside)
    done = qkablate("train", *tiny, "--rerun")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert f"{name}' is a link" in done.err
    assert [path.name for path in outside.iterdir()] == ["step-00000001"]


@pytest.mark.slow
def test_compressed_state_is_damaged(qkablate, tiny, tmp_path):
    """Refuse compressed files, which may expand to any size in memory."""
    import zipfile

    from qkablate.training import checkpoint

    assert qkablate("train", *tiny).code == 0
    (path,) = run_folder(tmp_path).glob("checkpoints/step-*/state.pt")
    before = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, part in parts.items():
            archive.writestr(name, bytes(2**22) if "/data/" in name else part)
    for content in (path.read_bytes(), b"[1]", b""):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="is not what training writes"):
            checkpoint._load_state(path, "cpu")
    path.write_bytes(before)
    assert checkpoint._load_state(path, "cpu")


@pytest.mark.parametrize(
    "content",
    ["[]", "{", '{"versions": {}, "threads": "x"}', '{"threads": 1}'],
)
def test_invalid_environment_is_written_again(qkablate, tiny, tmp_path, monkeypatch, content):
    with monkeypatch.context() as patch:
        interrupt_after(patch, 6)
        assert qkablate("train", *tiny).code == 143
    record = run_folder(tmp_path) / "environment.json"
    record.write_text(content)
    done = qkablate("train", *tiny)
    assert done.code == 0
    assert "environment.json is damaged: it is written again" in done.err
    assert json.loads(record.read_text())["threads"] == 1


@pytest.mark.parametrize("begins_anew", [False, True])
def test_run_that_goes_on_on_another_machine_names_both(
    qkablate, tiny, tmp_path, monkeypatch, begins_anew
):
    def train_on(cpu, steps):
        with monkeypatch.context() as patch:
            patch.setattr("qkablate.runs.run.read_cpu_name", lambda: cpu)
            if steps is not None:
                interrupt_after(patch, steps)
            return qkablate("train", *tiny, "train.checkpoint_every=2").code

    assert train_on("first CPU", 4) == 143
    assert train_on("second CPU", 2) == 143
    folder = run_folder(tmp_path)
    if begins_anew:  # nothing of the first two sessions is left
        shutil.rmtree(folder / "checkpoints")
    assert train_on("second CPU", 2) == 143
    assert train_on("third CPU", None) == 0
    cpus = ["first CPU", "second CPU", "third CPU"][begins_anew:]
    assert read_facts(folder, {})["cpu"] == ", then ".join(cpus)
    assert describe_computation(folder)["resumed"] == ["cpu"]
