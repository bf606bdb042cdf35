"""W&B is optional: its data is right, and training continues if it fails.

W&B keeps a process, credentials and settings as long as a Python process lives, so tests that
start it run in a separate process, in the empty home that every test has.
"""

import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from qkablate.config import TrackingConfig
from qkablate.errors import UserError
from qkablate.tracking import WandbRun
from qkablate.tracking.wandb.mode import probe_server, resolve_mode
from qkablate.tracking.wandb.run import OFFLINE, LoggedTables, RunIdentity, flatten_row
from qkablate.tracking.wandb.service import users_environment
from tests.tracking.wandb import log_reader
from tests.tracking.wandb.fake_server import FakeServer, dead_url

KEY = "0123456789abcdef0123456789abcdef01234567"
METRICS = {
    *("train/loss", "train/lr", "train/grad_norm", "val/loss", "val/bits_per_byte"),
    *("perf/tokens_per_second", "perf/mfu"),
    *("qk/stable_rank/L0", "ov/moved/L1", "attention/entropy/L0", "attention/induction/L1"),
}
BOUND = 120  # timeout in seconds

Run = subprocess.CompletedProcess[str]


ROOT = Path(__file__).parents[3]


def python(*words: str, **variables: str) -> Run:
    """Start Python without a terminal, in the environment of the test."""
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=BOUND,
    )


@pytest.fixture
def overrides(tiny: list[str]) -> list[str]:
    """Return the overrides of a tiny run with W&B enabled."""
    return [word for word in tiny if not word.startswith("tracking.wandb=")]


@pytest.fixture
def runs(tmp_path: Path) -> Callable[[], list[Path]]:
    return lambda: sorted((tmp_path / "outputs" / "runs").iterdir())


def read_rows(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "crc32"} for row in rows]


def by_step(rows: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Merge the rows of each step, as W&B does."""
    merged: dict[int, dict[str, Any]] = {}
    for row in rows:
        # W&B's own columns are left out, and the time, which differs between rows of a step.
        apart = ("seconds", "diagnostics")
        own = {name: plain(x) for name, x in row.items() if name[0] != "_" and name not in apart}
        own |= means(row.get("diagnostics", {}))
        merged.setdefault(row["step"], {}).update(own)
    return merged


def means(diagnostics: dict[str, Any]) -> dict[str, float]:
    """Return the means of the diagnostics over the heads of each layer."""
    return {
        f"{part}/{name}/L{layer}": sum(heads) / len(heads)
        for part, measures in diagnostics.items()
        for name, layers in measures.items()
        for layer, heads in enumerate(layers)
        if heads is not None and name != "singular"
    }


def plain(value: Any) -> Any:
    """Return NaN as a string, as in metrics.jsonl, so that it equals itself."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def best_and_last(rows: list[dict[str, Any]]) -> dict[str, float]:
    losses = [row["val/loss"] for row in rows if "val/loss" in row]
    return {"min": min(losses), "last": losses[-1]}


def offline(run: Path) -> list[log_reader.RecordedRun]:
    """Return what was recorded in a run's folder, by session."""
    folders = sorted((run / "wandb").glob("offline-run-*"))
    return [log_reader.read(folder) for folder in folders]


def holding(text: str, *folders: Path) -> list[Path]:
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if text.encode() in path.read_bytes()]


def test_diagnostics_are_sent_as_means_over_heads():
    row = {
        "step": 3,
        "diagnostics": {
            "qk": {
                "symmetry": [[0.5, 1.0], None],
                "singular": [[[2.0, 1.0]], None],
                "balance": [[None, 0.25], [None, None]],
            },
            "attention": {"entropy": [[1.0, 3.0], [0.0, 0.0]]},
        },
    }
    assert flatten_row(row) == {
        "step": 3,
        "qk/symmetry/L0": 0.75,
        "qk/balance/L0": 0.25,
        "attention/entropy/L0": 2.0,
        "attention/entropy/L1": 0.0,
    }
    names = ["encoder_L0", "cross_L0"]
    assert flatten_row(row, names)["attention/entropy/cross_L0"] == 0.0
    assert flatten_row({"step": 1, "train/loss": 2.0}) == {"step": 1, "train/loss": 2.0}


# Modes


