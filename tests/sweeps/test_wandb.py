"""A sweep in W&B: its runs in one group with tags, and one run with its tables.

W&B keeps state in its process, so that each sweep here runs in a separate one.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.helpers import without_keys
from tests.tracking.wandb import log_reader
from tests.tracking.wandb.fake_server import FakeServer

BOUND = 240  # seconds until a command counts as hanging
KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def words(tiny):
    """Return arguments of three arms, one with adjusted size; the baseline has both controls."""
    own = [word for word in tiny if not word.startswith("tracking.wandb=")]
    return [
        *own,
        "variant=standard,no_q",
        "control=none,params",
        "seed=0",
        "workers=2",
        "sweep.floor=false",
    ]


def sweep(*words, **variables):
    """Run the command in a separate process, without a terminal."""
    return subprocess.run(
        [sys.executable, "-m", "qkablate", "sweep", *words],
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=BOUND,
    )


def read_records(folder):
    return [log_reader.read(path) for path in sorted((folder / "wandb").glob("offline-run-*"))]


@pytest.mark.slow
def test_offline_sweep_records_runs_tables_and_report(words, tmp_path, home, qkablate):
    words = [*words, "seed=0,1", "tracking.wandb=offline", "tracking.tags=[mine]"]
    done = sweep(*words)
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.glob("outputs/sweeps/*/")
    manifest = json.loads((folder / "manifest.json").read_text())
    own = {run["id"]: run for run in manifest["runs"]}
    assert len(own) == 6
    for id, run in own.items():
        (path,) = tmp_path.glob(f"outputs/runs/*-{id}")
        (log,) = read_records(path)
        arm = manifest["arms"][run["arm"]]
        assert (log.id, log.name) == (f"{id}-1", run["label"])
        assert (log.group, log.job_type) == (folder.name, run["arm"])
        tags = {arm["variant"], "data=text", "mine", "d_model=16", "heads=2"}
        assert set(log.tags) == tags | {f"control={name}" for name in arm["controls"]}
        assert log.exit_code == 0
        assert {row["step"] for row in log.rows} >= {2, 4, 6, 8, 10, 12}
    controls = {name: set(arm["controls"]) for name, arm in manifest["arms"].items()}
    assert controls == {
        "standard-d16-h2": {"none", "params"},
        "no_q-d16-h2": {"none"},
        "no_q-d16-h2-params": {"params"},
    }

    (log,) = read_records(folder)
    assert (log.name, log.group, log.job_type) == (folder.name, folder.name, "sweep")
    assert log.id == f"sweep-{folder.name.rpartition('-')[2]}"
    assert set(log.tags) == {"sweep", "mine"}
    assert log.exit_code == 0
    assert log.summary["runs/done"] == 6
    rows = table(folder, "runs")
    assert rows == json.loads(qkablate("status", str(folder), "--json").out)["states"]
    assert {row["id"] for row in rows} == set(own)

    # Gaps with their intervals, verdicts, charts and the report.
    gaps, found = table(folder, "gaps"), json.loads(qkablate("results", str(folder), "--json").out)
    assert [gap["arm"] for gap in gaps] == ["no_q-d16-h2", "no_q-d16-h2-params"]
    for gap, one in zip(gaps, found["gaps"], strict=True):
        assert (gap["gap"], [gap["low"], gap["high"]]) == (one["mean"], one["interval"])
        for name in ("arm", "baseline", "n", "sd", "p", "p_holm", "detectable"):
            assert gap[name] == one[name]
        assert gap["verdict"] == "too few pairs (under 3)"  # one seed
        in_line = log.summary[f"gap/{gap['arm']}"]
        assert in_line == {name: gap[name] for name in in_line}
        assert {"gap", "low", "high", "n", "p_holm", "verdict"} <= set(in_line)
        run = next(run for run in own.values() if run["arm"] == gap["arm"])
        (path,) = tmp_path.glob(f"outputs/runs/*-{run['id']}")
        summary = read_records(path)[0].summary
        assert not any("gap" in name for name in summary)  # a gap needs two runs
    (apart,) = found["function_distance"]
    distances = table(folder, "distances")
    assert len(distances) == len(apart["distances"]) == 3  # two arms, and another seed
    for row, one in zip(distances, apart["distances"], strict=True):
        assert (row["baseline"], row["positions"]) == (apart["baseline"], apart["positions"])
        assert (row["nats"], [row["low"], row["high"]]) == (
            one["end"],
            one["interval"] or [None, None],
        )
        for name in ("arm", "n", "times_another_seed", "times_rounding"):
            assert row[name] == one[name]
    assert [row["arm"] for row in table(folder, "verdicts")] == [*manifest["arms"]]
    assert "Compared with standard on the same data and seeds" in log.summary["answer"]
    media = next(folder.glob("wandb/offline-run-*/files/media/html"))
    (page,) = media.glob("report_*.html")
    assert log.summary["answer"].partition(".")[0] in page.read_text()
    assert any("<svg" in path.read_text() for path in media.glob("charts/gaps_*.html"))
    assert f"qkablate sync {folder.name} out={folder.parents[1]}" in done.stdout

    # A finished sweep is not logged again.
    again = sweep(*words)
    assert again.returncode == 0
    assert len(read_records(folder)) == 1
    # Nothing is written outside the folders of the sweep and its runs.
    assert list(home.rglob("*")) == []
    assert not (tmp_path / "wandb").exists()


@pytest.mark.slow
def test_runs_survive_the_death_of_their_shared_wandb_process(spawn, words, tmp_path, home):
    """W&B's process is killed while two runs are logged: they succeed, and the rest is logged."""
    own = ["variant=standard", "seed=range(4)", "control=none", "train.steps=300"]
    words = [*without_keys(words, own), *own]
    launcher = spawn("sweep", *words, "tracking.wandb=offline")
    while launcher.poll() is None:
        begun = [
            path for path in tmp_path.glob("outputs/runs/*/metrics.jsonl") if path.stat().st_size
        ]
        if len(begun) >= 2 and (core := wandb_processes(home)):
            break
        time.sleep(0.02)
    assert len(core) == 1
    os.kill(core[0], signal.SIGKILL)
    _, err = launcher.communicate(timeout=BOUND)
    assert launcher.returncode == 0, err
    logs = [log for path in tmp_path.glob("outputs/runs/*") for log in read_records(path)]
    assert len(logs) >= 4
    assert sum(log.exit_code == 0 for log in logs) >= 2
    assert wandb_processes(home) == []


