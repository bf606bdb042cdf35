"""The local engine; tests/sweeps/running/test_launcher.py has the tests of all engines."""

import subprocess
import sys

import pytest

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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_forkserver_survives_signals_to_its_group(name):
    done = subprocess.run(
        [sys.executable, "-c", SIGNALED_EARLY, name], capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.returncode) == ("started\n", 0), done.stderr