@pytest.mark.parametrize(
    ("requested", "environment", "netrc", "mode"),
    [
        ("auto", {}, "", "offline"),
        ("auto", {"WANDB_API_KEY": KEY}, "", "online"),
        ("auto", {"WANDB_IDENTITY_TOKEN_FILE": "token"}, "", "online"),
        ("auto", {}, f"machine api.wandb.ai login user password {KEY}", "online"),
        ("auto", {}, f"default login user password {KEY}", "online"),
        ("auto", {}, "machine api.wandb.ai login user", "offline"),
        ("auto", {}, f"machine elsewhere.org login user password {KEY}", "offline"),
        ("auto", {}, "not a netrc file", "offline"),
        (
            "auto",
            {"WANDB_BASE_URL": "http://own.org:80"},
            f"machine own.org:80 login user password {KEY}",
            "online",
        ),
        (
            "auto",
            {"WANDB_BASE_URL": "http://own.org:80"},
            f"machine api.wandb.ai login user password {KEY}",
            "offline",
        ),
        ("auto", {"WANDB_API_KEY": KEY, "WANDB_MODE": "offline"}, "", "offline"),
        ("auto", {"WANDB_API_KEY": KEY, "WANDB_MODE": "dryrun"}, "", "offline"),
        ("auto", {"WANDB_API_KEY": KEY, "WANDB_MODE": "disabled"}, "", "disabled"),
        ("auto", {"WANDB_API_KEY": KEY, "WANDB_MODE": "online"}, "", "online"),
        ("offline", {"WANDB_API_KEY": KEY, "WANDB_MODE": "online"}, "", "offline"),
        ("disabled", {"WANDB_API_KEY": KEY, "WANDB_MODE": "online"}, "", "disabled"),
        ("online", {"WANDB_API_KEY": KEY, "WANDB_MODE": "disabled"}, "", "online"),
    ],
)
def test_mode(requested, environment, netrc, mode, home, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if netrc:
        (home / ".netrc").write_text(netrc + "\n")
    assert resolve_mode(TrackingConfig(wandb=requested)) == mode


def test_a_server_chosen_by_wandb_login_needs_a_key_of_its_own(home):
    (home / ".config" / "wandb").mkdir(parents=True)
    settings = home / ".config" / "wandb" / "settings"
    settings.write_text("[default]\nbase_url = https://own.org\n")
    (home / ".netrc").write_text(f"machine api.wandb.ai login user password {KEY}\n")
    assert resolve_mode(TrackingConfig()) == "offline"
    (home / ".netrc").write_text(f"machine own.org login user password {KEY}\n")
    assert resolve_mode(TrackingConfig()) == "online"


def test_the_netrc_path_can_be_set(home, monkeypatch):
    (home / "keys").write_text(f"machine api.wandb.ai login user password {KEY}\n")
    monkeypatch.setenv("NETRC", "~/keys")
    assert resolve_mode(TrackingConfig()) == "online"


def test_online_without_a_key_is_rejected(monkeypatch):
    with pytest.raises(UserError, match=r"tracking\.wandb: online needs a key"):
        resolve_mode(TrackingConfig(wandb="online"))
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(UserError, match="needs a key"):
        resolve_mode(TrackingConfig())


def test_an_unknown_mode_is_rejected(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "ofline")
    with pytest.raises(UserError, match=r"WANDB_MODE: 'ofline' \(nearest: offline\) is not one of"):
        resolve_mode(TrackingConfig())


# Offline


@pytest.mark.slow
def test_an_offline_run_records_everything_and_can_be_uploaded(overrides, runs, home, tmp_path):
    done = python(
        *("-m", "qkablate", "train", *overrides, "tracking.group=night", "tracking.tags=[a,b]"),
        # The key must neither be used nor written.
        **{"WANDB_MODE": "offline", "WANDB_API_KEY": KEY},
        **{"WANDB_PROJECT": "ours", "WANDB_ENTITY": "us"},
    )
    assert done.returncode == 0, done.stderr
    (run,) = runs()
    result = json.loads((run / "result.json").read_text())
    (recorded,) = offline(run)

    assert recorded.id == f"{result['id']}-1"
    assert recorded.name == result["label"] == "standard-d16-h2-s0"
    assert (recorded.project, recorded.entity) == ("ours", "us")
    assert (recorded.group, recorded.job_type) == ("night", "standard-d16-h2")
    assert sorted(recorded.tags) == ["a", "b", "data=text", "standard"]
    assert recorded.config["model"]["d_model"] == 16
    assert recorded.config["run_id"] == result["id"]
    assert recorded.exit_code == 0
    summary, read = recorded.summary, result["loss"]
    assert [summary[f"final/{split}_loss"] for split in ("train", "val", "test")] == [
        read[split] for split in ("train", "val", "test")
    ]
    assert (summary["params"], summary["final/tokens"]) == (result["params"]["total"], 384)
    assert summary["final/flops"] == result["flops_per_token"] * 384
    assert recorded.machine

    rows = read_rows(run)
    assert by_step(recorded.rows) == by_step(rows)
    assert set(by_step(recorded.rows)) == {0, 2, 4, 6, 8, 10, 12}
    assert all(row["_step"] == row["step"] for row in recorded.rows)
    assert recorded.metrics["*"].step_metric == "step"
    assert all(recorded.metrics[name].options.hidden for name in ("tokens", "flops", "seconds"))
    assert summary["val/loss"] == best_and_last(rows)

    assert set(recorded.artifacts) == {"run"}
    files = recorded.artifacts["run"]
    assert set(files) == {"config.yaml", "environment.json", "metrics.jsonl", "result.json"}
    assert json.loads(files.pop("result.json").read_text()).items() <= (
        {**result, "sha256": ANY, "wandb": None}.items()
    )
    assert all(path == run / name for name, path in files.items())  # nothing is copied
    assert set().union(*recorded.rows) >= METRICS
    assert all({"step", "tokens", "flops"} <= set(row) for row in recorded.rows + rows)

    # Nothing outside the run's folder, and no key in it.
    assert list(home.rglob("*")) == []
    assert not (tmp_path / "wandb").exists()
    assert holding(KEY, tmp_path / "outputs") == []

    assert done.stdout.strip().endswith(f"qkablate sync {run}")
    assert result["wandb"] == OFFLINE
    with FakeServer() as server:
        variables = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY}
        sent = python("-m", "qkablate", "sync", str(run), **variables)
        assert sent.returncode == 0, sent.stderr
        assert by_step(server.runs[recorded.id].rows) == by_step(rows)


