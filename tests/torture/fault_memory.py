"""A sweep of many runs leaks nothing, and a run without memory fails alone."""

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
_BOUND = 400  # seconds until a sweep counts as hanging
_SMALL_SWEEP = 100  # runs; half of them must end before the launcher's memory is stable
_MAX_GROWTH = 0.05  # of the launcher's memory after a fifth (in a small sweep: half) of the runs
# Limits with two runs at once: open files of the launcher, and its processes (fork server, resource
# tracker, two runs and two that end, each with a git process that describes the code).
_LIMITS = {"files": 16, "processes": 11, "shared": 4}

# Ways to request more memory than there is.
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

from qkablate.attention import QK, apply_matrix, empty_matrix, split_heads


def limit():
    """Limit the memory to a quarter of a gigabyte more than now."""
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**28,) * 2)


class Starves(QK):
    equation = "B_h = W_q W_kᵀ"
    params = "2 d²"
    match = "none"

    def __init__(self, spec):
        super().__init__(spec)
        self.w_q, self.w_k = (empty_matrix(spec.d_model, spec.d_model) for _ in range(2))
        self.calls = 0

    def queries(self, x_BTD):
        self.calls += x_BTD.device.type != "meta"
        if self.calls == 4:
            %s
        return split_heads(apply_matrix(x_BTD, self.w_q), self.spec.heads)

    def keys(self, y_BSD):
        return split_heads(apply_matrix(y_BSD, self.w_k), self.spec.heads)
'''


@dataclass(frozen=True)
class _Observation:
    """State of the launcher and its processes at one moment."""

    done: int
    memory: int  # the launcher's, in bytes
    files: int  # open in the launcher
    processes: int  # of the sweep, the launcher included
    shared: int  # semaphores and shared memory of all processes


def _observe(launcher: int, folder: Path) -> _Observation:
    status = Path(f"/proc/{launcher}/status").read_text()
    match = re.search(r"VmRSS:\s+(\d+)", status)
    pids = _processes(folder)
    shared = 0
    for pid in pids:
        with suppress(OSError):  # the process has ended
            shared += Path(f"/proc/{pid}/maps").read_text().count("/dev/shm/")
    done = sum(1 for _ in folder.glob("out/runs/*/result.json"))
    files = len(os.listdir(f"/proc/{launcher}/fd"))
    return _Observation(done, int(match[1]) * 1024 if match else 0, files, len(pids), shared)


def _processes(folder: Path) -> list[int]:
    """Return the processes that have the folder as their home."""
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"HOME={folder}\0".encode() in (path / "environ").read_bytes():
                pids.append(int(path.name))
    return pids


def _command(folder: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "qkablate", *words, f"out={folder}/out"]


def _sweep(folder: Path, *words: str) -> list[str]:
    return _command(
        folder,
        *("sweep", "model.layers=1", "model.d_model=8", "model.heads=2", "model.context=16"),
        *("train.steps=3", "train.batch_size=2", "train.eval_every=3", "data=text"),
        *(f"data.path={folder}/text.txt", f"data.cache={folder}/cache", "data.val_tokens=64"),
        *(
            "data.test_tokens=64",
            "threads=1",
            "tracking.wandb=disabled",
            "sweep.baseline=null",
            "sweep.floor=false",
        ),
        *("workers=2", *words),
    )


def _observe_sweep(folder: Path, runs: int) -> tuple[int | None, list[_Observation]]:
    """Watch a sweep until it ends; return its exit code, or None if it hangs."""
    words, observations = _sweep(folder, f"seed=range({runs})"), list[_Observation]()
    with (folder / "output.txt").open("wb") as output:
        launcher = subprocess.Popen(
            words,
            env={**os.environ, "HOME": str(folder)},
            stdout=output,
            stderr=output,
        )
        deadline = time.monotonic() + _BOUND
        while launcher.poll() is None:
            if time.monotonic() > deadline:
                launcher.kill()
                launcher.wait()
                return None, observations
            with suppress(OSError):  # the sweep has ended
                observations.append(_observe(launcher.pid, folder))
            time.sleep(0.1)
    return launcher.returncode, observations


def _many_runs(folder: Path, runs: int) -> Tally:
    tally = Tally(runs)
    code, observations = _observe_sweep(folder, runs)
    results = [json.loads(p.read_text()) for p in folder.glob("out/runs/*/result.json")]
    done = sum(result["status"] == "done" for result in results)
    if code != 0 or done != runs:
        output = (folder / "output.txt").read_text()[-500:]
        tally.lost.append(f"{done} of {runs} runs are done, exit code {code}: {output}")
        return tally
    warm_up = runs // 5 if runs > _SMALL_SWEEP else runs // 2
    # Not the last observations: more libraries are imported for the table at the end.
    training = [observation for observation in observations if warm_up <= observation.done < runs]
    if len(training) < 2:
        tally.wrong.append(f"observed only {len(training)} times during training")
        return tally
    first, last = training[0].memory, training[-1].memory
    if abs(last - first) > _MAX_GROWTH * first:
        tally.wrong.append(f"the launcher's memory went from {first:,} to {last:,} bytes")
    for what, limit in _LIMITS.items():
        peak = max(getattr(observation, what) for observation in observations)
        if peak > limit:
            tally.wrong.append(f"{what}: {peak} at once")
    if leftovers := _find_leftovers(folder):
        tally.wrong.append(f"processes are left: {leftovers}")
    return tally


def _find_leftovers(folder: Path) -> list[int]:
    """Return the processes that still exist after a grace period."""
    deadline = time.monotonic() + 10
    while (leftovers := _processes(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return leftovers


def _starving_runs(folder: Path, _: int) -> Tally:
    """Run a sweep in which only the runs without memory fail."""
    tally = Tally(1 + len(_STARVES))
    files = []
    for name, act in _STARVES.items():
        files.append(folder / f"{name}.py")
        files[-1].write_text(_CIRCUIT.replace("%s", act), encoding="utf-8")
    words = _sweep(
        folder, "sweep.name=hungry", "variant.file=" + ",".join(["null", *map(str, files)])
    )
    env = {**os.environ, "HOME": str(folder)}
    done = subprocess.run([*words, "seed=1000"], env=env, capture_output=True, timeout=_BOUND)
    status_output = subprocess.run(
        _command(folder, "status", "hungry", "--json"), env=env, capture_output=True
    )
    try:
        states = {s["variant"]: s for s in json.loads(status_output.stdout)["states"]}
    except ValueError:
        tally.lost.append(f"no sweep: {done.stderr.decode()[-500:]}")
        return tally
    for name, state in states.items():
        expected = "failed" if name in _STARVES else "done"
        if state["status"] != expected:
            tally.lost.append(f"{name} is {state['status']}: {state['error']}")
        elif expected == "failed" and name not in done.stdout.decode():
            tally.wrong.append(f"{name} is not reported as failed")
        elif expected == "failed" and not re.search("(?i)memory|allocate", state["error"] or ""):
            tally.wrong.append(f"{name} failed for another reason: {state['error']}")
    if done.returncode != 1 or len(states) != tally.cases:
        tally.wrong.append(f"{len(states)} runs, exit code {done.returncode}")
    return tally


def torture(cases: int, seed: int, folder: Path) -> Tally:
    tally = Tally()
    for name, part in (("starving", _starving_runs), ("many", _many_runs)):
        (folder / name).mkdir()
        (folder / name / "text.txt").write_text("the cat sat on the mat and saw two dogs\n" * 400)
        tally.add(part(folder / name, cases - tally.cases))
    return tally
