"""kill -9 at any moment of runs and sweeps."""

import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qkablate.sweeps.engines.base import LOG_FILE
from tests.torture import warm
from tests.torture.tally import Tally

SHORT = 6
FULL = 300
_SWEEP = ["variant=standard,no_q", "seed=0,1", "workers=2", "sweep.baseline=null"]
KINDS = {
    "fp32": ["train"],
    "bf16": ["train", "precision=bf16", "variant=merged_w"],
    "bf16, accumulating": ["train", "precision=bf16", "train.grad_accum=2"],
    "W&B": ["train", "tracking.wandb=offline"],
    "sweep": ["sweep", *_SWEEP],
    "bf16 sweep": ["sweep", *_SWEEP, "precision=bf16"],
}
_COLD = 0.05  # the part of the kills that hit a Python of its own, which mostly starts up
_TIMED = 0.25  # and that come from outside, by the clock


def _moments() -> dict[str, tuple[int, list[tuple[Any, str]]]]:
    """Return the functions at which a process kills itself, and the latest such call."""
    import safetensors.torch
    import torch

    from qkablate.cli import sweep, train
    from qkablate.data import corpus, document_store
    from qkablate.data import prepare as preparing
    from qkablate.runs import attention_map, lease, predictions, records, tensor_file
    from qkablate.sweeps.planning import manifest
    from qkablate.sweeps.running import launcher, results_table, worker
    from qkablate.tracking import MetricsFile, WandbRun
    from qkablate.training import checkpoint, environment, hardware, result
    from qkablate.training.loop import Trainer

    return {
        "start": (4, [(train, "load"), (train, "observe_leases"), (environment, "write")]),
        "data": (
            8,
            [
                *(
                    (corpus, "_prepare"),
                    (corpus, "load_corpus"),
                    (document_store.DocumentStore, "fill"),
                ),
                *((preparing, "_divide"), (preparing._Writer, "write"), (corpus, "_digest")),
            ],
        ),
        "lease": (4, [(lease, "_create"), (lease, "_remove_old"), (lease.Lease, "release")]),
        "predictions": (6, [(predictions, "write_predictions"), (tensor_file, "write_atomic")]),
        "attention map": (1, [(attention_map, "write_attention_map")]),
        "step": (12, [(Trainer, "_step")]),
        "row": (9, [(MetricsFile, "log")]),
        "evaluation": (5, [(Trainer, "evaluate")]),
        "checkpoint": (
            20,
            [
                *((checkpoint, "save"), (checkpoint, "_sync_file"), (checkpoint, "sync_folder")),
                *((safetensors.torch, "save_file"), (torch, "save"), (checkpoint, "keep_newest")),
            ],
        ),
        "resuming": (
            3,
            [(checkpoint, "load_newest"), (checkpoint, "load"), (hardware, "configure_process")],
        ),
        "result": (
            3,
            [(result, "publish"), (records, "name_exclusively"), (result, "write_json_once")],
        ),
        "W&B": (9, [(WandbRun, "_start"), (WandbRun, "log"), (WandbRun, "close")]),
        "fsync": (40, [(os, "fsync")]),
        "rename": (20, [(os, "rename"), (os, "replace"), (os, "link")]),
        "removal": (20, [(os, "unlink"), (os, "rmdir")]),
        "folder": (8, [(os, "mkdir")]),
        "sweep": (
            8,
            [
                *((sweep, "plan_sweep"), (manifest, "write_atomic"), (launcher, "link_run")),
                *(
                    (launcher.Launcher, "_start"),
                    (launcher.Launcher, "_handle_exit"),
                    (results_table, "write_results"),
                ),
                *((worker, "_train"), (worker, "_train_logged")),
            ],
        ),
    }


def _armed(moment: str, call: int, delay: float, after: bool) -> Callable[[], None]:
    """In a process: let it and each that it forks be killed at that call, or some time later."""

    def arm() -> None:
        calls = {"": 0}

        def count(owner: Any, name: str) -> None:
            original = getattr(owner, name)

            def counted(*arguments: Any, **named: Any) -> Any:
                calls[""] += 1
                hit = calls[""] == call
                if hit and not after:
                    _die(delay)
                found = original(*arguments, **named)
                if hit:
                    _die(delay)
                return found

            setattr(owner, name, counted)

        for owner, name in _moments()[moment][1]:
            count(owner, name)

    return arm


def _die(delay: float) -> None:
    """Now, or in the middle of what comes next: by another process, which needs no turn of ours."""
    victim = os.getpid()
    if not delay:
        os.kill(victim, signal.SIGKILL)
    if not os.fork():
        time.sleep(delay)
        if os.getppid() == victim:
            os.kill(victim, signal.SIGKILL)
        os._exit(0)