KILLED = """
import os, signal, sys, time
from pathlib import Path
from qkablate.cli import main
from qkablate.tracking import MetricsFile

out, *words = sys.argv[1:]
from tests.tracking.wandb import log_reader

def log(self, row, real=MetricsFile.log):
    real(self, row)
    if row["step"] == 8:
        # Its records reach the disk within a second, not only at the end.
        end, (folder,) = time.monotonic() + 10, Path(out).glob("runs/*/wandb/offline-run-*")
        while len(log_reader.read(folder).rows) < 3 and time.monotonic() < end:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)

MetricsFile.log = log
main(words)
"""

FAILED_THEN_DONE_THEN_AGAIN = """
import contextlib, sys
from qkablate.cli import main
from qkablate.training.loop import Trainer

def step(self, number, real=Trainer._step):
    if number == 9:
        Trainer._step = real
        raise RuntimeError("the machine is on fire")
    return real(self, number)

Trainer._step = step
words = sys.argv[1:]
for more, code in ([], 1), ([], 0), (["--rerun"], 0):
    try:
        main([*words, *more])
    except SystemExit as end:
        assert end.code == code, (end.code, code)
"""


@pytest.mark.slow
def test_sessions_of_one_attempt_share_an_id_and_a_rerun_gets_a_new_one(overrides, runs, tmp_path):
    out = str(tmp_path / "outputs")
    killed = python("-c", KILLED, out, "train", *overrides, PYTHONPATH=str(ROOT))
    assert killed.returncode == -9, killed.stderr
    rest = python("-c", FAILED_THEN_DONE_THEN_AGAIN, "train", *overrides)
    assert rest.returncode == 0, rest.stderr
    assert "resuming from step 4" in rest.stderr

    (run,) = runs()
    id_ = json.loads((run / "result.json").read_text())["id"]
    first, second = offline(run / "attempts" / "1"), offline(run)
    assert [recorded.id for recorded in first] == [f"{id_}-1"] * 3
    assert [recorded.exit_code for recorded in first] == [None, 1, 0]
    assert len(first[0].rows) >= 3  # rows before the kill are recorded
    assert [set(by_step(recorded.rows)) for recorded in first[1:]] == [{6, 8}, {10, 12}]
    together = by_step([row for recorded in first for row in recorded.rows])
    rows = read_rows(run / "attempts" / "1")
    assert set(together) == set(by_step(rows))
    assert first[2].summary["val/loss"] == best_and_last(rows)  # not of the last session only
    assert [set(recorded.artifacts) for recorded in first] == [set(), {"run"}, {"run"}]
    assert "metrics.jsonl" not in first[1].artifacts["run"]  # it failed, and the rows changed later

    assert [(recorded.id, recorded.exit_code) for recorded in second] == [(f"{id_}-2", 0)]
    assert by_step(second[0].rows) == by_step(read_rows(run))


