"""Run commands in processes forked from one that has imported everything, and compare runs.

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
PATIENCE = 120.0  # seconds until a command, which takes one or two, counts as hanging
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_CLOCKS = {"seconds", "perf/tokens_per_second", "perf/mfu", "crc32"}
RUN = [
    *("model.layers=2", "model.d_model=16", "model.heads=2", "model.context=16", "threads=1"),
    *("train.steps=12", "train.batch_size=2", "train.eval_every=6", "train.checkpoint_every=4"),
    *("model.dropout=0.1", "tracking.log_every=2", "data=text", "data.path=corpus.txt"),
    *("data.cache=cache", "tracking.wandb=disabled"),
]  # takes half a second; paths are relative to its folder
SWEEP = [
    *("sweep", "variant=standard,no_q", "seed=0", "workers=2"),
    *("sweep.baseline=null", "sweep.floor=false"),
]

# A translator of pairs of different lengths.
TRANSLATOR = [
    *("model=nano_translator", "variant=no_q", "variant.sites=encoder+cross", "data=pairs"),
    *("data.path=pairs.tsv", "data.source_field=a", "data.target_field=b", "data.tokenizer=bytes"),
]

# Function of the number of cases, a generator, an empty folder, and the number of the lane.
Lane = Callable[[int, random.Random, Path, int], Tally]


def with_words(words: list[str], others: list[str]) -> list[str]:
    """Return the words, of which the others replace those with the same key."""
    keys = {word.partition("=")[0] for word in others}
    return [*(word for word in words if word.partition("=")[0] not in keys), *others]


def write_pairs(file: Path) -> None:
    """Write numbers and their digits in reverse."""
    numbers = [str(i**3) for i in range(1, 200)]
    rows = "".join(f"{number}\t{number[::-1]}\n" for number in numbers)
    file.write_text(f"a\tb\n{rows}", encoding="utf-8")


def run_isolated(script: str, cases: int, seed: int, folder: Path) -> Tally:
    """Run `main` of a script in a separate process with its own home folder."""
    (folder / "home").mkdir()
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "HYDRA_", "XDG_"))
    }
    arguments = [sys.executable, script, str(cases), str(seed), str(folder)]
    process = subprocess.run(
        arguments,
        env={**environment, "HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return Tally(**json.loads(process.stdout))


def main(lane: Lane) -> None:
    """Run two lanes in parallel, each with half of the cases."""
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
        lane_cases = cases // LANES + (number < cases % LANES)
        lane_folder = folder / f"lane-{number}"
        lane_folder.mkdir()
        pids.append(os.fork())
        if not pids[-1]:
            code = 1
            try:
                ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
                tally = (
                    lane(lane_cases, random.Random(f"{seed} {number}"), lane_folder, number)
                    if lane_cases
                    else Tally()
                )
                (lane_folder / "tally.json").write_text(json.dumps(asdict(tally)), encoding="utf-8")
                code = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(code)
    total = Tally()
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if any(codes):
        sys.exit(f"a lane failed with exit codes {codes}")
    for number in range(LANES):
        tally = json.loads((folder / f"lane-{number}" / "tally.json").read_text(encoding="utf-8"))
        total.add(Tally(**tally))
    print(json.dumps(asdict(total)))


def prepare(folder: Path) -> Path:
    """Make a folder with a text and pairs in which commands can run."""
    folder.mkdir()
    rng = random.Random(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "dogs", "who", "ran"]
    text = " ".join(rng.choice(words) for _ in range(9000))
    (folder / "corpus.txt").write_text(text + "\n", encoding="utf-8")
    write_pairs(folder / "pairs.tsv")
    return folder


def start(
    words: list[str],
    folder: Path,
    *,
    before: Callable[[], None] | None = None,
    cold: bool = False,
) -> int:
    """Start a command with its output in a log; with `cold`, in a new Python."""
    pid = os.fork()
    if pid:
        return pid
    code: Any = 1
    try:
        os.setsid()
        os.chdir(folder)
        log_file = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
        null = os.open(os.devnull, os.O_RDONLY)
        for descriptor, target in enumerate((null, log_file, log_file)):
            os.dup2(target, descriptor)
        if cold:
            os.execv(sys.executable, [sys.executable, "-m", "qkablate", *words])
        _patch_forkserver()
        atexit._clear()
        if before is not None:
            before()
        from qkablate.cli import main as run_command

        run_command(words)
    except SystemExit as exit_:
        code = exit_.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _patch_forkserver() -> None:
    """Make multiprocessing fork its server, too, instead of starting a new Python."""
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
    """Return the exit code as subprocess does, or None if the process does not end in time."""
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


def find_children() -> list[int]:
    """Return the remaining processes of this lane's commands."""
    parent = os.getpid()
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def kill_children() -> None:
    while pids := find_children():
        for pid in pids:
            kill(pid)


def find_leftovers(seconds: float = 30.0) -> list[str]:
    """Return the commands of processes that still run after a while, and kill them."""
    end = time.monotonic() + seconds
    with suppress(ChildProcessError):
        while time.monotonic() < end:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(0.003)
    commands = []
    for pid in find_children():
        with suppress(OSError):
            commands.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:100])
    kill_children()
    return commands


def read_log(folder: Path) -> str:
    """Return the log of the last command."""
    return (folder / "log").read_text(encoding="utf-8", errors="replace")


def find_runs(folder: Path) -> list[Path]:
    return sorted((folder / "outputs" / "runs").glob("*"))


def newest_step(run: Path) -> int:
    """Return the step of the newest complete checkpoint; -1 if there is none."""
    steps = (int(p.name.removeprefix("step-")) for p in (run / "checkpoints").glob("step-*"))
    return max(steps, default=-1)


def find_difference(expected: Path, actual: Path) -> str:
    """Return which runs of two folders are not bit-identical; empty if all are."""
    names = [[run.name for run in find_runs(folder)] for folder in (expected, actual)]
    if names[0] != names[1]:
        return f"runs: {names[1]}, not {names[0]}"
    for first, second in zip(find_runs(expected), find_runs(actual), strict=True):
        try:
            expected_facts, actual_facts = _read_facts(first), _read_facts(second)
        except (OSError, ValueError, KeyError) as error:
            return f"{second.name}: {type(error).__name__}: {error}"
        for name, value in expected_facts.items():
            if actual_facts.get(name) != value:
                difference = f"{str(actual_facts.get(name))[:200]}, not {str(value)[:200]}"
                return f"{second.name}: {name}: {difference}"
    return ""


def _read_facts(run: Path) -> dict[str, Any]:
    """Return everything of a run that does not depend on a clock."""
    import torch
    from safetensors.torch import load_file

    from qkablate.runs.records import sha256

    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    facts = {key: result[key] for key in ("status", "loss", "bits_per_byte", "measures", "steps")}
    text = (run / "metrics.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.split("\n")[:-1]]
    facts["rows"] = [{k: v for k, v in row.items() if k not in _CLOCKS} for row in rows]
    facts["end of rows"] = text[-1:]
    predictions = sorted((run / "predictions").iterdir())
    facts["predictions"] = {path.name: sha256(path.read_bytes()) for path in predictions}
    if (run / "attention_map.safetensors").exists():  # translators keep none
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
