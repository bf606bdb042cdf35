"""SLURM's commands: its partitions, whether it would accept a job, and the jobs in its queue."""

import math
import re
import shutil
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkablate.config import EngineConfig
from qkablate.errors import UserError, nearest_hint

_TIMEOUT = 120.0  # seconds for one command
_MAX_REQUEUES = 1_000_000  # after preemption or timeout
# Options of sbatch that the engine sets: from a key of its own, or because it has to.
_RESERVED = {
    "partition": "engine.partition",
    "account": "engine.account",
    "time": "engine.hours",
    "signal": "engine.grace",
    "cpus-per-task": "engine.cpus",
    **dict.fromkeys(("array", "job-name", "output", "error", "open-mode", "wrap", "test-only"), ""),
    **dict.fromkeys(("chdir", "no-requeue", "wait", "parsable", "help", "ntasks", "nodes"), ""),
}
_MEMORY = {"mem", "mem-per-cpu", "mem-per-gpu"}  # mutually exclusive
# States after which a job does not continue; among them those that neither run nor user caused.
TAKEN_AWAY = {"BOOT_FAIL", "DEADLINE", "NODE_FAIL", "PREEMPTED", "REVOKED", "TIMEOUT"}
_OVER = TAKEN_AWAY | {"CANCELLED", "COMPLETED", "FAILED", "OUT_OF_MEMORY"}
ACTIVE = {"RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "SUSPENDED", "STOPPED"}


class SlurmCommandFailed(Exception):
    """A command of SLURM failed; its own message, as one line."""


class SubmissionRejected(SlurmCommandFailed):
    """SLURM's sbatch rejects the jobs."""


@dataclass(frozen=True)
class QueueEntry:
    """A job, or one task of an array, in SLURM's queue."""

    job: str  # its number, without that of the task
    state: str
    node: str
    reason: str

    @property
    def is_over(self) -> bool:
        return self.state in _OVER


def run_command(*command: str, stdin: str | None = None) -> str:
    """Return the output of a command; raise SlurmCommandFailed."""
    try:
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=_TIMEOUT
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlurmCommandFailed(f"{command[0]}: {error}") from None
    if done.returncode:
        message = format_error(done.stderr) or f"{command[0]} ended with {done.returncode}"
        raise SlurmCommandFailed(message)
    return done.stdout


def format_error(text: str) -> str:
    """Return SLURM's message as one line, without the names of its programs."""
    lines = [
        re.sub(r"^(sbatch: |\w+: error: |allocation failure: |error: |fatal: )*", "", line)
        for line in text.splitlines()
    ]
    kept = [line.strip() for line in lines if line.strip() and not line.startswith("Try ")]
    return "; ".join(dict.fromkeys(kept))


def check_cluster(engine: EngineConfig) -> None:
    """Raise UserError if the cluster lacks what the engine's keys ask for."""
    for name in ("sbatch", "squeue", "scancel", "sinfo", "scontrol"):
        if shutil.which(name) is None:
            raise UserError(
                f"engine: slurm submits with SLURM's own commands, and there is no {name} on this"
                " machine's path"
            )
    try:
        output = run_command("sinfo", "--all", "--noheader", "--format=%P|%l")
    except SlurmCommandFailed as reason:
        raise UserError(f"engine: SLURM does not answer: {reason}") from None
    limits = {line.partition("|")[0]: line.partition("|")[2] for line in output.splitlines()}
    default = [name for name in limits if name.endswith("*")]
    requested = engine.partition.split(",") if engine.partition else default
    limits = {name.rstrip("*"): limit for name, limit in limits.items()}
    for name in requested:
        limit = limits.get(name.rstrip("*"))
        if limit is None:
            raise UserError(
                f"engine.partition: there is no '{name}'; there is {', '.join(limits)}"
                f"{nearest_hint(name, limits)}"
            )
        if (engine.hours or 0) * 60 > parse_time_limit(limit):
            raise UserError(
                f"engine.hours: {engine.hours:g} exceeds the limit of partition {name.rstrip('*')}"
                f" ({limit}); a run that needs longer continues in another job"
            )
    for key, value in engine.sbatch.items():
        name = str(key).replace("_", "-")
        if name in _RESERVED:
            hint = f"; give {_RESERVED[name]}" if _RESERVED[name] else ""
            raise UserError(f"engine.sbatch.{key}: the engine sets this itself{hint}")
        if not re.fullmatch(r"[a-z][a-z-]*", name):
            raise UserError(
                f"engine.sbatch: '{key}' is not the name of an sbatch option, as qos is"
            )
        if not isinstance(value, str | int | float) or "\n" in str(value):
            raise UserError(
                f"engine.sbatch.{key}: '{value}' is not one line of text, a number or true"
            )


def check_job(parameters: Mapping[str, Any]) -> None:
    """Raise UserError if sbatch would reject a job with these parameters."""
    script = make_executor(Path("."), parameters, "check")._make_submission_file_text("true", "")
    try:
        run_command("sbatch", "--test-only", stdin=script)
    except SlurmCommandFailed as reason:
        if not re.search("(?i)busy|down|temporarily", str(reason)):  # these pass
            raise UserError(f"engine: sbatch would refuse the jobs: {reason}") from None


def parse_time_limit(limit: str) -> float:
    """Return the minutes of a limit as SLURM writes it: infinite, 30:00, 12:00:00, 7-00:00:00."""
    parts = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", limit)
    if parts is None:
        return math.inf
    days, hours, minutes, seconds = (int(part or 0) for part in parts.groups())
    return (days * 24 + hours) * 60 + minutes + seconds / 60


def max_array_size() -> int:
    """Return the most tasks that one array may have."""
    setting = re.search(r"MaxArraySize\s*=\s*(\d+)", run_command("scontrol", "show", "config"))
    return max(1, int(setting[1])) if setting else 1001


def set_throttle(job: str, limit: int) -> bool:
    """Limit the running tasks of an array; return False on failure, as for a single job."""
    try:
        run_command("scontrol", "update", f"JobId={job}", f"ArrayTaskThrottle={limit}")
    except SlurmCommandFailed:
        return False
    return True


def submitit_parameters(engine: EngineConfig, memory_gb: float, gpus: int) -> dict[str, Any]:
    """Return submitit's parameters of every job."""
    options = {str(key).replace("_", "-"): value for key, value in engine.sbatch.items()}
    options = {key: value for key, value in options.items() if value is not False}
    parameters: dict[str, Any] = {
        "time": math.ceil(60 * (engine.hours or 1)),
        "signal_delay_s": engine.grace,
        "cpus_per_task": engine.cpus,
        "mem": None if _MEMORY & {*options} else f"{math.ceil(1024 * memory_gb)}M",
        "gpus_per_node": gpus or None,
        "partition": engine.partition,
        "account": engine.account,
        "stderr_to_stdout": True,
        # Since SLURM 22.05, a step does not inherit the job's number of cores.
        "srun_args": [f"--cpus-per-task={engine.cpus}"],
        "additional_parameters": {"requeue": True, **options},
    }
    return {key: value for key, value in parameters.items() if value is not None}


def make_executor(folder: Path, parameters: Mapping[str, Any], name: str) -> Any:
    """Return submitit's executor, which writes its scripts and files in the folder."""
    from submitit import SlurmExecutor

    executor = SlurmExecutor(folder, max_num_timeout=_MAX_REQUEUES)
    executor.update_parameters(**parameters, job_name=name)
    return executor


def query_queue(user: int, names: Collection[str]) -> dict[tuple[str, int], QueueEntry]:
    """Return the jobs of these names, including those just ended, by name and task number."""
    if not names:
        return {}
    output = run_command(
        *("squeue", "--noheader", "--array", "--states=all", f"--user={user}"),
        *(f"--name={','.join(names)}", "--format=%F|%K|%T|%N|%j|%r"),
    )
    entries = {}
    for line in output.splitlines():
        parts = line.split("|", 5)
        if len(parts) == 6:
            job, task, state, node, name, reason = parts
            index = int(task) if task.isdecimal() else 0
            entries[name, index] = QueueEntry(job, state, node, reason)
    return entries
