"""Unpacked archives: a folder that could not be written is an error."""

import errno
from pathlib import Path

import pytest

from qkablate.analysis.publication.unpack import unpack_archives
from qkablate.errors import UserError


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


def test_folder_of_a_faster_process_is_used(full):
    full.append(lambda target: target.mkdir())
    folder = unpack_archives([])
    assert folder.is_dir()
    assert [*folder.parent.iterdir()] == [folder]