# Online


@pytest.mark.slow
def test_online_runs_of_one_process_are_separate(overrides, runs, home, tmp_path):
    with FakeServer() as server:
        machine = server.url.removeprefix("http://")
        (home / ".netrc").write_text(f"machine {machine} login user password {KEY}\n")
        done = python(
            *("-m", "qkablate", "train", "-m", *overrides),
            *("optim.lr=1e-3,1e3", "seed=0,1", "tracking.project=ours"),
            WANDB_BASE_URL=server.url,
        )
    assert done.returncode == 3, done.stderr
    assert len(server.runs) == len(runs()) == 4
    statuses = []
    for run in runs():
        result = json.loads((run / "result.json").read_text())
        received = server.runs[f"{result['id']}-1"]
        assert by_step(received.rows) == by_step(read_rows(run))
        assert received.name == result["label"]
        assert received.group == received.job_type == "standard-d16-h2"
        assert received.project == "ours"
        assert received.tags == ["standard", "data=text"]
        assert received.config["seed"] == result["seed"]
        assert received.system
        left = server.artifacts_of(f"{result['id']}-1")
        assert json.loads(left["run"].files["result.json"])["status"] == result["status"]
        assert left["run"].files["metrics.jsonl"] == (run / "metrics.jsonl").read_bytes()
        if result["status"] == "done":
            assert received.summary["val/loss"] == best_and_last(read_rows(run))
            assert received.summary["final/test_loss"] == result["loss"]["test"]
        assert received.complete
        assert received.exit_code == (0 if result["status"] == "done" else 3)
        assert result["wandb"].startswith(server.url)
        statuses.append(result["status"])
    assert sorted(statuses) == ["diverged", "diverged", "done", "done"]
    assert "wandb:" not in done.stderr
    assert [path.name for path in home.rglob("*")] == [".netrc"]
    assert not (tmp_path / "wandb").exists()
    assert holding(KEY, tmp_path / "outputs") == []


@pytest.mark.exhaustive
def test_translator_logs_its_metrics_config_and_examples(runs, tmp_path):
    words = ["model=nano_translator", "model.layers=1", "data=reverse", "train.steps=6"]
    words += ["tracking.log_every=2", "threads=1", f"out={tmp_path}/outputs"]
    with FakeServer() as server:
        variables = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY}
        done = python("-m", "qkablate", "train", *words, **variables)
        assert done.returncode == 0, done.stderr
    (run,) = runs()
    result = json.loads((run / "result.json").read_text())
    received = server.runs[f"{result['id']}-1"]
    assert received.complete
    assert received.config["model"]["form"] == "encoder_decoder"
    assert received.config["data"]["source"] == "reverse"
    assert received.summary["final/test_exact"] == result["exact"]["test"]
    by_step_received = by_step(received.rows)
    table = by_step_received[6].pop("examples")
    expected = by_step(read_rows(run))
    for row in expected.values():  # its layers have names by site, which the next line checks
        for name in [name for name in row if name.startswith(("qk/", "ov/", "attention/"))]:
            del row[name]
    assert by_step_received.keys() == expected.keys()
    assert all(by_step_received[step].items() >= row.items() for step, row in expected.items())
    assert {"qk/stable_rank/encoder_L0", "ov/moved/cross_L0"} <= set(by_step_received[6])
    assert received.summary["examples"]["path"] == table["path"]  # which views of sweeps show
    content = json.loads(received.files[table["path"]])
    assert content["columns"] == ["source", "target", "output", "right", "nats_per_token"]
    assert len(content["data"]) == 10
    for source, target, output, right, _ in content["data"]:
        assert target.split() == source.split()[::-1]
        assert right == (output == target)


# Failures

