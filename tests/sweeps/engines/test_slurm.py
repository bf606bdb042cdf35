"""The SLURM engine: sweeps survive what happens to jobs, and impossible requests are rejected."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from qkablate.config import EngineConfig
from qkablate.errors import UserError
from qkablate.sweeps.engines import factory
from qkablate.sweeps.engines.base import EXIT_ALREADY_RUNNING
from qkablate.sweeps.engines.slurm import cluster
from qkablate.sweeps.engines.slurm.batch import ArrayTask, JobArray
from qkablate.sweeps.engines.slurm.cluster import (
    QueueEntry,
    SlurmCommandFailed,
    SubmissionRejected,
    format_error,
    parse_time_limit,
)
from qkablate.sweeps.engines.slurm.engine import SlurmEngine
from qkablate.sweeps.planning.estimate import Timing
from tests.sweeps.run_checks import assert_same, final_state, results, status, wait_for_progress

SCRIPT = Path(__file__).parents[3] / "scripts" / "slurm-one-machine"

# Some seconds: long enough for a signal to arrive during training.
LONG = ("train.steps=1500", "train.eval_every=1500", "train.checkpoint_every=100")


@pytest.fixture
def grid(tiny, slurm):
    words = ["engine=slurm", "engine.memory_gb=1", "workers=2", "threads=1", "variant=standard"]
    return ["sweep", *tiny, "sweep.baseline=null", "sweep.floor=false", *words]


def jobs(tmp_path):
    """Return number, state and reason of the sweep's jobs in the queue."""
    names = [
        f"{path.parents[1].name}.{path.name}" for path in tmp_path.glob("outputs/sweeps/*/slurm/*")
    ]
    command = ["squeue", "--noheader", "--array", "--format=%i|%T|%r", f"--name={','.join(names)}"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [tuple(line.split("|")) for line in output.splitlines()]


def wait_for(what, launcher, seconds=100):
    end = time.monotonic() + seconds
    while not (found := what()):
        assert launcher.poll() is None, launcher.communicate()
        assert time.monotonic() < end, what
        time.sleep(0.1)
    return found


def train_undisturbed(qkablate, grid, tmp_path, *words):
    """Return the final states of the same sweep, undisturbed on this machine."""
    here = [word for word in grid if not word.startswith("engine")]
    assert qkablate(*here, *words, "out=calm").code == 0
    return {path.parent.name: final_state(path.parent) for path in results(tmp_path, "calm")}


def assert_undisturbed(tmp_path, reference):
    assert {path.parent.name for path in results(tmp_path)} == reference.keys()
    for path in results(tmp_path):
        assert_same(final_state(path.parent), reference[path.parent.name])


@pytest.mark.slow
def test_requeued_job_resumes_its_run(spawn, qkablate, grid, tmp_path):
    words = ["seed=0", *LONG]
    reference = train_undisturbed(qkablate, grid, tmp_path, *words)
    launcher = spawn(*grid, *words)
    wait_for_progress(launcher, tmp_path)
    ((job, *_),) = jobs(tmp_path)
    subprocess.run(
        ["scancel", "--signal=USR2", job], check=True
    )  # the signal that submitit requests
    wait_for(lambda: [j for j in jobs(tmp_path) if j[1:] == ("PENDING", "BeginTime")], launcher)
    subprocess.run(["scontrol", "update", f"jobid={job}", "starttime=now"], check=True)
    assert launcher.wait(timeout=120) == 0, launcher.communicate()
    assert_undisturbed(tmp_path, reference)


@pytest.mark.slow
def test_scancelled_run_writes_a_checkpoint(spawn, qkablate, grid, tmp_path):
    launcher = spawn(*grid, "seed=0", *LONG, "train.steps=100000")
    wait_for_progress(launcher, tmp_path)
    ((job, *_),) = jobs(tmp_path)
    subprocess.run(["scancel", job], check=True)
    assert launcher.wait(timeout=120) == 1
    assert set(status(qkablate)[1].values()) == {"interrupted"}
    assert list(tmp_path.glob("outputs/runs/*/checkpoints/step-*"))


@pytest.mark.exhaustive
def test_job_killed_without_an_exit_is_submitted_again(spawn, qkablate, grid, tmp_path):
    """All processes of the job are killed at once, as when a machine fails."""
    words = ["seed=0", *LONG]
    reference = train_undisturbed(qkablate, grid, tmp_path, *words)
    launcher = spawn(*grid, *words)
    wait_for_progress(launcher, tmp_path)
    (folder,) = tmp_path.glob("outputs/sweeps/*/slurm/*/0.json")
    waiting = json.loads(folder.read_text())["pid"]
    children = Path(f"/proc/{waiting}/task/{waiting}/children").read_text().split()
    for pid in [waiting, *map(int, children)]:
        os.kill(pid, signal.SIGKILL)
    _, err = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, err
    assert "restarting elsewhere" in err
    assert_undisturbed(tmp_path, reference)


@pytest.mark.exhaustive
def test_workers_limit_the_running_jobs(spawn, grid, tmp_path, qkablate):
    launcher = spawn(*grid, "seed=0,1,2", "workers=1")
    most = 0
    while launcher.poll() is None:
        if list(tmp_path.glob("outputs/sweeps/*/slurm/*/batch.json")):
            most = max(most, sum(job[1] == "RUNNING" for job in jobs(tmp_path)))
        time.sleep(0.2)
    assert launcher.returncode == 0, launcher.communicate()
    assert most == 1
    assert not list(tmp_path.glob("outputs/sweeps/*/slurm/*/*")), "what is over is cleaned up"


@pytest.mark.exhaustive
def test_absent_controller_is_waited_for(qkablate, grid, monkeypatch, tmp_path):
    """The controller is absent for some polls, as during its restart."""
    calls = []

    def ask(*command, stdin=None):
        calls.append(command[0])
        if command[0] == "squeue" and 1 < calls.count("squeue") < 5:
            raise SlurmCommandFailed("Unable to contact slurm controller (connect failure)")
        return real(*command, stdin=stdin)

    real = cluster.run_command
    monkeypatch.setattr(cluster, "run_command", ask)
    done = qkablate(*grid, "seed=0")
    assert done.code == 0, done.err
    assert done.err.count("SLURM does not answer") == 1
    assert done.err.count("SLURM answers again") == 1


@pytest.mark.slow
def test_files_in_the_sweep_folder_are_never_executed(qkablate, grid, tmp_path):
    """The files of another user may contain anything."""
    words = [*grid, "seed=0"]
    assert qkablate(*words).code == 0
    shutil.rmtree(tmp_path / "outputs" / "runs")
    (folder,) = tmp_path.glob("outputs/sweeps/*/slurm")
    contents = ["[", "{}", '{"runs": 3}', '{"runs": [[], {}, 3, "../../x"]}', "[" * 100_000, "null"]
    for number, content in enumerate(contents):
        batch = folder / f"{number:012x}"
        batch.mkdir()
        (batch / "batch.json").write_text(content)
        (batch / "0.json").write_text("cos\nsystem\n(S'touch ran'\ntR.")
        (batch / "1_0_result.pkl").write_text("cos\nsystem\n(S'touch ran'\ntR.")
    (folder / "x,y").mkdir()
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "batch.json").write_text('{"runs": []}')
    (folder / "0123456789ab").symlink_to(kept)
    (folder / "0123456789cd").write_text("no folder")
    done = qkablate(*words)
    assert done.code == 0, done.err
    assert not (tmp_path / "ran").exists()
    assert (kept / "batch.json").exists()


