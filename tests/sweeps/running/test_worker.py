"""The process of one run or of several as one vmapped program, beside others on its machine."""

import json
import os
import random
import signal
import time
from contextlib import suppress
from dataclasses import replace

import pytest

from qkablate.runs import lease
from qkablate.runs.run import Run
from qkablate.sweeps.engines.base import Engine, RunExit, RunTask
from qkablate.sweeps.running.launcher import Launcher
from qkablate.sweeps.running.progress_table import ProgressTable
from qkablate.sweeps.running.worker import limit_compilers
from qkablate.training.resolve import plan_run
from qkablate.training.vmapped.program import Member, train_program
from tests.sweeps.run_checks import assert_same, final_state, results, status, wait_for_progress

KILLS = 6
_GRID = ["variant=standard,merged_w", "seed=0,1,2", "train.vmap=3", "threads=1"]


@pytest.fixture
def grid(tiny):
    """Return the arguments of a sweep of programs."""
    return ["sweep", *tiny, "sweep.floor=false", *_GRID]


def read_result(path):
    return json.loads((path / "result.json").read_text())


@pytest.mark.slow
def test_runs_of_an_arm_train_as_programs(qkablate, grid, tmp_path):
    plan = qkablate(*grid, "--dry-run")
    assert "6 of 6 runs train together, up to 3 of an arm as one program" in plan.out
    assert qkablate(*grid, "workers=2").code == 0
    folders = [path.parent for path in results(tmp_path)]
    assert len(folders) == 6
    assert all(read_result(folder)["vmap"] for folder in folders)
    # All runs of the program count as sharing the machine.
    assert {read_result(folder)["packed"] for folder in folders} == {4}
    for folder in folders:
        log = (folder / "output.log").read_text()
        assert folder.name in log
        assert "step 12/12" in log
    before = results(tmp_path)
    assert qkablate(*grid, "workers=2").code == 0
    assert results(tmp_path) == before


@pytest.mark.slow
def test_size_of_programs_changes_no_bit(qkablate, grid, tmp_path):
    """The same runs in programs of other sizes have the same ids, rows and weights."""
    states = []
    for count in (3, 2, 16):
        out = f"out={count}"
        assert qkablate(*grid[:-2], f"train.vmap={count}", "threads=1", out, "workers=1").code == 0
        found = results(tmp_path, str(count))
        states.append({path.parent.name: final_state(path.parent) for path in found})
    for other in states[1:]:
        assert other.keys() == states[0].keys()
        for name, state in other.items():
            assert_same(state, states[0][name])


@pytest.mark.slow
def test_unsupported_runs_train_beside_programs(qkablate, tiny, tmp_path):
    words = ["sweep", *tiny, "sweep.floor=false", "seed=0,1", "train.vmap=2", "threads=1"]
    words += ["model.dropout=0,0.1", "sweep.baseline=null"]
    plan = qkablate(*words, "--dry-run")
    assert "2 of 4 runs train together" in plan.out
    text = " ".join(plan.out.split())
    assert "1 arm not vmapped: standard-d16-h2-dropout=0.1: model.dropout" in text
    assert qkablate(*words).code == 0
    vmapped = [read_result(path.parent)["vmap"] for path in results(tmp_path)]
    assert sorted(vmapped) == [False, False, True, True]


def lengthen(grid):
    return [*grid, "train.steps=60", "train.eval_every=20", "train.checkpoint_every=10"]


@pytest.fixture
def undisturbed(qkablate, grid, tmp_path):
    """Return {run: its final state} of a sweep that nobody disturbs."""
    assert qkablate(*lengthen(grid), "workers=2", "out=undisturbed").code == 0
    found = results(tmp_path, "undisturbed")
    return {path.parent.name: final_state(path.parent) for path in found}


def worker_pids(tmp_path):
    """Return the processes that hold a lease of a run."""
    pids = set()
    for path in tmp_path.glob("outputs/runs/*/lease/[0-9]*"):
        head, _, rest = path.read_text(errors="replace").partition("\n")
        if "released" not in rest:
            pids.add(json.loads(head)["pid"])
    return pids


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["launcher", "worker", "both"])
def test_kills_lose_and_change_nothing(spawn, qkablate, grid, undisturbed, tmp_path, victim):
    rng = random.Random(victim)
    words = [*lengthen(grid), "workers=2"]
    for _ in range(KILLS):
        launcher = spawn(*words)
        try:
            wait_for_progress(launcher, tmp_path, above=rng.randrange(40))
        except AssertionError:  # it has ended
            break
        time.sleep(rng.random() / 4)
        if victim != "launcher":
            for pid in worker_pids(tmp_path):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if victim != "worker":
            launcher.kill()
        launcher.communicate()
        while "running" in status(qkablate)[1].values():
            time.sleep(0.1)
    assert qkablate(*words).code == 0
    found = {path.parent.name: path.parent for path in results(tmp_path)}
    assert found.keys() == undisturbed.keys()
    for name, folder in found.items():
        assert_same(final_state(folder), undisturbed[name])
        assert read_result(folder)["attempt"] == 1