SCRIPT = """
import json, os, sys
from pathlib import Path
from qkablate.config import TrackingConfig
from qkablate.tracking.wandb import mode, run as run_module

mode.CONNECT_SECONDS, run_module.INIT_SECONDS, run_module.FINISH_SECONDS = 1, 1, 1
{before}
notes, folder = [], Path(sys.argv[1])
folder.mkdir()
identity = run_module.RunIdentity("abc-1", "a run", "a group", "an arm", ("a", "b"))
it = run_module.WandbRun(TrackingConfig(), identity, folder, {{"seed": 1}}, notes.append)
for step in range(5):
    it.log({{"step": step, "train/loss": 1.5}})
    {after_log}
it.close({{"final/status": "done"}}, 0)
print(json.dumps([notes, it.address]))
"""


def log_five_rows(run: Path, before: str = "", after_log: str = "", **variables: str) -> list[Any]:
    """Return the messages of W&B's client, and its address, after five rows."""
    script = SCRIPT.format(before=before, after_log=after_log)
    done = python("-c", script, str(run), **variables)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


@pytest.mark.slow
def test_an_unreachable_server_means_offline(overrides, runs):
    done = python(
        *("-m", "qkablate", "train", *overrides),
        WANDB_BASE_URL=dead_url(),
        WANDB_API_KEY=KEY,
    )
    assert done.returncode == 0, done.stderr
    assert "does not answer" in done.stderr
    assert "recording offline" in done.stderr
    (run,) = runs()
    (recorded,) = offline(run)
    assert by_step(recorded.rows) == by_step(read_rows(run))
    assert done.stdout.strip().endswith(f"qkablate sync {run}")


@pytest.mark.exhaustive
@pytest.mark.parametrize("url", ["foo", "http://:x", "http://app.wandb.ai"])
def test_an_invalid_address_means_offline(url, overrides, runs):
    words = ["-m", "qkablate", "train", *overrides]
    done = python(*words, WANDB_BASE_URL=url, WANDB_API_KEY=KEY)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "W&B" in line or "wandb" in line]
    assert f"WANDB_BASE_URL: '{url}' is not the address of a server (" in line
    assert line.endswith("; recording offline")
    (run,) = runs()
    (recorded,) = offline(run)
    assert by_step(recorded.rows) == by_step(read_rows(run))
    assert done.stdout.strip().endswith(f"qkablate sync {run}")


@pytest.mark.slow
def test_an_invalid_address_is_ignored_offline(tmp_path):
    run = tmp_path / "run"
    assert log_five_rows(run, WANDB_BASE_URL="foo") == [[], OFFLINE]
    assert len(offline(run)[0].rows) == 5


@pytest.mark.parametrize("url", ["foo", "http://:x", "http://[::1", "http://a b/"])
def test_an_invalid_address_does_not_answer(url):
    assert probe_server(url).startswith(f"{url} does not answer (")


def test_a_server_without_http_does_not_answer():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            connection, _ = server.accept()
            with connection:
                connection.recv(10_000)
                connection.sendall(b"rubbish\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert probe_server(url) == f"{url} does not answer (rubbish)"
        thread.join()


def test_an_invalid_address_has_no_key(home, monkeypatch):
    (home / ".netrc").write_text(f"machine api.wandb.ai login user password {KEY}\n")
    monkeypatch.setenv("WANDB_BASE_URL", "http://[::1")
    assert resolve_mode(TrackingConfig()) == "offline"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("server", "key", "message"),
    [
        ({"status": 401}, KEY, "401"),
        ({}, "short", "WANDB_API_KEY invalid"),
        ({"hangs_at": "/"}, KEY, "does not answer (timed out)"),
        ({"hangs_at": "/graphql"}, KEY, "deadline"),
        ({"dies_at": "/graphql"}, KEY, "deadline"),
    ],
)
def test_a_run_that_cannot_start_online_is_recorded_offline(server, key, message, tmp_path):
    run = tmp_path / "run"
    with FakeServer(**server) as fake:
        notes, address = log_five_rows(run, WANDB_BASE_URL=fake.url, WANDB_API_KEY=key)
    assert len(notes) == 1
    assert message in notes[0]
    assert "recording offline" in notes[0]
    assert address == OFFLINE
    (recorded,) = offline(run)
    assert [row["step"] for row in recorded.rows] == [0, 1, 2, 3, 4]
    assert recorded.exit_code == 0


