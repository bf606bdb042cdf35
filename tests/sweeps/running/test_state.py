"""Who runs a sweep, as the others see it."""

import os
from types import SimpleNamespace

from qkablate.runs.lease import owning
from qkablate.sweeps.running.state import Standing


def test_of_other_launchers_only_the_killed_are_swept_up(tmp_path):
    """One that has a folder and no claim yet is about to make it."""
    coming, killed = (tmp_path / "launchers" / name for name in ("there-1", "there-2"))
    (coming / "owner").mkdir(parents=True)
    if not (child := os.fork()):
        owning(killed).__enter__()
        os._exit(0)
    os.waitpid(child, 0)
    assert any((killed / "owner").iterdir())
    standing = Standing(SimpleNamespace(folder=tmp_path, out=str(tmp_path), runs=[]))
    assert not standing.is_run()
    with standing.launching():
        assert standing.is_run()
        assert coming.exists()
        assert not killed.exists()
    assert not standing.is_run()
