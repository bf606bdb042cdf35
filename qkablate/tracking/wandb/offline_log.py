"""What W&B keeps of a run on disk: a folder for every sitting, in it a log of records.

<run>/wandb/offline-run-20260131_235959-<id>/
    run-<id>.wandb           the log: LevelDB's framing, W&B's public protocol
    run-<id>.wandb.synced    all of it is at the server
    run-<id>.wandb.unsent    it was online, and not all of it could be sent
    result.json              as its artifact holds it
"""

import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qkablate.disk import open_file

LOG_SECONDS = 5  # that W&B is given to write the end of its log
_BLOCK, _FILE_HEADER, _HEADER = 32 * 1024, 7, 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
# What our runs write. Of the other kinds some have W&B read, write or remove files anywhere.
_KINDS = {
    *("header", "run", "environment", "config", "summary", "history", "stats", "metric", "files"),
    *("artifact", "telemetry", "preempting", "exit", "final", "footer"),
}


@dataclass
class Log:
    """What a log says of itself."""

    file: Path
    id: str = ""
    name: str = ""
    ended: bool = False
    paths: list[Path] = field(default_factory=list)  # files that are to be sent beside it
    strange: str = ""  # why it cannot be one of ours, or may hold more than we have read


def read(file: Path) -> Log:
    """OSError where it cannot be read, ValueError where it is none."""
    found = Log(file)
    try:
        _fill(found, file)
    except ValueError as error:  # W&B may read on where we do not
        found.strange = found.strange or f"it is damaged: {error}"
    if not found.id:
        raise ValueError("it is no log of W&B's")
    return found


def _fill(found: Log, file: Path) -> None:
    for record in _records(file, 0):
        kind = record.WhichOneof("record_type")
        found.strange = found.strange or _strange(kind, record)
        if kind == "run":
            found.id, found.name = record.run.run_id, record.run.display_name
        elif kind == "artifact":
            entries = record.artifact.manifest.contents
            found.paths += [Path(entry.local_path) for entry in entries if entry.local_path]
        elif kind == "files":
            found.paths += [file.parent / "files" / entry.path for entry in record.files.files]
        found.ended |= kind == "exit"


def _strange(kind: str | None, record: Any) -> str:
    """Why a record is none of ours."""
    if kind not in _KINDS:
        return f"it holds a record of the kind '{kind}', as none of ours does"
    if kind == "files":
        for path in (Path(entry.path) for entry in record.files.files):
            if path.is_absolute() or ".." in path.parts:
                return f"it wants to send '{path}', which is not the run's"
    if kind == "artifact":
        manifest = record.artifact.manifest
        others = [entry.ref for entry in manifest.contents if entry.ref]
        if manifest.manifest_file_path:
            others.append(manifest.manifest_file_path)  # a list of any files
        if others:
            return f"its artifact refers to '{others[0]}', as none of ours does"
    return ""


def is_whole(file: Path) -> bool:
    """Whether the log has its end: W&B writes nothing more once a write has failed."""
    try:
        size = file.stat().st_size
        start = max(0, (size - 1) // _BLOCK - 1) * _BLOCK  # two blocks: the end is a short record
        return any(r.WhichOneof("record_type") == "exit" for r in _records(file, start))
    except (OSError, ValueError):
        return False


def becomes_whole(file: Path) -> bool:
    """W&B's process writes the end when we are told that it is there: a millisecond later."""
    until = time.monotonic() + LOG_SECONDS
    while not (whole := is_whole(file)) and time.monotonic() < until:
        time.sleep(0.002)
    return whole


def why_not(file: Path) -> str:
    """W&B writes in another process, which tells nobody what it could not write: so we try."""
    trial = file.with_name("trial")
    try:
        trial.write_bytes(bytes(2**16))
    except OSError as error:
        return f" ({error.strerror})"
    finally:
        with suppress(OSError):
            trial.unlink(missing_ok=True)
    return ""


def _records(file: Path, start: int) -> Iterator[Any]:
    """The whole ones, from a block on; a process that was killed leaves half a one at the end, and
    a power cut zeros. ValueError where anything stands after what cannot be read.
    """
    from google.protobuf.message import DecodeError
    from wandb.proto import wandb_internal_pb2

    make: Any = wandb_internal_pb2.Record  # type: ignore[attr-defined]
    with open_file(file) as log:
        log.seek(start)
        data = log.read()
    position = 0 if start else _FILE_HEADER
    parts: bytes | None = None  # of a record that has begun
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
    return file.with_name(f"{file.name}.unsent")


def synced_mark(file: Path) -> Path:
    return file.with_name(f"{file.name}.synced")


def logs(folder: Path) -> list[Path]:
    """The logs of a run or a sweep that the server should have, those of earlier attempts too, in
    the order in which they were begun. What lies behind a link is not the folder's.
    """
    own = folder.resolve()
    found = [
        file
        for place in ("wandb", "attempts/*/wandb")
        for kind in ("offline-run-*", "run-*")
        for file in folder.glob(f"{place}/{kind}/*.wandb")
        if kind == "offline-run-*" or unsent_mark(file).exists()
    ]
    inside = [file for file in found if file.resolve() == own / file.relative_to(folder)]
    return sorted(inside, key=begun)


def begun(file: Path) -> tuple[str, str]:
    """When the sitting began, as its folder's name says, and a name to tell two apart."""
    return file.parent.name.removeprefix("offline-").removeprefix("run-"), str(file)
