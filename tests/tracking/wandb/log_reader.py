"""Reads what W&B recorded offline: a LevelDB log of the records of its public protocol."""

import json
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

BLOCK = 32 * 1024
FILE_HEADER, CHUNK_HEADER = 7, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


@dataclass
class Described:
    """Data that W&B knows of a run from its beginning."""

    name: str = ""
    project: str = ""
    entity: str = ""
    group: str = ""
    job_type: str = ""
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)


@dataclass
class Recorded(Described):
    """One run, as far as it was recorded."""

    id: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)  # how each was defined
    artifacts: dict[str, dict[str, Path]] = field(default_factory=dict)  # files, by kind
    machine: list[dict[str, Any]] = field(default_factory=list)  # readings of the machine
    summary: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None


def read(folder: Path) -> Recorded:
    """Return the run recorded in one `offline-run-…` folder."""
    (path,) = folder.glob("*.wandb")
    run = Recorded()
    for content in _contents(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            told = record.run
            run.id, run.name, run.job_type = told.run_id, told.display_name, told.job_type
            run.project, run.entity, run.group = told.project, told.entity, told.run_group
            run.tags = list(told.tags)
            run.config |= _values(told.config.update)
        elif kind == "history":
            run.rows.append(_values(record.history.item))
        elif kind == "summary":
            run.summary |= _values(record.summary.update)
        elif kind == "metric":
            run.metrics[record.metric.name or record.metric.glob_name] = record.metric
        elif kind == "artifact":
            entries = record.artifact.manifest.contents
            run.artifacts[record.artifact.type] = {e.path: Path(e.local_path) for e in entries}
        elif kind == "stats":
            run.machine.append(_values(record.stats.item))
        elif kind == "exit":
            run.exit_code = record.exit.exit_code
    return run


def edit(path: Path, change: Callable[[list[Any]], None]) -> None:
    """Write a log anew, with other records."""
    whole = path.read_bytes()
    records = [wandb_internal_pb2.Record.FromString(one) for one in _contents(whole)]
    change(records)
    log = bytearray(whole[:FILE_HEADER])
    for record in records:
        rest, kinds = record.SerializeToString(), (FULL, FIRST)
        while kinds:
            room = BLOCK - len(log) % BLOCK
            if room < CHUNK_HEADER:
                log += bytes(room)
                continue
            part, rest = rest[: room - CHUNK_HEADER], rest[room - CHUNK_HEADER :]
            kind = kinds[bool(rest)]
            checksum = zlib.crc32(bytes([kind]) + part)
            log += struct.pack("<IHB", checksum, len(part), kind) + part
            kinds = (LAST, MIDDLE) if rest else ()
    path.write_bytes(log)


def _values(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def _contents(data: bytes) -> Iterator[bytes]:
    """Whole records; a process that was killed leaves half a one at the end."""
    position, parts = FILE_HEADER, b""
    while position + CHUNK_HEADER <= len(data):
        if BLOCK - position % BLOCK < CHUNK_HEADER:  # padding: no header fits
            position += BLOCK - position % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        position += CHUNK_HEADER
        chunk = data[position : position + length]
        position += length
        if kind not in (FULL, FIRST, MIDDLE, LAST) or len(chunk) < length:
            return
        parts = chunk if kind in (FULL, FIRST) else parts + chunk
        if kind in (FULL, LAST):
            yield parts
