"""What engine=ray promises besides what every engine does (see test_launch.py)."""

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

from qkablate.runs.lease import is_owned
from qkablate.sweeps.engines.ray.cluster import Wish, room_for
from tests.sweeps.watching import assert_same, final_state

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None and not os.environ.get("QKABLATE_NEEDS_RAY"),
    reason="Ray is not installed",
)


@pytest.fixture
def grid(tiny):
    return ["sweep", *tiny, "sweep.baseline=null", "variant=standard", "seed=0,1", "engine=ray"]


def test_a_cluster_of_its_own_trains_what_this_machine_does(
    spawn, qkablate, grid, tiny, tmp_path, home
):
    """Bit for bit; nobody else can reach it, and nothing is left of it."""
    words = [*grid, "train.steps=40"]
    assert qkablate(*words, "engine=local", f"out={tmp_path / 'calm'}").code == 0
    before = of_home(home)
    launcher = spawn(*words)
    wait_for_runs(launcher, tmp_path)
    places = {socket.inet_ntoa(place) for place in listening(home)}
    assert places == {"127.0.0.1"}
    _, err = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, err
    assert "Traceback" not in err
    assert of_home(home) == before
    assert not list(home.iterdir())
    assert_all_same(tmp_path / "calm", tmp_path / "outputs")


def test_a_run_whose_worker_is_killed_goes_on_elsewhere(spawn, qkablate, grid, ray, tmp_path):
    words = [*grid, "train.steps=400", "train.checkpoint_every=1000"]
    assert qkablate(*words, "engine=local", f"out={tmp_path / 'calm'}").code == 0
    launcher = spawn(*words, f"engine.address={ray}")
    wait_for_runs(launcher, tmp_path)
    (run, *_) = running(tmp_path)
    os.kill(parent(parent(run)), signal.SIGKILL)
    _, err = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, err
    assert "again, elsewhere" in err
    assert_all_same(tmp_path / "calm", tmp_path / "outputs")
    results = [json.loads(path.read_text()) for path in tmp_path.glob("outputs/runs/*/result.json")]
    assert all(result["attempt"] == 1 for result in results)  # resumed, not begun again


@pytest.mark.parametrize("who", ["launcher", "driver"])
def test_what_is_killed_leaves_checkpoints(spawn, qkablate, grid, ray, tmp_path, who):
    words = [*grid, f"engine.address={ray}", "train.steps=100000", "train.checkpoint_every=100000"]
    launcher = spawn(*words)
    wait_for_runs(launcher, tmp_path)
    folders = list(tmp_path.glob("outputs/runs/*"))
    victims = {"launcher": [launcher.pid], "driver": drivers(launcher.pid)}[who]
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
    _, err = launcher.communicate(timeout=60)
    if who == "driver":
        assert launcher.returncode == 1
        assert err.splitlines()[-1].startswith("qkablate: the Ray cluster")
        assert "Traceback" not in err
    wait_for_their_end(folders)
    assert all(list(folder.glob("checkpoints/step-*")) for folder in folders)
    found = json.loads(qkablate("status", "--json").out)
    assert {state["status"] for state in found["states"]} <= {"interrupted", "waiting"}
    if who == "driver":
        return
    steps = [int(p.name[5:]) for p in tmp_path.glob("outputs/runs/*/checkpoints/step-*")]
    launcher = spawn(*words)
    wait_for_runs(launcher, tmp_path, above=max(steps))
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=60)
    assert launcher.returncode == 130


def test_a_cluster_that_ends_is_told_in_a_line(
    spawn, qkablate, grid, other_ray, tmp_path, monkeypatch
):
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "1")  # how long Ray hopes
    other_ray.start("--num-cpus=2")
    words = [*grid, f"engine.address={other_ray.address}", "train.steps=100000"]
    launcher = spawn(*words)
    wait_for_runs(launcher, tmp_path)
    other_ray.stop()
    _, err = launcher.communicate(timeout=120)
    assert launcher.returncode == 1
    assert err.splitlines()[-1].startswith("qkablate: the Ray cluster")
    assert "Traceback" not in err
    folders = list(tmp_path.glob("outputs/runs/*"))
    wait_for_their_end(folders)
    found = json.loads(qkablate("status", "--json").out)
    assert "interrupted" in {state["status"] for state in found["states"]}


# Ray believes in a GPU here, and torch does not: runs ask for a part of it, and train on the CPU.
_ON_A_PART = """
import sys
from qkablate.cli import main
from qkablate.sweeps.planning import packing
packing.gpus_of_a_run = lambda *_: float(sys.argv[1])
main(sys.argv[2:])
"""


