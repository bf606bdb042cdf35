"""`train --extend`: a longer run goes on from the stable phase of a shorter one."""

import dataclasses
import itertools
from collections import defaultdict
from pathlib import Path

from qkablate.config import Config, check, flatten, resolve
from qkablate.errors import ImpossibleConfig, UserError, print_stderr
from qkablate.runs.prefix import (
    LENGTH_KEYS,
    BranchOrigin,
    find_branches,
    find_prefix,
    read_origin,
)
from qkablate.training import checkpoint
from qkablate.training.resolve import plan_run


def find_extension(requested: Config) -> tuple[Config, Path]:
    """Return the config of a run, and the branch of another one from which it goes on.

    Where the config is not resolved, settings that depend on the length of the run are those of
    the other one. UserError if there is none.
    """
    if requested.optim.schedule != "wsd":
        raise ImpossibleConfig(
            f"--extend: optim.schedule={requested.optim.schedule} has no stable phase to go on from"
            " (allowed: wsd)"
        )
    runs = Path(requested.out).expanduser() / "runs"
    by_settings: dict[tuple[int, ...], list[tuple[BranchOrigin, Path]]] = defaultdict(list)
    for path in itertools.chain(*map(find_branches, sorted(runs.glob("*")))):
        origin = read_origin(path)
        if origin and origin.settings.keys() == {*LENGTH_KEYS}:
            by_settings[tuple(origin.settings[key] for key in LENGTH_KEYS)].append((origin, path))
    found: list[tuple[BranchOrigin, Path, Config]] = []
    data = None
    for settings, branches in by_settings.items():
        try:
            config = _take_over(requested, dict(zip(LENGTH_KEYS, settings, strict=True)))
        except UserError:  # a warm-up longer than this run, or no setting that a run can have
            continue
        plan = plan_run(config, data=data)
        data, prefix = plan.data, find_prefix(plan.config, plan.identity)
        for origin, path in branches:
            is_own = path.parent.parent == plan.run.folder
            if prefix and origin.prefix == prefix.id and origin.step <= prefix.steps and not is_own:
                found.append((origin, path, config))
    found.sort(key=lambda entry: -entry[0].step)
    entry = next((entry for entry in found if _is_intact(entry[1])), None)
    if entry is None:
        raise UserError(
            f"--extend: '{requested.out}' has no shorter wsd run with the same settings but for"
            " train.steps (without --extend, this run trains from the start)"
        )
    origin, path, config = entry
    taken = [f"{k}={v}" for k, v in origin.settings.items() if flatten(requested)[k] == "auto"]
    beside = f", with its {' '.join(taken)}" if taken else ""
    name = path.parent.parent.name
    print_stderr(f"extends {name} from step {origin.step}{beside}")
    return config, path


def _is_intact(path: Path) -> bool:
    try:
        checkpoint.load(path, "cpu")
    except (OSError, ValueError, TypeError) as error:
        print_stderr(f"branch '{path}' is damaged ({error}): not used")
        return False
    return True


def _take_over(requested: Config, settings: dict[str, int]) -> Config:
    """Return the resolved config, with these settings where it has `auto`."""
    config, values = requested, flatten(requested)
    for key, value in settings.items():
        if values[key] == "auto":
            section, _, leaf = key.partition(".")
            part = dataclasses.replace(getattr(config, section), **{leaf: value})
            config = dataclasses.replace(config, **{section: part})
    check(config)
    return resolve(config)
