"""The environments of a run, kept in its folder: threads, versions, the frozen config."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qkablate.config import KEYS
from qkablate.runs.prefix import BranchOrigin
from qkablate.runs.records import list_environments, read_json, write_json
from qkablate.runs.run import describe_environment, package_versions
from qkablate.training import hardware
from qkablate.training.resolve import RunPlan

# What is known of a machine that may change the last bits of what it computes.
_COMPUTING = ("cpu", "device", "device_memory", "cpu_capability")
_PACKAGES = ("torch", "numpy")
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


def write(plan: RunPlan, processes: int, *, resumes: bool = False) -> None:
    """Freeze the config, and write environment.json, where a run that resumes keeps its first."""
    folder = plan.run.folder
    recorded = _read_environment(folder)
    if plan.data.tokenizer is not None:
        write_json(folder / "tokenizer.json", plan.data.tokenizer)
    plan.run.freeze(plan.config, plan.identity)
    current = describe_environment(plan.config, hardware.describe_device(plan.config), processes)
    if recorded is None or not resumes:
        write_json(folder / "environment.json", current)
        return
    environments = list_environments(recorded)
    if not _is_same(environments[-1], current):
        resumed = [*environments[1:], current]
        write_json(folder / "environment.json", {**recorded, "resumed": resumed})


def describe_computation(folder: Path) -> dict[str, Any]:
    """Return what the last bits of a run depend on beside its config, from its environment.json."""
    computed = [_describe(content) for content in list_environments(_read(folder)) or [{}]]
    now = package_versions()
    last = computed[-1] | {package: now.get(package) for package in _PACKAGES}
    changed = {key for earlier in computed for key in last if earlier.get(key) != last[key]}
    return {**last, "resumed": sorted(changed)}


def _describe(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the last bits depend on in one environment."""
    machine = content.get("machine")
    machine = machine if isinstance(machine, dict) else {}
    return {
        **{package: _version(content, package) for package in _PACKAGES},
        **{key: machine[key] for key in _COMPUTING if key in machine},
        **{key: content.get(key, 1) for key in ("threads", "processes")},
    }


def _version(content: Mapping[str, Any], package: str) -> str | None:
    versions = content.get("versions")
    return versions.get(package) if isinstance(versions, dict) else None


def _is_same(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether two environments are equal in all that a result could depend on."""
    first, second = (
        (_describe(content), _version(content, "qkablate"), content.get("code"))
        for content in (before, now)
    )
    return first == second


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
