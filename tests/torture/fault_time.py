"""Clocks that jump, differ from machine to machine, or stand still for an owner that sleeps.

Whatever the clocks say, a run ends with the numbers of one that nobody disturbed, one process at a
time trains it, and an owner that wakes after its run was taken over writes nothing any more.
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
from tests.torture.readers import SMALL, command, text, wrong
from tests.torture.tally import Tally

SHORT = 3
FULL = 21
_STEPS = 6  # of SMALL
_BEAT, _SILENCE = 0.05, 1.0  # seconds; else a case would take minutes
_ZONES = ("UTC", "Asia/Kathmandu", "Pacific/Kiritimati", "America/St_Johns", "Nowhere/Else")


def torture(cases: int, seed: int, folder: Path) -> Tally:
    chance = random.Random(seed)
    tally = Tally()
    words = [*SMALL, *text(folder / "data"), "train.checkpoint_every=1"]
    said = command("train", *words, f"out={folder / 'calm'}")
    assert said.code == 0, said.err
    calm = _numbers(folder / "calm")
    for n in range(cases):
        kind = (_clock_jumps, _two_machines, _owner_sleeps)[n % 3]
        out = folder / str(n)
        with mock.patch.multiple(lease, HEARTBEAT=_BEAT, TIMEOUT=_SILENCE):
            what, found = kind(chance, out, [*words, f"out={out}"])
        if not found and _numbers(out) != calm:
            found = "its numbers are not those of the calm run"
        tally.cases += 1
        if found:
            tally.wrong.append(f"{what}: {found}")
    return tally


def _clock_jumps(chance: random.Random, out: Path, words: list[str]) -> tuple[str, str]:
    """Sittings that end by a signal, each in another time zone, with a clock that was set."""
    sittings = [
        (chance.choice([-1e9, -3600, 0, 3600, 1e9]), chance.choice(_ZONES), stop)
        for stop in (*sorted(chance.sample(range(1, _STEPS), 2)), None)
    ]
    for shift, zone, stop in sittings:
        child = _begin(words, out.with_suffix(".err"), shift=shift, zone=zone, ends_at=stop)
        if (code := _end(child)) != (0 if stop is None else 128 + signal.SIGTERM):
            return f"{sittings}", f"exit code {code}"
    return f"{sittings}", ""


def _two_machines(chance: random.Random, out: Path, words: list[str]) -> tuple[str, str]:
    """Train one run from two machines with different clocks.

    One trains it; the other names the holder of the lease or finds the result.
    """
    shifts = [chance.uniform(-1e5, 1e5) for _ in range(2)]
    errs = [out.with_suffix(f".{n}.err") for n in range(2)]
    children = [
        _begin(words, err, shift=shift, host=f"machine-{n}", pause=0.1)
        for n, (err, shift) in enumerate(zip(errs, shifts, strict=True))
    ]
    codes = sorted(_end(child) for child in children)
    said = " ".join(err.read_text(encoding="utf-8") for err in errs)
    if codes == [0, 1] and "is being trained by process" in said:
        return f"clocks {shifts}", ""
    fine = codes == [0, 0] and said.count("step") <= 2 * _STEPS
    return f"clocks {shifts}", "" if fine else f"exit codes {codes}: {said[-300:]}"


def _owner_sleeps(chance: random.Random, out: Path, words: list[str]) -> tuple[str, str]:
    """Suspend a process before a step while another machine takes over its run."""
    stop = chance.randrange(_STEPS)
    shift = chance.choice([-86400.0, 0.0, 86400.0])
    what = f"asleep at step {stop}, the other's clock off by {shift:.0f} s"
    owner = _begin(words, out.with_suffix(".err"), sleeps_at=stop, host="sleeper")
    try:
        _, status = os.waitpid(owner, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            return what, f"it did not sleep: {status}"
        other = _begin(words, out.with_suffix(".other.err"), shift=shift, host="other")
        if code := _end(other):
            return what, f"nobody takes over: exit code {code}"
        before = _files(out)
    finally:
        os.kill(owner, signal.SIGCONT)
    code = _end(owner)
    said = out.with_suffix(".err").read_text(encoding="utf-8")
    if code != 1 or "was taken over by process" not in said or "Traceback" in said:
        return what, f"the owner ends with code {code}: {said[-300:]}"
    changed = {path for path, content in _files(out).items() if before.get(path) != content}
    return what, f"it wrote {changed}" if changed else ""


def _begin(
    words: list[str],
    err: Path,
    *,
    shift: float = 0.0,
    zone: str = "UTC",
    host: str = "here",
    ends_at: int | None = None,
    sleeps_at: int | None = None,
    pause: float = 0.0,
) -> int:
    """Start training in a child with its own clock, time zone, host name and kernel."""
    if child := os.fork():
        return child
    code = 70
    try:
        clock, strftime, step = time.time, time.strftime, Trainer._step
        elsewhere = {"boot": host, "device": 1}

        def told(form: str) -> str:
            return strftime(form, time.localtime(clock() + shift))

        def stepped(self: Trainer, at: int) -> object:
            time.sleep(pause)
            if at == ends_at:
                os.kill(os.getpid(), signal.SIGTERM)
            if at == sleeps_at:
                os.kill(os.getpid(), signal.SIGSTOP)
            return step(self, at)

        os.environ["TZ"] = zone
        time.tzset()
        with (
            mock.patch.object(time, "time", side_effect=lambda: clock() + shift),
            mock.patch.object(time, "strftime", side_effect=told),
            mock.patch.object(socket, "gethostname", return_value=host),
            mock.patch.object(lease, "_lock_scope", return_value=elsewhere),
            mock.patch.object(Trainer, "_step", stepped),
        ):
            said = command("train", *words)
        err.write_text(said.err + wrong(said, (0, 1, 128 + signal.SIGTERM)), encoding="utf-8")
        code = said.code
    finally:
        os._exit(code)


def _end(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _numbers(out: Path) -> tuple[object, list[object]]:
    """Return the losses of the only run, and every row once."""
    (path,) = out.glob("runs/*/result.json")
    rows = map(json.loads, path.with_name("metrics.jsonl").read_text().splitlines())
    own = ("step", "tokens", "train/loss", "val/loss", "train/grad_norm")
    return (
        json.loads(path.read_text(encoding="utf-8"))["loss"],
        [{key: row.get(key) for key in own} for row in rows],
    )


def _files(out: Path) -> dict[Path, bytes]:
    """Return the files of the run but for leases, where a sleeper may beat once more."""
    found = [path for path in out.rglob("*") if path.is_file() and path.parent.name != "lease"]
    return {path: path.read_bytes() for path in found}
