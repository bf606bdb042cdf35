"""Published models that are hostile, damaged imported runs, and SIGKILL in import and export.

A hostile folder is refused in one line, runs no code, and takes no more memory than a good one. A
killed command leaves no run and no model that is incomplete, and gives the same bytes when it is
repeated. Of a damaged run every command gives the numbers that were imported, or one line.
"""

import os
import pickle
import random
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from tests.pretrained.hostile_models import FOLDERS
from tests.pretrained.published import write_published
from tests.torture import sandbox
from tests.torture.fault_damage import damage
from tests.torture.sandbox import TINY, CommandResult, run_command
from tests.torture.tally import Tally

MEMORY = 2**29  # bytes that a command may allocate beyond its imports
IMPORT = ["import", "published", "as=small"]
EXPORT = ["export", "small", "hf"]
_DATA = [word for word in TINY if word.startswith(("data", "tracking"))]
READERS = [
    *(["ls"], ["ls", "--json"], ["inspect", "small"], ["verify", "small"], ["sample", "small"]),
    *(["eval", "small", *_DATA[:3]], ["compare", "small", "standard"], ["status"]),
    *(["report", "small", "standard", "-o", "page.html"], EXPORT, IMPORT),
    ["project", "small", "variant=no_q", "finetune.steps=1", *_DATA],
]
_CALLS: list[tuple[Any, str, int]] = [
    *((os, "fsync", 12), (os, "rename", 3), (os, "mkdir", 6), (os, "unlink", 4)),
    *((safetensors.torch, "save_file", 1), (torch, "save", 1), (os, "rmdir", 4)),
]


class World:
    """A published model, the run that it becomes, and the model that the run becomes."""

    def __init__(self, folder: Path) -> None:
        self.box, self.saved, self.marker = (folder / n for n in ("box", "saved", "marker"))
        sandbox.make_box(self.box)
        write_published(self.box / "published", vocabulary=256)
        harm = pickle.dumps(_Harm(str(self.marker)))
        for name in ("pytorch_model.bin", "training_args.bin", "modeling_small.py"):
            (self.box / "published" / name).write_bytes(harm)
        sandbox.run_successfully(["train", "variant=standard", *TINY], self.box)
        for words in (IMPORT, EXPORT):
            sandbox.run_successfully(words, self.box)
        (self.run,) = (self.box / "outputs" / "runs").glob("small-*")
        self.imported, self.exported = read_files(self.run), read_files(self.box / "hf")
        sandbox.run_successfully(["inspect", "small", "--variants"], self.box)
        self.inspected = read_files(self.run)
        shutil.copytree(self.box, self.saved)

    def restore(self, *removed: Path) -> None:
        """Restore the box without some of its folders."""
        sandbox.restore_box(self.saved, self.box)
        for path in removed:
            shutil.rmtree(path)


class _Harm:
    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the files below a folder."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def _judge(world: World, words: list[str], result: CommandResult) -> Iterator[str]:
    """Yield the problems of any command."""
    name = " ".join(words[:2])
    yield from (f"{name}: did harm: {item}" for item in result.harm)
    if world.marker.exists():
        yield f"{name}: ran code"
        world.marker.unlink()
    if "Traceback" in result.all or result.code not in (0, 1, 2):
        yield f"{name}: ended with {result.code}: {result.err[-500:]}"
    if result.code == 2 and not result.err.splitlines()[-1].startswith("qkablate: "):
        yield f"{name}: no reason: {result.err[-300:]!r}"
    if raw := re.search("[\x00-\x08\x0b-\x1f\x7f\x9b]", result.err):
        yield f"{name}: sent {raw[0]!r} to the terminal"


