"""What is asked of SLURM's own commands: what the cluster has, whether it would take a job, and
what became of those in its queue.
"""

import math
import re
import shutil
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkablate.config import EngineConfig
from qkablate.errors import UserError, nearest

PATIENCE = 120.0  # seconds for one command
MANY = 1_000_000  # times that SLURM may take a run's machine away, or its time be over
# What sbatch takes and the engine says: by a key of its own, or because it has to.
_OWN = {
    "partition": "engine.partition",
    "account": "engine.account",
    "time": "engine.hours",
    "signal": "engine.grace",
    "cpus-per-task": "engine.cpus",
    **dict.fromkeys(("array", "job-name", "output", "error", "open-mode", "wrap", "test-only"), ""),
    **dict.fromkeys(("chdir", "no-requeue", "wait", "parsable", "help", "ntasks", "nodes"), ""),
}
_MEMORY = {"mem", "mem-per-cpu", "mem-per-gpu"}  # one of them alone


class Unanswered(Exception):
    """SLURM did not do what it was asked for; its own words, in one line."""


@dataclass(frozen=True)
class Row:
    """A job, or one task of an array, as the queue shows it."""

    job: str  # its number, without that of the task
    state: str
    node: str
    reason: str


def ask(*command: str, given: str | None = None) -> str:
    """What a command says, or Unanswered."""
    try:
        done = subprocess.run(
            command, input=given, capture_output=True, text=True, timeout=PATIENCE
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unanswered(f"{command[0]}: {error}") from None
    if done.returncode:
        raise Unanswered(one_line(done.stderr) or f"{command[0]} ended with {done.returncode}")
    return done.stdout


def one_line(said: str) -> str:
    """SLURM's words without the names of its programs."""
    lines = [
        re.sub(r"^(sbatch: |\w+: error: |allocation failure: |error: |fatal: )*", "", line)
        for line in said.splitlines()
    ]
    kept = [line.strip() for line in lines if line.strip() and not line.startswith("Try ")]
    return "; ".join(dict.fromkeys(kept))


def check(engine: EngineConfig) -> None:
    """UserError for what the cluster does not have, before any work."""
    for name in ("sbatch", "squeue", "scancel", "sinfo", "scontrol"):
        if shutil.which(name) is None:
            raise UserError(
                f"engine: slurm submits with SLURM's own commands, and there is no {name} on this"
                " machine's path"
            )
    try:
        said = ask("sinfo", "--all", "--noheader", "--format=%P|%l")
    except Unanswered as reason:
        raise UserError(f"engine: SLURM does not answer: {reason}") from None
    limits = {line.partition("|")[0]: line.partition("|")[2] for line in said.splitlines()}
    default = [name for name in limits if name.endswith("*")]
    wanted = engine.partition.split(",") if engine.partition else default
    limits = {name.rstrip("*"): limit for name, limit in limits.items()}
    for name in wanted:
        limit = limits.get(name.rstrip("*"))
        if limit is None:
            raise UserError(
                f"engine.partition: there is no '{name}'; there is {', '.join(limits)}"
                f"{nearest(name, limits)}"
            )
        if (engine.hours or 0) * 60 > minutes(limit):
            raise UserError(
                f"engine.hours: {engine.hours:g} is more than partition {name.rstrip('*')} gives"
                f" ({limit}); a run that needs longer goes on in another job"
            )
    _check_sbatch(engine.sbatch)


def check_job(given: Mapping[str, Any]) -> None:
    """UserError for a job that sbatch would not take, in its own words."""
    script = executor(Path("."), given, "check")._make_submission_file_text("true", "")
    try:
        ask("sbatch", "--test-only", given=script)
    except Unanswered as reason:
        if not re.search("(?i)busy|down|temporarily", str(reason)):  # that passes
            raise UserError(f"engine: sbatch would refuse the jobs: {reason}") from None


def _check_sbatch(given: Mapping[Any, Any]) -> None:
    for key, value in given.items():
        name = str(key).replace("_", "-")
        if name in _OWN:
            hint = f"; give {_OWN[name]}" if _OWN[name] else ""
            raise UserError(f"engine.sbatch.{key}: the engine says this itself{hint}")
        if not re.fullmatch(r"[a-z][a-z-]*", name):
            raise UserError(f"engine.sbatch: '{key}' is no option of sbatch, as constraint is")
        if not isinstance(value, str | int | float) or "\n" in str(value):
            raise UserError(f"engine.sbatch.{key}: '{value}' is not one word, number, or true")


def minutes(limit: str) -> float:
    """Of a limit as SLURM writes it: infinite, 30:00, 12:00:00, 7-00:00:00."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", limit)
    if found is None:
        return math.inf
    days, hours, mins, seconds = (int(part or 0) for part in found.groups())
    return (days * 24 + hours) * 60 + mins + seconds / 60


def largest_array() -> int:
    """How many tasks one array may have."""
    found = re.search(r"MaxArraySize\s*=\s*(\d+)", ask("scontrol", "show", "config"))
    return max(1, int(found[1])) if found else 1001


def parameters(engine: EngineConfig, memory_gb: float, gpus: int) -> dict[str, Any]:
    """What submitit is told of every job."""
    more = {str(key).replace("_", "-"): value for key, value in engine.sbatch.items()}
    more = {key: value for key, value in more.items() if value is not False}
    found: dict[str, Any] = {
        "time": math.ceil(60 * (engine.hours or 1)),
        "signal_delay_s": engine.grace,
        "cpus_per_task": engine.cpus,
        "mem": None if _MEMORY & {*more} else f"{math.ceil(1024 * memory_gb)}M",
        "gpus_per_node": gpus or None,
        "partition": engine.partition,
        "account": engine.account,
        "stderr_to_stdout": True,
        # A step takes the job's number of cores no more by itself.
        "srun_args": [f"--cpus-per-task={engine.cpus}"],
        "additional_parameters": {"requeue": True, **more},
    }
    return {key: value for key, value in found.items() if value is not None}


def executor(folder: Path, given: Mapping[str, Any], name: str) -> Any:
    """submitit's, which writes the scripts and keeps its files in the folder."""
    from submitit import SlurmExecutor

    made = SlurmExecutor(folder, max_num_timeout=MANY)
    made.update_parameters(**given, job_name=name)
    return made


def queue(user: int, names: Collection[str]) -> dict[tuple[str, int], Row]:
    """All jobs of these names, also those that ended just now; by name and number of the task."""
    if not names:
        return {}
    said = ask(
        *("squeue", "--noheader", "--array", "--states=all", f"--user={user}"),
        *(f"--name={','.join(names)}", "--format=%F|%K|%T|%N|%j|%r"),
    )
    found = {}
    for line in said.splitlines():
        parts = line.split("|", 5)
        if len(parts) == 6:
            job, task, state, node, name, reason = parts
            number = int(task) if task.isdecimal() else 0
            found[name, number] = Row(job, state, node, reason)
    return found
