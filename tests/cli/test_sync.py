"""`qkablate sync`: everything arrives once, in order, after any interruption."""

import fcntl
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from wandb.proto import wandb_internal_pb2

from qkablate.runs.lease import hold_lease
from qkablate.tracking.wandb import sync
from tests.cli.helpers import processes_of
from tests.tracking.wandb import log_reader
from tests.tracking.wandb.fake_server import FakeServer, dead_url

KEY = "0123456789abcdef0123456789abcdef01234567"
# Four runs of six rows each; the second in two sittings.
RECORD = """
import json, sys, time
from pathlib import Path
from qkablate.config import TrackingConfig
from qkablate.tracking.wandb.run import RunArtifacts, RunIdentity, WandbRun

runs = [("a", range(6)), ("b", range(3)), ("c", range(6)), ("b", range(3, 6)), ("d", range(6))]
for run, steps in runs:
    began = int(time.time())
    folder = Path(sys.argv[1]) / "runs" / f"arm-s0-{run * 12}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(f"id: {run * 12}\\n")
    identity = RunIdentity(f"{run * 12}-1", f"arm {run}", "g", "j", ())
    mirror = WandbRun(TrackingConfig(wandb="offline"), identity, folder, {"seed": 1}, print)
    for step in steps:
        mirror.log({"step": step, "train/loss": 3 - step / 10})
    left = RunArtifacts({"status": "done"}, {"config.yaml": folder / "config.yaml"}, {})
    mirror.close({"final/status": "done"}, 0, left if steps.stop == 6 else None)
    while run == "b" and int(time.time()) == began:
        time.sleep(0.01)  # W&B names a session by the second in which it begins
"""
IDS = [f"{letter * 12}-1" for letter in "abcd"]


def record(out, script=RECORD):
    env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    words = [sys.executable, "-c", script, str(out)]
    subprocess.run(words, check=True, capture_output=True, timeout=120, env=env)
    return out


@pytest.fixture(scope="module")
def moved_folder(tmp_path_factory):
    """Return runs that were moved after they were recorded, so that their files are missing."""
    folder = tmp_path_factory.mktemp("moved")
    return record(folder / "first").rename(folder / "then")


@pytest.fixture
def recorded(moved_folder, tmp_path, monkeypatch):
    """Copy the runs into `outputs`, and set a key."""
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    shutil.copytree(moved_folder, tmp_path / "outputs", symlinks=True)
    return tmp_path / "outputs"


@pytest.fixture
def server(monkeypatch):
    with FakeServer() as fake:
        monkeypatch.setenv("WANDB_BASE_URL", fake.url)
        yield fake


ENCODERS = """
import sys
from pathlib import Path
from qkablate.cli import main
from qkablate.data import sources

folder = Path(sys.argv[1])
folder.mkdir()
files = [folder / f"{i}.py" for i in range(60)]
for i, file in enumerate(files):
    file.write_text(f"call(x, {'+' * i}y)\\n")
sources.find_files = lambda _: files
words = ["train", "model=nano_encoder", "model.context=80", "model.layers=1", "train.steps=2"]
words += ["train.batch_size=2", "tracking.wandb=offline", "threads=1", f"out={folder}"]
words += [f"data.cache={folder}/cache"]
masked = ["data=text", "data.objective=mlm", f"data.path={folder}/*.py"]
for kind in (masked, ["data=stdlib_tags", "data.vocab_size=257"]):
    try:
        main([*words, *kind])
    except SystemExit as end:
        assert end.code == 0
"""


@pytest.mark.exhaustive
def test_runs_of_encoders_arrive_with_their_examples(server, qkablate, monkeypatch, tmp_path):
    """One is trained on masked text, and one on tags, in one process."""
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    out = record(tmp_path / "encoders", ENCODERS)
    done = qkablate("sync", f"out={out}")
    assert done.code == 0, done.err
    folders = [*(out / "runs").iterdir()]
    assert len(folders) == len(server.runs) == 2
    sources = set()
    for folder in folders:
        result = json.loads((folder / "result.json").read_text())
        run = server.runs[f"{result['id']}-1"]
        assert run.complete
        assert run.summary["final/test_accuracy"] == result["accuracy"]["test"]
        assert run.config["model"]["form"] == "encoder"
        (table,) = (row["examples"] for row in run.rows if "examples" in row)
        content = json.loads(run.files[table["path"]])
        assert content["columns"] == ["text", "answers", "output", "accuracy", "nats_per_token"]
        assert "▒" in content["data"][0][0] or "x/argument" in content["data"][0][1]
        sources.add(run.config["data"]["source"])
    assert sources == {"text", "stdlib_tags"}


