"""Upload of offline logs by W&B's own `wandb sync`, supervised.

W&B marks every log that was uploaded; a log without a mark is uploaded by the next call. The logs
of one run are uploaded one after the other, oldest first.
"""

import fcntl
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from qkablate.errors import sanitize
from qkablate.redaction import redact
from qkablate.tracking.wandb.mode import probe_server
from qkablate.tracking.wandb.offline_log import (
    OfflineLog,
    find_logs,
    read_log,
    start_time,
    synced_mark,
)

PROBE_SECONDS = 20  # without progress, after which the server is probed
STALL_SECONDS = 600  # without progress, after which the upload is given up
_BATCH = 100  # logs per process
_INTERVAL = 0.2
_FOLDERS = ("", "CACHE_", "DATA_", "ARTIFACT_")  # WANDB_DIR, WANDB_CACHE_DIR, …
_LINK = re.compile(r"\[[^\]/]*/([^\]]+)\] View run .* at (http\S+)")
_ERROR = re.compile(r"wandb: ERROR (.+)")
# Variables that would change what `wandb sync` does.
_NOT_PASSED = ("WANDB_MODE", "WANDB_SERVICE", "WANDB_RUN_ID", "WANDB_SILENT", "WANDB_QUIET")


@dataclass
class SyncPlan:
    """The logs of some folders, by what can be done with them."""

    logs: list[OfflineLog] = field(default_factory=list)  # to upload, oldest first
    folders: dict[Path, Path] = field(default_factory=dict)  # by log file
    uploaded: int = 0  # logs that were uploaded before
    busy: list[str] = field(default_factory=list)  # folders that are being trained in
    unreadable: list[Path] = field(default_factory=list)  # empty, or damaged at the beginning
    rejected: dict[Path, str] = field(default_factory=dict)


def plan_sync(folders: dict[Path, bool]) -> SyncPlan:
    """Sort the logs of these folders, each with whether it is being trained in."""
    plan = SyncPlan()
    for folder, is_busy in folders.items():
        files = find_logs(folder)
        new = [file for file in files if not synced_mark(file).exists()]
        plan.uploaded += len(files) - len(new)
        if is_busy:
            plan.busy += [folder.name] * bool(new)
            continue
        for file in new:
            try:
                log = read_log(file)
            except ValueError:
                plan.unreadable.append(file)
            except OSError as error:
                plan.rejected[file] = error.strerror or str(error)
            else:
                if reason := _reject(log, folder):
                    plan.rejected[file] = reason
                else:
                    plan.logs.append(log)
                    plan.folders[file] = folder
    plan.logs.sort(key=lambda log: start_time(log.file))
    return plan


def _reject(log: OfflineLog, folder: Path) -> str:
    """Return why a log is not uploaded: a forged one could name any file here, and W&B obeys."""
    if log.rejection:
        return sanitize(log.rejection)
    roots = [folder.resolve()]
    if data_folder := os.environ.get("WANDB_DATA_DIR"):
        roots.append(Path(data_folder).resolve())
    for path in log.paths:
        target = path.resolve()
        if target.exists() and not any(target.is_relative_to(root) for root in roots):
            return sanitize(f"it refers to '{path}', which is not a file of the run")
    logs = log.file.with_name("logs")  # where W&B's processes make links of their own
    for path in log.file.parent.rglob("*"):
        if path.is_symlink() and path.parent != logs:
            return sanitize(f"'{path.name}' is a link; qkablate does not write through links")
    return ""


@contextmanager
def lock_folders(folders: Iterable[Path]) -> Iterator[list[int]]:
    """Lock folders against a second upload at the same time; BlockingIOError names one in use."""
    locks: list[int] = []
    with ExitStack() as stack:
        for folder in sorted(folders):
            locks.append(os.open(folder, os.O_RDONLY))
            stack.callback(os.close, locks[-1])
            try:
                fcntl.flock(locks[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BlockingIOError(str(folder)) from None
            except OSError:
                pass  # a network file system without locks
        yield locks


@dataclass
class SyncResult:
    """Outcome of an upload."""

    logs: list[OfflineLog] = field(default_factory=list)  # that were uploaded
    failed: dict[Path, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)  # by run id


def send_logs(
    logs: list[OfflineLog], server: str, locks: list[int], tick: Callable[[int], None]
) -> SyncResult:
    """Upload logs; `tick` is called with the number of uploaded logs."""
    outcome = SyncResult()
    for first in range(0, len(logs), _BATCH):
        part = logs[first : first + _BATCH]

        def count(done: int, before: int = first) -> None:
            tick(before + done)

        reason = _send(part, server, locks, outcome, count)
        for log in part:
            if synced_mark(log.file).exists():
                outcome.logs.append(log)
            else:
                outcome.failed[log.file] = reason
        if probe_server(server):
            outcome.failed |= {log.file: reason for log in logs[first + _BATCH :]}
            break
    return outcome


def _send(
    logs: list[OfflineLog],
    server: str,
    locks: list[int],
    outcome: SyncResult,
    tick: Callable[[int], None],
) -> str:
    """Upload logs with one process, and return why any of them is missing."""
    files = [str(log.file.absolute()) for log in logs]
    script = str(Path(__file__).with_name("sync_process.py"))
    with tempfile.TemporaryDirectory(prefix="qkablate-sync-") as folder:
        output = Path(folder) / "output.txt"
        variables = dict.fromkeys(("TMPDIR", *(f"WANDB_{kind}DIR" for kind in _FOLDERS)), folder)
        variables["WANDB_ERROR_REPORTING"] = "false"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-P", script, "sync", "--include-online", *files],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={k: v for k, v in os.environ.items() if k not in _NOT_PASSED} | variables,
                pass_fds=locks,
                start_new_session=True,  # Ctrl-C is handled by this process
            )
        try:
            reason = _watch(process, output, logs, server, tick)
        finally:
            process.kill()
            process.wait()
        text = output.read_text(encoding="utf-8", errors="replace")
    outcome.links |= {id: redact(link) for id, link in _LINK.findall(text)}
    errors = list(dict.fromkeys(_ERROR.findall(text)))
    lines = text.strip().splitlines() or ["no output"]
    return redact(reason or "; ".join(errors) or f"wandb sync: {lines[-1]}")


def _watch(
    process: subprocess.Popen[bytes],
    output: Path,
    logs: list[OfflineLog],
    server: str,
    tick: Callable[[int], None],
) -> str:
    """Wait until the process has ended; return '', or why waiting longer is pointless."""
    progress, since, probed = (0, 0), time.monotonic(), time.monotonic()
    while True:
        ended = process.poll() is not None
        done = sum(synced_mark(log.file).exists() for log in logs)
        tick(done)
        if ended:
            return ""
        now = time.monotonic()
        if (current := (done, output.stat().st_size)) != progress:
            progress, since = current, now
        if now - since > PROBE_SECONDS and now - probed > PROBE_SECONDS / 2:
            probed = now
            if reason := probe_server(server):
                return reason
        if now - since > STALL_SECONDS:
            return f"{server} answers, but has accepted nothing for {STALL_SECONDS} s"
        time.sleep(_INTERVAL)