def wandb_processes(home):
    """Return the pids of W&B's processes of this test."""
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


def table(folder, name):
    (path,) = folder.glob(f"wandb/offline-run-*/files/media/table/{name}_*.json")
    content = json.loads(path.read_text())
    return [dict(zip(content["columns"], row, strict=True)) for row in content["data"]]


WITHOUT = """
import sys
{broken}
from qkablate.cli import main
main(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("sys.modules['jinja2'] = None", "import of jinja2 halted"),
        ("import qkablate.report.page as p; p.render_page = lambda *_: 1 / 0", "division by zero"),
    ],
)
def test_table_is_logged_even_if_the_report_fails(broken, message, words, tmp_path):
    script = ["-c", WITHOUT.format(broken=broken), "sweep", *words, "tracking.wandb=offline"]
    done = subprocess.run(
        [sys.executable, *script],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=BOUND,
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "W&B: the table of runs" in line]
    assert message in line
    (folder,) = tmp_path.glob("outputs/sweeps/*/")
    assert len(table(folder, "runs")) == 3
    assert read_records(folder)[0].exit_code == 0


@pytest.mark.slow
def test_online_sweep_uploads_runs_tables_and_report(words, tmp_path):
    with FakeServer() as server:
        done = sweep(
            *words,
            *("tracking.project=ours", "tracking.group=august", "sweep.name=which"),
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
    assert {name for name in row if name[0] != "_"} >= {
        *("runs", "gaps", "verdicts", "distances", "report")
    }
    assert {one.name.rpartition("-")[2] for one in server.artifacts if one.kind == "run_table"} == {
        *("runs", "gaps", "verdicts", "distances")
    }
    assert table.files[row["report"]["path"]].startswith(b"<!doctype html>")
    assert all(server.artifacts_of(f"{run['id']}-1")["run"].is_complete for run in manifest["runs"])
    assert server.url in done.stdout
    assert KEY not in done.stdout + done.stderr
