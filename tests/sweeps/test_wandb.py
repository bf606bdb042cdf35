"""A sweep in W&B: its runs together, under names one can group and filter by, and one table.

W&B holds on to a process, so that each sweep here has one of its own.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "tracking"))
import wandb_log
from fake_server import FakeServer

BOUND = 240  # seconds: then it hangs
KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def words(tiny):
    """Three arms, one of which pays for what it lacks; the baseline stands under both controls."""
    own = [word for word in tiny if not word.startswith("track.wandb=")]
    return [*own, "variant=standard,no_q", "control=none,params", "seed=0", "workers=2"]


def sweep(*words, **variables):
    """The command in a process of its own, without a terminal."""
    return subprocess.run(
        [sys.executable, "-m", "qkablate", "sweep", *words],
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=BOUND,
    )


def recorded(folder):
    return [wandb_log.read(path) for path in sorted((folder / "wandb").glob("offline-run-*"))]


def test_offline(words, tmp_path, home):
    done = sweep(*words, "track.wandb=offline", "track.tags=[mine]")
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.glob("outputs/sweeps/*/")
    manifest = json.loads((folder / "manifest.json").read_text())
    own = {run["id"]: run for run in manifest["runs"]}
    assert len(own) == 3
    for id, run in own.items():
        (path,) = tmp_path.glob(f"outputs/runs/*-{id}")
        (log,) = recorded(path)
        arm = manifest["arms"][run["arm"]]
        assert (log.id, log.name) == (f"{id}-1", run["label"])
        assert (log.group, log.job_type) == (folder.name, run["arm"])
        tags = {arm["variant"], "mine", "d_model=16", "heads=2"}
        assert set(log.tags) == tags | {f"control={name}" for name in arm["controls"]}
        assert log.exit_code == 0
        assert {row["step"] for row in log.rows} >= {2, 4, 6, 8, 10, 12}
    controls = {name: set(arm["controls"]) for name, arm in manifest["arms"].items()}
    assert controls == {
        "standard-d16-h2": {"none", "params"},
        "no_q-d16-h2": {"none"},
        "no_q-d16-h2-params": {"params"},
    }

    (log,) = recorded(folder)
    assert (log.name, log.group, log.job_type) == (folder.name, folder.name, "sweep")
    assert log.id == f"sweep-{folder.name.rpartition('-')[2]}"
    assert set(log.tags) == {"sweep", "mine"}
    assert log.exit_code == 0
    assert log.summary["runs/done"] == 3
    (path,) = folder.glob("wandb/offline-run-*/files/media/table/runs_*.json")
    table = json.loads(path.read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    told = json.loads(status(folder))["states"]
    assert rows == told
    assert {row["id"] for row in rows} == set(own)
    assert f"wandb sync {folder}/wandb/offline-run-*" in done.stdout

    # What has been done before is not told again.
    again = sweep(*words, "track.wandb=offline", "track.tags=[mine]")
    assert again.returncode == 0
    assert len(recorded(folder)) == 1
    # And nothing is written outside the folders of the sweep and its runs.
    assert list(home.rglob("*")) == []
    assert not (tmp_path / "wandb").exists()


def test_all_runs_have_one_process_of_its_own_and_can_do_without(spawn, words, tmp_path, home):
    """It is killed while two runs are mirrored: they end well, and the others are mirrored."""
    words = [*words, "variant=standard", "seed=range(4)", "control=none", "train.steps=300"]
    launcher = spawn("sweep", *words, "track.wandb=offline")
    while launcher.poll() is None:
        begun = [
            path for path in tmp_path.glob("outputs/runs/*/metrics.jsonl") if path.stat().st_size
        ]
        if len(begun) >= 2 and (core := wandb_processes(home)):
            break
    assert len(core) == 1
    os.kill(core[0], signal.SIGKILL)
    _, err = launcher.communicate(timeout=BOUND)
    assert launcher.returncode == 0, err
    logs = [log for path in tmp_path.glob("outputs/runs/*") for log in recorded(path)]
    assert len(logs) >= 4
    assert sum(log.exit_code == 0 for log in logs) >= 2
    assert wandb_processes(home) == []


def wandb_processes(home):
    """Those of this test."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            name = (path / "cmdline").read_bytes().split(b"\0")[0]
            if (
                name.endswith(b"wandb-core")
                and str(home).encode() in (path / "environ").read_bytes()
            ):
                found.append(int(path.name))
    return found


def status(folder):
    command = [sys.executable, "-m", "qkablate", "status", str(folder), "--json"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


class TableServer(FakeServer):
    """It has every table already, so that none is asked of us."""

    def _graphql(self, operation, given):
        if operation == "ArtifactType":
            return {"project": None}
        if operation == "CreateArtifact":
            sequence = {"id": "1", "latestArtifact": None}
            artifact = {"id": "1", "state": "COMMITTED", "artifactSequence": sequence}
            return {"createArtifact": {"artifact": artifact}}
        return super()._graphql(operation, given)


def test_online(words, tmp_path):
    with TableServer() as server:
        done = sweep(
            *words,
            *("track.project=ours", "track.group=august", "sweep.name=which"),
            WANDB_BASE_URL=server.url,
            WANDB_API_KEY=KEY,
        )
        received = dict(server.runs)
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.glob("outputs/sweeps/*/")
    manifest = json.loads((folder / "manifest.json").read_text())
    table = received.pop(f"sweep-{folder.name.rpartition('-')[2]}")
    assert set(received) == {f"{run['id']}-1" for run in manifest["runs"]}
    assert (table.name, table.job_type, table.tags) == (folder.name, "sweep", ["sweep"])
    assert sorted(run.job_type for run in received.values()) == sorted(manifest["arms"])
    for run in (table, *received.values()):
        assert (run.project, run.group) == ("ours", "august")
        assert (run.complete, run.exit_code) == (True, 0)
    (row,) = table.rows
    assert row["runs"]["nrows"] == 3
    assert server.url in done.stdout
    assert KEY not in done.stdout + done.stderr
