"""What SLURM does to a job, the sweep survives; what it would not take is said before."""

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
from qkablate.sweeps.engines import OWNED, factory
from qkablate.sweeps.engines.slurm import cluster as slurm_cluster
from qkablate.sweeps.engines.slurm.batch import Batch
from qkablate.sweeps.engines.slurm.cluster import Row, Unanswered, minutes, one_line
from qkablate.sweeps.engines.slurm.engine import Refused, Slurm, _Job
from qkablate.sweeps.planning.estimate import _Timed
from tests.sweeps.watching import assert_same, final_state, results, status, wait_for_progress

SCRIPT = Path(__file__).parents[3] / "scripts" / "slurm-one-machine"

# Some seconds: long enough for a signal to find it at work.
LONG = ("train.steps=1500", "train.eval_every=1500", "train.checkpoint_every=100")


@pytest.fixture
def grid(tiny, slurm):
    words = ["engine=slurm", "engine.memory_gb=1", "workers=2", "threads=1", "variant=standard"]
    return ["sweep", *tiny, "sweep.baseline=null", *words]


def jobs(tmp_path):
    """Number and state of every job of the sweep that is in the queue."""
    names = [
        f"{path.parents[1].name}.{path.name}" for path in tmp_path.glob("outputs/sweeps/*/slurm/*")
    ]
    command = ["squeue", "--noheader", "--array", "--format=%i|%T|%r", f"--name={','.join(names)}"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [tuple(line.split("|")) for line in said.splitlines()]


def wait_for(what, launcher, seconds=100):
    end = time.monotonic() + seconds
    while not (found := what()):
        assert launcher.poll() is None, launcher.communicate()
        assert time.monotonic() < end, what
        time.sleep(0.1)
    return found


def calm(qkablate, grid, tmp_path, *words):
    """The same sweep, undisturbed and on this machine."""
    here = [word for word in grid if not word.startswith("engine")]
    assert qkablate(*here, *words, "out=calm").code == 0
    return {path.parent.name: final_state(path.parent) for path in results(tmp_path, "calm")}


def assert_calm(tmp_path, reference):
    assert {path.parent.name for path in results(tmp_path)} == reference.keys()
    for path in results(tmp_path):
        assert_same(final_state(path.parent), reference[path.parent.name])


def test_a_job_whose_time_is_over_goes_on_where_it_was(spawn, qkablate, grid, tmp_path):
    words = ["seed=0", *LONG]
    reference = calm(qkablate, grid, tmp_path, *words)
    launcher = spawn(*grid, *words)
    wait_for_progress(launcher, tmp_path)
    ((job, *_),) = jobs(tmp_path)
    subprocess.run(["scancel", "--signal=USR2", job], check=True)  # as submitit asked for
    wait_for(lambda: [j for j in jobs(tmp_path) if j[1:] == ("PENDING", "BeginTime")], launcher)
    subprocess.run(["scontrol", "update", f"jobid={job}", "starttime=now"], check=True)
    assert launcher.wait(timeout=120) == 0, launcher.communicate()
    assert_calm(tmp_path, reference)


def test_scancel_lets_a_run_write_its_checkpoint(spawn, qkablate, grid, tmp_path):
    launcher = spawn(*grid, "seed=0", *LONG, "train.steps=100000")
    wait_for_progress(launcher, tmp_path)
    ((job, *_),) = jobs(tmp_path)
    subprocess.run(["scancel", job], check=True)
    assert launcher.wait(timeout=120) == 1
    assert set(status(qkablate)[1].values()) == {"interrupted"}
    assert list(tmp_path.glob("outputs/runs/*/checkpoints/step-*"))


def test_a_job_that_ends_without_a_word_is_made_again(spawn, qkablate, grid, tmp_path):
    """All its processes at once, as where a machine fails."""
    words = ["seed=0", *LONG]
    reference = calm(qkablate, grid, tmp_path, *words)
    launcher = spawn(*grid, *words)
    wait_for_progress(launcher, tmp_path)
    (folder,) = tmp_path.glob("outputs/sweeps/*/slurm/*/0.json")
    waiting = json.loads(folder.read_text())["pid"]
    children = Path(f"/proc/{waiting}/task/{waiting}/children").read_text().split()
    for pid in [waiting, *map(int, children)]:
        os.kill(pid, signal.SIGKILL)
    _, err = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, err
    print(err)
    assert "again, elsewhere" in err
    assert_calm(tmp_path, reference)


def test_no_more_than_so_many_at_once(spawn, grid, tmp_path, qkablate):
    launcher = spawn(*grid, "seed=0,1,2", "workers=1")
    most = 0
    while launcher.poll() is None:
        if list(tmp_path.glob("outputs/sweeps/*/slurm/*/batch.json")):
            most = max(most, sum(job[1] == "RUNNING" for job in jobs(tmp_path)))
        time.sleep(0.2)
    assert launcher.returncode == 0, launcher.communicate()
    assert most == 1
    assert not list(tmp_path.glob("outputs/sweeps/*/slurm/*/*")), "what is over is cleaned up"


def test_a_controller_that_is_away_is_waited_for(qkablate, grid, monkeypatch, tmp_path):
    """As while it is started anew."""
    calls = []

    def ask(*command, given=None):
        calls.append(command[0])
        if command[0] == "squeue" and 1 < calls.count("squeue") < 5:
            raise Unanswered("Unable to contact slurm controller (connect failure)")
        return real(*command, given=given)

    real = slurm_cluster.ask
    monkeypatch.setattr(slurm_cluster, "ask", ask)
    done = qkablate(*grid, "seed=0")
    assert done.code == 0, done.err
    assert done.err.count("SLURM does not answer") == 1
    assert done.err.count("SLURM answers again") == 1


def test_what_stands_in_the_folder_runs_nothing(qkablate, grid, tmp_path):
    """Files of a sweep that somebody else has written."""
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


def test_it_can_be_left_while_the_controller_is_away(slurm, monkeypatch, tmp_path):
    (tmp_path / "sweep").mkdir()
    said = []
    engine = Slurm(tmp_path / "sweep", {}, None, said.append)
    batch = Batch(tmp_path / "0123456789ab")
    engine._jobs = {"run": _Job("run", batch, 0, "1")}

    def away(*command, given=None):
        raise Unanswered("Unable to contact slurm controller")

    monkeypatch.setattr("qkablate.sweeps.engines.slurm.engine.ask", away)
    monkeypatch.setattr(slurm_cluster, "ask", away)
    engine.stop(now=False)
    assert engine.ended(0.1) == []  # it is waited for
    engine.stop(now=True)
    assert [ended.id for ended in engine.ended(0.1)] == ["run"]
    assert "its jobs may still be there" in said[-1]


@pytest.fixture
def engine(monkeypatch, tmp_path):
    """One without a cluster: its queue is empty, and sbatch takes nothing."""
    (tmp_path / "sweep").mkdir()
    monkeypatch.setattr("qkablate.sweeps.engines.slurm.engine.queue", lambda *_: {})
    monkeypatch.setattr("qkablate.sweeps.engines.slurm.engine.largest_array", lambda: 1000)
    return Slurm(tmp_path / "sweep", {}, None, lambda _: None)


@pytest.mark.parametrize(
    ("state", "code", "goes_on"),
    [
        *(("PREEMPTED", 143, True), ("TIMEOUT", 143, True), ("CANCELLED", 143, False)),
        *(("COMPLETED", 0, False), ("FAILED", 1, False)),
    ],
)
def test_what_slurm_has_taken_goes_on(engine, tmp_path, state, code, goes_on):
    batch = Batch.new(tmp_path, ["run"], 1)
    batch.file(0).write_text(json.dumps({"code": code}))
    ended = engine._judge(_Job("run", batch, 0, "7"), Row("7", state, "node", ""))
    assert (ended.code, bool(ended.gone)) == (code, goes_on)


def test_what_another_launcher_has_seen_to_may_be_submitted_again(engine, tmp_path):
    ended = engine._judge(_Job("run", Batch(tmp_path / "0123456789ab"), 0, "7"), None)
    assert ended.code == OWNED


def test_a_log_stays_where_a_task_has_left_no_word(engine, tmp_path):
    folder = tmp_path / "sweep" / "slurm"
    folder.mkdir()
    silent, told = Batch.new(folder, ["a"], 1), Batch.new(folder, ["b"], 1)
    crashed = Batch.new(folder, ["c"], 1)
    told.file(0).write_text('{"code": 0}')
    crashed.file(0).write_text('{"code": -6}')
    assert engine.adopt(["a", "b", "c"]) == ["c"]  # of which nobody has heard yet
    assert [ended.code for ended in engine.ended(0.0)] == [-6]
    assert [batch.folder.exists() for batch in (silent, told, crashed)] == [True, False, False]


def test_shorter_arrays_where_a_user_may_not_submit_as_many(engine, monkeypatch):
    taken = []

    def submit(tasks, room):
        if len(tasks) > 3:
            raise Refused("Job violates accounting/QOS policy")
        engine._submitted = True
        taken.append(len(tasks))
        for task in tasks:
            del engine._collected[task]

    monkeypatch.setattr(engine, "_submit_array", submit)
    monkeypatch.setattr(
        "qkablate.sweeps.engines.slurm.engine.Slurm._take_over", lambda *_, **__: None
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
    raise Refused("Invalid account")


REFUSED = {
    "engine.partition=debgu": r"engine.partition: there is no 'debgu'; .*\(nearest: debug\)",
    "engine.hours=100": r"engine.hours: 100 is more than partition debug gives \(1-00:00:00\)",
    "engine.cpus=4000": "engine: sbatch would refuse the jobs: Requested node configuration",
    "engine.gpus=3": "engine.gpus: '3' is not auto, or a number from 0 to 1",
    "engine.gpus=1": "engine.gpus: 1, and the runs would be trained on the cpu; give device=cuda",
    "engine.memory_gb=1000000": "engine: sbatch would refuse the jobs: Requested node",
    "engine.sbatch={constraint: a100}": "engine: sbatch would refuse .*: Invalid feature",
    "engine.sbatch={nope: 1}": "engine: sbatch would refuse .*: unrecognized option '--nope=1'",
    "engine.sbatch=long": "engine.sbatch",
    "engine.sbatch={partition: x}": "engine.sbatch.partition: the engine says this itself; give",
    "engine.sbatch={array: x}": "engine.sbatch.array: the engine says this itself",
    "engine.sbatch={qos: [1, 2]}": "engine.sbatch.qos: .* is not one word, number, or true",
    "engine.address=auto": "engine.address: engine=slurm has no such key",
    "engine.grace=86400": "engine.grace: 86400 s are not less than engine.hours",
    "threads=2": "threads: 2 on 1 of a machine's cores: give engine.cpus=2",
    "device=cuda": "precision: auto",
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_cannot_be_is_said_in_one_line_before_anything_is_done(qkablate, grid, word, tmp_path):
    done = qkablate(*grid, "seed=0", word)
    assert done.code == 2
    assert re.search(REFUSED[word], done.err), done.err
    assert len(done.err.strip().splitlines()) == 1
    assert not list(tmp_path.glob("outputs/sweeps/*/manifest.json"))


def test_a_sweep_for_gpus_can_be_planned_where_there_is_none(qkablate, grid, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    words = ["seed=0", "device=cuda", "precision=bf16"]
    done = qkablate(*grid, *words, "compile=false")
    assert "sbatch would refuse the jobs: Invalid generic resource" in done.err  # it wants a GPU
    assert "compile: auto is settled by the GPU" in qkablate(*grid, *words, "compile=auto").err


def test_a_dry_run_says_how_it_will_be_packed(qkablate, grid, monkeypatch):
    asked = []
    timed = _Timed(1e6, 1e-3, 1.0, 10**8)
    monkeypatch.setattr(
        "qkablate.sweeps.planning.estimate._timed",
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


def test_without_submitit_it_names_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs submitit, .*: pip install 'qkablate\[slurm\]'"):
        factory.check(EngineConfig("slurm"))


def test_without_slurm_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="there is no sbatch on this machine's path"):
        slurm_cluster.check(EngineConfig("slurm"))


def test_a_controller_that_does_not_answer_is_one_line(slurm, monkeypatch, tmp_path):
    nobody = tmp_path / "slurm.conf"
    text = Path(os.environ["SLURM_CONF"]).read_text()
    nobody.write_text(re.sub("(?m)^SlurmctldPort=.*", "SlurmctldPort=9", text))
    monkeypatch.setenv("SLURM_CONF", str(nobody))
    with pytest.raises(UserError, match=r"engine: SLURM does not answer: [^\n]*$"):
        slurm_cluster.check(EngineConfig("slurm"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can hide a folder from a node")
def test_a_folder_that_the_nodes_do_not_see(slurm, qkablate, grid, tmp_path, monkeypatch):
    """A cluster whose node has something else mounted over `out`."""
    hidden, cluster = tmp_path / "outputs", tmp_path / "cluster"
    hidden.mkdir()
    mounted = f"mount -t tmpfs none '{hidden}' && exec '{SCRIPT}' '{cluster}'"
    started = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mounted], capture_output=True, text=True
    )
    if "unshare" in started.stderr or "mount" in started.stderr:
        pytest.skip(f"no mounts of one's own here: {started.stderr.strip()}")
    try:
        assert started.returncode == 0, started.stderr
        monkeypatch.setenv("SLURM_CONF", str(cluster / "slurm.conf"))
        done = qkablate(*grid, "seed=0,1,2,3")
    finally:
        subprocess.run([SCRIPT, "stop", cluster], check=True)
    assert done.code == 2
    last = done.err.strip().splitlines()[-1]
    assert last.startswith("qkablate: out: the first job on ")
    assert str(hidden) in last


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ("infinite", float("inf")),
        ("30:00", 30),
        ("1:30", 1.5),
        ("12:00:00", 720),
        ("7-00:00:00", 7 * 24 * 60),
    ],
)
def test_limits_as_slurm_writes_them(limit, said):
    assert minutes(limit) == said


def test_its_words_in_one_line():
    said = "sbatch: error: invalid partition specified: x\nallocation failure: Invalid partition\n"
    assert one_line(said) == "invalid partition specified: x; Invalid partition"
