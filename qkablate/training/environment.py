"""The environment a run began with, kept in its folder: threads, versions, the frozen config."""

import dataclasses
from pathlib import Path
from typing import Any

from qkablate.config import KEYS
from qkablate.runs.prefix import BranchOrigin
from qkablate.runs.records import read_json, write_json
from qkablate.runs.run import describe_environment, package_versions
from qkablate.training import hardware
from qkablate.training.resolve import RunPlan

# What is known of a machine that may change the last bits of what it computes.
_COMPUTING = ("cpu", "device", "device_memory", "cpu_capability")
_MAX_THREADS = (KEYS["threads"].bounds or (1, 1))[1]


def restore_environment(plan: RunPlan, processes: int) -> tuple[RunPlan, list[str]]:
    """Return the plan with the threads this run began with, and notes on what has changed."""
    folder, config, notes = plan.run.folder, plan.config, list[str]()
    recorded = _read_environment(folder)
    if recorded is None:
        if (folder / "environment.json").exists() and _read(folder) is None:
            notes.append("environment.json is damaged: it is written again with current values")
        return plan, notes
    count = recorded.get("processes", 1)
    if count != processes:
        before = f"{count} process{'es' * (count > 1)}"
        notes.append(f"this run began with {before} and resumes with {processes}")
    elif recorded["threads"] != config.threads:
        notes.append(f"threads: {recorded['threads']}, as this run began, not {config.threads}")
    current = package_versions()
    for package in ("torch", "numpy", "qkablate"):
        before, after = recorded["versions"].get(package), current.get(package)
        if before != after:
            notes.append(f"this run began with {package} {before} and resumes with {after}")
    if count == processes:  # otherwise the order of sums differs in any case
        config = dataclasses.replace(config, threads=recorded["threads"])
    return dataclasses.replace(plan, config=config), notes


def write(plan: RunPlan, processes: int) -> None:
    """Freeze the config, and write environment.json unless the run has one."""
    folder = plan.run.folder
    recorded = _read_environment(folder)
    if plan.data.tokenizer is not None:
        write_json(folder / "tokenizer.json", plan.data.tokenizer)
    plan.run.freeze(plan.config, plan.identity)
    if recorded is None:
        current = describe_environment(
            plan.config, hardware.describe_device(plan.config), processes
        )
        write_json(folder / "environment.json", current)


def describe_computation(folder: Path) -> dict[str, Any]:
    """Return what the last bits of a run depend on beside its config, from its environment.json."""
    content = _read(folder) or {}
    machine = content.get("machine")
    machine = machine if isinstance(machine, dict) else {}
    began, now = content.get("versions", {}), package_versions()
    packages = ("torch", "numpy")
    return {
        **{package: now.get(package) for package in packages},
        **{key: machine[key] for key in _COMPUTING if key in machine},
        **{key: content.get(key, 1) for key in ("threads", "processes")},
        "resumed": [package for package in packages if began.get(package) != now.get(package)],
    }


def record_branch(folder: Path, origin: BranchOrigin) -> None:
    """Add to environment.json from which run another one's first steps were taken."""
    content, branch = _read(folder), {"run": origin.run, "step": origin.step}
    if content is not None:
        write_json(folder / "environment.json", {**content, "branch": branch})


def _read_environment(folder: Path) -> dict[str, Any] | None:
    """Read environment.json if the folder holds a run."""
    return _read(folder) if (folder / "config.yaml").exists() else None


def _read(folder: Path) -> dict[str, Any] | None:
    """Read environment.json, or None if it is missing or damaged."""
    content = read_json(folder / "environment.json")
    if not isinstance(content, dict) or not isinstance(content.get("versions"), dict):
        return None
    counts = (content.get("threads"), content.get("processes", 1))
    return content if all(type(n) is int and 1 <= n <= _MAX_THREADS for n in counts) else None
