"""Clocks that jump, differ between machines, or stop while a process is suspended.

Whatever the clocks show, a run ends with the numbers of an undisturbed one, only one process at a
time trains it, and a process that wakes after its lease was taken over writes nothing.
"""

import json
import os
import random
import signal
import socket
import time
from pathlib import Path
from unittest import mock

from qkablate.runs import lease
from qkablate.training.loop import Trainer
from tests.torture.readers import SMALL, find_problem, prepare_text, run_command
from tests.torture.tally import Tally

SHORT = 3
FULL = 21
_STEPS = 6  # of SMALL
_HEARTBEAT, _TIMEOUT = 0.05, 1.0  # seconds, so that a case does not take minutes
_ZONES = ("UTC", "Asia/Kathmandu", "Pacific/Kiritimati", "America/St_Johns", "Nowhere/Else")


def torture(cases: int, seed: int, folder: Path) -> Tally:
    rng = random.Random(seed)
    tally = Tally()
    words = [*SMALL, *prepare_text(folder / "data"), "train.checkpoint_every=1"]
    result = run_command("train", *words, f"out={folder / 'reference'}")
    assert result.code == 0, result.err
    reference = _numbers(folder / "reference")
    for n in range(cases):
        fault = (_clock_jumps, _two_machines, _holder_sleeps)[n % 3]
        out = folder / str(n)
        with mock.patch.multiple(lease, HEARTBEAT=_HEARTBEAT, TIMEOUT=_TIMEOUT):
            description, problem = fault(rng, out, [*words, f"out={out}"])
        if not problem and _numbers(out) != reference:
            problem = "its numbers differ from those of the undisturbed run"
        tally.cases += 1
        if problem:
            tally.wrong.append(f"{description}: {problem}")
    return tally


def _clock_jumps(rng: random.Random, out: Path, words: list[str]) -> tuple[str, str]:
    """Train in several sessions, each with another time zone and another clock."""
    sessions = [
        (rng.choice([-1e9, -3600, 0, 3600, 1e9]), rng.choice(_ZONES), stop)
        for stop in (*sorted(rng.sample(range(1, _STEPS), 2)), None)
    ]
    for clock_shift, zone, stop in sessions:
        child = _start_training(
            words, out.with_suffix(".err"), clock_shift=clock_shift, zone=zone, terminate_at=stop
        )
        if (code := _wait(child)) != (0 if stop is None else 128 + signal.SIGTERM):
            return f"{sessions}", f"exit code {code}"
    return f"{sessions}", ""


def _two_machines(rng: random.Random, out: Path, words: list[str]) -> tuple[str, str]:
    """Train one run from two machines with different clocks.

    One trains; the other reports the holder of the lease, or finds the result.
    """
    shifts = [rng.uniform(-1e5, 1e5) for _ in range(2)]
    errs = [out.with_suffix(f".{n}.err") for n in range(2)]
    children = [
        _start_training(words, err, clock_shift=clock_shift, host=f"machine-{n}", pause=0.1)
        for n, (err, clock_shift) in enumerate(zip(errs, shifts, strict=True))
    ]
    codes = sorted(_wait(child) for child in children)
    output = " ".join(err.read_text(encoding="utf-8") for err in errs)
    if codes == [0, 1] and "is being trained by process" in output:
        return f"clocks {shifts}", ""
    is_ok = codes == [0, 0] and output.count("step") <= 2 * _STEPS
    return f"clocks {shifts}", "" if is_ok else f"exit codes {codes}: {output[-300:]}"


def _holder_sleeps(rng: random.Random, out: Path, words: list[str]) -> tuple[str, str]:
    """Suspend a process before a step while another machine takes over its run."""
    stop = rng.randrange(_STEPS)
    clock_shift = rng.choice([-86400.0, 0.0, 86400.0])
    description = f"asleep at step {stop}, the other's clock off by {clock_shift:.0f} s"
    sleeper = _start_training(words, out.with_suffix(".err"), suspend_at=stop, host="sleeper")
    try:
        _, status = os.waitpid(sleeper, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            return description, f"it did not sleep: {status}"
        other = _start_training(
            words, out.with_suffix(".other.err"), clock_shift=clock_shift, host="other"
        )
        if code := _wait(other):
            return description, f"the run was not taken over: exit code {code}"
        before = _files(out)
    finally:
        os.kill(sleeper, signal.SIGCONT)
    code = _wait(sleeper)
    output = out.with_suffix(".err").read_text(encoding="utf-8")
    if code != 1 or "was taken over by process" not in output or "Traceback" in output:
        return description, f"the suspended process ended with code {code}: {output[-300:]}"
    changed = {path for path, content in _files(out).items() if before.get(path) != content}
    return description, f"it wrote {changed}" if changed else ""


def _start_training(
    words: list[str],
    err: Path,
    *,
    clock_shift: float = 0.0,
    zone: str = "UTC",
    host: str = "here",
    terminate_at: int | None = None,
    suspend_at: int | None = None,
    pause: float = 0.0,
) -> int:
    """Start training in a child with its own clock, time zone, host name and kernel."""
    if child := os.fork():
        return child
    code = 70
    try:
        clock, strftime, original_step = time.time, time.strftime, Trainer._step
        lock_scope = {"boot": host, "device": 1}

        def shifted_strftime(form: str) -> str:
            return strftime(form, time.localtime(clock() + clock_shift))

        def patched_step(self: Trainer, number: int) -> object:
            time.sleep(pause)
            if number == terminate_at:
                os.kill(os.getpid(), signal.SIGTERM)
            if number == suspend_at:
                os.kill(os.getpid(), signal.SIGSTOP)
            return original_step(self, number)

        os.environ["TZ"] = zone
        time.tzset()
        with (
            mock.patch.object(time, "time", side_effect=lambda: clock() + clock_shift),
            mock.patch.object(time, "strftime", side_effect=shifted_strftime),
            mock.patch.object(socket, "gethostname", return_value=host),
            mock.patch.object(lease, "_lock_scope", return_value=lock_scope),
            mock.patch.object(Trainer, "_step", patched_step),
        ):
            result = run_command("train", *words)
        err.write_text(
            result.err + find_problem(result, (0, 1, 128 + signal.SIGTERM)), encoding="utf-8"
        )
        code = result.code
    finally:
        os._exit(code)


def _wait(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _numbers(out: Path) -> tuple[object, list[object]]:
    """Return the losses and the rows of the only run."""
    (path,) = out.glob("runs/*/result.json")
    rows = map(json.loads, path.with_name("metrics.jsonl").read_text().splitlines())
    keys = ("step", "tokens", "train/loss", "val/loss", "train/grad_norm")
    return (
        json.loads(path.read_text(encoding="utf-8"))["loss"],
        [{key: row.get(key) for key in keys} for row in rows],
    )


def _files(out: Path) -> dict[Path, bytes]:
    """Return the files of the run except leases, which the sleeper may renew once more."""
    paths = [path for path in out.rglob("*") if path.is_file() and path.parent.name != "lease"]
    return {path: path.read_bytes() for path in paths}
