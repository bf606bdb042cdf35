"""Damage to files: bytes flipped, cut, zeroed, doubled or added, in runs, a sweep and data.

Whoever reads finds the number that was written, or none and says so; and training goes on from the
last state that is whole.
"""

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from qkablate.analysis.study.standalone_runs import read_standalone_runs
from qkablate.analysis.study.study import Study, read_study
from qkablate.data import corpus
from qkablate.errors import UserError
from qkablate.sweeps.planning.manifest import read_manifest
from qkablate.sweeps.running import results_table
from qkablate.sweeps.running.state import SweepState
from qkablate.training import checkpoint
from qkablate.training.warm_start.restore import restore
from tests.torture import watched
from tests.torture.tally import Tally
from tests.torture.watched import TINY

ROUGH = ["train", "variant=merged_w", *TINY]
SWEEP = ["sweep", "sweep.name=small", "variant=standard,no_q", "seed=0,1", *TINY]

# What is read, by name: {what: value}. A value of None stands for one that is said to be missing.
Reading = dict[str, Any]
# What tells of the damage in words, and no number.
_WORDS = {"status", "reason", "error", "folder", "code", "torch", "cpu", "version"}


def damage(content: bytes, chance: random.Random) -> bytes:
    """One accident."""
    at = chance.randrange(len(content))
    size = min(len(content) - at, chance.choice([1, 2, 7, 64, 512, 4096]))
    region = content[at : at + size]
    match chance.randrange(8):
        case 0 | 1 | 2:
            flipped = bytes([content[at] ^ 1 << chance.randrange(8)])
            return content[:at] + flipped + content[at + 1 :]
        case 3:
            return content[:at] + content[at + size :]
        case 4:
            return content[:at]
        case 5:
            return content[:at] + bytes(size) + content[at + size :]
        case 6:
            return content[: at + size] + region + content[at + size :]
        case _:
            return content + chance.choice([region, chance.randbytes(size), bytes(size)])


class World:
    """A small sweep that is done, a run that was interrupted, and their data."""

    def __init__(self, folder: Path) -> None:
        self.box = folder / "box"
        watched.begin(self.box)
        for variant in ("standard", "no_q"):
            for seed in (0, 1):
                words = ["train", f"variant={variant}", f"seed={seed}", *TINY]
                watched.done(words, self.box)
        watched.done(SWEEP, self.box)  # which has nothing to train
        watched.command(ROUGH, self.box, before=watched.interrupt_at(10))
        self.runs = self.box / "outputs" / "runs"
        self.rough = next(self.runs.glob("merged_w-*"))
        self.steps = sorted((self.rough / "checkpoints").glob("step-*"))
        self.swept = sorted(path for path in self.runs.iterdir() if path != self.rough)
        (self.sweep,) = (self.box / "outputs" / "sweeps").glob("small-*")
        (self.data,) = (path for path in (self.box / "cache").glob("text-*") if path.is_dir())
        self.whole = {path: checkpoint.load(path, "cpu") for path in self.steps}
        self.calm = {name: read(self) for name, read in READERS.items()}

    def targets(self) -> dict[str, list[Path]]:
        """Draw what is damaged, each kind equally often."""
        swept, steps = self.swept, self.steps
        return {
            "checkpoint": [file for step in steps for file in step.iterdir()],
            "config": [path / "config.yaml" for path in (*swept, self.rough)],
            "metrics": [path / "metrics.jsonl" for path in (*swept, self.rough)],
            "result": [path / "result.json" for path in swept],
            "record": [path / "environment.json" for path in (*swept, self.rough)],
            "tokenizer": [path / "tokenizer.json" for path in swept[:2]],
            "weights": [file for run in swept[:2] for file in run.glob("checkpoints/*/*")],
            "manifest": [self.sweep / "manifest.json"],
            "data": [path for path in self.data.iterdir() if path.is_file()],
        }


# Who reads. Each gives all numbers that a user is shown, or raises UserError.


def _of_study(study: Study) -> Reading:
    found: Reading = {}
    for entry in study.entries:
        for record in entry.records.values():
            own = record.run.id
            found[f"{own} of"] = (entry.arm.config.model, record.seeds, entry.rate, entry.arm.flops)
            found[f"{own} val"], found[f"{own} test"] = record.val, record.test
            for key in record.facts.keys() - _WORDS:
                found[f"{own} {key}"] = record.facts[key]
            for metric, curve in record.loss_curves.items():
                for tokens, loss in curve.items():
                    found[f"{own} {metric} {tokens}"] = loss
    return found


