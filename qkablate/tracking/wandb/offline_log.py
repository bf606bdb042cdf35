"""W&B's files of a run: a folder for every session, with a log of records.

<run>/wandb/offline-run-20260131_235959-<id>/
    run-<id>.wandb           the log: LevelDB's framing, W&B's public protocol
    run-<id>.wandb.synced    everything was uploaded
    run-<id>.wandb.unsent    the session was online, and not everything was uploaded
    result.json              the copy for the artifact
"""

import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qkablate.disk import open_file

LOG_SECONDS = 5  # timeout for W&B to write the end of its log
_BLOCK, _FILE_HEADER, _HEADER = 32 * 1024, 7, 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
# Records that our runs write. Some others make W&B read, write or remove arbitrary files.
_KINDS = {
    *("header", "run", "environment", "config", "summary", "history", "stats", "metric", "files"),
    *("artifact", "telemetry", "preempting", "exit", "final", "footer"),
}


@dataclass
class OfflineLog:
    """A log's description of itself."""

    file: Path
    id: str = ""
    name: str = ""
    ended: bool = False
    paths: list[Path] = field(default_factory=list)  # files to upload with it
    rejection: str = ""  # why it must not be uploaded


def read_log(file: Path) -> OfflineLog:
    """Read a log; OSError where that fails, ValueError where it has not been begun."""
    log = OfflineLog(file)
    try:
        for record in read_records(file, 0):
            kind = record.WhichOneof("record_type")
            log.rejection = log.rejection or _reject(kind, record)
            if kind == "run":
                log.id, log.name = record.run.run_id, record.run.display_name
            elif kind == "artifact":
                entries = record.artifact.manifest.contents
                log.paths += [Path(entry.local_path) for entry in entries if entry.local_path]
            elif kind == "files":
                log.paths += [file.parent / "files" / entry.path for entry in record.files.files]
            log.ended |= kind == "exit"
    except ValueError as error:  # W&B may read further than this parser
        log.rejection = log.rejection or f"it is damaged: {error}"
    if not log.id and not log.rejection:
        raise ValueError("it is not a log of W&B: it names no run")
    return log


def _reject(kind: str | None, record: Any) -> str:
    """Return why a record must not be uploaded, or ''."""
    if kind not in _KINDS:
        return f"it holds a record of the kind '{kind}', which runs never write"
    if kind == "files":
        for path in (Path(entry.path) for entry in record.files.files):
            if path.is_absolute() or ".." in path.parts:
                return f"it refers to '{path}', which is not a file of the run"
    if kind == "artifact":
        manifest = record.artifact.manifest
        # A manifest file is a list of arbitrary files.
        references = *(entry.ref for entry in manifest.contents), manifest.manifest_file_path
        if reference := next(filter(None, references), None):
            return f"its artifact refers to '{reference}', which runs never do"
    return ""


def is_complete(file: Path) -> bool:
    """Return whether the log has its end: W&B writes nothing more once a write has failed."""
    try:
        size = file.stat().st_size
        start = max(0, (size - 1) // _BLOCK - 1) * _BLOCK  # two blocks: the end is a short record
        return any(r.WhichOneof("record_type") == "exit" for r in read_records(file, start))
    except (OSError, ValueError):
        return False


def wait_until_complete(file: Path) -> bool:
    """Wait for W&B's process, which writes the log's end a moment after it has reported it."""
    deadline = time.monotonic() + LOG_SECONDS
    while not (complete := is_complete(file)) and time.monotonic() < deadline:
        time.sleep(0.002)
    return complete


def write_error(file: Path) -> str:
    """Return why W&B's process, which does not report it, could not write: by a trial write."""
    trial = file.with_name("trial")
    try:
        trial.write_bytes(bytes(2**16))
    except OSError as error:
        return f" ({error.strerror})"
    finally:
        with suppress(OSError):
            trial.unlink(missing_ok=True)
    return ""


def read_records(file: Path, start: int) -> Iterator[Any]:
    """Yield the complete records from a block on.

    A killed process leaves half a record at the end, and a power cut zeros; ValueError where
    anything else follows an unreadable record.
    """
    from google.protobuf.message import DecodeError
    from wandb.proto import wandb_internal_pb2

    make: Any = wandb_internal_pb2.Record  # type: ignore[attr-defined]
    with open_file(file) as log:
        log.seek(start)
        data = log.read()
    position = 0 if start else _FILE_HEADER
    parts: bytes | None = None  # of the record being read
    while position + _HEADER <= len(data):
        if _BLOCK - position % _BLOCK < _HEADER:  # padding: no header fits
            position += _BLOCK - position % _BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        crosses = position % _BLOCK + _HEADER + length > _BLOCK
        if kind not in (_FULL, _FIRST, _MIDDLE, _LAST) or crosses:
            if any(data[position:]):
                raise ValueError(f"no record begins at byte {start + position:,}")
            return
        position += _HEADER
        chunk = data[position : position + length]
        position += length
        if len(chunk) < length:
            return
        if kind in (_FULL, _FIRST):
            parts = b""
        elif parts is None:
            continue  # its beginning lies before `start`
        parts += chunk
        if kind in (_FULL, _LAST):
            record = make()
            try:
                record.ParseFromString(parts)
            except DecodeError as error:
                raise ValueError(str(error)) from None
            parts = None
            yield record


def unsent_mark(file: Path) -> Path:
    """Return the file that marks a log of an online session as not fully uploaded."""
    return file.with_name(f"{file.name}.unsent")


def synced_mark(file: Path) -> Path:
    """Return the file that marks a log as uploaded."""
    return file.with_name(f"{file.name}.synced")


def find_logs(folder: Path) -> list[Path]:
    """Return the logs of a run or sweep to upload, with those of earlier attempts, oldest first.

    Files behind symbolic links are not part of the folder.
    """
    root = folder.resolve()
    files = [
        file
        for parent in ("wandb", "attempts/*/wandb")
        for kind in ("offline-run-*", "run-*")
        for file in folder.glob(f"{parent}/{kind}/*.wandb")
        if kind == "offline-run-*" or unsent_mark(file).exists()
    ]
    inside = [file for file in files if file.resolve() == root / file.relative_to(folder)]
    return sorted(inside, key=start_time)


def start_time(file: Path) -> tuple[str, str]:
    """Return when a session started, from its folder's name, and its path to break ties."""
    return file.parent.name.removeprefix("offline-").removeprefix("run-"), str(file)