def steps(server, run):
    return [row["step"] for row in server.runs[run].rows]


def missing(server):
    """Return which of the four runs the server lacks."""
    return [id for id in IDS if id not in server.runs or {*steps(server, id)} != {*range(6)}]


@pytest.mark.slow
def test_everything_is_uploaded_once(recorded, server, qkablate, home):
    done = qkablate("sync")
    assert done.code == 0, done.err
    assert set(server.runs) == {*IDS}
    for id in IDS:
        assert steps(server, id) == [*range(6)]
        assert server.runs[id].summary["final/status"] == "done"
        assert server.runs[id].complete
        assert server.runs[id].config["seed"] == 1
    assert [server.runs[id].sessions for id in IDS] == [1, 2, 1, 1]
    assert "5 of 5 logs uploaded" in done.out
    assert all(f"{server.url}/somebody/qkablate/runs/{id}" in done.out for id in IDS)
    assert "uploaded 5 of 5" in done.err
    again = qkablate("sync")
    assert (again.code, again.out) == (0, "nothing to upload; 5 logs uploaded before\n")
    assert [server.runs[id].sessions for id in IDS] == [1, 2, 1, 1]
    assert list(home.rglob("*")) == []
    assert KEY not in done.out + done.err


@pytest.mark.slow
def test_files_are_uploaded_with_their_rows(server, qkablate, monkeypatch, tmp_path):
    """Files that were moved are reported; their rows are uploaded."""
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    out = record(tmp_path / "there")
    shutil.move(out / "runs" / f"arm-s0-{'b' * 12}", out / "runs" / f"other-s0-{'b' * 12}")
    done = qkablate("sync", f"out={out}")
    assert done.code == 0, done.err
    left = server.artifacts_of(IDS[0])["run"].files
    assert json.loads(left["result.json"]) == {"status": "done"}
    assert left["config.yaml"] == b"id: aaaaaaaaaaaa\n"
    assert server.artifacts_of(IDS[1]) == {}
    assert missing(server) == []
    told = [line for line in done.err.splitlines() if "without its files" in line]
    assert [line.partition(": ")[2].partition(":")[0] for line in told] == ["arm b"]


