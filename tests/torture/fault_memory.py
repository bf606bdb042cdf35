"""Many runs in one sweep leave nothing behind, and a run without memory dies alone."""

import json
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.torture.tally import Tally

SHORT, FULL = 15, 505
_BOUND = 400  # seconds: then it hangs
_FEW = 100  # runs, of which half must have ended before the launcher has all it needs
_GROWTH = 0.05  # of its memory from then on: a fifth or, of few, half of the runs
# With two runs at once: of the launcher, and of its processes (the server that forks, the one that
# watches over semaphores, two runs and two that end, each with a git that tells the code's state).
_MOST = {"files": 16, "processes": 11, "shared": 4}

# Each asks for more memory than there is, in its own way.
_STARVES = {
    "tensor": "torch.empty(2**60)",
    "limited_tensor": "limit(); kept = [torch.ones(2**24) for _ in range(64)]",
    "limited_bytes": "limit(); kept = [bytes(2**26) for _ in range(64)]",
    "limited_array": "limit(); kept = [np.ones(2**24) for _ in range(64)]",
}
_CIRCUIT = '''
import resource

import numpy as np
import torch

from qkablate.attention import QK, matrix, project, split_heads


def limit():
    """A quarter of a gigabyte more than it has."""
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**28,) * 2)


class Starves(QK):
    equation = "B_h = W_q W_kᵀ"
    params = "2 d²"
    match = "none"

    def __init__(self, spec):
        super().__init__(spec)
        self.w_q, self.w_k = (matrix(spec.d_model, spec.d_model) for _ in range(2))
        self.calls = 0

    def queries(self, x_BTD):
        self.calls += x_BTD.device.type != "meta"
        if self.calls == 4:
            %s
        return split_heads(project(x_BTD, self.w_q), self.spec.heads)

    def keys(self, y_BSD):
        return split_heads(project(y_BSD, self.w_k), self.spec.heads)
'''


@dataclass(frozen=True)
class _Look:
    """The launcher and its processes at one moment."""

    done: int
    memory: int  # of the launcher, in bytes
    files: int  # that it has open
    processes: int  # of the sweep, the launcher included
    shared: int  # semaphores and shared memory, of all of them


def _look(launcher: int, folder: Path) -> _Look:
    status = Path(f"/proc/{launcher}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+)", status)
    own = _processes(folder)
    shared = 0
    for pid in own:
        with suppress(OSError):  # it has ended
            shared += Path(f"/proc/{pid}/maps").read_text().count("/dev/shm/")
    done = sum(1 for _ in folder.glob("out/runs/*/result.json"))
    files = len(os.listdir(f"/proc/{launcher}/fd"))
    return _Look(done, int(found[1]) * 1024 if found else 0, files, len(own), shared)


