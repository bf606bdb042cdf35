"""The prefix of a run: the steps that longer ones take, too, as wsd before its cooldown.

Runs with the same prefix id are equal, bit for bit, up to where the shorter one's cooldown begins:
weights, optimizer, rows and predictions. Imports no torch.

<run>/branches/
    step-00000800/     a checkpoint from which a run of another length can go on
        metrics.jsonl  the rows until then
        origin.json    see BranchOrigin; covered by SHA256SUMS, as is all else
    predictions/       those that only shorter runs record, before they branch off
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from qkablate.config import Config
from qkablate.config.schedule import stable_steps
from qkablate.disk import read_file
from qkablate.runs.run import run_id
from qkablate.strict_json import from_json, parse_json

FOLDER = "branches"
ORIGIN_FILE, ROWS_FILE = "origin.json", "metrics.jsonl"
# Keys of the identity that only the end of a run depends on.
_OF_THE_END = ("steps", "test_tokens", "evaluate_test")
# Keys whose `auto` depends on the length of the run: a longer one takes them over.
LENGTH_KEYS = ("optim.warmup", "train.eval_every", "train.eval_tokens", "train.test_tokens")
_MAX_ORIGIN = 2**16  # bytes


@dataclass(frozen=True)
class Prefix:
    """The first steps of a run, up to its cooldown."""

    id: str
    steps: int


def _as_path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


@dataclass(frozen=True)
class Branching:
    """The branches of a run: where it begins, and for whom it keeps others."""

    # The branch at which it begins; None: the initial weights.
    start: Path | None = field(default=None, metadata={"from_json": _as_path})
    # Lengths, in steps, of runs for which it keeps branches; None: of longer ones that extend it.
    horizons: tuple[int, ...] | None = None
    extends: bool = False  # the user asked for it: another environment is noted, and no obstacle


NO_BRANCHING = Branching()


@dataclass(frozen=True)
class BranchOrigin:
    """The run that wrote a branch, and what the branch depends on."""

    run: str  # its id
    step: int
    prefix: str  # its prefix id
    computed: dict[str, Any]  # versions, threads, CPU: see training/environment.py
    settings: dict[str, int]  # the run's values of LENGTH_KEYS


def find_prefix(config: Config, identity: Mapping[str, Any]) -> Prefix | None:
    """Return the prefix of a resolved run; None if it has none, as with another schedule."""
    steps = stable_steps(config)
    if steps < 1:
        return None
    train = {key: value for key, value in identity["train"].items() if key not in _OF_THE_END}
    # The rows and predictions in common depend on these, too.
    rows = {"log_every": config.tracking.log_every, "diagnostics": config.diagnostics.every}
    return Prefix(run_id({**identity, "train": train, "rows": rows}), steps)


def with_steps(config: Config, steps: int) -> Config:
    """Return the config of a run of another length."""
    return replace(config, train=replace(config.train, steps=steps))


def branch_path(folder: Path, step: int) -> Path:
    """Return where a run keeps its branch at a step."""
    return folder / FOLDER / f"step-{step:08d}"


def find_branch(folders: Iterable[Path], prefix: Prefix) -> Path | None:
    """Return the branch in these runs' folders from which the fewest steps are left, if any.

    It is not verified: whoever starts from it does that.
    """
    found: dict[int, Path] = {}
    for folder in folders:
        for path in find_branches(folder):
            origin = read_origin(path)
            if origin and origin.prefix == prefix.id and origin.step <= prefix.steps:
                found[origin.step] = path
    return found[max(found)] if found else None


def find_branches(folder: Path) -> list[Path]:
    """Return the branches in a run's folder; links are none."""
    branches = folder / FOLDER
    if branches.is_symlink():
        return []
    return sorted(path for path in branches.glob("step-*") if not path.is_symlink())


def read_origin(path: Path) -> BranchOrigin | None:
    """Return the origin of a branch; None if it cannot be read."""
    try:
        content = read_file(path / ORIGIN_FILE, last=_MAX_ORIGIN)
        return from_json(BranchOrigin, parse_json(content))
    except (OSError, ValueError):
        return None
