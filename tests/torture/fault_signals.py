"""SIGTERM, SIGINT, SIGHUP and SIGUSR2 at any moment of runs, multiruns and sweeps."""

import json
import os
import random
import signal
import time
from pathlib import Path

from tests.torture import forked
from tests.torture.tally import Tally

SHORT = 4
FULL = 60
# Long enough that most signals arrive during training.
_LONG = ["train.steps=40", "train.eval_every=20", "train.checkpoint_every=15"]
KINDS = {
    "run": ["train"],
    "bf16 run": ["train", "precision=bf16"],
    "multirun": ["train", "-m", "seed=0,1"],
    "sweep": forked.SWEEP,
}
# A command ends with 128 + the signal's number, or by the signal itself before the handlers are
# installed (which a shell shows as the same number).
GRACEFUL = (signal.SIGINT, signal.SIGTERM)
ABRUPT = (signal.SIGHUP, signal.SIGUSR2)  # these end a launcher, too; its runs notice


def _lane(cases: int, rng: random.Random, folder: Path, number: int) -> Tally:
    tally, reference, duration = Tally(), dict[str, Path](), dict[str, float]()
    attempts = 0
    while tally.cases < cases:
        kind = rng.choice(list(KINDS)[number :: forked.LANES])
        words = [KINDS[kind][0], *forked.RUN, *_LONG, *KINDS[kind][1:]]
        if kind not in reference:
            reference[kind] = forked.prepare(folder / f"reference {kind}")
            began = time.monotonic()
            if forked.wait(forked.start(words, reference[kind])):
                raise RuntimeError(forked.read_log(reference[kind]))
            duration[kind] = time.monotonic() - began
        name = f"try {attempts} of {folder.name} ({kind})"
        tally.add(
            _interrupted(words, rng, folder / str(attempts), reference[kind], duration[kind], name)
        )
        attempts += 1
    return tally


def _interrupted(
    words: list[str], rng: random.Random, folder: Path, reference: Path, duration: float, name: str
) -> Tally:
    """Interrupt a command several times, finish it, and compare."""
    tally = Tally()
    forked.prepare(folder)
    for _ in range(rng.choice((1, 2, 3))):
        number = rng.choice((*GRACEFUL, *GRACEFUL, *ABRUPT))
        cold = rng.random() < 0.15
        twice = number == signal.SIGINT and rng.random() < 0.3
        seconds = rng.random() * (duration + 3.0 * cold)
        description = (
            f"{name}: {number.name}{' twice' * twice} after {seconds:.3f} s{' (cold)' * cold}"
        )
        before = _read_rows(folder)
        pid = forked.start(words, folder, cold=cold)
        code = forked.wait(pid, seconds)
        if code is None:
            os.killpg(pid, number)  # as a terminal would
            if twice:
                time.sleep(rng.uniform(0.0, 0.3))
                os.kill(pid, number)  # not reaped yet, so the id is still valid
            code = forked.wait(pid)
            tally.cases += 1
        if code is None:
            forked.kill(pid)
            tally.lost.append(f"{description}: the command hangs")
        if leftovers := forked.find_leftovers():
            tally.wrong.append(f"{description}: processes are left: {leftovers}")
        log_text = forked.read_log(folder)
        if code == 0:  # it had already finished
            break
        if code not in (128 + number, -number):
            tally.wrong.append(f"{description}: code {code}: {log_text[-2000:]}")
        elif "Traceback" in log_text:
            tally.wrong.append(f"{description}: {log_text[-2000:]}")
        elif (number in GRACEFUL or words[0] == "train") and not twice:
            tally.wrong += [
                f"{description}: {problem}" for problem in _find_unsaved(folder, before, log_text)
            ]
    code = forked.wait(pid := forked.start(words, folder))
    if code is None:
        forked.kill(pid)
        tally.lost.append(f"{name}: the command hangs")
    elif code:
        tally.lost.append(f"{name}: code {code}: {forked.read_log(folder)}")
    elif difference := forked.find_difference(reference, folder):
        tally.wrong.append(f"{name}: {difference}")
    if leftovers := forked.find_leftovers():
        tally.wrong.append(f"{name}: processes are left: {leftovers}")
    return tally


def _read_rows(folder: Path) -> dict[Path, bytes]:
    """Return the rows of the runs that have any and have no result."""
    unfinished = (run for run in forked.find_runs(folder) if not (run / "result.json").exists())
    files = {run: run / "metrics.jsonl" for run in unfinished}
    return {run: file.read_bytes() for run, file in files.items() if file.exists()}


def _find_unsaved(folder: Path, before: dict[Path, bytes], log_text: str) -> list[str]:
    """Return the runs that have trained and did not save their last step."""
    problems = []
    for run, rows in _read_rows(folder).items():
        steps = [json.loads(row)["step"] for row in rows.splitlines()]
        if before.get(run) != rows and steps and forked.newest_step(run) < max(steps):
            problems.append(f"{run.name} had reached step {max(steps)}: {log_text[-1000:]}")
    return problems


def torture(cases: int, seed: int, folder: Path) -> Tally:
    return forked.run_isolated(__file__, cases, seed, folder)


if __name__ == "__main__":
    forked.main(_lane)