def test_launcher_can_stop_while_the_controller_is_absent(slurm, monkeypatch, tmp_path):
    (tmp_path / "sweep").mkdir()
    output = []
    engine = SlurmEngine(tmp_path / "sweep", {}, None, output.append)
    batch = JobArray(tmp_path / "0123456789ab")
    engine._tasks = {"run": ArrayTask("run", batch, 0, "1")}

    def away(*command, stdin=None):
        raise SlurmCommandFailed("Unable to contact slurm controller")

    monkeypatch.setattr(cluster, "run_command", away)
    engine.stop(now=False)
    assert engine.wait_for_exits(0.1) == []  # it waits
    engine.stop(now=True)
    assert [exit.id for exit in engine.wait_for_exits(0.1)] == ["run"]
    assert "its jobs may still be there" in output[-1]


@pytest.fixture
def engine(monkeypatch, tmp_path):
    """Return an engine without a cluster: its queue is empty."""
    (tmp_path / "sweep").mkdir()
    monkeypatch.setattr(cluster, "query_queue", lambda *_: {})
    monkeypatch.setattr(cluster, "max_array_size", lambda: 1000)
    return SlurmEngine(tmp_path / "sweep", {}, None, lambda _: None)


@pytest.mark.parametrize(
    ("state", "code", "goes_on"),
    [
        *(("PREEMPTED", 143, True), ("TIMEOUT", 143, True), ("CANCELLED", 143, False)),
        *(("COMPLETED", 0, False), ("FAILED", 1, False)),
    ],
)
def test_runs_taken_away_by_slurm_are_requeued(engine, tmp_path, state, code, goes_on):
    batch = JobArray.create(tmp_path, [["run"]], 1)
    batch.file(0).write_text(json.dumps({"code": code}))
    exit = engine._find_exit(ArrayTask("run", batch, 0, "7"), QueueEntry("7", state, "node", ""))
    assert (exit.code, bool(exit.requeue_reason)) == (code, goes_on)