def _try_hostile(world: World, rng: random.Random) -> Iterator[str]:
    """Import a hostile folder."""
    name = rng.choice(list(FOLDERS))
    world.restore(world.run, world.box / "hf")
    plant, reason = FOLDERS[name]
    try:
        plant(world.box / "published")
    except OSError:  # no sparse files of 4 TB here
        return
    result = run_command(IMPORT, world.box, memory=MEMORY)
    problems = [*_judge(world, IMPORT, result)]
    if result.code != 2 or result.out or result.err.count("\n") != 1:
        problems.append(f"not one line: {result}"[:600])
    if not re.search(f"{reason}|a pickle alone", result.err):
        problems.append(f"the message is not {reason!r} but {result.err!r}")
    if left := [*world.run.parent.glob("small-*"), *world.run.parent.glob(".*")]:
        problems.append(f"left {left}")
    yield from (f"{name}: {problem}" for problem in problems)


def _arm_kill(target: Any, name: str, number: int, after: bool) -> Callable[[], None]:
    """Return a function that makes the process die at or after a call."""

    def arm() -> None:
        original, count = getattr(target, name), [0]

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            if count[0] == number and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            value = original(*args, **kwargs)
            if count[0] == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return value

        setattr(target, name, wrapped)

    return arm


def _try_kill(world: World, rng: random.Random) -> Iterator[str]:
    """Kill an import or an export once or twice, and repeat it."""
    words, folder, expected = rng.choice(
        [(IMPORT, world.run, world.imported), (EXPORT, world.box / "hf", world.exported)]
    )
    world.restore(*{folder, world.box / "hf"})
    kills = []
    for _ in range(rng.choice((1, 1, 2))):
        target, name, calls = rng.choice(_CALLS)
        number, after = rng.randint(1, calls), rng.random() < 0.5
        kills.append(f"{'after' if after else 'before'} {name} {number}")
        armed = _arm_kill(target, name, number, after)
        result = run_command(words, world.box, before=armed)
        where = f"{words[0]}, killed {' and '.join(kills)}"
        if result.code == 0 and read_files(folder) == expected:
            return  # it ended before the call
        if folder.exists() and read_files(folder) != expected:
            yield f"{where}: an incomplete folder has the name: {sorted(read_files(folder))}"
        if result.code != -signal.SIGKILL:
            if not (words == EXPORT and "is not an empty folder" in result.err):
                yield f"{where}: ended with {result.code}: {result.err[-300:]}"
            break
        listed = run_command(["ls", "--json"], world.box)
        yield from _judge(world, ["ls"], listed)
        if ("small-" in listed.out) != world.run.exists():
            yield f"{where}: ls shows a run that is not there"
    was_whole = folder.exists()
    result = run_command(words, world.box)
    if result.code != 0 and not (words == EXPORT and was_whole):
        yield f"{where}: then ended with {result.code}: {result.err[-300:]}"
    if (found := read_files(folder)) != expected:
        differences = {n for n in {*found, *expected} if found.get(n) != expected.get(n)}
        yield f"{where}: then other bytes in {sorted(differences)}"
    if not was_whole and (left := [*folder.parent.glob(".*.tmp")]):
        yield f"{where}: left {left}"


def _try_damage(world: World, rng: random.Random) -> Iterator[str]:
    """Damage a file of an imported run, and read it by one of the commands."""
    world.restore(world.box / "hf")
    name = rng.choice(["origin.json", "inspection.json", *world.inspected])
    path = world.run / name
    path.write_bytes(damage(world.inspected[name], rng))
    for words in rng.sample(READERS, 4):
        result = run_command(words, world.box, memory=2**30)
        yield from (f"damaged {name}: {problem}" for problem in _judge(world, words, result))
        weights = "model.safetensors"
        if words == EXPORT and result.code == 0:
            found = read_files(world.box / "hf")
            if found.get(weights) != world.exported[weights]:
                yield f"damaged {name}: other weights were exported"


_KINDS = [_try_hostile, _try_kill, _try_hostile, _try_damage, _try_kill]


def torture(cases: int, seed: int, folder: Path) -> Tally:
    sandbox.import_everything()
    world, tally, rng = World(folder), Tally(), random.Random(seed)
    for case in range(cases):
        tally.cases += 1
        tally.wrong += [f"case {case}: {line}" for line in _KINDS[case % len(_KINDS)](world, rng)]
    return tally


SHORT, FULL = 15, 400
