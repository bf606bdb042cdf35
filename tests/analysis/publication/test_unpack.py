"""Unpacked archives: a folder that could not be written is an error."""

import errno
import json
from pathlib import Path

import pytest

from qkablate.analysis.publication import archive, unpack
from qkablate.analysis.publication.unpack import unpack_archives
from qkablate.errors import UserError
from qkablate.runs import run

RESULTS = Path(__file__).parents[3] / "docs" / "study" / "results"


@pytest.fixture
def full(monkeypatch, tmp_path):
    """Let no folder of the cache be renamed; return the list of what `rename` does before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = []

    def rename(_, target):
        for step in before:
            step(target)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "rename", rename)
    return before


def test_folder_that_cannot_be_written_is_refused(full):
    with pytest.raises(UserError, match="cannot be written: No space left"):
        unpack_archives([])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["NUMERICS", "CUDA_NUMERICS"])
def test_runs_of_other_numerics_are_read(name, monkeypatch, tmp_path):
    """Their ids change, and what was unpacked before is not used."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (path,) = RESULTS.glob("block_matters-*.json.gz")  # trained on a GPU
    before = unpack_archives([path])
    for module in (archive, unpack, run):
        monkeypatch.setattr(module, name, getattr(run, name) + 1)
    after = unpack_archives([path])
    ids = [{one.name for one in (folder / "runs").iterdir()} for folder in (before, after)]
    assert len(ids[0]) == len(ids[1]) == 337
    assert not ids[0] & ids[1]
    (manifest,) = (after / "sweeps").glob("*/manifest.json")
    planned = {one["id"] for one in json.loads(manifest.read_text())["runs"]}
    assert planned <= {one.rpartition("-")[2] for one in ids[1]}


def test_looks_of_other_machine_settings_are_read(monkeypatch, tmp_path):
    """An arm of one name has other settings in the second look."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (path,) = RESULTS.glob("book_start-*.json.gz")
    published = archive.read_archive(path)
    (seeds,) = published.looks
    look = json.loads(json.dumps(published.looks[seeds]))
    for arm in look["manifest"]["arms"].values():
        arm["config"]["matmul"] = "onednn"
    look["manifest"]["id"] = "0123456789ab"
    published.looks["99"] = look
    (tmp_path / "two").mkdir()
    folder = unpack_archives([published.write(tmp_path / "two")])
    assert len([*(folder / "runs").iterdir()]) == len(published.runs)


def test_folder_of_a_faster_process_is_used(full):
    full.append(lambda target: target.mkdir())
    folder = unpack_archives([])
    assert folder.is_dir()
    assert [*folder.parent.iterdir()] == [folder]
