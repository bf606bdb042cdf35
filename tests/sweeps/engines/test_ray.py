"""The Ray engine; tests/sweeps/running/test_launcher.py has the tests of all engines."""

import importlib.util
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qkablate.runs.lease import is_leased
from qkablate.sweeps.engines.ray.cluster import ClusterRequest, runs_per_node
from tests.sweeps.run_checks import assert_same, final_state

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None and not os.environ.get("QKABLATE_NEEDS_RAY"),
    reason="Ray is not installed",
)


@pytest.fixture
def grid(tiny):
    return [
        "sweep",
        *tiny,
        "sweep.baseline=null",
        "sweep.floor=false",
        "variant=standard",
        "seed=0,1",
        "engine=ray",
    ]


@pytest.mark.slow
def test_private_cluster_gives_the_local_results(spawn, qkablate, grid, tiny, tmp_path, home):
    """Results are bit-identical; the cluster listens on loopback only and leaves nothing behind."""
    words = [*grid, "train.steps=40"]
    assert qkablate(*words, "engine=local", f"out={tmp_path / 'calm'}").code == 0
    before = processes_of(home)
    launcher = spawn(*words)
    wait_for_runs(launcher, tmp_path)
    places = {socket.inet_ntoa(place) for place in listening(home)}
    assert places == {"127.0.0.1"}
    _, err = launcher.communicate(timeout=300)
    assert launcher.returncode == 0, err
    assert "Traceback" not in err
    assert processes_of(home) == before
    assert not list(home.iterdir())
    assert_all_same(tmp_path / "calm", tmp_path / "outputs")


@pytest.mark.exhaustive
def test_run_with_killed_worker_is_resumed_elsewhere(spawn, qkablate, grid, ray, tmp_path):
    words = [*grid, "train.steps=400", "train.checkpoint_every=1000"]
    assert qkablate(*words, "engine=local", f"out={tmp_path / 'calm'}").code == 0
    launcher = spawn(*words, f"engine.address={ray}")
    wait_for_runs(launcher, tmp_path)
    (run, *_) = running(tmp_path)
    os.kill(parent(parent(run)), signal.SIGKILL)
    _, err = launcher.communicate(timeout=300)
    assert launcher.returncode == 0, err
    assert "restarting elsewhere" in err
    assert_all_same(tmp_path / "calm", tmp_path / "outputs")
    results = [json.loads(path.read_text()) for path in tmp_path.glob("outputs/runs/*/result.json")]
    assert all(result["attempt"] == 1 for result in results)  # resumed, not restarted


@pytest.mark.exhaustive
def test_killed_driver_leaves_checkpoints(spawn, qkablate, grid, ray, tmp_path):
    words = [*grid, f"engine.address={ray}", "train.steps=100000", "train.checkpoint_every=100000"]
    launcher = spawn(*words)
    wait_for_runs(launcher, tmp_path)
    folders = list(tmp_path.glob("outputs/runs/*"))
    os.kill(driver(launcher.pid), signal.SIGKILL)
    _, err = launcher.communicate(timeout=300)
    assert launcher.returncode == 1
    assert err.splitlines()[-1].startswith("qkablate: the Ray cluster")
    assert "Traceback" not in err
    wait_for_their_end(folders)
    assert all(list(folder.glob("checkpoints/step-*")) for folder in folders)
    report = json.loads(qkablate("status", "--json").out)
    assert {state["status"] for state in report["states"]} <= {"interrupted", "waiting"}


@pytest.mark.exhaustive
def test_lost_cluster_is_reported_in_one_line(
    spawn, qkablate, grid, other_ray, tmp_path, monkeypatch
):
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "1")  # before Ray gives up
    other_ray.start("--num-cpus=2")
    words = [*grid, f"engine.address={other_ray.address}", "train.steps=100000"]
    launcher = spawn(*words)
    wait_for_runs(launcher, tmp_path)
    other_ray.stop()
    _, err = launcher.communicate(timeout=300)
    assert launcher.returncode == 1
    assert err.splitlines()[-1].startswith("qkablate: the Ray cluster")
    assert "Traceback" not in err
    folders = list(tmp_path.glob("outputs/runs/*"))
    wait_for_their_end(folders)
    report = json.loads(qkablate("status", "--json").out)
    assert "interrupted" in {state["status"] for state in report["states"]}


# The node pretends to have a GPU: runs request a fraction of it, and train on the CPU.
_ON_A_PART = """
import sys
from qkablate.cli import main
from qkablate.sweeps.planning import packing
packing.gpus_per_run = lambda *_: float(sys.argv[1])
main(sys.argv[2:])
"""


@pytest.mark.exhaustive
def test_runs_share_a_gpu(grid, ray, tmp_path):
    words = [*grid, f"engine.address={ray}", "train.steps=100000"]
    command = [sys.executable, "-c", _ON_A_PART, "0.5", *words]
    launcher = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_for_runs(launcher, tmp_path, runs=2)
    runs = running(tmp_path)
    assert len(runs) == 2
    assert {environment(run)["CUDA_VISIBLE_DEVICES"] for run in runs} == {"0"}
    launcher.send_signal(signal.SIGTERM)
    _, err = launcher.communicate(timeout=300)
    assert launcher.returncode == 143
    assert "room for 2 at once" in err


