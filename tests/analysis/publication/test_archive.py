"""Archives: reading returns what was written, and merging loses and invents nothing."""

import gzip
import json

import pytest

from qkablate.analysis.publication.archive import (
    CHECKSUMS,
    find_archives,
    read_archive,
)
from qkablate.errors import UserError
from tests.analysis.publication.made_up import HASH, make_archive, make_run


def test_archive_returns_its_runs(tmp_path):
    """Runs with other fields are in tables of their own; the order of the runs changes no byte."""
    runs = {"b1": make_run(2.25), "a1": make_run(1 / 3, seed=2), "c1": make_run(1.0, chance=0.5)}
    archive = make_archive(runs)
    path = archive.write(tmp_path)
    assert read_archive(path).runs == runs
    assert read_archive(path).looks == archive.looks
    content = path.read_bytes()
    assert make_archive(dict(reversed(runs.items()))).write(tmp_path / "other").name == path.name
    assert (tmp_path / "other" / path.name).read_bytes() == content


def test_merged_archives_hold_the_runs_of_both():
    first = make_archive({"a1": make_run(1.0)}, documents=documents([10, 20], 1))
    second = make_archive(
        {"a1": make_run(1.0), "b1": make_run(2.0)}, "2025-12-31", documents=documents([1, 2], 1)
    )
    first.merge(second)
    assert [*first.runs] == ["a1", "b1"]
    assert first.registration["registered"] == "2025-12-31"
    assert first.documents == documents([11, 22], 2)


def documents(losses, runs):
    return {"no_q-d16 {}": {"tokens": "t", "losses": losses, "runs": runs}}


@pytest.mark.parametrize(
    "other", [make_run(1.0625), make_run(1.0, status="diverged"), make_run(1.0, steps=9)]
)
def test_other_figures_of_the_same_run_are_refused(other):
    archive = make_archive({"a1": make_run(1.0)})
    with pytest.raises(UserError, match=r"run a1 is published with .*one id, two results"):
        archive.merge(make_archive({"a1": other}))
    assert archive.runs == {"a1": make_run(1.0)}


def test_other_sweep_of_a_look_is_refused():
    archive, other = (make_archive({"a1": make_run(1.0)}) for _ in range(2))
    other.looks["3"]["manifest"]["id"] = "bb"
    with pytest.raises(UserError, match="with 3 seeds aa is published, and here it is bb"):
        archive.merge(other)


def change_a_loss(path):
    content = json.loads(gzip.decompress(path.read_bytes()))
    content["runs"][0]["equal"]["result\x1floss\x1fval"] = 0.5
    path.write_bytes(gzip.compress(json.dumps(content).encode()))


@pytest.mark.parametrize(
    "damage",
    [
        change_a_loss,
        lambda path: path.write_bytes(path.read_bytes()[:-20]),
        lambda path: path.write_bytes(b"no gzip"),
        lambda path: (path.parent / CHECKSUMS).write_text(f"{HASH}  {path.name}\n"),
    ],
)
def test_damaged_archive_is_refused(tmp_path, damage):
    path = make_archive({"a1": make_run(1.0)}).write(tmp_path)
    damage(path)
    with pytest.raises(UserError, match="is no archive of runs, or damaged"):
        read_archive(path)


def test_changed_loss_is_noticed_without_the_file_of_checksums(tmp_path):
    path = make_archive({"a1": make_run(1.0)}).write(tmp_path)
    (tmp_path / CHECKSUMS).unlink()
    change_a_loss(path)
    with pytest.raises(UserError, match="its checksum does not match"):
        read_archive(path)


def test_name_that_leads_out_of_the_folder_is_refused(tmp_path):
    archive = make_archive({"a1": make_run(1.0)})
    archive.looks["3"]["manifest"]["name"] = "../../evil"
    with pytest.raises(UserError, match="is not a valid name"):
        read_archive(archive.write(tmp_path))


def test_archives_are_found_by_folder_and_by_file(tmp_path):
    path = make_archive({"a1": make_run(1.0)}).write(tmp_path)
    assert find_archives(tmp_path) == find_archives(path) == [path]
    assert find_archives(tmp_path / CHECKSUMS) == find_archives(tmp_path / "none") == []