def _sweep(world: World) -> Reading:
    found = _of_study(read_study(world.sweep))
    sweep_state = SweepState(read_manifest(world.sweep))
    sweep_state.refresh()
    for row in results_table.result_rows(sweep_state):
        for key in row.keys() - _WORDS:
            found[f"row {row['id']} {key}"] = row[key]
    return found


def _loose(world: World) -> Reading:
    return _of_study(read_standalone_runs([*world.swept, world.rough]))


def _models(world: World) -> Reading:
    """Return what `sample` and `verify` compute with."""
    found: Reading = {}
    for run in world.swept[:2]:
        restored = restore(run)
        with torch.no_grad():
            found[f"{run.name} logits"] = restored.model(torch.arange(8)[None]).tolist()
        found[f"{run.name} text"] = restored.tokenizer().decode(list(range(60, 90)))
    return found


def _tokens(world: World) -> Reading:
    found = corpus.load_corpus(world.data)
    return {split: found.split(split).tobytes() for split in found.tokens} | {
        "description": found.description,
        "bytes": found.manifest.bytes,
    }


READERS: dict[str, Callable[[World], Reading]] = {
    "sweep": _sweep,
    "loose": _loose,
    "model": _models,
    "data": _tokens,
}
_READ_BY = {
    "config": ("loose", "model"),
    "metrics": ("sweep", "loose"),
    "result": ("sweep", "loose"),
    "record": ("sweep", "loose"),
    "tokenizer": ("model",),
    "weights": ("model",),
    "manifest": ("sweep",),
    "data": ("data",),
}


def _wrong_numbers(calm: Reading, found: Reading) -> Iterator[str]:
    for key, value in found.items():
        if value is not None and value != {} and value != calm.get(key):
            yield f"{key} is {value!r:.80}, and was {calm.get(key)!r:.80}"


def _resumed(world: World, kind: str) -> Iterator[str]:
    """Return what training resumes from, and its messages."""
    notes: list[str] = []
    found = checkpoint.load_newest(
        world.rough / "checkpoints", "cpu", world.rough / "metrics.jsonl", notes.append
    )
    newest = world.steps[-1]
    expected = (
        world.whole.get(newest.with_name(f"step-{found.progress.step:08d}")) if found else None
    )
    if found and (expected is None or not _same(found, expected)):
        yield "goes on from a state that was never written"
    if (found is None or found.progress.step != 8) and not notes:
        yield "says nothing of a checkpoint that is not used"
    if found is None and kind == "checkpoint":
        yield "uses none of the checkpoints, of which one is whole"


def _same(one: checkpoint.Checkpoint, other: checkpoint.Checkpoint) -> bool:
    def leaves(value: Any) -> Iterator[Any]:
        if isinstance(value, dict):
            for key in value:
                yield from (key, *leaves(value[key]))
        elif isinstance(value, list | tuple):
            for inner in value:
                yield from leaves(inner)
        else:
            yield value.tolist() if isinstance(value, torch.Tensor) else value

    both = [[*leaves([c.weights, c.state])] for c in (one, other)]
    return one.progress == other.progress and both[0] == both[1]


def torture(cases: int, seed: int, folder: Path) -> Tally:
    watched.warm()
    world = World(folder)
    targets, tally, chance = world.targets(), Tally(), random.Random(seed)
    for case in range(cases):
        kind = list(targets)[case % len(targets)]
        path = chance.choice(sorted(targets[kind]))
        kept = path.read_bytes()
        path.write_bytes(damage(kept, chance))
        name = f"case {case}, {path.relative_to(world.box)}"
        tally.cases += 1
        try:
            for reader in _READ_BY.get(kind, ()):
                try:
                    with redirect_stderr(StringIO()):
                        found = READERS[reader](world)
                except UserError as told:
                    if "\n" in str(told) or not str(told):
                        tally.wrong.append(f"{name}: {reader}: {told}")
                    continue
                wrong = _wrong_numbers(world.calm[reader], found)
                tally.wrong += [f"{name}: {reader}: {one}" for one in wrong]
            if kind == "checkpoint" or path == world.rough / "metrics.jsonl":
                copy = shutil.copytree(world.rough, folder / "rough")
                tally.wrong += [f"{name}: {one}" for one in _resumed(world, kind)]
                shutil.rmtree(world.rough)
                shutil.move(copy, world.rough)
        except Exception as error:
            tally.wrong.append(f"{name}: {type(error).__name__}: {error}")
        path.write_bytes(kept)
    return tally


SHORT, FULL = 36, 1000
