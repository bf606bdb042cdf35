"""The prefix that runs of several lengths share, and how its branches are found."""

import dataclasses
import json
from pathlib import Path

import pytest

from qkablate.config import Config, flatten, keys_with, resolve
from qkablate.config.keys import Role
from qkablate.config.schema import OptimConfig, TrainConfig
from qkablate.runs.prefix import BranchOrigin, Prefix, branch_path, find_branch, find_prefix
from qkablate.runs.run import identity

FACTS = {"data_fingerprint": "f", "vocabulary": 9, "device": "cpu", "kernel": "math"}
OF_THE_END = {"train.steps", "train.test_tokens", "train.evaluate_test"}


def wsd(steps=1000, **train):
    optim = OptimConfig(schedule="wsd", warmup=50)
    fixed = {"eval_every": 250, "eval_tokens": 1024, "test_tokens": 2048}
    return resolve(
        dataclasses.replace(Config(), optim=optim, train=TrainConfig(steps, **{**fixed, **train}))
    )


def prefix(config):
    return find_prefix(config, identity(config, circuits_from_outside={}, **FACTS))


def change(config, name):
    """Return the config with another value of a key."""
    value = flatten(config)[name]
    other = not value if isinstance(value, bool) else [0.5, 0.6]
    if isinstance(value, int | float) and not isinstance(value, bool):
        other = value + 1
    elif isinstance(value, str | None):
        other = "other"
    section, _, leaf = name.rpartition(".")
    if not section:
        return dataclasses.replace(config, **{leaf: other})
    part = dataclasses.replace(getattr(config, section), **{leaf: other})
    return dataclasses.replace(config, **{section: part})


def test_lengths_share_a_prefix_up_to_the_cooldown():
    found = [prefix(wsd(steps)) for steps in (1000, 2000, 4000, 8000)]
    assert len({one.id for one in found}) == 1
    assert [one.steps for one in found] == [800, 1600, 3200, 6400]
    assert prefix(wsd(test_tokens=4096)).id == prefix(wsd(evaluate_test=False)).id == found[0].id


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_other_schedules_have_no_prefix(schedule):
    optim = OptimConfig(schedule=schedule, warmup=5)
    assert prefix(dataclasses.replace(wsd(), optim=optim)) is None


def test_a_run_of_one_step_has_no_prefix():
    optim = OptimConfig(schedule="wsd", warmup=0, cooldown=0.0)
    assert (
        prefix(dataclasses.replace(wsd(), optim=optim, train=TrainConfig(1, eval_every=1))) is None
    )


def test_every_setting_of_the_steps_before_is_part_of_the_prefix():
    """All that is hashed into the id, but what only the end depends on, and what shapes rows."""
    config = wsd()
    names = {name for name in keys_with(Role.IDENTITY) if not name.startswith("init_from.")}
    names -= OF_THE_END | {"optim.schedule", "optim.cooldown", "device"}
    names |= {"tracking.log_every", "diagnostics.every"}
    assert names
    same = [name for name in names if prefix(change(config, name)).id == prefix(config).id]
    assert same == []


def write_origin(folder, step, id="p", changed=None):
    path = branch_path(folder, step)
    path.mkdir(parents=True)
    origin = dataclasses.asdict(BranchOrigin("run", step, id, {"torch": "2"}, {}))
    (path / "origin.json").write_text(json.dumps({**origin, **(changed or {})}))
    return path


def test_the_latest_branch_before_the_cooldown_is_found(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    write_origin(one, 100)
    expected = write_origin(other, 200)
    write_origin(other, 300)  # in the cooldown
    write_origin(one, 250, id="q")  # of other settings
    assert find_branch([one, other, tmp_path / "nowhere"], Prefix("p", 299)) == expected
    assert find_branch([one, other], Prefix("p", 99)) is None


def test_links_and_damaged_origins_are_no_branches(tmp_path):
    folder = tmp_path / "run"
    write_origin(folder, 10, changed={"step": "10"})
    write_origin(folder, 20, changed={"more": 1})
    (write_origin(folder, 30) / "origin.json").write_bytes(b'{"run": ')
    elsewhere = write_origin(tmp_path / "elsewhere", 40)
    branch_path(folder, 40).symlink_to(elsewhere)
    assert find_branch([folder], Prefix("p", 99)) is None
    (tmp_path / "linked").mkdir()
    Path(tmp_path / "linked" / "branches").symlink_to(elsewhere.parent)
    assert find_branch([tmp_path / "linked"], Prefix("p", 99)) is None
