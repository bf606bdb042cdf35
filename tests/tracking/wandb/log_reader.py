"""Reader of W&B's offline logs: LevelDB framing, records of W&B's public protocol."""

import json
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

Record: Any = wandb_internal_pb2.Record  # type: ignore[attr-defined]
BLOCK = 32 * 1024
FILE_HEADER, CHUNK_HEADER = 7, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


@dataclass
class RunMetadata:
    """Metadata of a run."""

    name: str = ""
    project: str = ""
    entity: str = ""
    group: str = ""
    job_type: str = ""
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)


@dataclass
class RecordedRun(RunMetadata):
    """Content of an offline log."""

    id: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)  # how each was defined
    artifacts: dict[str, dict[str, Path]] = field(default_factory=dict)  # files, by kind
    machine: list[dict[str, Any]] = field(default_factory=list)  # measurements of the machine
    summary: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None


def read(folder: Path) -> RecordedRun:
    """Return the run recorded in one `offline-run-…` folder."""
    (path,) = folder.glob("*.wandb")
    run = RecordedRun()
    for content in _contents(path.read_bytes()):
        record = Record()
        record.ParseFromString(content)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            header = record.run
            run.id, run.name, run.job_type = header.run_id, header.display_name, header.job_type
            run.project, run.entity, run.group = header.project, header.entity, header.run_group
            run.tags = list(header.tags)
            run.config |= _values(header.config.update)
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
    """Rewrite a log with changed records."""
    data = path.read_bytes()
    records = [Record.FromString(content) for content in _contents(data)]
    change(records)
    log = bytearray(data[:FILE_HEADER])
    for record in records:
        rest: bytes = record.SerializeToString()
        kinds: tuple[int, ...] = (FULL, FIRST)
        while kinds:
            space = BLOCK - len(log) % BLOCK
            if space < CHUNK_HEADER:
                log += bytes(space)
                continue
            part, rest = rest[: space - CHUNK_HEADER], rest[space - CHUNK_HEADER :]
            kind = kinds[bool(rest)]
            checksum = zlib.crc32(bytes([kind]) + part)
            log += struct.pack("<IHB", checksum, len(part), kind) + part
            kinds = (LAST, MIDDLE) if rest else ()
    path.write_bytes(log)


def _values(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def _contents(data: bytes) -> Iterator[bytes]:
    """Yield the complete records; a killed process leaves half a record at the end."""
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
