"""What must outlast a power cut is forced to disk, with the folders that hold its name."""

import os

import pytest

from qkablate.disk import append, make_folder, read_file
from qkablate.tracking import Journal


@pytest.fixture
def forced(monkeypatch):
    """The inodes that were, in order."""
    found = []

    def fsync(descriptor, original=os.fsync):
        original(descriptor)
        found.append(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", fsync)
    return found


def test_the_names_of_new_folders_are_forced(tmp_path, forced):
    made = tmp_path / "a" / "b" / "c"
    make_folder(made)
    above = [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]
    assert forced == [path.stat().st_ino for path in above]
    make_folder(made)
    assert len(forced) == len(above)


def test_a_folder_is_no_file(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError, match="file"):
            make_folder(path)


def test_the_name_of_a_journal_is_forced(tmp_path, forced):
    Journal(tmp_path / "metrics.jsonl").close()
    assert tmp_path.stat().st_ino in forced


def test_everything_of_a_run_and_of_its_data_is_forced(qkablate, tiny, tmp_path, forced):
    assert qkablate("train", *tiny).code == 0
    holding = {path.parent for top in ("outputs", "cache") for path in (tmp_path / top).rglob("*")}
    holding = {path for path in holding if path.name != "owner"}  # no claim outlasts the machine
    assert len(holding) >= 7
    assert [path for path in holding if path.stat().st_ino not in forced] == []
    files = [path for folder in holding for path in folder.iterdir() if path.is_file()]
    files = [path for path in files if path.suffix != ".lock"]  # which hold nothing
    assert len(files) >= 12
    assert [path for path in files if path.stat().st_ino not in forced] == []


@pytest.mark.parametrize("use", [read_file, append], ids=["read", "append"])
def test_a_pipe_is_no_file_and_is_not_waited_for(tmp_path, use):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match=r"no file|No such device"):
        use(tmp_path / "pipe")


def test_nothing_is_appended_through_a_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        append(tmp_path / "link")
    assert not (tmp_path / "elsewhere").exists()


def test_the_last_bytes_of_a_file(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    assert [read_file(tmp_path / "file", last) for last in (None, 2, 9)] == [b"abc", b"bc", b"abc"]
