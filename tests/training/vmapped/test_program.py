"""Programs of several runs: each is a run of its own, whatever happens to the others."""

import errno
import json
import shutil
from dataclasses import replace

import pytest
import torch

from qkablate.errors import UserError
from qkablate.runs.lease import AlreadyRunning
from qkablate.training import environment, result
from qkablate.training.session import train_run
from qkablate.training.signals import Stopped
from qkablate.training.vmapped import program
from qkablate.training.vmapped.program import Member, train_alone, train_program
from qkablate.training.vmapped.stack import RunStack
from tests.training.helpers import assert_identical, interrupt_after, read_rows
from tests.training.vmapped.helpers import make_plans


def train(plans, **options):
    """Train the runs as one program; return the statuses of their results, or the errors."""
    members = [Member(plan, **options) for plan in plans]
    train_program(members)
    return [
        member.outcome.result["status"]
        if not isinstance(member.outcome, Exception)
        else type(member.outcome)
        for member in members
    ]


@pytest.fixture
def undisturbed(tmp_path):
    """Return the folders of three runs, trained as one program."""
    plans = make_plans(tmp_path, 3, out="undisturbed")
    assert train(plans) == ["done"] * 3
    return [plan.run.folder for plan in plans]


def assert_all_identical(plans, folders):
    for plan, folder in zip(plans, folders, strict=True):
        assert_identical(plan.run.folder, folder)


def test_each_run_is_that_of_its_own_config(tmp_path, undisturbed):
    singles = make_plans(tmp_path, 3, train={"vmap": 1})
    for plan, folder in zip(singles, undisturbed, strict=True):
        train_run(plan)
        rows = list(zip(read_rows(folder), read_rows(plan.run.folder), strict=True))
        for row, other in rows:
            assert row.keys() == other.keys()
            diagnostics, others = row.pop("diagnostics", None), other.pop("diagnostics", None)
            assert (diagnostics is None) == (others is None)
            assert row == pytest.approx(other, rel=1e-3, abs=1e-5)
        names = [{path.name for path in one.iterdir()} for one in (folder, plan.run.folder)]
        assert names[0] == names[1]
        result = json.loads((folder / "result.json").read_text())
        assert result["vmap"] is True
        assert (result["program_runs"], plan.run.result["program_runs"]) == (3, 1)
        assert result["id"] != plan.run.id
        assert plan.run.result["vmap"] is False


def test_id_says_that_a_run_is_vmapped_and_not_with_how_many_others(tmp_path):
    by_count = {k: make_plans(tmp_path, 1, train={"vmap": k})[0] for k in (1, 2, 16)}
    assert by_count[2].identity["vmap"] == "yes"
    assert "vmap" not in by_count[1].identity
    assert by_count[2].run.id == by_count[16].run.id != by_count[1].run.id
    assert by_count[2].config == by_count[16].config


@pytest.mark.parametrize("others", [[], [2], [1, 2]])
def test_rest_of_a_stopped_program_resumes_bit_identically(
    tmp_path, undisturbed, monkeypatch, others
):
    """The first run resumes with some others, which may be at other steps."""
    plans = make_plans(tmp_path, 3)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 22)
        assert train(plans) == [Stopped] * 3
    assert not any(plan.run.result for plan in plans)
    if others:
        train_program([Member(plans[others[0]])])
    assert set(train([plans[0], *[plans[i] for i in others]])) == {"done"}
    train(plans)
    assert_all_identical(plans, undisturbed)


def test_runs_that_are_done_are_not_trained_again(tmp_path, undisturbed):
    plans = make_plans(tmp_path, 4, out="undisturbed")
    before = [(folder / "result.json").stat().st_mtime_ns for folder in undisturbed]
    members = [Member(plan) for plan in plans]
    train_program(members)
    assert [member.outcome.trained for member in members] == [False] * 3 + [True]
    assert [(f / "result.json").stat().st_mtime_ns for f in undisturbed] == before


def test_diverging_run_is_marked_and_the_others_are_not_affected(
    tmp_path, undisturbed, monkeypatch
):
    plans = make_plans(tmp_path, 3)
    call = RunStack.__call__

    def poison(self, numbers):
        if numbers[0] == 5 and len(numbers) == 3:
            next(self.steps[1].model.parameters()).data.fill_(torch.nan)
        call(self, numbers)

    monkeypatch.setattr(RunStack, "__call__", poison)
    assert train(plans) == ["done", "diverged", "done"]
    assert plans[1].run.result["diverged_at"] == 6
    assert_identical(plans[0].run.folder, undisturbed[0])
    assert_identical(plans[2].run.folder, undisturbed[2])


@pytest.mark.slow
@pytest.mark.parametrize("where", ["step", "stack", "evaluation"])
def test_out_of_memory_halves_the_program_and_fails_no_run(
    tmp_path, undisturbed, monkeypatch, capsys, where
):
    from qkablate.training import loop

    owner, name = {
        "step": (RunStack, "_losses"),
        "stack": (RunStack, "_bind"),
        "evaluation": (loop, "evaluate_split"),
    }[where]
    original, calls = getattr(owner, name), []

    def starve(*args):
        calls.append(args)
        if len(calls) == (2 if where == "stack" else 8):
            raise torch.OutOfMemoryError("injected")
        return original(*args)

    monkeypatch.setattr(owner, name, starve)
    plans = make_plans(tmp_path, 3)
    assert train(plans) == ["done"] * 3
    assert_all_identical(plans, undisturbed)
    assert "memory ran out" in capsys.readouterr().err


