"""Damaged files: bytes flipped, cut, zeroed, doubled or added, in runs, a sweep and data.

A reader returns the number that was written, or reports that it is missing; training resumes from
the last intact checkpoint.
"""

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from copy import deepcopy
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from qkablate.analysis.study.standalone_runs import read_standalone_runs
from qkablate.analysis.study.study import Study, read_study
from qkablate.config import ModelConfig
from qkablate.data import Pairs, corpus
from qkablate.errors import UserError
from qkablate.sweeps.planning.manifest import read_manifest
from qkablate.sweeps.running import results
from qkablate.sweeps.running.state import SweepState
from qkablate.training import checkpoint
from qkablate.training.warm_start.restore import restore
from tests.torture import forked, sandbox
from tests.torture.sandbox import SWEEP, TINY
from tests.torture.tally import Tally

INTERRUPTED = ["train", "variant=merged_w", *TINY]

# Values by name; None stands for a value that is reported as missing.
Reading = dict[str, Any]
# Columns with words, which may describe the damage.
_WORDS = {"status", "reason", "error", "folder", "code", "torch", "cpu", "version"}


def damage(content: bytes, rng: random.Random) -> bytes:
    """Return the content with one random accident."""
    position = rng.randrange(len(content))
    size = min(len(content) - position, rng.choice([1, 2, 7, 64, 512, 4096]))
    region = content[position : position + size]
    match rng.randrange(8):
        case 0 | 1 | 2:
            flipped = bytes([content[position] ^ 1 << rng.randrange(8)])
            return content[:position] + flipped + content[position + 1 :]
        case 3:
            return content[:position] + content[position + size :]
        case 4:
            return content[:position]
        case 5:
            return content[:position] + bytes(size) + content[position + size :]
        case 6:
            return content[: position + size] + region + content[position + size :]
        case _:
            return content + rng.choice([region, rng.randbytes(size), bytes(size)])


class World:
    """A small finished sweep, an interrupted run, and their data."""

    def __init__(self, folder: Path) -> None:
        self.box = folder / "box"
        sandbox.make_box(self.box)
        for variant in ("standard", "no_q"):
            for seed in (0, 1):
                words = ["train", f"variant={variant}", f"seed={seed}", *TINY]
                sandbox.run_successfully(words, self.box)
        sandbox.run_successfully(SWEEP, self.box)  # which has nothing to train
        sandbox.run_command(INTERRUPTED, self.box, before=sandbox.interrupt_at(10))
        forked.write_pairs(self.box / "pairs.tsv")
        pairs = ["train", *forked.with_words(TINY, [*forked.TRANSLATOR, "out=translators"])]
        sandbox.run_successfully(pairs, self.box)
        (self.translator,) = (self.box / "translators" / "runs").iterdir()
        (self.pairs,) = (path for path in (self.box / "cache").glob("pairs-*") if path.is_dir())
        self.runs = self.box / "outputs" / "runs"
        self.interrupted = next(self.runs.glob("merged_w-*"))
        self.steps = sorted((self.interrupted / "checkpoints").glob("step-*"))
        self.swept = sorted(path for path in self.runs.iterdir() if path != self.interrupted)
        (self.sweep,) = (self.box / "outputs" / "sweeps").glob("small-*")
        (self.data,) = (path for path in (self.box / "cache").glob("text-*") if path.is_dir())
        # Copies: loaded weights may be views of the files, which are going to be damaged.
        self.saved = {path: deepcopy(checkpoint.load(path, "cpu")) for path in self.steps}
        self.reference = {name: read(self) for name, read in READERS.items()}

    def targets(self) -> dict[str, list[Path]]:
        """Return the files to damage, by kind; each kind is drawn equally often."""
        swept, steps = self.swept, self.steps
        held, pairs = (
            [file for file in folder.iterdir() if file.is_file() and file.stat().st_size]
            for folder in (self.data, self.pairs)
        )
        translator = [self.translator / "config.yaml", self.translator / "tokenizer.json"]
        return {
            "checkpoint": [file for step in steps for file in step.iterdir()],
            "config": [path / "config.yaml" for path in (*swept, self.interrupted)],
            "metrics": [path / "metrics.jsonl" for path in (*swept, self.interrupted)],
            "result": [path / "result.json" for path in swept],
            "record": [path / "environment.json" for path in (*swept, self.interrupted)],
            "tokenizer": [path / "tokenizer.json" for path in swept[:2]],
            "weights": [file for run in swept[:2] for file in run.glob("checkpoints/*/*")],
            "manifest": [self.sweep / "manifest.json"],
            "data": held,
            "translator": [*translator, *self.translator.glob("checkpoints/*/*")],
            "pairs": pairs,
        }


# Readers: each returns all numbers that a user is shown, or raises UserError.


def _read_study_numbers(study: Study) -> Reading:
    reading: Reading = {}
    for entry in study.entries:
        for record in entry.records.values():
            run_id = record.run.id
            reading[f"{run_id} of"] = (
                entry.arm.config.model,
                record.seeds,
                entry.rate,
                entry.arm.flops,
            )
            reading[f"{run_id} val"], reading[f"{run_id} test"] = record.val, record.test
            for key in record.facts.keys() - _WORDS:
                reading[f"{run_id} {key}"] = record.facts[key]
            for metric, curve in record.loss_curves.items():
                for tokens, loss in curve.items():
                    reading[f"{run_id} {metric} {tokens}"] = loss
    return reading


