"""SIGKILL at any moment of runs and sweeps."""

import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qkablate.sweeps.engines.base import LOG_FILE
from tests.torture import forked
from tests.torture.tally import Tally

SHORT = 6
FULL = 300
_SWEEP = [
    "variant=standard,no_q",
    "seed=0,1",
    "workers=2",
    "sweep.baseline=null",
    "sweep.floor=false",
]
KINDS = {
    "fp32": ["train"],
    "bf16": ["train", "precision=bf16", "variant=merged_w"],
    "bf16, accumulating": ["train", "precision=bf16", "train.grad_accum=2"],
    "Muon": ["train", "optim=muon", "variant=merged_w"],
    "W&B": ["train", "tracking.wandb=offline"],
    "sweep": ["sweep", *_SWEEP],
    "programs": ["sweep", *_SWEEP, "train.vmap=2"],
    "bf16 sweep": ["sweep", *_SWEEP, "precision=bf16"],
    "horizons": [
        *("sweep", "variant=standard", "sweep.floor=false", "workers=2", "optim.schedule=wsd"),
        *("train.steps=7,9,24", "train.eval_every=3", "diagnostics.every=1"),
    ],
    "translator": ["train", *forked.TRANSLATOR, "train.grad_accum=2"],
}
_COLD = 0.05  # fraction of kills that hit a new Python, mostly during its start
_TIMED = 0.25  # fraction of kills that come from outside, at a random time


def _moments() -> dict[str, tuple[int, list[tuple[Any, str]]]]:
    """Return the functions at which a process kills itself, and the latest such call."""
    import safetensors.torch
    import torch

    from qkablate.api import train as api_train
    from qkablate.cli import sweep, train
    from qkablate.data import corpus, document_store, writer
    from qkablate.data import prepare as preparing
    from qkablate.runs import attention_map, lease, predictions, records, tensor_file
    from qkablate.sweeps.planning import manifest
    from qkablate.sweeps.running import launcher, results, worker
    from qkablate.tracking import MetricsFile, WandbRun
    from qkablate.training import checkpoint, environment, hardware, loop, result, session
    from qkablate.training.loop import Trainer
    from qkablate.training.warm_start import branch

    return {
        "train": (4, [(train, "from_hydra"), (api_train, "observe_leases")]),
        "start": (4, [(environment, "write")]),
        "data": (
            8,
            [
                *(
                    (corpus, "_prepare"),
                    (corpus, "load_corpus"),
                    (document_store.DocumentStore, "fill"),
                ),
                *(
                    (preparing, "_divide"),
                    (writer.SplitWriter, "write"),
                    (corpus, "_verify_sha256"),
                ),
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
                *((checkpoint, "save"), (checkpoint, "sync_file"), (checkpoint, "sync_folder")),
                *((safetensors.torch, "save_file"), (torch, "save"), (checkpoint, "keep_newest")),
            ],
        ),
        "resuming": (
            3,
            [(checkpoint, "load_newest"), (checkpoint, "load"), (hardware, "configure_process")],
        ),
        "result": (
            3,
            [(result, "write_result"), (records, "name_exclusively"), (result, "write_json_once")],
        ),
        "W&B": (9, [(WandbRun, "_start"), (WandbRun, "log"), (WandbRun, "close")]),
        "fsync": (40, [(os, "fsync")]),
        "rename": (20, [(os, "rename"), (os, "replace"), (os, "link")]),
        "removal": (20, [(os, "unlink"), (os, "rmdir")]),
        "folder": (8, [(os, "mkdir")]),
        "branch": (
            3,
            [
                *((loop, "write_predictions_of_branches"), (session, "write_branch")),
                *((session, "start_from_branch"), (branch, "write_atomic")),
                (environment, "record_branch"),
            ],
        ),
        "sweep": (
            8,
            [
                *((sweep, "plan_sweep"), (manifest, "write_atomic"), (launcher, "link_run")),
                *(
                    (launcher.Launcher, "_start"),
                    (launcher.Launcher, "_handle_exit"),
                    (results, "write_results"),
                ),
                *((worker, "_train"), (worker, "_train_logged")),
            ],
        ),
    }


