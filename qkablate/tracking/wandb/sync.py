"""What was recorded offline goes to the server: by W&B's own `wandb sync`, which is watched.

W&B marks every log that has arrived; what has no mark is sent again by the next call. Logs of one
run are sent one after the other, in the order in which they were begun.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from qkablate.redaction import redacted
from qkablate.tracking.wandb.mode import silence_of
from qkablate.tracking.wandb.offline_log import Log, synced_mark

SILENT_SECONDS = 20  # without an answer or anything new, after which the server counts as gone
STALLED_SECONDS = 600  # the same of one that answers: W&B itself would try for hours
_AT_ONCE = 100  # logs that one process is given
_EVERY = 0.2
_LINK = re.compile(r"\[[^\]/]*/([^\]]+)\] View run .* at (http\S+)")
_ERROR = re.compile(r"wandb: ERROR (.+)")
# Of our own environment: what would make `wandb sync` something else.
_NOT_PASSED = ("WANDB_MODE", "WANDB_SERVICE", "WANDB_RUN_ID", "WANDB_SILENT", "WANDB_QUIET")


@dataclass
class Sent:
    """How it went."""

    logs: list[Log] = field(default_factory=list)  # that are at the server
    failed: dict[Path, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)  # by run


def send(logs: list[Log], server: str, locks: list[int], tick: Callable[[int], None]) -> Sent:
    """Send them; `tick` hears how many are there."""
    outcome = Sent()
    for first in range(0, len(logs), _AT_ONCE):
        part = logs[first : first + _AT_ONCE]

        def count(done: int, before: int = first) -> None:
            tick(before + done)

        reason = _send(part, server, locks, outcome, count)
        for log in part:
            if synced_mark(log.file).exists():
                outcome.logs.append(log)
            else:
                outcome.failed[log.file] = reason
        if silence_of(server):
            outcome.failed |= {log.file: reason for log in logs[first + _AT_ONCE :]}
            break
    return outcome


def _send(
    logs: list[Log], server: str, locks: list[int], outcome: Sent, tick: Callable[[int], None]
) -> str:
    """One process for all of them; why something is missing, if anything is."""
    files = [str(log.file.absolute()) for log in logs]
    sender = str(Path(__file__).with_name("sync_process.py"))
    with tempfile.TemporaryDirectory(prefix="qkablate-sync-") as folder:
        said = Path(folder) / "said.txt"
        with said.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-P", sender, "sync", "--include-online", *files],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=_environment(folder),
                pass_fds=locks,
                start_new_session=True,  # Ctrl-C is for us
            )
        try:
            reason = ""
            for reason in _watched(process, said, logs, server, tick):
                if reason:
                    break
        finally:
            process.kill()
            process.wait()
        text = said.read_text(encoding="utf-8", errors="replace")
    outcome.links |= {id: redacted(link) for id, link in _LINK.findall(text)}
    errors = list(dict.fromkeys(_ERROR.findall(text)))
    lines = text.strip().splitlines() or ["it said nothing"]
    return redacted(reason or "; ".join(errors) or f"wandb sync: {lines[-1]}")


def _watched(
    process: subprocess.Popen[bytes],
    said: Path,
    logs: list[Log],
    server: str,
    tick: Callable[[int], None],
) -> Iterator[str]:
    """Until it has ended; a word that is not empty says why to wait no longer."""
    known, since, asked = (0, 0), time.monotonic(), time.monotonic()
    while True:
        ended = process.poll() is not None
        done = sum(synced_mark(log.file).exists() for log in logs)
        tick(done)
        if ended:
            return
        now = time.monotonic()
        seen = (done, said.stat().st_size)
        if seen != known:
            known, since = seen, now
        if now - since > SILENT_SECONDS and now - asked > SILENT_SECONDS / 2:
            asked = now
            yield silence_of(server)
        if now - since > STALLED_SECONDS:
            yield f"{server} answers, and has taken nothing for {STALLED_SECONDS} s"
        time.sleep(_EVERY)


def _environment(folder: str) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED}
    places = {f"WANDB_{what}_DIR": folder for what in ("CACHE", "DATA", "ARTIFACT")}
    return own | places | {"WANDB_DIR": folder, "WANDB_ERROR_REPORTING": "false"}
