"""Sync of files and folders, and refusal of links and FIFOs."""

import hashlib
import os

import pytest

from qkablate.disk import (
    exclusive_folder,
    hash_file,
    link_atomic,
    make_folder,
    open_append,
    read_file,
)
from qkablate.tracking import MetricsFile


@pytest.fixture
def synced(monkeypatch):
    """Return the inodes that were synced, in order."""
    inodes = []

    def fsync(descriptor, original=os.fsync):
        original(descriptor)
        inodes.append(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", fsync)
    return inodes


def test_new_folders_are_synced(tmp_path, synced):
    folder = tmp_path / "a" / "b" / "c"
    make_folder(folder)
    above = [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]
    assert synced == [path.stat().st_ino for path in above]
    make_folder(folder)
    assert len(synced) == len(above)


def test_file_in_place_of_a_folder_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError, match="file"):
            make_folder(path)


def test_metrics_file_is_synced(tmp_path, synced):
    MetricsFile(tmp_path / "metrics.jsonl").close()
    assert tmp_path.stat().st_ino in synced


def test_all_files_of_a_run_and_its_data_are_synced(qkablate, tiny, tmp_path, synced):
    assert qkablate("train", *tiny).code == 0
    folders = {path.parent for top in ("outputs", "cache") for path in (tmp_path / top).rglob("*")}
    folders = {path for path in folders if path.name != "lease"}  # no lease outlasts the machine
    assert len(folders) >= 7
    assert [path for path in folders if path.stat().st_ino not in synced] == []
    files = [path for folder in folders for path in folder.iterdir() if path.is_file()]
    files = [path for path in files if path.suffix != ".lock"]  # which are empty
    assert len(files) >= 12
    assert [path for path in files if path.stat().st_ino not in synced] == []


@pytest.mark.parametrize("use", [read_file, open_append], ids=["read", "append"])
def test_fifo_is_refused_without_blocking(tmp_path, use):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match=r"not a regular file|No such device"):
        use(tmp_path / "pipe")


def test_append_refuses_links(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        open_append(tmp_path / "link")
    assert not (tmp_path / "elsewhere").exists()


def test_last_bytes_are_read(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    assert [read_file(tmp_path / "file", last) for last in (None, 2, 9)] == [b"abc", b"bc", b"abc"]


def test_hash_is_that_of_the_content(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    assert hash_file(tmp_path / "file") == hashlib.sha256(b"abc").hexdigest()


def test_link_is_relative_and_replaces_an_earlier_one(tmp_path):
    """A temporary link that a killed process left behind is no obstacle."""
    for name in ("old", "new", "links"):
        (tmp_path / name).mkdir()
    link = tmp_path / "links" / "run"
    (tmp_path / "links" / f".run.{os.getpid()}").symlink_to("nowhere")
    for name in ("old", "new"):
        link_atomic(link, tmp_path / name)
        assert os.readlink(link) == f"../{name}"
    assert [path.name for path in (tmp_path / "links").iterdir()] == ["run"]


def test_exclusive_folder_is_empty_and_is_removed(tmp_path):
    folder = tmp_path / "work"
    (folder / "new" / "left").mkdir(parents=True)  # by a process that was killed
    with exclusive_folder(folder) as content:
        assert [*content.iterdir()] == []
        (content / "file").touch()
        with pytest.raises(BlockingIOError), exclusive_folder(folder):
            pass
        content.rename(tmp_path / "done")
    assert [path.name for path in tmp_path.iterdir() if path.name != "home"] == ["done"]
    with pytest.raises(ZeroDivisionError), exclusive_folder(folder):
        _ = 1 / 0
    assert not folder.exists()


def test_exclusive_folder_removes_nothing_of_others(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    with pytest.raises(FileExistsError), exclusive_folder(tmp_path / "link"):
        pass
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "new").symlink_to(tmp_path / "precious")
    with exclusive_folder(tmp_path / "work"):
        pass
    assert [path.name for path in (tmp_path / "precious").iterdir()] == ["file"]
