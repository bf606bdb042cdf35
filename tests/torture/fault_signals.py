"""SIGTERM, SIGINT, SIGHUP and SIGUSR2 at any moment of runs, multiruns and sweeps."""

import json
import os
import random
import signal
import time
from pathlib import Path

from tests.torture import warm
from tests.torture.tally import Tally

SHORT = 4
FULL = 60
# Long enough that most signals hit what is trained.
_LONG = ["train.steps=40", "train.eval_every=20", "train.checkpoint_every=15"]
KINDS = {
    "run": ["train"],
    "bf16 run": ["train", "precision=bf16"],
    "multirun": ["train", "-m", "seed=0,1"],
    "sweep": ["sweep", "variant=standard,no_q", "seed=0", "workers=2", "sweep.baseline=null"],
}
# Each may end with 128 + its number, or with the signal itself, before anything listens (which a
# shell shows as the same number).
ASKS = (signal.SIGINT, signal.SIGTERM)
ENDS = (signal.SIGHUP, signal.SIGUSR2)  # a launcher, too: its runs see that it is gone


def _lane(cases: int, chance: random.Random, folder: Path, number: int) -> Tally:
    found, calm, took = Tally(), dict[str, Path](), dict[str, float]()
    tries = 0
    while found.cases < cases:
        kind = chance.choice(list(KINDS)[number :: warm.LANES])
        words = [KINDS[kind][0], *warm.RUN, *_LONG, *KINDS[kind][1:]]
        if kind not in calm:
            calm[kind] = warm.prepare(folder / f"calm {kind}")
            began = time.monotonic()
            if warm.wait(warm.start(words, calm[kind])):
                raise RuntimeError(warm.log(calm[kind]))
            took[kind] = time.monotonic() - began
        name = f"try {tries} of {folder.name} ({kind})"
        found.add(_interrupted(words, chance, folder / str(tries), calm[kind], took[kind], name))
        tries += 1
    return found


def _interrupted(
    words: list[str], chance: random.Random, folder: Path, calm: Path, took: float, name: str
) -> Tally:
    """One command, sent signals until it ends."""
    found = Tally()
    warm.prepare(folder)
    for _ in range(chance.choice((1, 2, 3))):
        number = chance.choice((*ASKS, *ASKS, *ENDS))
        cold = chance.random() < 0.15
        twice = number == signal.SIGINT and chance.random() < 0.3
        seconds = chance.random() * (took + 3.0 * cold)
        told = f"{name}: {number.name}{' twice' * twice} after {seconds:.3f} s{' (cold)' * cold}"
        before = _rows(folder)
        pid = warm.start(words, folder, cold=cold)
        code = warm.wait(pid, seconds)
        if code is None:
            os.killpg(pid, number)  # as a terminal does
            if twice:
                time.sleep(chance.uniform(0.0, 0.3))
                os.kill(pid, number)  # not yet waited for: it is still ours
            code = warm.wait(pid)
            found.cases += 1
        if code is None:
            warm.kill(pid)
            found.lost.append(f"{told}: it never ends")
        if left := warm.left():
            found.wrong.append(f"{told}: it leaves {left}")
        said = warm.log(folder)
        if code == 0:  # it was faster
            break
        if code not in (128 + number, -number):
            found.wrong.append(f"{told}: code {code}: {said[-2000:]}")
        elif "Traceback" in said:
            found.wrong.append(f"{told}: {said[-2000:]}")
        elif (number in ASKS or words[0] == "train") and not twice:
            found.wrong += [f"{told}: {what}" for what in _unsaved(folder, before, said)]
    code = warm.wait(pid := warm.start(words, folder))
    if code is None:
        warm.kill(pid)
        found.lost.append(f"{name}: it never ends")
    elif code:
        found.lost.append(f"{name}: code {code}: {warm.log(folder)}")
    elif different := warm.difference(calm, folder):
        found.wrong.append(f"{name}: {different}")
    if left := warm.left():
        found.wrong.append(f"{name}: it leaves {left}")
    return found


def _rows(folder: Path) -> dict[Path, bytes]:
    """Return the rows of the runs that have any and have no result."""
    unfinished = (run for run in warm.runs(folder) if not (run / "result.json").exists())
    files = {run: run / "metrics.jsonl" for run in unfinished}
    return {run: file.read_bytes() for run, file in files.items() if file.exists()}


def _unsaved(folder: Path, before: dict[Path, bytes], said: str) -> list[str]:
    """Return the runs that have trained and did not save their last step."""
    found = []
    for run, rows in _rows(folder).items():
        steps = [json.loads(row)["step"] for row in rows.splitlines()]
        if before.get(run) != rows and steps and warm.saved(run) < max(steps):
            found.append(f"{run.name} had come to step {max(steps)}: {said[-1000:]}")
    return found


def torture(cases: int, seed: int, folder: Path) -> Tally:
    return warm.apart(__file__, cases, seed, folder)


if __name__ == "__main__":
    warm.main(_lane)
