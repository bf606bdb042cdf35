"""What stands in a run's files, and whether it is what was written: JSON, rows of metrics, the
frozen config, the result under its seal.
"""

import hashlib
import json
import os
import secrets
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from qkablate.disk import name_exclusively, read_file, sync_folder

_CHECK = b', "crc32": "%08x"}'  # at the end of a row
_DEEPEST = 32  # maps and lists in each other, in a frozen config


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, _json(value))


def publish_json(path: Path, value: Any) -> None:
    """The same, but what stands there already stays: FileExistsError."""
    # A name of its own: two processes that both believe they own the run must not share it.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        _write_synced(temporary, _json(value))
        name_exclusively(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_atomic(path: Path, content: str | bytes) -> None:
    """All of it or nothing, whatever happens meanwhile."""
    # A name of its own: two launchers of a sweep may write the same file at once.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    _write_synced(temporary, content)
    temporary.replace(path)
    sync_folder(path.parent)


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def _write_synced(path: Path, content: str | bytes) -> None:
    with path.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def row_line(row: Mapping[str, Any]) -> bytes:
    """A row of metrics.jsonl, with a checksum of what stands before it."""
    own = json.dumps(row, allow_nan=False)[:-1].encode()
    return own + _CHECK % zlib.crc32(own)


def read_row(line: bytes) -> dict[str, Any]:
    """The same, read; ValueError where it is not what was written."""
    own, check = line[: -len(_CHECK % 0)], line[-len(_CHECK % 0) :]
    if b'"crc32"' in line and check != _CHECK % zlib.crc32(own):  # older ones have none
        raise ValueError("a row does not have its checksum")
    try:
        row = json.loads(line)
    except RecursionError as error:
        raise ValueError(str(error)) from None
    if not isinstance(row, dict):
        raise ValueError("a row is no map")
    return row


def read_json(path: Path) -> Any:
    """The content, or None where there is no such file or no whole JSON in it."""
    try:
        text = read_file(path).decode()
        value = json.loads(text)
        if "\\u" in text:  # half of a pair is no character, and could be written nowhere
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (OSError, ValueError, RecursionError):
        return None


def read_config(folder: Path) -> dict[str, Any]:
    """The frozen config as plain data, with the id and the identity; ValueError for what no run
    writes.
    """
    import yaml

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where it is
    try:
        text = read_file(folder / "config.yaml").decode()
        depth = 0
        for event in yaml.parse(text, loader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST:  # the time to read it grows with its square
                raise ValueError("it is not what a run writes: too deep")
            if isinstance(event, yaml.AliasEvent):  # a few could stand for gigabytes
                raise ValueError("a frozen config holds no alias")
            if isinstance(event, yaml.ScalarEvent) and "${" in event.value:
                # OmegaConf would look it up, even in the environment.
                raise ValueError("a frozen config holds no ${…}")
        content = yaml.load(text, loader)
    except (OSError, yaml.YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())[:200]) from None
    except (LookupError, AttributeError, TypeError, OverflowError):  # `!!int ''`
        raise ValueError("it is not what a run writes: a value that is none of its kind") from None
    if not isinstance(content, dict):
        raise ValueError("it is not what a run writes: no map")
    return content


def read_result(folder: Path) -> dict[str, Any] | None:
    """The result of a run that has ended; None where there is none, or one that cannot be."""
    result = read_json(folder / "result.json")
    return result if isinstance(result, dict) and _is_whole(result) else None


def sealed(result: Mapping[str, Any], metrics: Path) -> dict[str, Any]:
    """With the checksums of the run's course and of the result itself."""
    course = sha256(read_file(metrics)) if metrics.exists() else None
    content = {**result, "metrics_sha256": course}
    return {**content, "sha256": _seal(content)}


def _seal(result: Mapping[str, Any]) -> str:
    own = {key: value for key, value in result.items() if key != "sha256"}
    return sha256(json.dumps(own, sort_keys=True).encode())


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def is_number(value: Any) -> TypeGuard[float]:
    """What a result or a metric can be: no infinity, and none of the words that JSON has for it."""
    return type(value) in (int, float) and abs(value) < 1e18  # of NaN, this is false


def _is_whole(result: Mapping[str, Any]) -> bool:
    loss, status = result.get("loss"), result.get("status")
    if result.get("sha256") not in (None, _seal(result)):  # older ones have none
        return False
    if status not in ("done", "diverged", "failed") or not isinstance(loss, dict):
        return False
    numbers = [result.get("tokens"), result.get("seconds"), result.get("packed", 1)]
    if status == "done":
        numbers += [loss.get("val"), 0 if loss.get("test", "") is None else loss.get("test")]
    if status == "diverged":
        numbers.append(result.get("diverged_at"))
    return all(map(is_number, numbers))
