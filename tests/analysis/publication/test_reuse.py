"""Published runs that count as done: malformed ones are refused in one line."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from qkablate.analysis.claims.parse import load_claim
from qkablate.analysis.claims.registry import claim_grid
from qkablate.analysis.publication.reuse import (
    count_published,
    find_archive,
    follow_search,
    machine_settings,
)
from qkablate.api.sweep import plan_sweep
from qkablate.compose.configs import open_hydra
from qkablate.compose.grid import read_request
from qkablate.errors import UserError
from qkablate.sweeps.planning.tuning_losses import RULES
from tests.analysis.publication.made_up import make_archive, make_run

RESULTS = Path(__file__).parents[3] / "docs" / "study" / "results"


def test_arm_without_settings_is_refused():
    archive = make_archive({"a1": make_run(1.0)})
    archive.looks["3"]["manifest"]["arms"] = {"no_q-d16": {"config": {}}}
    with pytest.raises(UserError, match="mine-small-0123456789ab' is not an archive of runs"):
        machine_settings(archive, {})


@pytest.mark.parametrize(
    ("counts", "typed", "word"),
    [
        ((1, 1), [], "1"),
        ((8, 8), ["train.vmap=8"], "8"),
        ((1, 8), [], "auto"),
        ((1, 8), ["train.vmap=8"], "8"),  # `auto` may choose another number
        ((None, None), [], "1"),
    ],
)
def test_published_programs_are_planned_again(counts, typed, word):
    archive, settings = make_archive({"a1": make_run(1.0)}), {"matmul": "torch", "compile": False}
    arms = {
        f"arm{n}": {
            "config": {**settings, "precision": "fp32", "train": {"vmap": count} if count else {}},
            "facts": {"device": "cpu"},
        }
        for n, count in enumerate(counts)
    }
    archive.looks["3"]["manifest"] |= {"arms": arms, "command": ["qkablate", *typed]}
    expected = ["matmul=torch", "precision=fp32", "compile=false", f"train.vmap={word}"]
    assert machine_settings(archive, {}) == [*expected, "device=cpu"]
    given = machine_settings(archive, {"train.vmap": "2"})
    assert not any(setting.startswith("train.vmap") for setting in given)


def test_published_claim_is_continued_with_its_own_search(tmp_path):
    """Other rules chose the published rates, and standard had one rate to tune."""
    claim = load_claim("directed")
    archive = find_archive(str(RESULTS), claim)
    published = archive.looks["16"]["manifest"]
    grid, words = claim_grid(claim, 16)
    with open_hydra():
        request = read_request([*words, *machine_settings(archive, {}), f"out={tmp_path}"], grid)
        planned, _ = plan_sweep(request, [])
    followed = follow_search(archive, planned, 16)
    assert followed.id == published["id"] != planned.id
    assert (followed.tuning_rules, planned.tuning_rules) == (1, RULES)
    assert [run.id for run in followed.runs] == [run["id"] for run in published["runs"]]


def test_plan_with_some_of_the_published_runs_is_refused(tmp_path):
    """The others would be trained anew, and could not be published beside them."""
    archive = make_archive({"a1": make_run(1.0), "b1": make_run(2.0, seed=2)})
    archive.looks["3"]["manifest"]["arms"] = {}

    def plan(changes, tuning):
        return SimpleNamespace(id=f"a{changes['seed']}", label="no_q-d16")

    manifest = SimpleNamespace(arms={"no_q-d16": SimpleNamespace(run=plan)}, out=str(tmp_path))
    with pytest.raises(UserError, match="1 of the 2 published runs is of this plan: their arms"):
        count_published(archive, manifest)
    del archive.runs["b1"]
    assert count_published(archive, manifest) == 1


def test_run_without_an_arm_is_refused():
    archive = make_archive({"a1": make_run(1.0)})
    del archive.runs["a1"]["arm"]
    manifest = SimpleNamespace(arms={})
    with pytest.raises(UserError, match="damaged: 'arm'"):
        count_published(archive, manifest)