def _processes(folder: Path) -> list[int]:
    """All that have the folder as their home."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"HOME={folder}\0".encode() in (path / "environ").read_bytes():
                found.append(int(path.name))
    return found


def _command(folder: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "qkablate", *words, f"out={folder}/out"]


def _sweep(folder: Path, *words: str) -> list[str]:
    return _command(
        folder,
        *("sweep", "model.layers=1", "model.d_model=8", "model.heads=2", "model.context=16"),
        *("train.steps=3", "train.batch_size=2", "train.eval_every=3", "data=text"),
        *(f"data.path={folder}/text.txt", f"data.cache={folder}/cache", "data.val_tokens=64"),
        *("data.test_tokens=64", "threads=1", "tracking.wandb=disabled", "sweep.baseline=null"),
        *("workers=2", *words),
    )


def _watched(folder: Path, runs: int) -> tuple[int | None, list[_Look]]:
    """Watch a sweep until it ends; return its exit code, or None if it hangs."""
    words, looks = _sweep(folder, f"seed=range({runs})"), list[_Look]()
    with (folder / "told.txt").open("wb") as told:
        launcher = subprocess.Popen(
            words, env={**os.environ, "HOME": str(folder)}, stdout=told, stderr=told
        )
        until = time.monotonic() + _BOUND
        while launcher.poll() is None:
            if time.monotonic() > until:
                launcher.kill()
                launcher.wait()
                return None, looks
            with suppress(OSError):  # it has ended meanwhile
                looks.append(_look(launcher.pid, folder))
            time.sleep(0.1)
    return launcher.returncode, looks


def _many(folder: Path, runs: int) -> Tally:
    found = Tally(runs)
    code, looks = _watched(folder, runs)
    results = [json.loads(p.read_text()) for p in folder.glob("out/runs/*/result.json")]
    done = sum(result["status"] == "done" for result in results)
    if code != 0 or done != runs:
        said = (folder / "told.txt").read_text()[-500:]
        found.lost.append(f"{done} of {runs} runs are done, exit code {code}: {said}")
        return found
    settled = runs // 5 if runs > _FEW else runs // 2
    # Not the last looks: other libraries are imported for the table at the end.
    training = [look for look in looks if settled <= look.done < runs]
    if len(training) < 2:
        found.wrong.append(f"seen {len(training)} times while it trained: too seldom")
        return found
    first, last = training[0].memory, training[-1].memory
    if abs(last - first) > _GROWTH * first:
        found.wrong.append(f"the launcher's memory went from {first:,} to {last:,} bytes")
    for what, most in _MOST.items():
        peak = max(getattr(look, what) for look in looks)
        if peak > most:
            found.wrong.append(f"{what}: {peak} at once")
    if left := _left(folder):
        found.wrong.append(f"processes that outlive the sweep: {left}")
    return found


def _left(folder: Path) -> list[int]:
    """Return the processes that still exist after a grace period."""
    until = time.monotonic() + 10
    while (left := _processes(folder)) and time.monotonic() < until:
        time.sleep(0.1)
    return left


def _starving(folder: Path, _: int) -> Tally:
    """Each beside others, all of which end well but those that starve."""
    found = Tally(1 + len(_STARVES))
    files = []
    for name, act in _STARVES.items():
        files.append(folder / f"{name}.py")
        files[-1].write_text(_CIRCUIT.replace("%s", act), encoding="utf-8")
    words = _sweep(
        folder, "sweep.name=hungry", "variant.file=" + ",".join(["null", *map(str, files)])
    )
    env = {**os.environ, "HOME": str(folder)}
    done = subprocess.run([*words, "seed=1000"], env=env, capture_output=True, timeout=_BOUND)
    told = subprocess.run(
        _command(folder, "status", "hungry", "--json"), env=env, capture_output=True
    )
    try:
        states = {s["variant"]: s for s in json.loads(told.stdout)["states"]}
    except ValueError:
        found.lost.append(f"no sweep: {done.stderr.decode()[-500:]}")
        return found
    for name, state in states.items():
        wanted = "failed" if name in _STARVES else "done"
        if state["status"] != wanted:
            found.lost.append(f"{name} is {state['status']}: {state['error']}")
        elif wanted == "failed" and name not in done.stdout.decode():
            found.wrong.append(f"{name} is not told to have failed")
        elif wanted == "failed" and not re.search("(?i)memory|allocate", state["error"] or ""):
            found.wrong.append(f"{name} failed for another reason: {state['error']}")
    if done.returncode != 1 or len(states) != found.cases:
        found.wrong.append(f"{len(states)} runs, exit code {done.returncode}")
    return found


def torture(cases: int, seed: int, folder: Path) -> Tally:
    tally = Tally()
    for name, part in (("starving", _starving), ("many", _many)):
        (folder / name).mkdir()
        (folder / name / "text.txt").write_text("the cat sat on the mat and saw two dogs\n" * 400)
        tally.add(part(folder / name, cases - tally.cases))
    return tally