@pytest.mark.parametrize(
    ("cpus", "gpus", "count"),
    [(1, 0, 8), (3, 0, 2), (1, 1, 2), (1, 0.5, 4), (1, 0.3, 6), (8, 2, 1)],
)
def test_runs_per_node_follow_from_cpus_and_gpus(cpus, gpus, count):
    """A fraction of a GPU never spans two."""
    request = ClusterRequest(None, cpus, gpus, "", "")
    assert runs_per_node({"CPU": 8.0, "GPU": 2.0}, request) == count


@pytest.mark.exhaustive
def test_folder_invisible_to_a_node_is_named(qkablate, grid, other_ray, tmp_path):
    out = tmp_path / "outputs"
    out.mkdir()
    blind = f'mount -t tmpfs none {out} && exec "$@"'
    other_ray.start("--num-cpus=0")
    try:
        before = ("unshare", "-m", "sh", "-c", blind, "sh")
        other_ray.start("--num-cpus=2", "--node-name=blind", before=before)
    except (AssertionError, OSError) as error:
        pytest.skip(f"no mounts of one's own here: {error}")
    done = qkablate(*grid, f"engine.address={other_ray.address}")
    assert done.code == 2
    folder = next(out.glob("sweeps/*"))
    assert done.err.endswith(f"out: node blind does not see the sweep's folder '{folder}'\n")
    assert not list(tmp_path.glob("outputs/runs/*"))
    assert not list(folder.glob(".ray-*"))


@pytest.mark.slow
def test_request_larger_than_any_node_is_rejected(qkablate, grid, ray, tmp_path, monkeypatch):
    done = qkablate(*grid, f"engine.address={ray}", "engine.cpus=3")
    assert done.code == 2
    says = "qkablate: engine.cpus: a run needs 3, and the largest node has 2"
    assert done.err.splitlines()[-1] == says
    monkeypatch.setattr("qkablate.sweeps.planning.packing.gpus_per_run", lambda *_: 2)
    done = qkablate(*grid, f"engine.address={ray}")
    assert done.code == 2
    says = "qkablate: engine.gpus: a run needs 2, and the largest node has 1"
    assert done.err.splitlines()[-1] == says
    assert not list(tmp_path.glob("outputs/runs/*"))


@pytest.mark.parametrize("address", ["somewhere", "host:", "ray://", "host:99999", "http://h:80"])
def test_invalid_address_is_rejected(qkablate, grid, address, tmp_path):
    done = qkablate(*grid, f'engine.address="{address}"')
    assert done.code == 2
    assert f"engine.address: '{address}' is not null, auto, HOST:PORT" in done.err
    assert not (tmp_path / "outputs").exists()


def test_unreachable_address_is_rejected(qkablate, grid, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    done = qkablate(*grid, f"engine.address={address}")
    assert done.code == 2
    assert done.err == (
        f"qkablate: engine.address: nothing answers at '{address}': Connection refused\n"
    )
    assert not (tmp_path / "outputs").exists()


@pytest.mark.slow
def test_invalid_token_is_reported_in_one_line(qkablate, grid, ray, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    done = qkablate(*grid, f"engine.address={ray}")
    assert done.code == 2
    last = done.err.splitlines()[-1]
    assert last.startswith("qkablate: engine.address: ")
    assert "InvalidAuthToken" in last
    assert "Traceback" not in done.err


def wait_for_runs(launcher, tmp_path, runs=1):
    """Wait until so many runs have trained."""
    while launcher.poll() is None:
        begun = 0
        for path in tmp_path.glob("outputs/runs/*/metrics.jsonl"):
            rows = [json.loads(line) for line in path.read_text().splitlines()[:-1]]
            begun += any("train/loss" in row and row["step"] > 0 for row in rows)
        if begun >= runs:
            return
        time.sleep(0.05)
    raise AssertionError(launcher.communicate())


def wait_for_their_end(folders):
    while any(map(is_leased, folders)):
        time.sleep(0.05)


def running(tmp_path) -> list[int]:
    """Return the pids of the processes that train."""
    owned = [folder for folder in tmp_path.glob("outputs/runs/*") if is_leased(folder)]
    claims = [max(folder.glob("lease/0*")) for folder in owned]
    return [json.loads(claim.read_text().splitlines()[0])["pid"] for claim in claims]


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def driver(launcher: int) -> int:
    """Return the pid of a launcher's Ray driver."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    (pid,) = (pid for pid in pids if "spawn_main" in command(pid) and parent(pid) == launcher)
    return pid


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def environment(pid: int) -> dict[str, str]:
    try:
        words = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(word.split("=", 1) for word in words if "=" in word)


def processes_of(home: Path) -> list[int]:
    """Return the processes with this HOME: all that a launcher has started."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if environment(pid).get("HOME") == str(home)]


def listening(home: Path) -> set[bytes]:
    """Return the addresses at which these processes listen."""
    sockets = set()
    for pid in processes_of(home):
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                sockets.add(os.readlink(link))
            except OSError:
                continue
    places = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                words = bytes.fromhex(fields[1].partition(":")[0])
                places.add(struct.pack("=I", *struct.unpack(">I", words[-4:])))
    return places


def assert_all_same(one: Path, other: Path) -> None:
    """Assert that two folders have the same runs, bit for bit."""
    folders = sorted(path.parent for path in one.glob("runs/*/result.json"))
    assert len(folders) == 2
    for folder in folders:
        assert_same(final_state(folder), final_state(other / "runs" / folder.name))
