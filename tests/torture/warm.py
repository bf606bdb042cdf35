"""Commands in processes forked from one that has everything imported, and what becomes of runs.

A fault that works with whole processes runs in one of its own (`apart`), as two lanes side by side.
A lane inherits every process that its commands leave behind, so that none goes unseen.
"""

import atexit
import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.torture.tally import Tally

LANES = 2
PATIENCE = 120.0  # seconds for a command that takes one or two: then it never ends
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_CLOCKS = {"seconds", "perf/tokens_per_second", "perf/mfu", "crc32"}
RUN = [
    *("model.layers=2", "model.d_model=16", "model.heads=2", "model.context=16", "threads=1"),
    *("train.steps=12", "train.batch_size=2", "train.eval_every=6", "train.checkpoint_every=4"),
    *("model.dropout=0.1", "tracking.log_every=2", "data=text", "data.path=corpus.txt"),
    *("data.cache=cache", "tracking.wandb=disabled"),
]  # of half a second; all paths from the folder it stands in

# So many cases in an empty folder; the number of the lane says which kinds are its own.
Lane = Callable[[int, random.Random, Path, int], Tally]


def apart(script: str, cases: int, seed: int, folder: Path) -> Tally:
    """Run `main` of a script in a separate process with its own home folder."""
    (folder / "home").mkdir()
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "HYDRA_", "XDG_"))}
    words = [sys.executable, script, str(cases), str(seed), str(folder)]
    done = subprocess.run(
        words,
        env={**kept, "HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return Tally(**json.loads(done.stdout))


def main(lane: Lane) -> None:
    """Two lanes at once, each with its half of the cases."""
    cases, seed, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    import hydra  # noqa: F401
    import omegaconf  # noqa: F401

    import qkablate.cli.hydra.multirun
    import qkablate.cli.sweep
    import qkablate.cli.train
    import qkablate.sweeps.running.launcher
    import qkablate.sweeps.running.worker  # noqa: F401

    pids = []
    for number in range(LANES):
        own = cases // LANES + (number < cases % LANES)
        place = folder / f"lane-{number}"
        place.mkdir()
        pids.append(os.fork())
        if not pids[-1]:
            code = 1
            try:
                ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
                found = (
                    lane(own, random.Random(f"{seed} {number}"), place, number) if own else Tally()
                )
                (place / "tally.json").write_text(json.dumps(asdict(found)), encoding="utf-8")
                code = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(code)
    whole = Tally()
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if any(codes):
        sys.exit(f"a lane has broken down: {codes}")
    for number in range(LANES):
        found = json.loads((folder / f"lane-{number}" / "tally.json").read_text(encoding="utf-8"))
        whole.add(Tally(**found))
    print(json.dumps(asdict(whole)))


def prepare(folder: Path) -> Path:
    """Make a folder with a text in which commands can run."""
    folder.mkdir()
    chance = random.Random(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "dogs", "who", "ran"]
    text = " ".join(chance.choice(words) for _ in range(9000))
    (folder / "corpus.txt").write_text(text + "\n", encoding="utf-8")
    return folder


def start(
    words: list[str], folder: Path, *, before: Callable[[], None] | None = None, cold: bool = False
) -> int:
    """Start a command with its output in a log; `cold`: in a new Python."""
    pid = os.fork()
    if pid:
        return pid
    code: Any = 1
    try:
        os.setsid()
        os.chdir(folder)
        log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for descriptor, ours in enumerate((nothing, log, log)):
            os.dup2(ours, descriptor)
        if cold:
            os.execv(sys.executable, [sys.executable, "-m", "qkablate", *words])
        _fork_the_forkserver()
        atexit._clear()
        if before is not None:
            before()
        from qkablate.cli import main as command

        command(words)
    except SystemExit as done:
        code = done.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _fork_the_forkserver() -> None:
    """Fork the fork server, too, in place of a new Python that imports for seconds."""
    from multiprocessing import util

    def spawn(exe: bytes, args: list[str], kept: list[int]) -> int:
        pid = os.fork()
        if not pid:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            low = 3
            for descriptor in [*sorted(kept), os.sysconf("SC_OPEN_MAX")]:
                os.closerange(low, descriptor)
                low = descriptor + 1
            try:
                exec(args[-1], {})
            finally:
                os._exit(0)
        return pid

    util.spawnv_passfds = spawn


def wait(pid: int, seconds: float = PATIENCE) -> int | None:
    """Return the exit code as subprocess does, or None if it does not end in time."""
    end = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            return None
        time.sleep(0.003)


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    wait(pid)


def children() -> list[int]:
    """Return the processes that this lane's commands have left."""
    me = os.getpid()
    return [int(pid) for pid in Path(f"/proc/{me}/task/{me}/children").read_text().split()]


def kill_what_is_left() -> None:
    while pids := children():
        for pid in pids:
            kill(pid)


def left(seconds: float = 30.0) -> list[str]:
    """Return what still runs of all that was started, after a while; then kill it."""
    end = time.monotonic() + seconds
    with suppress(ChildProcessError):
        while time.monotonic() < end:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(0.003)
    found = []
    for pid in children():
        with suppress(OSError):
            found.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:100])
    kill_what_is_left()
    return found


def log(folder: Path) -> str:
    """Return the log of the last command."""
    return (folder / "log").read_text(encoding="utf-8", errors="replace")


def runs(folder: Path) -> list[Path]:
    return sorted((folder / "outputs" / "runs").glob("*"))


def saved(run: Path) -> int:
    """Return the step of the newest complete checkpoint; -1 if there is none."""
    found = (int(p.name.removeprefix("step-")) for p in (run / "checkpoints").glob("step-*"))
    return max(found, default=-1)


def difference(calm: Path, rough: Path) -> str:
    """Return which runs of two folders are not bit-identical; empty if all are."""
    names = [[run.name for run in runs(folder)] for folder in (calm, rough)]
    if names[0] != names[1]:
        return f"runs: {names[1]}, not {names[0]}"
    for one, other in zip(runs(calm), runs(rough), strict=True):
        try:
            mine, theirs = _facts(one), _facts(other)
        except (OSError, ValueError, KeyError) as error:
            return f"{other.name}: {type(error).__name__}: {error}"
        for what, value in mine.items():
            if theirs[what] != value:
                return f"{other.name}: {what}: {str(theirs[what])[:200]}, not {str(value)[:200]}"
    return ""


def _facts(run: Path) -> dict[str, Any]:
    """All of a run that no clock decides."""
    import torch
    from safetensors.torch import load_file

    from qkablate.runs.records import sha256

    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    facts = {key: result[key] for key in ("status", "loss", "bits_per_byte", "measures", "steps")}
    text = (run / "metrics.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.split("\n")[:-1]]
    facts["rows"] = [{k: v for k, v in row.items() if k not in _CLOCKS} for row in rows]
    facts["end of rows"] = text[-1:]
    kept = sorted((run / "predictions").iterdir())
    facts["predictions"] = {path.name: sha256(path.read_bytes()) for path in kept}
    facts["example"] = sha256((run / "attention_map.safetensors").read_bytes())
    newest = max((run / "checkpoints").glob("step-*"))
    facts["checkpoint"] = newest.name
    facts["weights"] = _numbers(load_file(newest / "weights.safetensors"))
    state = torch.load(newest / "state.pt", weights_only=True)
    for index, entry in state["optimizer"]["state"].items():
        facts[f"moments of {index}"] = _numbers(entry)
    return facts


def _numbers(tensors: dict[str, Any]) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