DYING = """
import sys
from qkablate.cli import main
from qkablate.tracking.wandb import run as run_module

run_module.FINISH_SECONDS = 2
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_training_continues_when_the_server_dies(overrides, runs):
    with FakeServer(dies_at="/file_stream") as server:
        done = python(
            *("-c", DYING, "train", *overrides),
            WANDB_BASE_URL=server.url,
            WANDB_API_KEY=KEY,
        )
        assert server.dead.is_set()
    assert done.returncode == 0, done.stderr
    (run,) = runs()
    assert f"W&B: upload unfinished after 2 s; to finish it: qkablate sync {run}\n" in done.stderr
    assert done.stdout.strip().endswith(f"qkablate sync {run}")
    result = json.loads((run / "result.json").read_text())
    assert (result["status"], result["wandb"]) == ("done", OFFLINE)
    assert [row["step"] for row in read_rows(run)] == [0, 0, 2, 4, 6, 6, 6, *(8, 10, 12, 12, 12)]
    # The rows that were not sent are on disk, and marked as unsent.
    (folder,) = (run / "wandb").glob("run-*")
    assert by_step(log_reader.read(folder).rows) == by_step(read_rows(run))
    with FakeServer() as server:
        variables = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY}
        sent = python("-m", "qkablate", "sync", f"out={run.parents[1]}", **variables)
        assert sent.returncode == 0, sent.stderr
        assert by_step(server.runs[f"{result['id']}-1"].rows) == by_step(read_rows(run))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for a process in /proc")
def test_training_continues_when_the_process_of_wandb_dies(tmp_path):
    kill = """
    if step == 2:
        (child,) = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        os.kill(int(child), 9)
        os.waitpid(int(child), 0)
    """
    notes, _ = log_five_rows(tmp_path / "run", after_log=kill.strip())
    assert len(notes) == 1
    assert notes[0].endswith("continuing without it")


@pytest.mark.slow
def test_there_is_no_prompt_for_a_key(tmp_path):
    """Even on a terminal, with credentials that qkablate accepts and W&B does not."""
    before = """
import pty, tty
_, slave = pty.openpty()
for stream in (0, 2):
    os.dup2(slave, stream)
run_module.resolve_mode = lambda tracking: "online"
"""
    run = tmp_path / "run"
    with FakeServer() as server:
        notes, _ = log_five_rows(run, before, WANDB_BASE_URL=server.url, TERM="xterm")
    assert notes == [
        "W&B: No API key configured. Use `wandb login` to log in.; recording offline instead"
    ]
    assert len(offline(run)) == 1


FULL_DISK = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
"""


@pytest.mark.slow
def test_an_incomplete_log_is_reported(tmp_path):
    """Limit the size of the files of W&B's process, which does not report it."""
    notes, address = log_five_rows(
        tmp_path / "run", FULL_DISK, "it.log({'step': step, 'a': 'b' * 4000})"
    )
    assert notes == ["W&B: the log is incomplete (File too large); metrics.jsonl is complete"]
    assert address == OFFLINE


