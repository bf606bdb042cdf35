"""Archives: reading returns what was written, and merging loses and invents nothing."""

import gzip
import json

import pytest

from qkablate.analysis.publication.archive import (
    CHECKSUMS,
    find_archives,
    read_archive,
)
from qkablate.disk import hash_file, write_atomic
from qkablate.errors import UserError
from qkablate.strict_json import hash_json
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


@pytest.mark.parametrize("when", ["2025-12-31", "2026-01-02"])
def test_merged_archive_knows_the_earlier_wordings_of_both(when):
    """Otherwise an exploratory claim would become a confirmatory one."""
    first, second = make_archive({"a1": make_run(1.0)}), make_archive({}, when)
    first.registration["earlier"], second.registration["earlier"] = ["aa"], ["bb"]
    first.merge(second)
    assert first.registration["earlier"] == ["aa", "bb"]


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
    with pytest.raises(UserError, match="is not an archive of runs, or is damaged"):
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


def test_archive_of_another_name_is_refused(tmp_path):
    """A renamed copy would be mixed with the runs of the claim, or taken for another claim's."""
    path = make_archive({"a1": make_run(1.0)}).write(tmp_path)
    copy = path.with_name("other-small-0123456789ab.json.gz")
    copy.write_bytes(path.read_bytes())
    with pytest.raises(UserError, match=f"rename it to {path.name}"):
        read_archive(copy)
    assert [*read_archive(path).runs] == ["a1"]


@pytest.mark.parametrize("written", range(3))
def test_killed_writer_leaves_a_readable_archive(tmp_path, monkeypatch, written):
    """It is killed before each of the three files that it replaces."""
    path = make_archive({"a1": make_run(1.0)}).write(tmp_path)
    replaced = []

    def write(*file):
        if len(replaced) == written:
            raise KeyboardInterrupt
        replaced.append(file)
        write_atomic(*file)

    later = make_archive({"a1": make_run(1.0), "b1": make_run(2.0)})
    with monkeypatch.context() as patch:
        patch.setattr("qkablate.analysis.publication.archive.write_atomic", write)
        with pytest.raises(KeyboardInterrupt):
            later.write(tmp_path)
    assert "a1" in read_archive(path).runs
    later.write(tmp_path)
    assert read_archive(path).runs == later.runs
    assert (tmp_path / CHECKSUMS).read_text() == f"{hash_file(path)}  {path.name}\n"


def test_checksums_of_other_archives_stay(tmp_path):
    """A changed archive is not blessed by whoever publishes another claim."""
    changed = make_archive({"a1": make_run(1.0)}).write(tmp_path)
    changed.write_bytes(gzip.compress(gzip.decompress(changed.read_bytes()), 1))
    other = make_archive({"a1": make_run(2.0)})
    other.registration["claim"]["name"] = "other"
    assert read_archive(other.write(tmp_path)).runs == other.runs
    with pytest.raises(UserError, match=f"its checksum is not that of {CHECKSUMS}"):
        read_archive(changed)


def copy_many(content):
    """Make a small file of many runs: a table holds what they have in common once."""
    (table,) = content["runs"]
    table["ids"] = [f"a{i}" for i in range(4000)]
    table["each"] = {}


@pytest.mark.parametrize(
    "field", [{f"k{i}": 0 for i in range(3000)}, {"curve": [0.5] * 30_000}], ids=["keys", "curve"]
)
def test_file_that_expands_without_measure_is_refused(tmp_path, field):
    path = make_archive({"a1": make_run(1.0, **field)}).write(tmp_path)
    assert len(read_archive(path).runs) == 1
    reseal(path, copy_many)
    with pytest.raises(UserError, match="its runs would be too large"):
        read_archive(path)


def test_documents_that_expand_without_measure_are_refused(tmp_path):
    path = make_archive({"a1": make_run(1.0)}, documents=documents([0] * 30_000, 1)).write(tmp_path)
    reseal(path, copy_many)
    with pytest.raises(UserError, match="its runs would be too large"):
        read_archive(path)


def reseal(path, change):
    """Change the content of an archive, with sums that are right."""
    content = json.loads(gzip.decompress(path.read_bytes()))
    change(content)
    del content["sha256"]
    path.write_bytes(gzip.compress(json.dumps(content | {"sha256": hash_json(content)}).encode()))
    (path.parent / CHECKSUMS).unlink()


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(looks={}),
        lambda content: content["looks"].update(three=content["looks"]["3"]),
        lambda content: content.update(environments={"e": {"machine": 1}}),
        lambda content: content.update(environments={"e": {"resumed": 1}}),
        lambda content: content.update(environments={"e": {"resumed": [{"machine": 1}]}}),
        lambda content: content["runs"][0]["equal"].pop("result\x1floss\x1fval"),
        lambda content: content["runs"][0]["equal"].pop("environment"),
        lambda content: content.update(documents=[]),
    ],
)
def test_malformed_content_is_refused(tmp_path, change):
    path = make_archive({"a1": make_run(1.0)}).write(tmp_path)
    reseal(path, change)
    with pytest.raises(UserError, match="is not an archive of runs, or is damaged"):
        read_archive(path)


def test_archives_are_found_by_folder_and_by_file(tmp_path):
    path = make_archive({"a1": make_run(1.0)}).write(tmp_path)
    assert find_archives(tmp_path) == find_archives(path) == [path]
    assert find_archives(tmp_path / CHECKSUMS) == find_archives(tmp_path / "none") == []
