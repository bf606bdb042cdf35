"""Published runs that count as done: malformed ones are refused in one line."""

from types import SimpleNamespace

import pytest

from qkablate.analysis.publication.reuse import count_published, machine_settings
from qkablate.errors import UserError
from tests.analysis.publication.made_up import make_archive, make_run


def test_arm_without_settings_is_refused():
    archive = make_archive({"a1": make_run(1.0)})
    archive.looks["3"]["manifest"]["arms"] = {"no_q-d16": {"config": {}}}
    with pytest.raises(UserError, match="mine-small-0123456789ab' is not an archive of runs"):
        machine_settings(archive, {})


@pytest.mark.parametrize(
    ("counts", "word"), [((1, 1), "1"), ((8, 8), "8"), ((1, 8), "auto"), ((None, None), "1")]
)
def test_published_programs_are_planned_again(counts, word):
    archive, settings = make_archive({"a1": make_run(1.0)}), {"matmul": "torch", "compile": False}
    arms = {
        f"arm{n}": {
            "config": {**settings, "precision": "fp32", "train": {"vmap": count} if count else {}},
            "facts": {"device": "cpu"},
        }
        for n, count in enumerate(counts)
    }
    archive.looks["3"]["manifest"]["arms"] = arms
    expected = ["matmul=torch", "precision=fp32", "compile=false", f"train.vmap={word}"]
    assert machine_settings(archive, {}) == [*expected, "device=cpu"]
    assert f"train.vmap={word}" not in machine_settings(archive, {"train.vmap": "2"})


def test_run_without_an_arm_is_refused():
    archive = make_archive({"a1": make_run(1.0)})
    del archive.runs["a1"]["arm"]
    manifest = SimpleNamespace(arms={})
    with pytest.raises(UserError, match="damaged: 'arm'"):
        count_published(archive, manifest)