class _Chain:
    """One command, killed until it ends."""

    def __init__(
        self,
        kind: str,
        chance: random.Random,
        folder: Path,
        calm: Path,
        took: float,
        name: str,
    ) -> None:
        self.words = [KINDS[kind][0], *warm.RUN, *KINDS[kind][1:]]
        self.kind, self.chance, self.name = kind, chance, name
        self.calm, self.took = calm, took  # the undisturbed one, and its seconds
        self.folder = warm.prepare(folder)
        self.tally = Tally()
        self.story: list[str] = []
        self.sweep = self.words[0] == "sweep"

    def run(self) -> Tally:
        for _ in range(self.chance.choice((1, 2, 2, 3, 3, 4, 6))):
            if not self._kill():
                break
            self._look_for_damage(self._logs())
        self._end()
        return self.tally

    def _kill(self) -> bool:
        """Return whether a kill hit before the command ended."""
        chance = self.chance
        way = chance.random()
        cold = way < _COLD
        if way < _TIMED:
            seconds = chance.random() * (self.took + 3.0 * cold)
            told = f"after {seconds:.3f} s{' from a cold start' * cold}"
            pid = warm.start(self.words, self.folder, cold=cold)
        else:
            moments = _moments()
            moment = chance.choice([m for m in moments if self._has(m)])
            call = 1 + int(moments[moment][0] * chance.random() ** 1.5)
            delay = chance.choice((0.0, 0.0, chance.uniform(0.0, 0.005)))
            after = chance.random() < 0.5
            told = f"{'after' if after else 'before'} {moment} {call} + {delay * 1000:.1f} ms"
            pid = warm.start(self.words, self.folder, before=_armed(moment, call, delay, after))
            seconds = warm.PATIENCE
        code = warm.wait(pid, seconds)
        if code is None:
            warm.kill(pid)
            if way >= _TIMED:
                self.tally.lost.append(self._told(f"it does not end: {told}"))
                return False
            code = -signal.SIGKILL
        everything = self.sweep and chance.random() < 0.5
        if everything and code == -signal.SIGKILL:  # as a machine short of memory may
            warm.kill_what_is_left()
            told += ", all its processes"
        hit = code == -signal.SIGKILL or (code == 1 and "SIGKILL" in warm.log(self.folder))
        if hit:
            self.tally.cases += 1
            self.story.append(told)
        elif code:
            self.tally.wrong.append(self._told(f"code {code} ({told}): {warm.log(self.folder)}"))
        return hit

    def _has(self, moment: str) -> bool:
        return {"W&B": self.kind == "W&B", "sweep": self.sweep}.get(moment, True)

    def _end(self) -> None:
        """Undisturbed, from where the kills have left it."""
        settled = not warm.children()  # else runs whose launcher is gone may get on yet
        written = self._written() if settled else {}
        before = {path: len(text) for path, text in self._logs().items()}
        code = warm.wait(pid := warm.start(self.words, self.folder))
        if code is None:
            warm.kill(pid)
            self.tally.lost.append(self._told("it never ends"))
        elif code:
            self.tally.lost.append(self._told(f"code {code}: {warm.log(self.folder)}"))
        else:
            logs = self._logs()
            self._look_for_damage(logs)
            for run, step in written.items():
                log = self._log(run)
                said = logs[log][before.get(log, 0) if self.sweep else 0 :]
                used = re.search(r"resuming from step (\d+)", said)
                if used is None or int(used[1]) != step:
                    self.tally.lost.append(self._told(f"step {step} was not used: {said[-2000:]}"))
            if found := warm.difference(self.calm, self.folder):
                self.tally.wrong.append(self._told(found))
        if left := warm.left():
            self.tally.wrong.append(self._told(f"it leaves {left}"))

    def _written(self) -> dict[Path, int]:
        """Return the newest checkpoint of each run that has one and has no result."""
        unfinished = (r for r in warm.runs(self.folder) if not (r / "result.json").exists())
        return {run: step for run in unfinished if (step := warm.saved(run)) >= 0}

    def _log(self, run: Path) -> Path:
        return run / LOG_FILE if self.sweep else self.folder / "log"

    def _logs(self) -> dict[Path, str]:
        paths = {self.folder / "log", *map(self._log, warm.runs(self.folder))}
        return {p: p.read_text("utf-8", "replace") if p.exists() else "" for p in paths}

    def _look_for_damage(self, logs: dict[Path, str]) -> None:
        """Check that a kill leaves nothing half-written under a final name."""
        for said in logs.values():
            if "damaged" in said or "Traceback" in said:
                self.tally.wrong.append(self._told(said[-2000:]))

    def _told(self, what: str) -> str:
        return f"{self.name} ({self.kind}; killed {'; '.join(self.story)}): {what}"


def _lane(cases: int, chance: random.Random, folder: Path, number: int) -> Tally:
    found, calm, took = Tally(), dict[str, Path](), dict[str, float]()
    chains = 0
    while found.cases < cases:
        kind = chance.choice(list(KINDS)[number :: warm.LANES])
        if kind not in calm:
            calm[kind] = warm.prepare(folder / f"calm {kind}")
            words = [KINDS[kind][0], *warm.RUN, *KINDS[kind][1:]]
            began = time.monotonic()
            if code := warm.wait(warm.start(words, calm[kind])):
                raise RuntimeError(f"code {code} of {words}: {warm.log(calm[kind])}")
            took[kind] = time.monotonic() - began
        name = f"chain {chains} of {folder.name}"
        chain = _Chain(kind, chance, folder / str(chains), calm[kind], took[kind], name)
        found.add(chain.run())
        chains += 1
    return found


def torture(cases: int, seed: int, folder: Path) -> Tally:
    return warm.apart(__file__, cases, seed, folder)


if __name__ == "__main__":
    warm.main(_lane)