def test_array_removed_by_another_launcher_is_already_running(engine, tmp_path):
    exit = engine._find_exit(ArrayTask("run", JobArray(tmp_path / "0123456789ab"), 0, "7"), None)
    assert exit.code == EXIT_ALREADY_RUNNING


def test_logs_of_tasks_without_an_exit_are_kept(engine, tmp_path):
    folder = tmp_path / "sweep" / "slurm"
    folder.mkdir()
    silent, told = JobArray.create(folder, [["a"]], 1), JobArray.create(folder, [["b"]], 1)
    crashed = JobArray.create(folder, [["c"]], 1)
    told.file(0).write_text('{"code": 0}')
    crashed.file(0).write_text('{"code": -6}')
    assert engine.adopt(["a", "b", "c"]) == [["c"]]  # a crash that was not reported yet
    assert [exit.code for exit in engine.wait_for_exits(0.0)] == [-6]
    assert [batch.folder.exists() for batch in (silent, told, crashed)] == [True, False, False]


def test_all_runs_of_a_program_are_taken_over(engine, monkeypatch, tmp_path):
    """Also where its first run has ended since, or an earlier version wrote the folder."""
    folder = tmp_path / "sweep" / "slurm"
    folder.mkdir()
    program, alone = JobArray.create(folder, [["a", "b", "c"]], 1), folder / "0123456789ab"
    alone.mkdir()
    (alone / "batch.json").write_text('{"runs": ["d"]}')
    queue = {
        (name, 0): QueueEntry("7", "PENDING", "", "")
        for name in (program.name, f"sweep.{alone.name}")
    }
    monkeypatch.setattr(cluster, "query_queue", lambda *_: queue)
    monkeypatch.setattr(cluster, "set_throttle", lambda *_: False)
    assert sorted(engine.adopt(["b", "c", "d"])) == [["a", "b", "c"], ["d"]]
    assert engine.queued_ids() == {"a", "d"}


def test_rejected_arrays_are_halved(engine, monkeypatch):
    taken = []

    def submit(tasks, room):
        if len(tasks) > 3:
            raise SubmissionRejected("Job violates accounting/QOS policy")
        engine._submitted = True
        taken.append(len(tasks))
        for task in tasks:
            del engine._collected[task]

    monkeypatch.setattr(engine, "_submit_array", submit)
    monkeypatch.setattr(
        "qkablate.sweeps.engines.slurm.engine.SlurmEngine._take_over", lambda *_, **__: None
    )
    engine._collected = {number: number for number in range(10)}
    engine._submit()
    assert sum(taken) == 10
    assert max(taken) <= 3
    engine._submitted = False
    engine._collected = {0: 0}
    monkeypatch.setattr(engine, "_submit_array", refuse)
    with pytest.raises(UserError, match="engine: sbatch refuses the jobs: Invalid account"):
        engine._submit()


def refuse(tasks, room):
    raise SubmissionRejected("Invalid account")


REFUSED = {
    "engine.partition=debgu": r"engine.partition: there is no 'debgu'; .*\(nearest: debug\)",
    "engine.hours=100": r"engine.hours: 100 exceeds the limit of partition debug \(1-00:00:00\)",
    "engine.cpus=4000": "engine: sbatch would refuse the jobs: Requested node configuration",
    "engine.gpus=3": "engine.gpus: 3 is not auto, or a number from 0 to 1",
    "engine.gpus=1": "engine.gpus: 1, and the runs would be trained on the cpu; give device=cuda",
    "engine.memory_gb=1000000": "engine: sbatch would refuse the jobs: Requested node",
    "engine.sbatch={constraint: a100}": "engine: sbatch would refuse .*: Invalid feature",
    "engine.sbatch={nope: 1}": "engine: sbatch would refuse .*: unrecognized option '--nope=1'",
    "engine.sbatch=long": "engine.sbatch",
    "engine.sbatch={partition: x}": "engine.sbatch.partition: the engine sets this itself; give",
    "engine.sbatch={array: x}": "engine.sbatch.array: the engine sets this itself",
    "engine.sbatch={qos: [1, 2]}": "engine.sbatch.qos: .* is not one line of text",
    "engine.address=auto": "engine.address: engine=slurm has no such key",
    "engine.grace=86400": "engine.grace: 86400 s is not less than engine.hours",
    "threads=2": "threads: 2 on 1 of a machine's cores: give engine.cpus=2",
    "device=cuda": "precision: auto",
}


