"""A sweep runs to its end whatever happens to its runs, its launcher and other launchers."""

import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from qkablate.cli import main
from qkablate.sweeps.running.launcher import may_fit_alone
from tests.sweeps.run_checks import assert_same, final_state, results, status, wait_for_progress

KILLS = 10  # `make torture` has more


@pytest.fixture
def local_grid(tiny):
    """Return the arguments of a sweep on this machine."""
    return ["sweep", *tiny, "sweep.baseline=null", "sweep.floor=false", "workers=2"]


@pytest.fixture
def grid(tiny, engine):
    """Return the same arguments with every engine."""
    return ["sweep", *tiny, "sweep.baseline=null", "sweep.floor=false", *engine]


@pytest.fixture(scope="module")
def final_states():
    """Return a place for final states, by the words of their sweep."""
    return {}


@pytest.fixture
def undisturbed(final_states, qkablate, local_grid, tmp_path):
    """Train a sweep on this machine, once for all engines; return {run: final state}."""

    def train(*words):
        if words not in final_states:
            assert qkablate(*local_grid, *words, "out=reference").code == 0
            found = results(tmp_path, "reference")
            final_states[words] = {path.parent.name: final_state(path.parent) for path in found}
        return final_states[words]

    return train


@pytest.mark.slow
def test_engines_train_the_same_runs(qkablate, grid, local_grid, undisturbed, tmp_path):
    """Results and ids are identical, so that an engine continues the sweep of another."""
    words = ["variant=standard,no_q", "seed=0", "threads=1"]
    reference = undisturbed(*words)
    assert qkablate(*grid, *words).code == 0
    found = results(tmp_path)
    assert {path.parent.name for path in found} == reference.keys()
    for path in found:
        assert_same(final_state(path.parent), reference[path.parent.name])
    for again in (grid, local_grid):
        assert qkablate(*again, *words).code == 0
    assert results(tmp_path) == found
    assert len(list(tmp_path.glob("outputs/sweeps/*/manifest.json"))) == 1


@pytest.mark.slow
def test_killed_launcher_loses_and_repeats_nothing(spawn, grid, undisturbed, qkablate, tmp_path):
    words = ["variant=standard,no_q", "seed=0", "threads=1", "train.steps=1000"]
    words += ["train.eval_every=1000", "train.checkpoint_every=1000"]
    reference = undisturbed(*words)
    launcher = spawn(*grid, *words)
    wait_for_progress(launcher, tmp_path)
    _, states = status(qkablate)  # from another shell
    assert "running" in states.values()
    assert "done" not in states.values()
    launcher.kill()
    launcher.wait()
    begun = [path.parent for path in tmp_path.glob("outputs/runs/*/metrics.jsonl")]
    if "engine=slurm" not in grid:  # whose jobs go on
        while "running" in status(qkablate)[1].values():
            time.sleep(0.1)
        assert all(list(folder.glob("checkpoints/step-*")) for folder in begun)
    assert qkablate(*grid, *words).code == 0
    for name, state in reference.items():
        folder = tmp_path / "outputs" / "runs" / name
        assert_same(final_state(folder), state)
        # Resumed or, with SLURM, adopted.
        assert json.loads((folder / "result.json").read_text())["attempt"] == 1


