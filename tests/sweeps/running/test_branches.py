"""Runs wait for a longer one, begin at its branches, and remove those that nobody needs."""

import dataclasses
import json

import pytest

from qkablate.runs.prefix import NO_BRANCHING, BranchOrigin, branch_path
from qkablate.sweeps.prefixes import find_run_prefix
from qkablate.sweeps.running.branches import SharedPrefixes
from qkablate.sweeps.running.state import RunState

STABLE = {10: 8, 20: 16, 40: 32}  # steps before the cooldown, by length


@pytest.fixture
def sweep(plan_grid, tmp_path):
    """Return the shared prefixes of three lengths, and the state of each run by its length."""
    manifest = plan_grid("optim.schedule=wsd", "optim.warmup=2", "train.steps=10,20,40")
    prefixes = SharedPrefixes(manifest)
    states = {
        int(manifest.arms[run.arm].config.train.steps): RunState(run, tmp_path / "runs" / run.name)
        for run in manifest.runs
    }
    prefixes.add([*states.values()])
    return prefixes, states


def is_waiting(state):
    return state.status == "waiting"


def waiting(sweep):
    """Return the lengths of the runs that wait for a longer one."""
    prefixes, states = sweep
    still = {n: state for n, state in states.items() if is_waiting(state)}
    return {n for n, state in still.items() if prefixes.must_wait(state, is_waiting)}


def run_to(state, step, status="running"):
    state.status, state.metrics = status, {"step": step}


def write_branch(sweep, length, step):
    """Write a branch at which runs of this sweep can begin."""
    prefixes, states = sweep
    path = branch_path(states[length].folder, step)
    path.mkdir(parents=True)
    prefix = find_run_prefix(prefixes.manifest, states[length].run)
    origin = BranchOrigin(states[length].run.id, step, prefix.id, {}, {})
    (path / "origin.json").write_text(json.dumps(dataclasses.asdict(origin)))
    return path


def test_shorter_runs_wait_for_the_longest_to_begin(sweep):
    assert waiting(sweep) == {10, 20}


def test_they_wait_until_it_comes_to_their_branch(sweep):
    _, states = sweep
    run_to(states[40], 0)
    assert waiting(sweep) == {10, 20}
    write_branch(sweep, 40, STABLE[10])
    assert waiting(sweep) == {20}


def test_nobody_waits_for_what_will_not_come(sweep):
    """Another process trains the longest, and keeps no branches: it has passed the first."""
    _, states = sweep
    run_to(states[40], STABLE[10])
    assert waiting(sweep) == {10, 20}
    run_to(states[40], STABLE[10] + 1)
    assert waiting(sweep) == {10, 20}  # now for the second longest, which waits itself
    states[20].status = "done"
    assert waiting(sweep) == set()


def test_run_that_has_begun_waits_for_nobody(sweep):
    _, states = sweep
    (states[10].folder / "checkpoints" / "step-00000004").mkdir(parents=True)
    assert waiting(sweep) == {20}


@pytest.mark.parametrize("status", ["failed", "diverged", "interrupted", "done"])
def test_the_next_longest_takes_the_place_of_one_that_ended(sweep, status):
    _, states = sweep
    run_to(states[40], 5, status)
    assert waiting(sweep) == {10}


def test_longest_keeps_branches_for_the_others_and_for_its_own_length(sweep):
    prefixes, states = sweep
    plans = {n: prefixes.plan_branching(state) for n, state in states.items()}
    assert plans[40].horizons == (10, 20, 40)
    assert plans[20].horizons == (10,)
    assert plans[10].horizons == ()
    assert {plan.start for plan in plans.values()} == {None}
    (states[10].folder / "checkpoints" / "step-00000004").mkdir(parents=True)
    states[20].status = "done"
    assert prefixes.plan_branching(states[40]).horizons == (40,)


def test_run_begins_at_the_latest_branch_that_it_can_use(sweep):
    prefixes, states = sweep
    first, own = write_branch(sweep, 40, STABLE[10]), write_branch(sweep, 20, STABLE[20])
    assert prefixes.plan_branching(states[10]).start == first
    assert prefixes.plan_branching(states[40]).start == own  # it extends a shorter one
    assert prefixes.plan_branching(states[20]).start == first  # not its own


def test_branches_are_removed_when_nobody_needs_them(sweep):
    prefixes, states = sweep
    for step in STABLE.values():
        write_branch(sweep, 40, step)
    (states[40].folder / "branches" / "predictions").mkdir()

    def kept():
        names = (states[40].folder / "branches").glob("*")
        return {int(p.name[5:]) if p.name.startswith("step-") else p.name for p in names}

    run_to(states[40], 40, "done")
    prefixes.remove_branches()
    assert kept() == {8, 16, 32, "predictions"}
    run_to(states[10], 9, "interrupted")  # it may have to begin again
    prefixes.remove_branches(states[10])
    assert kept() == {8, 16, 32, "predictions"}
    run_to(states[10], 10, "done")
    prefixes.remove_branches(states[10])
    assert kept() == {16, 32, "predictions"}
    run_to(states[20], 20, "diverged")
    prefixes.remove_branches()
    assert kept() == {32}  # to be extended


def test_nothing_is_removed_through_a_link(sweep, tmp_path):
    prefixes, states = sweep
    elsewhere = tmp_path / "elsewhere"
    for name in ("step-00000008", "predictions"):
        (elsewhere / name).mkdir(parents=True)
    states[40].folder.mkdir(parents=True)
    (states[40].folder / "branches").symlink_to(elsewhere)
    for state in states.values():
        state.status = "done"
    prefixes.remove_branches()
    assert {path.name for path in elsewhere.iterdir()} == {"step-00000008", "predictions"}


def test_other_schedules_have_no_part_in_it(plan_grid, tmp_path):
    manifest = plan_grid("train.steps=10,20")
    prefixes = SharedPrefixes(manifest)
    states = [RunState(run, tmp_path / run.name) for run in manifest.runs]
    prefixes.add(states)
    assert not any(prefixes.must_wait(state, is_waiting) for state in states)
    assert {prefixes.plan_branching(state) for state in states} == {NO_BRANCHING}
    prefixes.remove_branches()