class StarvingEngine(Engine):
    """Trains in this process; the first program is killed to free memory."""

    slots = 1
    is_remote = False

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._tasks: list[RunTask] = []

    def start(self, task: RunTask) -> None:
        self._tasks.append(task)
        self.sizes.append(1 + len(task.others))

    def wait_for_exits(self, seconds: float) -> list[RunExit]:
        tasks, self._tasks = self._tasks, []
        if len(self.sizes) == 1:
            return [RunExit(task.id, -signal.SIGKILL, out_of_memory=True) for task in tasks]
        for task in tasks:
            train_program([Member(plan_run(one.config)) for one in (task, *task.others)])
        return [RunExit(task.id, 0) for task in tasks]

    def stop(self, *, now: bool) -> None: ...

    def close(self) -> None: ...


def test_program_that_is_killed_to_free_memory_is_halved(plan_grid):
    manifest = plan_grid("seed=0,1,2,3", "train.vmap=4", "sweep.baseline=null")
    manifest.write()
    engine = StarvingEngine()
    launcher = Launcher(manifest, engine, ProgressTable())
    assert launcher.run() == 0
    assert engine.sizes == [4, 2, 2]
    runs = [Run(manifest.out, run.label, run.id) for run in manifest.runs]
    assert [run.result["status"] for run in runs] == ["done"] * 4


class RemoteEngine(StarvingEngine):
    """Runs on another machine, whose processes die without releasing their leases."""

    is_remote = True
    poll_interval = 0.01

    def wait_for_exits(self, seconds: float) -> list[RunExit]:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            (task.folder / "lease").mkdir(parents=True)
            holder = {"token": "t", "host": "far", "pid": 7, "boot": "b", "device": 1, "since": "x"}
            (task.folder / "lease" / "00000001").write_text(json.dumps(holder) + "\n...")
        time.sleep(0.01)
        return [RunExit(task.id, -signal.SIGSEGV) for task in tasks]


def test_crash_on_another_machine_is_a_failure(plan_grid, monkeypatch):
    """Only after its lease has been silent for long enough: it may be another process's."""
    monkeypatch.setattr(lease, "TIMEOUT", 0.3)
    manifest = plan_grid("seed=0", "sweep.baseline=null")
    manifest.write()
    launcher = Launcher(manifest, RemoteEngine(), ProgressTable(), stop_on_failure=True)
    began = time.monotonic()
    assert launcher.run() == 1
    assert time.monotonic() - began > 0.3
    (run,) = (Run(manifest.out, run.label, run.id) for run in manifest.runs)
    assert run.result["status"] == "failed"
    assert run.result["error"] == "its process was ended by SIGSEGV"


def test_end_of_runs_that_another_launcher_trains_is_seen(plan_grid):
    """Whoever ends last logs the sweep."""
    manifest = plan_grid("seed=0,1", "sweep.baseline=null")
    manifest.write()
    launcher, later = (Launcher(manifest, StarvingEngine(), ProgressTable()) for _ in range(2))
    for run in manifest.runs:
        train_program([Member(plan_run(manifest.config_of(run)))])
    assert launcher.run() == 0
    assert (launcher.trained, launcher.saw_an_end) == (False, True)
    assert not later.saw_an_end
    after = Launcher(manifest, StarvingEngine(), ProgressTable())
    assert after.run() == 0
    assert not after.saw_an_end


class KilledEngine(StarvingEngine):
    """All processes are killed before they train."""

    slots = 2

    def wait_for_exits(self, seconds: float) -> list[RunExit]:
        tasks, self._tasks = self._tasks, []
        return [RunExit(task.id, -signal.SIGKILL) for task in tasks]


@pytest.mark.parametrize(("device", "sizes"), [("cpu", [2, 2]), ("cuda", [4])])
def test_programs_are_smaller_where_that_is_faster(plan_grid, device, sizes):
    manifest = plan_grid("seed=0,1,2,3", "train.vmap=4", "sweep.baseline=null")
    manifest.write()
    arms = {
        name: replace(arm, config=replace(arm.config, device=device))
        for name, arm in manifest.arms.items()
    }
    engine = KilledEngine()
    assert Launcher(replace(manifest, arms=arms), engine, ProgressTable()).run() == 1
    assert engine.sizes == sizes


def test_task_of_several_runs_is_one_line(plan_grid, tmp_path):
    manifest = plan_grid("seed=0,1", "train.vmap=2", "sweep.baseline=null")
    first, second = (
        RunTask(run.id, tmp_path, manifest.config_of(run), 1, retry=False) for run in manifest.runs
    )
    task = RunTask(first.id, first.folder, first.config, 1, retry=False, others=(second,))
    assert "\n" not in task.to_json()
    assert RunTask.from_json(task.to_json()) == task


@pytest.mark.parametrize(
    ("cores", "packed", "compilers"), [(64, 1, 8), (64, 16, 4), (2, 2, 1), (2, 8, 1), (12, 0, 8)]
)
def test_run_compiles_with_its_share_of_the_cores(monkeypatch, cores, packed, compilers):
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "3")
    limit_compilers(packed)
    assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == "3"  # the user's
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS")
    monkeypatch.setattr("qkablate.sweeps.running.worker.count_cores", lambda: cores)
    limit_compilers(packed)
    assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == str(compilers)