@pytest.mark.exhaustive
def test_bad_runs_do_not_affect_others(qkablate, grid, circuit, tmp_path):
    ends = {"raises": "failed", "killed": "interrupted", "crashes": "failed"}
    if "engine=local" in grid:  # in a run's own process, whoever has started it
        ends |= {"diverges": "diverged", "starves": "failed"}
    files = ",".join(str(circuit(name)) for name in ends)
    words = [*grid, f"variant.file={files}", "seed=0"]
    done = qkablate(*words)
    assert done.code == 1
    found, states = status(qkablate)
    assert states == {(name, 0): end for name, end in ends.items()}
    errors = {state["variant"]: state["error"] for state in found["states"]}
    assert errors["raises"] == "ValueError: no queries today"
    assert "SIGKILL" in errors["killed"]
    assert "SIGABRT" in errors["crashes"]
    assert "memory" in errors.get("starves", "memory")
    failed = {name for name, end in ends.items() if end == "failed"}
    for name in failed:
        assert errors[name] in done.out
    # The same command resumes what was interrupted, and nothing else.
    before = results(tmp_path)
    again = qkablate(*words)
    assert again.code == 1
    _, states = status(qkablate)
    assert states["killed", 0] == "done"
    assert states["raises", 0] == "failed"
    after = results(tmp_path)
    assert before.items() <= after.items()
    # Failed runs are retried on request.
    assert qkablate(*words, "--retry", "failed").code == 1
    changed = {path.parent.name for path, _ in results(tmp_path).items() - after.items()}
    assert {name.partition("-")[0] for name in changed} == failed


@pytest.mark.slow
def test_run_out_of_memory_is_retried_alone_once(qkablate, local_grid, circuit):
    files = f"{circuit('starves_once')},{circuit('starves')}"
    done = qkablate(*local_grid, f"variant.file={files}", "seed=0")
    assert done.code == 1
    found, states = status(qkablate)
    assert states == {("starves_once", 0): "done", ("starves", 0): "failed"}
    assert [state["packed"] for state in found["states"]] == [1, 1]
    assert done.err.count("retrying alone") == 2


@pytest.mark.parametrize(
    ("device", "packed", "vmap", "says"),
    [
        ("cpu", 1, False, False),
        ("cpu", 4, False, True),
        ("cpu", 4, True, True),
        ("cuda", 2, False, True),
        ("cuda", 17, True, False),
    ],
)
def test_run_out_of_memory_is_retried_if_that_may_help(device, packed, vmap, says):
    """Alone it needs less than beside other processes, and on a CPU than in a program."""
    facts = {"device": device, "packed": packed, "vmap": vmap}
    assert may_fit_alone(SimpleNamespace(result={"out_of_memory": True, **facts})) is says
    assert not may_fit_alone(SimpleNamespace(result={"out_of_memory": False, **facts}))


@pytest.mark.exhaustive
def test_on_failure_stop_starts_nothing_more(qkablate, grid, circuit):
    words = [*grid, "on_failure=stop", "workers=1"]
    done = qkablate(*words, f"variant.file={circuit('raises', 1)}", "seed=0,1,2")
    assert done.code == 1
    _, states = status(qkablate)
    assert sorted(states.values()) == ["failed", "waiting", "waiting"]
    assert "on_failure=stop" in done.err


@pytest.mark.slow
def test_larger_sweep_trains_only_new_runs(qkablate, local_grid, tmp_path):
    assert qkablate(*local_grid, "variant=standard", "seed=0,1").code == 0
    before = results(tmp_path)
    done = qkablate(*local_grid, "variant=standard,no_q", "seed=0,1,2")
    assert done.code == 0
    after = results(tmp_path)
    assert len(before) == 2
    assert len(after) == 6
    assert before.items() <= after.items()
    assert len(list((tmp_path / "outputs" / "sweeps").glob("*/manifest.json"))) == 2
    (newest,) = tmp_path.glob("outputs/sweeps/*/runs/no_q-*-s2-*")
    assert newest.resolve() in [path.parent.resolve() for path in after]