@pytest.mark.slow
def test_single_run_dry_run_and_missing_run(recorded, server, qkablate, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY")
    dry = qkablate("sync", "--dry-run")
    assert dry.code == 0
    assert "5 logs to upload; 0 uploaded before" in dry.out
    assert "qkablate sync" in dry.out.splitlines()[-1]
    names = [line.split()[2] for line in dry.out.splitlines()[1:6]]
    assert sorted(names) == sorted([*IDS, IDS[1]])
    done = qkablate("sync")
    assert done.code == 2
    assert (
        done.err
        == "qkablate: sync needs a key: `wandb login`, or WANDB_API_KEY; --dry-run needs none\n"
    )
    assert server.runs == {}
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    assert qkablate("sync", "bbbb").code == 0
    assert steps(server, IDS[1]) == [*range(6)]
    assert len(server.runs) == 1
    unknown = qkablate("sync", "arm-s1")
    assert unknown.code == 2
    assert "there is no sweep or run 'arm-s1' in 'outputs' (nearest: arm-s0" in unknown.err


class Closing(FakeServer):
    """It takes some runs whole, and then no more."""

    def __init__(self, most: int, then: str) -> None:
        super().__init__()
        self.most, self.then, self.full = most, then, threading.Event()

    def _stream(self, name, sent):
        if sum(run.complete for run in self.runs.values()) >= self.most:
            self.full.set()
            if self.then == "dies":
                self.die()
            else:
                self.over.wait()
        super()._stream(name, sent)


@pytest.mark.slow
def test_upload_resumes_after_a_server_failure(recorded, qkablate, monkeypatch):
    monkeypatch.setattr(sync, "PROBE_SECONDS", 1)
    with Closing(1, "dies") as first:
        monkeypatch.setenv("WANDB_BASE_URL", first.url)
        done = qkablate("sync")
    assert done.code == 1
    (line,) = [line for line in done.err.splitlines() if "not uploaded" in line]
    assert "does not answer" in line
    assert "the same command retries" in line
    sent = [*recorded.rglob("*.synced")]
    assert 1 <= len(sent) < 5
    with FakeServer() as second:
        second.runs |= first.runs  # it has kept what it had
        monkeypatch.setenv("WANDB_BASE_URL", second.url)
        done = qkablate("sync")
        assert done.code == 0, done.err
        assert missing(second) == []
    assert f"{5 - len(sent)} of" in done.out


@pytest.mark.slow
def test_killed_upload_is_resumed(recorded, spawn, qkablate, monkeypatch):
    with Closing(1, "waits") as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        process = spawn("sync")
        assert server.full.wait(60)
        children = processes_of(process.pid)
        assert children
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        while any(map(is_alive, children)):  # else they would send beside the next call
            time.sleep(0.01)
        server.most = 100
        server.over.set()
        done = qkablate("sync")
        assert done.code == 0, done.err
        assert missing(server) == []
    assert len([*recorded.rglob("*.synced")]) == 5


def is_alive(pid):
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def test_no_server_is_one_line(recorded, qkablate, monkeypatch):
    monkeypatch.setenv("WANDB_BASE_URL", dead_url())
    done = qkablate("sync")
    assert done.code == 1
    (line,) = [line for line in done.err.splitlines() if "without its files" not in line]
    assert "does not answer" in line
    assert list(recorded.rglob("*.synced")) == []


@pytest.mark.slow
def test_refused_key_is_reported(recorded, qkablate, monkeypatch):
    with FakeServer(status=401) as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        done = qkablate("sync", "aaaa")
    assert done.code == 1
    assert "W&B: not uploaded: arm-s0-aaaaaaaaaaaa: " in done.err


@pytest.mark.slow
def test_running_runs_are_skipped(recorded, server, qkablate):
    with hold_lease(recorded / "runs" / f"arm-s0-{'b' * 12}"):
        done = qkablate("sync")
    assert done.code == 0
    assert f"skipped: arm-s0-{'b' * 12} is being trained" in done.err
    assert set(server.runs) == {*IDS} - {IDS[1]}
    assert qkablate("sync").code == 0
    assert missing(server) == []


@pytest.mark.slow
def test_concurrent_calls_upload_nothing_twice(recorded, server, qkablate):
    held = os.open(recorded, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    done = qkablate("sync")
    os.close(held)
    assert done.code == 1
    assert "another `qkablate sync` is running" in done.err
    assert server.runs == {}
    assert qkablate("sync").code == 0


@pytest.mark.slow
def test_untrusted_log_cannot_upload_our_files(recorded, server, qkablate, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("the secret")
    script = RECORD.replace("{'config.yaml': folder", "{'x': folder")
    script = script.replace('folder / "config.yaml"}', f'Path("{secret}")}}')
    out = tmp_path / "stranger"
    record(out, script)
    done = qkablate("sync", "aaaa", f"out={out}")
    assert done.code == 1
    assert f"it refers to '{secret}', which is not a file of the run" in done.err
    assert (server.runs, server.artifacts) == ({}, [])


def lists(record, folder):
    listed = folder.parent / "list.json.gz"
    entries = {"x": {"digest": "", "local_path": str(folder / "secret.txt"), "size": 10}}
    listed.write_bytes(gzip.compress(json.dumps({"version": 1, "contents": entries}).encode()))
    record.artifact.type = "run"
    record.artifact.name = "run-x"
    record.artifact.manifest.manifest_file_path = str(listed)


def refers(record, folder):
    record.artifact.manifest.contents.add(path="x", ref=f"file://{folder}/secret.txt")


def names(record, folder):
    record.artifact.manifest.contents.add(path="x", local_path=f"{folder}/secret.txt")


def climbs(record, folder):
    record.files.files.add(path="../" * 9 + "secret.txt")


def begins_at_the_root(record, folder):
    record.files.files.add(path=f"{folder}/secret.txt")


def watches(record, folder):
    record.tbrecord.log_dir = str(folder)
    record.tbrecord.save = True


def sends(record, folder):
    names(record.request.log_artifact, folder)


def fetches(record, folder):
    record.request.download_artifact.artifact_id = "x"
    record.request.download_artifact.download_root = str(folder)


def uses(record, folder):
    record.use_artifact.id = "x"


WAYS = [lists, refers, names, climbs, begins_at_the_root, watches, sends, fetches, uses]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_record_that_may_name_any_file_is_rejected(way, recorded, server, qkablate, tmp_path):
    (tmp_path / "secret.txt").write_text("the secret")
    (file,) = recorded.glob("runs/*/wandb/offline-run-*/run-aaaa*.wandb")
    record = wandb_internal_pb2.Record()
    way(record, tmp_path)
    log_reader.edit(file, lambda records: records.insert(-1, record))
    done = qkablate("sync", "aaaa")
    assert done.code == 1
    (line,) = [line for line in done.err.splitlines() if line.startswith("not uploaded: ")]
    assert line.startswith(f"not uploaded: {file.relative_to(tmp_path)}: it")
    assert (server.runs, server.artifacts) == ({}, [])


def test_damage_hides_no_records(recorded, server, qkablate):
    """W&B may read on behind what we cannot read."""
    a, b, c, d = (
        next(recorded.glob(f"runs/*/wandb/offline-run-*/run-{x * 12}-1.wandb")) for x in "abcd"
    )
    whole = a.read_bytes()
    a.write_bytes(whole + bytes(7) + b"more")
    b.write_bytes(whole + b"\0\0\0\0\xff\xff\1")  # longer than a block
    none = SimpleNamespace(SerializeToString=lambda: b"\xff" * 4)
    log_reader.edit(c, lambda records: records.insert(3, none))
    d.write_bytes(d.read_bytes() + bytes(9_000))  # a power cut
    done = qkablate("sync", "--dry-run")
    damaged = [line for line in done.err.splitlines() if ": it is damaged: " in line]
    assert [line.split(": ")[1] for line in damaged] == [
        str(file.relative_to(recorded.parent)) for file in (a, b, c)
    ]
    assert IDS[3] in done.out
    assert done.code == 1
    for file in (a, b, c):
        file.unlink()
    d.write_bytes(b"\xff" * 1_000)  # nothing of it can be read
    done = qkablate("sync", "--dry-run")
    assert f"{d.relative_to(recorded.parent)}: it is damaged: " in done.err
    assert done.code == 1


def test_links_in_wandbs_folder_are_rejected(recorded, server, qkablate, tmp_path):
    (tmp_path / "mine.yaml").write_text("mine")
    (files,) = recorded.glob(f"runs/*-{'a' * 12}/wandb/offline-run-*/files")
    (files / "config.yaml").symlink_to(tmp_path / "mine.yaml")
    (other,) = recorded.glob(f"runs/*-{'d' * 12}/wandb/offline-run-*/files")
    other.rename(tmp_path / "files")
    other.symlink_to(tmp_path / "files")
    done = qkablate("sync", "aaaa", "dddd")
    assert done.code == 1
    assert "'config.yaml' is a link; qkablate does not write through links" in done.err
    assert done.err.count("not uploaded: ") == 2
    assert server.runs == {}
    assert (tmp_path / "mine.yaml").read_text() == "mine"


@pytest.mark.parametrize("url", ["foo", "http://:x"])
def test_invalid_address_is_rejected(url, recorded, qkablate, monkeypatch):
    monkeypatch.setenv("WANDB_BASE_URL", url)
    done = qkablate("sync")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(
        f"qkablate: WANDB_BASE_URL: '{url}' is not the address of a server ("
    )
    assert done.err.count("\n") == 1
    assert qkablate("sync", "--dry-run").code == 0


@pytest.mark.slow
def test_invalid_logs_are_reported(recorded, server, qkablate):
    a, b = (recorded / "runs" / f"arm-s0-{x * 12}" for x in "ab")
    (file,) = a.glob("wandb/offline-run-*/*.wandb")
    file.write_bytes(file.read_bytes()[:7])  # killed in its first second
    first, second = sorted(b.glob("wandb/offline-run-*/*.wandb"))
    second.with_name(f"{second.name}.synced").symlink_to(a / "elsewhere")
    done = qkablate("sync")
    assert done.code == 1
    assert "1 log cannot be read" in done.err
    assert "is a link; qkablate does not write through links" in done.err
    assert not (a / "elsewhere").exists()
    assert steps(server, IDS[1]) == [0, 1, 2]
    assert first.with_name(f"{first.name}.synced").exists()
