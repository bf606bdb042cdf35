"""What a run began with, in its folder: the threads, the versions, the config it is frozen as."""

import dataclasses
from pathlib import Path
from typing import Any

from qkablate.config import RANGES
from qkablate.runs.records import read_json, write_json
from qkablate.runs.run import environment, versions
from qkablate.training import hardware
from qkablate.training.resolve import Plan

_MOST = RANGES["threads"][1]


def as_begun(plan: Plan, processes: int) -> tuple[Plan, list[str]]:
    """The plan with the threads this run began with, and what there is to say of that."""
    folder, config, notes = plan.run.folder, plan.config, list[str]()
    known = _known(plan)
    if known is None:
        if (folder / "environment.json").exists() and _read(folder) is None:
            notes.append("environment.json is damaged: it is written anew, as things are now")
        return plan, notes
    began = known.get("processes", 1)
    if began != processes:
        told = f"{began} process{'es' * (began > 1)}"
        notes.append(f"this run began with {told}, and goes on with {processes}")
    elif known["threads"] != config.threads:
        notes.append(f"threads: {known['threads']}, as this run began, not {config.threads}")
    now = versions()
    for what in ("torch", "numpy", "qkablate"):
        before, after = known["versions"].get(what), now.get(what)
        if before != after:
            notes.append(f"this run began with {what} {before}, and goes on with {after}")
    if began == processes:  # else the sums have another order in any case
        config = dataclasses.replace(config, threads=known["threads"])
    return dataclasses.replace(plan, config=config), notes


def write(plan: Plan, processes: int) -> None:
    """Freeze the config; begin the record where there is none."""
    folder, known = plan.run.folder, _known(plan)
    if plan.data.tokenizer is not None:
        write_json(folder / "tokenizer.json", plan.data.tokenizer)
    plan.run.freeze(plan.config, plan.identity)
    if known is None:
        now = environment(plan.config, hardware.describe(plan.config), processes)
        write_json(folder / "environment.json", now)


def _known(plan: Plan) -> dict[str, Any] | None:
    """The record, if there is a run that it belongs to."""
    return _read(plan.run.folder) if (plan.run.folder / "config.yaml").exists() else None


def _read(folder: Path) -> dict[str, Any] | None:
    """What stands there, if it can be one."""
    known = read_json(folder / "environment.json")
    if not isinstance(known, dict) or not isinstance(known.get("versions"), dict):
        return None
    counts = (known.get("threads"), known.get("processes", 1))
    return known if all(type(n) is int and 1 <= n <= _MOST for n in counts) else None