class _CallCounter:
    """Records in a file which of the functions in `_moments` an undisturbed command calls."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def arm(self) -> None:
        """Make this process and its forks record their calls."""
        for moment, (_, functions) in _moments().items():
            for target, name in functions:
                self._wrap(target, name, f"{moment}: {name}\n".encode())

    def missing(self, moments: set[str]) -> list[str]:
        """Return the functions that no command has called."""
        called = set(self._file.read_text("utf-8").splitlines())
        names = [f"{moment}: {name}" for moment in moments for _, name in _moments()[moment][1]]
        return sorted(set(names) - called)

    def _wrap(self, target: Any, name: str, line: bytes) -> None:
        original = getattr(target, name)
        state = {"is_first": True}

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if state["is_first"]:
                state["is_first"] = False
                with self._file.open("ab", buffering=0) as file:
                    file.write(line)
            return original(*args, **kwargs)

        setattr(target, name, wrapped)


def _arm_kill(moment: str, call_number: int, delay: float, after: bool) -> Callable[[], None]:
    """Return a function that makes a process, and its forks, die at or after a call."""

    def arm() -> None:
        count = {"": 0}

        def wrap(target: Any, name: str) -> None:
            original = getattr(target, name)

            def wrapped(*args: Any, **kwargs: Any) -> Any:
                count[""] += 1
                is_due = count[""] == call_number
                if is_due and not after:
                    _die(delay)
                value = original(*args, **kwargs)
                if is_due:
                    _die(delay)
                return value

            setattr(target, name, wrapped)

        for target, name in _moments()[moment][1]:
            wrap(target, name)

    return arm


def _die(delay: float) -> None:
    """Kill this process now, or after a delay by another process."""
    victim = os.getpid()
    if not delay:
        os.kill(victim, signal.SIGKILL)
    if not os.fork():
        time.sleep(delay)
        if os.getppid() == victim:
            os.kill(victim, signal.SIGKILL)
        os._exit(0)


def _has_moment(kind: str, moment: str) -> bool:
    """Return whether a command of this kind comes to a moment."""
    command = KINDS[kind][0]
    needs = {"W&B": kind == "W&B", "sweep": command == "sweep", "train": command == "train"}
    needs["attention map"] = kind != "translator"
    needs["branch"] = kind == "horizons"
    return needs.get(moment, True)


def _words(kind: str) -> list[str]:
    command, *words = KINDS[kind]
    return [command, *forked.with_words(forked.RUN, words)]


class _KillChain:
    """A command that is killed several times, and then finishes."""

    def __init__(
        self,
        kind: str,
        rng: random.Random,
        folder: Path,
        reference: Path,
        seconds_needed: float,
        name: str,
    ) -> None:
        self.words = _words(kind)
        self.kind, self.rng, self.name = kind, rng, name
        self.reference, self.seconds_needed = reference, seconds_needed  # of the undisturbed run
        self.folder = forked.prepare(folder)
        self.tally = Tally()
        self.kills: list[str] = []
        self.sweep = self.words[0] == "sweep"

    def run(self) -> Tally:
        for _ in range(self.rng.choice((1, 2, 2, 3, 3, 4, 6))):
            if not self._kill():
                break
            self._check_for_damage(self._logs())
        self._finish()
        return self.tally

    def _kill(self) -> bool:
        """Return whether a kill hit before the command ended."""
        rng = self.rng
        draw = rng.random()
        cold = draw < _COLD
        if draw < _TIMED:
            seconds = rng.random() * (self.seconds_needed + 3.0 * cold)
            description = f"after {seconds:.3f} s{' from a cold start' * cold}"
            pid = forked.start(self.words, self.folder, cold=cold)
        else:
            moments = _moments()
            moment = rng.choice([m for m in moments if _has_moment(self.kind, m)])
            call_number = 1 + int(moments[moment][0] * rng.random() ** 1.5)
            delay = rng.choice((0.0, 0.0, rng.uniform(0.0, 0.005)))
            after = rng.random() < 0.5
            description = (
                f"{'after' if after else 'before'} {moment} {call_number} + {delay * 1000:.1f} ms"
            )
            pid = forked.start(
                self.words, self.folder, before=_arm_kill(moment, call_number, delay, after)
            )
            seconds = forked.PATIENCE
        code = forked.wait(pid, seconds)
        if code is None:
            forked.kill(pid)
            if draw >= _TIMED:
                self.tally.lost.append(self._describe(f"the command hangs: {description}"))
                return False
            code = -signal.SIGKILL
        kill_all = self.sweep and rng.random() < 0.5
        if kill_all and code == -signal.SIGKILL:  # as when memory runs out
            forked.kill_children()
            description += ", all its processes"
        was_killed = code == -signal.SIGKILL or (
            code == 1 and "SIGKILL" in forked.read_log(self.folder)
        )
        if was_killed:
            self.tally.cases += 1
            self.kills.append(description)
        elif code:
            self.tally.wrong.append(
                self._describe(f"code {code} ({description}): {forked.read_log(self.folder)}")
            )
        return was_killed

    def _finish(self) -> None:
        """Run the command undisturbed on what the kills have left, and compare."""
        is_idle = (
            not forked.find_children()
        )  # otherwise runs of a killed launcher may still progress
        checkpoints = self._newest_checkpoints() if is_idle else {}
        before = {path: len(text) for path, text in self._logs().items()}
        code = forked.wait(pid := forked.start(self.words, self.folder))
        if code is None:
            forked.kill(pid)
            self.tally.lost.append(self._describe("the command hangs"))
        elif code:
            self.tally.lost.append(self._describe(f"code {code}: {forked.read_log(self.folder)}"))
        else:
            logs = self._logs()
            self._check_for_damage(logs)
            for run, step in checkpoints.items():
                path = self._log(run)
                log_text = logs[path][before.get(path, 0) if self.sweep else 0 :]
                resumed = re.search(r"resuming from step (\d+)", log_text)
                if resumed is None or int(resumed[1]) != step:
                    self.tally.lost.append(
                        self._describe(f"step {step} was not used: {log_text[-2000:]}")
                    )
            if difference := forked.find_difference(self.reference, self.folder):
                self.tally.wrong.append(self._describe(difference))
        if leftovers := forked.find_leftovers():
            self.tally.wrong.append(self._describe(f"processes are left: {leftovers}"))

    def _newest_checkpoints(self) -> dict[Path, int]:
        """Return the newest checkpoint of each run that has one and has no result."""
        unfinished = (r for r in forked.find_runs(self.folder) if not (r / "result.json").exists())
        return {run: step for run in unfinished if (step := forked.newest_step(run)) >= 0}

    def _log(self, run: Path) -> Path:
        return run / LOG_FILE if self.sweep else self.folder / "log"

    def _logs(self) -> dict[Path, str]:
        paths = {self.folder / "log", *map(self._log, forked.find_runs(self.folder))}
        return {p: p.read_text("utf-8", "replace") if p.exists() else "" for p in paths}

    def _check_for_damage(self, logs: dict[Path, str]) -> None:
        """Check that a kill leaves nothing half-written under a final name."""
        for log_text in logs.values():
            if "damaged" in log_text or "Traceback" in log_text:
                self.tally.wrong.append(self._describe(log_text[-2000:]))

    def _describe(self, message: str) -> str:
        return f"{self.name} ({self.kind}; killed {'; '.join(self.kills)}): {message}"


def _lane(cases: int, rng: random.Random, folder: Path, number: int) -> Tally:
    tally, reference, seconds_needed = Tally(), dict[str, Path](), dict[str, float]()
    chains = 0
    while tally.cases < cases:
        kind = rng.choice(list(KINDS)[number :: forked.LANES])
        if kind not in reference:
            reference[kind] = forked.prepare(folder / f"reference {kind}")
            words = _words(kind)
            began = time.monotonic()
            counter = _CallCounter(folder / f"calls {kind}")
            if code := forked.wait(forked.start(words, reference[kind], before=counter.arm)):
                raise RuntimeError(f"code {code} of {words}: {forked.read_log(reference[kind])}")
            seconds_needed[kind] = time.monotonic() - began
            moments = {m for m in _moments() if _has_moment(kind, m)} - {"resuming"}
            tally.wrong += [f"{kind}: never called: {call}" for call in counter.missing(moments)]
        name = f"chain {chains} of {folder.name}"
        chain = _KillChain(
            kind, rng, folder / str(chains), reference[kind], seconds_needed[kind], name
        )
        tally.add(chain.run())
        chains += 1
    return tally


def torture(cases: int, seed: int, folder: Path) -> Tally:
    return forked.run_isolated(__file__, cases, seed, folder)


if __name__ == "__main__":
    forked.main(_lane)