def test_program_that_does_not_fit_on_a_gpu_says_what_to_change(tmp_path, monkeypatch, capsys):
    """There half of its runs would have as many rows."""
    from qkablate.training.vmapped import program

    def starve(*args):
        raise torch.OutOfMemoryError("injected")

    monkeypatch.setattr(RunStack, "_losses", starve)
    monkeypatch.setattr(program, "_needs_less_when_halved", lambda plan: False)
    plans = make_plans(tmp_path, 3)
    assert train(plans) == ["failed"] * 3
    for plan in plans:
        error = plan.run.result["error"]
        assert "runs at once need more memory than cpu has; give a smaller number" in error
        assert plan.run.result["out_of_memory"]
    assert "memory ran out" not in capsys.readouterr().err


def test_one_run_that_does_not_fit_alone_fails_as_one_of_no_program(tmp_path, monkeypatch):
    def starve(*args):
        raise torch.OutOfMemoryError("injected")

    monkeypatch.setattr(RunStack, "_losses", starve)
    plans = make_plans(tmp_path, 2)
    assert train(plans, packed=2) == ["failed"] * 2
    assert all(plan.run.result["out_of_memory"] for plan in plans)


def test_error_of_the_joint_step_fails_every_run_with_its_reason(tmp_path, monkeypatch):
    def fail(*args):
        raise ValueError("no losses today")

    monkeypatch.setattr(RunStack, "_losses", fail)
    plans = make_plans(tmp_path, 2)
    assert train(plans) == ["failed"] * 2
    assert {plan.run.result["error"] for plan in plans} == {"ValueError: no losses today"}
    monkeypatch.undo()
    assert train(plans, retry=False) == ["failed"] * 2
    assert train(plans) == ["done"] * 2


def test_run_of_another_process_is_left_to_it(tmp_path, undisturbed):
    plans = make_plans(tmp_path, 3)
    with plans[1].run.hold_lease():
        assert train(plans) == ["done", AlreadyRunning, "done"]
    assert_identical(plans[0].run.folder, undisturbed[0])
    with plans[1].run.hold_lease(), pytest.raises(AlreadyRunning):
        train_alone(Member(plans[1]))
    assert train_alone(Member(plans[1])).result["status"] == "done"
    assert_identical(plans[1].run.folder, undisturbed[1])


def test_runs_resume_with_the_threads_they_began_with(tmp_path, monkeypatch):
    plans = make_plans(tmp_path, 2)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 6)
        train(plans[:1])
    plans[1] = replace(plans[1], config=replace(plans[1].config, threads=2))
    seen = []
    monkeypatch.setattr(
        program, "_train_or_halve", lambda members, _: seen.append([m.plan for m in members])
    )
    train_program([Member(replace(p, config=replace(p.config, threads=2))) for p in plans])
    assert len(seen) == 2


def test_output_of_each_run_is_in_its_own_log(tmp_path):
    plans = make_plans(tmp_path, 2)
    logs = [(tmp_path / f"{i}.log").open("w") for i in range(2)]
    train_program([Member(p, log=log) for p, log in zip(plans, logs, strict=True)])
    for i, log in enumerate(logs):
        log.close()
        text = (tmp_path / f"{i}.log").read_text()
        assert f"-s{i}-" in text
        assert f"-s{1 - i}-" not in text
        assert "step 12/12" in text


def test_rerun_archives_the_attempt(tmp_path):
    plans = make_plans(tmp_path, 1)
    train(plans)
    assert train(plans, rerun=True) == ["done"]
    assert plans[0].run.attempt == 2


def test_single_run_reads_the_checkpoint_of_a_vmapped_one(tmp_path, monkeypatch):
    """Its format is the same: a run of the other kind could go on from it."""
    vmapped, single = (make_plans(tmp_path, 1, train={"vmap": k})[0] for k in (4, 1))
    with monkeypatch.context() as patch:
        interrupt_after(patch, 6)
        assert train([vmapped]) == [Stopped]
    with single.run.hold_lease():
        shutil.copytree(vmapped.run.checkpoints, single.run.checkpoints)
        shutil.copy(vmapped.run.metrics, single.run.metrics)
    assert train_run(single).result["status"] == "done"
    train([vmapped])
    losses = [plan.run.result["loss"] for plan in (vmapped, single)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_user_error_of_one_run_is_its_own(tmp_path):
    plans = make_plans(tmp_path, 2)
    plans[0].run.folder.mkdir(parents=True)
    (plans[0].run.folder / "link").symlink_to(tmp_path)
    assert train(plans) == [UserError, "done"]


@pytest.mark.parametrize("name", ["write_environment", "write_result"])
def test_unexpected_error_of_one_run_is_its_own(tmp_path, undisturbed, monkeypatch, name):
    """Its disk may be full where a run records neither a result nor a failure."""
    plans = make_plans(tmp_path, 3)
    owner, name = (environment, "write") if name == "write_environment" else (result, name)
    original = getattr(owner, name)

    def fill_disk(place, *args, **options):
        if place in (plans[1].run, plans[1]):
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(place, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fill_disk)
        assert train(plans) == ["done", OSError, "done"]
        with pytest.raises(OSError, match="No space left"):
            train_alone(Member(plans[1]))
    assert plans[1].run.result is None
    assert_identical(plans[0].run.folder, undisturbed[0])
    assert_identical(plans[2].run.folder, undisturbed[2])
    assert train(plans) == ["done"] * 3
    assert_identical(plans[1].run.folder, undisturbed[1])