@pytest.mark.exhaustive
def test_the_last_checkpoint_is_uploaded_with_tracking_artifacts(overrides, runs, tmp_path):
    with FakeServer() as server:
        done = python(
            *("-m", "qkablate", "train", *overrides, "tracking.artifacts=true"),
            **{"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY},
        )
        assert done.returncode == 0, done.stderr
    (run,) = runs()
    id_ = json.loads((run / "result.json").read_text())["id"]
    model = server.artifacts_of(f"{id_}-1")["model"]
    step = "checkpoints/step-00000012"
    assert {name for name in model.files if name.startswith(step)} == {
        f"{step}/{path.name}" for path in (run / step).iterdir()
    }
    assert all(content == (run / name).read_bytes() for name, content in model.files.items())
    for name, content in model.files.items():  # the downloaded files are a run to sample from
        path = tmp_path / "back" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    sampled = python("-m", "qkablate", "sample", str(tmp_path / "back"))
    assert sampled.returncode == 0, sampled.stderr


class Stub:
    """A W&B run that raises errors."""

    def __init__(self, log: Exception | None = None, finish: Exception | None = None) -> None:
        self.summary: dict[str, Any] = {}
        self.calls: list[str] = []
        self._log, self._finish = log, finish

    def log(self, row: dict[str, Any], step: int) -> None:
        self.calls.append(f"log {step}")
        if self._log:
            raise self._log

    def finish(self, exit_code: int) -> None:
        self.calls.append(f"finish {exit_code}")
        if self._finish:
            raise self._finish


def stubbed(monkeypatch, folder: Path, start: Callable[..., Any]) -> tuple[WandbRun, list[str]]:
    for name in ("WANDB_CACHE_DIR", "WANDB_ERROR_REPORTING"):
        monkeypatch.setenv(name, "set here, so that monkeypatch restores it")
    monkeypatch.setattr(WandbRun, "_start", start)
    monkeypatch.setattr(WandbRun, "_stop_service", lambda self: None)
    notes: list[str] = []
    identity = RunIdentity("abc-1", "a run", "a group", "an arm", ())
    return WandbRun(TrackingConfig(), identity, folder, {}, notes.append), notes


@pytest.mark.parametrize("finish", [None, RuntimeError("no"), TimeoutError("no")])
def test_an_error_while_logging_ends_only_the_wandb_run(finish, monkeypatch, tmp_path):
    stub = Stub(log=OSError("the disk is full\nand more of it"), finish=finish)
    wandb_run, notes = stubbed(monkeypatch, tmp_path, lambda *_: stub)
    for step in range(3):
        wandb_run.log({"step": step})
    wandb_run.close({}, 0)
    assert notes == ["W&B: the disk is full; continuing without it"]
    assert stub.calls == ["log 0", "finish 1"]
    assert wandb_run.address == "offline"  # the server has not all of it


@pytest.mark.parametrize("error", [RuntimeError("no"), TimeoutError("no")])
def test_an_error_at_the_end_is_reported(error, monkeypatch, tmp_path):
    stub = Stub(finish=error)
    wandb_run, notes = stubbed(monkeypatch, tmp_path, lambda *_: stub)
    wandb_run.log({"step": 7})
    wandb_run.close({"final/status": "done"}, 3)
    wandb_run.close({}, 0)
    assert stub.calls == ["log 7", "finish 3"]
    assert stub.summary == {"final/status": "done"}
    assert len(notes) == 1
    assert wandb_run.address == "offline"


def test_tables_are_kept_in_the_folder_of_their_run(monkeypatch, tmp_path):
    """Also if other runs of this process have begun since, as vmapped runs do."""
    seen: list[tuple[str, str]] = []

    class Observed(Stub):
        def log(self, row: dict[str, Any], step: int | None) -> None:
            seen.append((os.environ["WANDB_DATA_DIR"], tempfile.gettempdir()))

    runs = [
        stubbed(monkeypatch, tmp_path / name, lambda *_: Observed())[0] for name in ("one", "two")
    ]
    before = tempfile.gettempdir()
    for run in runs:
        run.log_tables(LoggedTables({"examples": (["a"], [[1]])}))
    for run in reversed(runs):
        run.close({}, 0)
    folders = [tmp_path / name / "wandb" for name in ("one", "two")]
    assert seen == [(str(folder / "data"), str(folder / "tmp")) for folder in folders]
    assert tempfile.gettempdir() == before
    assert not any((folder / "tmp").exists() for folder in folders)


def test_other_processes_get_the_variables_of_the_user(monkeypatch, tmp_path):
    """The folders and the service of a run are not for the runs of a later sweep."""
    monkeypatch.setenv("WANDB_SERVICE", "a run's")
    stubbed(monkeypatch, tmp_path, lambda *_: Stub())
    assert os.environ["WANDB_DATA_DIR"] == str(tmp_path / "wandb" / "data")
    found = users_environment()
    assert not {"WANDB_DATA_DIR", "WANDB_SERVICE"} & {*found}
    assert found["WANDB_CACHE_DIR"] == "set here, so that monkeypatch restores it"


def test_a_wandb_run_that_cannot_start_is_off(monkeypatch, tmp_path):
    def start(*_: Any) -> None:
        raise OSError("the disk is full")

    wandb_run, notes = stubbed(monkeypatch, tmp_path, start)
    wandb_run.log({"step": 1})
    wandb_run.close({}, 0)
    assert notes[-1] == "W&B: the disk is full; continuing without it"
    assert wandb_run.address is None


def test_wandb_is_not_imported_when_disabled(tmp_path):
    script = SCRIPT.format(before="", after_log="") + "assert 'wandb' not in sys.modules"
    done = python("-c", script, str(tmp_path / "run"), WANDB_MODE="disabled")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[], None]
    assert list((tmp_path / "run").iterdir()) == []