@pytest.mark.parametrize("word", REFUSED)
def test_invalid_requests_are_rejected_in_one_line(qkablate, grid, word, tmp_path):
    done = qkablate(*grid, "seed=0", word)
    assert done.code == 2
    assert re.search(REFUSED[word], done.err), done.err
    assert len(done.err.strip().splitlines()) == 1
    assert not list(tmp_path.glob("outputs/sweeps/*/manifest.json"))


def test_gpu_sweep_can_be_planned_without_a_gpu(qkablate, grid, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    words = ["seed=0", "device=cuda", "precision=bf16"]
    done = qkablate(*grid, *words, "compile=false")
    assert (
        "sbatch would refuse the jobs: Invalid generic resource" in done.err
    )  # the job requests a GPU
    assert "compile: auto depends on the GPU" in qkablate(*grid, *words, "compile=auto").err


def test_dry_run_shows_the_packing(qkablate, grid, monkeypatch):
    asked = []
    timed = Timing(1e6, 1e-3, 1.0, 10**8)
    monkeypatch.setattr(
        "qkablate.sweeps.planning.estimate._measure",
        lambda arm, m, slots, k: asked.append(slots) or timed,
    )
    words = ["seed=range(40)", "workers=32", "engine.partition=debug", "--dry-run"]
    done = qkablate(*grid, *words)
    assert done.code == 0
    assert (
        "packing  32 at once at most on slurm, partition debug, on cpu, 1 core, 1 GB, 24 h each"
        in done.out
    )
    assert set(map(len, asked)) == {1}, "people log in to this machine"


def test_missing_submitit_names_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs submitit, .*: pip install '\.\[slurm\]'"):
        factory.check_engine(EngineConfig("slurm"))


def test_missing_slurm_commands_are_reported(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="there is no sbatch on this machine's path"):
        cluster.check_cluster(EngineConfig("slurm"))


@pytest.mark.slow
def test_unreachable_controller_is_reported_in_one_line(slurm, monkeypatch, tmp_path):
    nobody = tmp_path / "slurm.conf"
    text = Path(os.environ["SLURM_CONF"]).read_text()
    nobody.write_text(re.sub("(?m)^SlurmctldPort=.*", "SlurmctldPort=9", text))
    monkeypatch.setenv("SLURM_CONF", str(nobody))
    with pytest.raises(UserError, match=r"engine: SLURM does not answer: [^\n]*$"):
        cluster.check_cluster(EngineConfig("slurm"))


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can hide a folder from a node")
def test_folder_invisible_to_the_nodes_is_named(slurm, qkablate, grid, tmp_path, monkeypatch):
    """Another file system is mounted over `out` on the cluster's node."""
    hidden, cluster_folder = tmp_path / "outputs", tmp_path / "cluster"
    hidden.mkdir()
    mounted = f"mount -t tmpfs none '{hidden}' && exec '{SCRIPT}' '{cluster_folder}'"
    started = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mounted], capture_output=True, text=True
    )
    if "unshare" in started.stderr or "mount" in started.stderr:
        pytest.skip(f"no mounts of one's own here: {started.stderr.strip()}")
    try:
        assert started.returncode == 0, started.stderr
        monkeypatch.setenv("SLURM_CONF", str(cluster_folder / "slurm.conf"))
        done = qkablate(*grid, "seed=0,1,2,3")
    finally:
        subprocess.run([SCRIPT, "stop", cluster_folder], check=True)
    assert done.code == 2
    last = done.err.strip().splitlines()[-1]
    assert last.startswith("qkablate: out: the first job on ")
    assert str(hidden) in last


@pytest.mark.parametrize(
    ("limit", "minutes"),
    [
        ("infinite", float("inf")),
        ("30:00", 30),
        ("1:30", 1.5),
        ("12:00:00", 720),
        ("7-00:00:00", 7 * 24 * 60),
    ],
)
def test_time_limits_are_parsed(limit, minutes):
    assert parse_time_limit(limit) == minutes


def test_slurm_errors_are_formatted_as_one_line():
    output = (
        "sbatch: error: invalid partition specified: x\nallocation failure: Invalid partition\n"
    )
    assert format_error(output) == "invalid partition specified: x; Invalid partition"
