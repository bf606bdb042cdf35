"""The local engine; tests/sweeps/running/test_launcher.py has the tests of all engines."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from qkablate.sweeps.engines import local

SIGNALED_EARLY = """
import multiprocessing, os, signal, sys
from multiprocessing import forkserver, resource_tracker
from qkablate.sweeps.engines import local

multiprocessing.set_forkserver_preload(local.PRELOADED)
resource_tracker.ensure_running()
with local.blocked_signals():
    forkserver.ensure_running()
# While it imports torch.
os.kill(forkserver._forkserver._forkserver_pid, signal.Signals[sys.argv[1]])
process = multiprocessing.get_context("forkserver").Process(target=print, args=("started",))
process.start()
process.join()
"""


def test_run_is_started_again_if_its_server_was_killed():
    """Then multiprocessing says 255, and the process is still writing its checkpoint."""
    sentinel, end = os.pipe()
    os.close(end)
    process = SimpleNamespace(sentinel=sentinel, join=lambda: None, exitcode=255)
    engine = local.LocalEngine([None], wandb=None)
    lifeline = SimpleNamespace(close=lambda: None)
    engine._running["a1"] = local._Running(process, 0, lifeline, 0)
    (exit,) = engine.wait_for_exits(1.0)
    assert (exit.id, exit.code) == ("a1", 255)
    assert exit.requeue_reason == "the server of its process was killed"
    os.close(sentinel)


TASK = """
import os
from types import SimpleNamespace

class Task(SimpleNamespace):
    @property
    def folder(self):  # the first thing that the worker asks for
        os.write(2, os.environ.get("SET_LATER", "missing").encode())
        os._exit(0)
"""
LAUNCHER = """
import os
from multiprocessing import forkserver
from qkablate.sweeps.engines import local
from task import Task

engine = local.LocalEngine([None], wandb=None)
forkserver.ensure_running()  # as by an earlier sweep of this process
os.environ["SET_LATER"] = "set"
engine.start(Task(id="a1"))
while not engine.wait_for_exits(1.0):
    pass
"""


@pytest.mark.slow
def test_workers_have_the_environment_of_their_launcher(tmp_path):
    """The server's is that of the first sweep of a process."""
    (tmp_path / "task.py").write_text(TASK)
    script = tmp_path / "script.py"
    script.write_text(LAUNCHER)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert (done.stderr, done.returncode) == ("set", 0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_forkserver_survives_signals_to_its_group(name):
    done = subprocess.run(
        [sys.executable, "-c", SIGNALED_EARLY, name], capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.returncode) == ("started\n", 0), done.stderr