@pytest.mark.slow
def test_sweep_run_equals_the_run_of_train(qkablate, tiny, tmp_path):
    """It is bit-identical and has the same id."""
    words = ["variant=merged_w", "optim.lr=2e-3", "control=params", "seed=1"]
    assert qkablate("sweep", *tiny, "sweep.floor=false", *words).code == 0
    own = {path.parent.name: final_state(path.parent) for path in results(tmp_path)}
    manifest = json.loads(next(tmp_path.glob("outputs/sweeps/*/manifest.json")).read_text())
    assert len(own) == 2
    (tmp_path / "outputs").rename(tmp_path / "of-the-sweep")
    for run in manifest["runs"]:
        arm = manifest["arms"][run["arm"]]["overrides"]
        changes = [f"{key}={value}" for key, value in run["changes"].items()]
        assert qkablate("train", *(f"{k}={v}" for k, v in arm.items()), *changes).code == 0
        (folder,) = tmp_path.glob(f"outputs/runs/*-{run['id']}")
        assert_same(own[folder.name], final_state(folder))


@pytest.mark.exhaustive
def test_two_launchers_share_the_work(spawn, grid, tmp_path, qkablate):
    words = [*grid, "variant=standard,no_q", "seed=0,1"]
    launchers = [spawn(*words) for _ in range(2)]
    ends = [launcher.communicate(timeout=600) for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], ends
    assert len(results(tmp_path)) == 4
    # Each run was trained once: its metrics have one row for every logged step.
    for path in results(tmp_path):
        rows = (path.parent / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(row)["step"] for row in rows if "train/loss" in row]
        assert steps == sorted(set(steps))
        assert json.loads(path.read_text())["attempt"] == 1
    assert all(end[0] == ends[0][0] for end in ends)  # both print the whole table


HORIZONS = ["variant=standard", "seed=0", "optim.schedule=wsd", "optim.warmup=2"]
HORIZONS += ["train.steps=9,14,30", "train.eval_every=3", "diagnostics.every=1"]


def find_shared_steps(tmp_path, out="outputs"):
    """Return the step at which each run has branched off, by its length; None: it has not."""
    steps = {}
    for path in results(tmp_path, out):
        length = json.loads(path.read_text())["steps"]
        environment = json.loads((path.parent / "environment.json").read_text())
        steps[length] = environment.get("branch", {}).get("step")
    return steps


@pytest.mark.exhaustive
def test_shorter_horizons_branch_off_the_longest(qkablate, grid, undisturbed, tmp_path):
    """With every engine, all that is written equals that of runs trained alone."""
    reference = undisturbed(*HORIZONS, "sweep.share_prefix=false")
    assert find_shared_steps(tmp_path, "reference") in ({}, {9: None, 14: None, 30: None})
    assert qkablate(*grid, *HORIZONS).code == 0
    assert find_shared_steps(tmp_path) == {9: 7, 14: 11, 30: None}
    found = results(tmp_path)
    assert {path.parent.name for path in found} == reference.keys()
    for path in found:
        assert_same(final_state(path.parent), reference[path.parent.name])
    kept = [path.name for path in tmp_path.glob("outputs/runs/*/branches/*")]
    assert kept == ["step-00000024"]  # that of the longest, which can be extended


@pytest.mark.exhaustive
def test_two_launchers_share_prefixes(spawn, grid, undisturbed, tmp_path):
    reference = undisturbed(*HORIZONS, "sweep.share_prefix=false")
    launchers = [spawn(*grid, *HORIZONS) for _ in range(2)]
    ends = [launcher.communicate(timeout=480) for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], ends
    for path in results(tmp_path):
        assert_same(final_state(path.parent), reference[path.parent.name])
        assert json.loads(path.read_text())["attempt"] == 1


@pytest.mark.slow
def test_shorter_horizons_do_not_depend_on_the_longest(qkablate, local_grid, circuit, tmp_path):
    """It fails before anybody could branch off: the next longest takes its place."""
    words = [f"variant.file={circuit('killed', 4)}", *HORIZONS[1:], "workers=1"]
    assert qkablate(*local_grid, *words).code == 1
    assert find_shared_steps(tmp_path) == {9: 7, 14: None}  # without a result: the longest