def _read_sweep(world: World) -> Reading:
    reading = _read_study_numbers(read_study(world.sweep))
    sweep_state = SweepState(read_manifest(world.sweep))
    sweep_state.refresh()
    for row in results.result_rows(sweep_state):
        for key in row.keys() - _WORDS:
            reading[f"row {row['id']} {key}"] = row[key]
    return reading


def _read_standalone(world: World) -> Reading:
    return _read_study_numbers(read_standalone_runs([*world.swept, world.interrupted]))


def _read_models(world: World) -> Reading:
    """Return the numbers that `sample` and `verify` compute with."""
    reading: Reading = {}
    for run in world.swept[:2]:
        restored = restore(run)
        with torch.no_grad():
            reading[f"{run.name} logits"] = restored.model(torch.arange(8)[None]).tolist()
        reading[f"{run.name} text"] = restored.tokenizer().decode(list(range(60, 90)))
    return reading


def _read_tokens(world: World) -> Reading:
    data = corpus.load_corpus(world.data)
    return {split: data.split(split).tobytes() for split in data.tokens} | {
        "description": data.description,
        "bytes": data.manifest.bytes,
    }


def _read_translator(world: World) -> Reading:
    """Return the numbers that `sample` computes with, and what `train` says of the run."""
    restored = restore(world.translator)
    source, target = torch.arange(48, 56)[None], torch.arange(50, 54)[None]
    with torch.no_grad():
        logits = restored.model(source, target).tolist()
    sentences = restored.sentences()
    return {"logits": logits, "ids": sentences.encode("123"), "text": sentences.decode([49, 50])}


def _read_pairs(world: World) -> Reading:
    pairs = Pairs(corpus.load_corpus(world.pairs), ModelConfig(form="encoder_decoder"))
    return {
        f"{name} {i}": [split.sentence(i, side).tolist() for side in (0, 1)]
        for name, split in pairs.splits.items()
        for i in range(len(split))
    } | {"longest": pairs.longest(), "counts": pairs.tokens}


READERS: dict[str, Callable[[World], Reading]] = {
    "sweep": _read_sweep,
    "standalone": _read_standalone,
    "model": _read_models,
    "data": _read_tokens,
    "translator": _read_translator,
    "pairs": _read_pairs,
}
_READ_BY = {
    "config": ("standalone", "model"),
    "metrics": ("sweep", "standalone"),
    "result": ("sweep", "standalone"),
    "record": ("sweep", "standalone"),
    "tokenizer": ("model",),
    "weights": ("model",),
    "manifest": ("sweep",),
    "data": ("data",),
    "translator": ("translator",),
    "pairs": ("pairs",),
}


def _find_wrong_numbers(reference: Reading, reading: Reading) -> Iterator[str]:
    for key, value in reading.items():
        if value is not None and value != {} and value != reference.get(key):
            yield f"{key} is {value!r:.80}, but was {reference.get(key)!r:.80}"


def _check_resuming(world: World, kind: str) -> Iterator[str]:
    """Yield the problems of resuming from the damaged run."""
    notes: list[str] = []
    resumed = checkpoint.load_newest(
        world.interrupted / "checkpoints", "cpu", world.interrupted / "metrics.jsonl", notes.append
    )
    newest = world.steps[-1]
    expected = (
        world.saved.get(newest.with_name(f"step-{resumed.progress.step:08d}")) if resumed else None
    )
    if resumed and (expected is None or not _is_same(resumed, expected)):
        yield "resumes from a state that was never written"
    if (resumed is None or resumed.progress.step != 8) and not notes:
        yield "does not report a checkpoint that is not used"
    if resumed is None and kind == "checkpoint":
        yield "uses no checkpoint, although one is intact"


def _is_same(first: checkpoint.Checkpoint, second: checkpoint.Checkpoint) -> bool:
    def leaves(value: Any) -> Iterator[Any]:
        if isinstance(value, dict):
            for key in value:
                yield from (key, *leaves(value[key]))
        elif isinstance(value, list | tuple):
            for inner in value:
                yield from leaves(inner)
        else:
            yield value.tolist() if isinstance(value, torch.Tensor) else value

    both = [[*leaves([c.weights, c.state])] for c in (first, second)]
    return first.progress == second.progress and both[0] == both[1]


def torture(cases: int, seed: int, folder: Path) -> Tally:
    sandbox.import_everything()
    world = World(folder)
    targets, tally, rng = world.targets(), Tally(), random.Random(seed)
    for case in range(cases):
        kind = list(targets)[case % len(targets)]
        path = rng.choice(sorted(targets[kind]))
        original = path.read_bytes()
        path.write_bytes(damage(original, rng))
        name = f"case {case}, {path.relative_to(world.box)}"
        tally.cases += 1
        try:
            for reader in _READ_BY.get(kind, ()):
                try:
                    with redirect_stderr(StringIO()):
                        reading = READERS[reader](world)
                except UserError as error:
                    if "\n" in str(error) or not str(error):
                        tally.wrong.append(f"{name}: {reader}: {error}")
                    continue
                wrong = _find_wrong_numbers(world.reference[reader], reading)
                tally.wrong += [f"{name}: {reader}: {problem}" for problem in wrong]
            if kind == "checkpoint" or path == world.interrupted / "metrics.jsonl":
                copy = shutil.copytree(world.interrupted, folder / "copy")
                tally.wrong += [f"{name}: {problem}" for problem in _check_resuming(world, kind)]
                shutil.rmtree(world.interrupted)
                shutil.move(copy, world.interrupted)
        except Exception as error:
            tally.wrong.append(f"{name}: {type(error).__name__}: {error}")
        path.write_bytes(original)
    return tally


SHORT, FULL = 44, 1000