def test_runs_share_a_gpu(grid, ray, tmp_path):
    words = [*grid, f"engine.address={ray}", "train.steps=100000"]
    command = [sys.executable, "-c", _ON_A_PART, "0.5", *words]
    launcher = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_for_runs(launcher, tmp_path, runs=2)
    runs = running(tmp_path)
    assert len(runs) == 2
    assert {environment(run)["CUDA_VISIBLE_DEVICES"] for run in runs} == {"0"}
    launcher.send_signal(signal.SIGTERM)
    _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 143
    assert "room for 2 at once" in err


@pytest.mark.parametrize(
    ("cpus", "gpus", "room"), [(1, 0, 8), (3, 0, 2), (1, 1, 2), (1, 0.5, 4), (1, 0.3, 6), (8, 2, 1)]
)
def test_how_many_runs_a_node_takes(cpus, gpus, room):
    """A part of a GPU never lies on two."""
    wish = Wish(None, cpus, gpus, "", "")
    assert room_for({"CPU": 8.0, "GPU": 2.0}, wish) == room


def test_a_folder_that_a_node_does_not_see_is_named(qkablate, grid, other_ray, tmp_path):
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


def test_no_node_is_large_enough(qkablate, grid, ray, tmp_path, monkeypatch):
    done = qkablate(*grid, f"engine.address={ray}", "engine.cpus=3")
    assert done.code == 2
    says = "qkablate: engine.cpus: 3 for a run, and the largest node has 2"
    assert done.err.splitlines()[-1] == says
    monkeypatch.setattr("qkablate.sweeps.planning.packing.gpus_of_a_run", lambda *_: 2)
    done = qkablate(*grid, f"engine.address={ray}")
    assert done.code == 2
    says = "qkablate: engine.gpus: 2 for a run, and the largest node has 1"
    assert done.err.splitlines()[-1] == says
    assert not list(tmp_path.glob("outputs/runs/*"))


@pytest.mark.parametrize("address", ["somewhere", "host:", "ray://", "host:99999", "http://h:80"])
def test_an_address_that_is_none(qkablate, grid, address, tmp_path):
    done = qkablate(*grid, f'engine.address="{address}"')
    assert done.code == 2
    assert f"engine.address: '{address}' is not null, auto, HOST:PORT" in done.err
    assert not (tmp_path / "outputs").exists()


def test_nothing_answers_at_the_address(qkablate, grid, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    done = qkablate(*grid, f"engine.address={address}")
    assert done.code == 2
    assert done.err == (
        f"qkablate: engine.address: nothing answers at '{address}': Connection refused\n"
    )
    assert not (tmp_path / "outputs").exists()


def test_another_token_is_told_in_a_line(qkablate, grid, ray, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    done = qkablate(*grid, f"engine.address={ray}")
    assert done.code == 2
    last = done.err.splitlines()[-1]
    assert last.startswith("qkablate: engine.address: ")
    assert "InvalidAuthToken" in last
    assert "Traceback" not in done.err


def wait_for_runs(launcher, tmp_path, above=0, runs=1):
    """Until so many runs have trained past a step."""
    while launcher.poll() is None:
        found = 0
        for path in tmp_path.glob("outputs/runs/*/metrics.jsonl"):
            rows = [json.loads(line) for line in path.read_text().splitlines()[:-1]]
            found += any("train/loss" in row and row["step"] > above for row in rows)
        if found >= runs:
            return
        time.sleep(0.05)
    raise AssertionError(launcher.communicate())


def wait_for_their_end(folders):
    while any(map(is_owned, folders)):
        time.sleep(0.05)


def running(tmp_path) -> list[int]:
    """The processes that train."""
    owned = [folder for folder in tmp_path.glob("outputs/runs/*") if is_owned(folder)]
    claims = [max(folder.glob("owner/0*")) for folder in owned]
    return [json.loads(claim.read_text().splitlines()[0])["pid"] for claim in claims]


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def drivers(launcher: int) -> list[int]:
    """The process that speaks with Ray for a launcher."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    found = [pid for pid in pids if "spawn_main" in command(pid) and parent(pid) == launcher]
    assert len(found) == 1
    return found


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


def of_home(home: Path) -> list[int]:
    """The processes with this home but our own: all that a launcher has started."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if environment(pid).get("HOME") == str(home)]


def listening(home: Path) -> set[bytes]:
    """The addresses at which they listen."""
    sockets = set()
    for pid in of_home(home):
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
    """The same runs, bit for bit."""
    folders = sorted(path.parent for path in one.glob("runs/*/result.json"))
    assert len(folders) == 2
    for folder in folders:
        assert_same(final_state(folder), final_state(other / "runs" / folder.name))