@pytest.mark.exhaustive
def test_interrupted_sweep_is_resumed(spawn, grid, qkablate, tmp_path):
    words = [*grid, "variant=standard", "seed=0,1,2", "train.steps=100000"]
    words += ["train.eval_every=100000"]
    launcher = spawn(*words)
    wait_for_progress(launcher, tmp_path)
    launcher.send_signal(signal.SIGINT)
    out, err = launcher.communicate(timeout=120)
    assert launcher.returncode == 130, err
    assert "interrupted" in out
    _, states = status(qkablate)
    assert "running" not in states.values()
    assert "interrupted" in states.values()
    checkpoints = list(tmp_path.glob("outputs/runs/*/checkpoints/step-*"))
    assert checkpoints
    steps = max(int(path.name.removeprefix("step-")) for path in checkpoints)
    launcher = spawn(*words)
    wait_for_progress(launcher, tmp_path, "train/loss", above=steps)
    # A second interrupt stops at once.
    launcher.send_signal(signal.SIGSTOP)  # so that both signals arrive together
    launcher.send_signal(signal.SIGINT)
    launcher.send_signal(signal.SIGCONT)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(timeout=120) == 130
    assert set(status(qkablate)[1].values()) <= {"interrupted", "waiting"}


@pytest.mark.exhaustive
def test_sigterm_to_all_children_lets_runs_finish(spawn, local_grid, tmp_path):
    """`timeout` and systemd signal all processes; the launcher needs its server for exit codes."""
    words = ["variant=standard", "seed=0", "train.steps=500", "train.eval_every=500"]
    launcher = spawn(*local_grid, *words)
    wait_for_progress(launcher, tmp_path)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    assert children
    for pid in children:
        os.kill(int(pid), signal.SIGTERM)
    _, err = launcher.communicate(timeout=600)
    assert launcher.returncode == 0, err
    (output,) = tmp_path.glob("outputs/runs/*/output.log")
    assert "its process ended" not in output.read_text()


@pytest.mark.exhaustive
def test_kills_of_the_launcher_change_no_result(qkablate, tiny, tmp_path):
    """After ten kills at random moments, all runs equal those of an undisturbed sweep."""
    words = [
        "sweep",
        *tiny,
        "workers=2",
        "variant=standard,no_q",
        "seed=0,1,2",
        "sweep.floor=false",
    ]
    words += ["train.steps=40", "control=none,params"]
    assert qkablate(*words).code == 0
    calm = {path.parent.name: final_state(path.parent) for path in results(tmp_path)}
    assert len(calm) == 9
    chance = random.Random(0)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["qkablate.sweeps.running.launcher", "qkablate.sweeps.planning.expand"]
    )
    rough = [*words, "out=rough"]
    kills, code = 0, None
    while code != 0:
        launcher = context.Process(
            target=run_silently, args=(rough, str(tmp_path), os.environ["HOME"])
        )
        launcher.start()
        launcher.join(chance.uniform(0.1, 1.5) if kills < KILLS else 240)
        code = launcher.exitcode
        assert code in (None, 0)
        if code is None:
            assert kills < KILLS
            os.kill(launcher.pid, signal.SIGKILL)
            launcher.join()
            kills += 1
        elif kills < KILLS:  # it had finished already: remove a result and continue
            code = None
            delete_one(tmp_path / "rough", chance)
    found = results(tmp_path, "rough")
    assert {path.parent.name for path in found} == calm.keys()
    for path in found:
        assert_same(calm[path.parent.name], final_state(path.parent))
    assert len(list((tmp_path / "rough" / "sweeps").glob("*/manifest.json"))) == 1


def delete_one(out: Path, chance: random.Random) -> None:
    """Remove a result, as if the run had been killed just before writing it."""
    path = chance.choice(sorted(out.glob("runs/*/result.json")))
    path.unlink()


def run_silently(words, folder, home):
    """Run a launcher in an existing process, without output."""
    os.chdir(folder)
    os.environ["HOME"] = home
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    main(words)
