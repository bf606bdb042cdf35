"""Files of a run with their checksums: JSON, rows of metrics, the frozen config, the result."""

import hashlib
import json
import secrets
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from qkablate.disk import name_exclusively, read_file, sync_folder, write_atomic, write_synced
from qkablate.strict_json import hash_json, parse_json

_CHECK = b', "crc32": "%08x"}'  # at the end of a row
_MAX_DEPTH = 32  # nested maps and lists in a frozen config


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically."""
    write_atomic(path, _json(value))


def write_json_once(path: Path, value: Any) -> None:
    """Write JSON atomically; FileExistsError if the file exists."""
    # A unique name: two processes may both believe that they hold the lease.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        write_synced(temporary, _json(value))
        name_exclusively(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def encode_row(row: Mapping[str, Any]) -> bytes:
    """Return a row of metrics.jsonl, with a checksum of the text before it."""
    text = json.dumps(row, allow_nan=False)[:-1].encode()
    return text + _CHECK % zlib.crc32(text)


def decode_row(line: bytes) -> dict[str, Any]:
    """Return the values of a row; ValueError if it is not as it was written."""
    text, check = line[: -len(_CHECK % 0)], line[-len(_CHECK % 0) :]
    if b'"crc32"' in line and check != _CHECK % zlib.crc32(text):  # older rows have none
        raise ValueError("the checksum of a row is wrong")
    row = parse_json(line)
    if not isinstance(row, dict):
        raise ValueError("a row is not a map")
    return row


def read_json(path: Path) -> Any:
    """Return the content of a file, or None if it does not exist or is not complete JSON."""
    try:
        text = read_file(path).decode()
        value = parse_json(text)
        if "\\u" in text:  # half of a surrogate pair could not be written again
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (OSError, ValueError):
        return None


def read_config(folder: Path) -> dict[str, Any]:
    """Return the frozen config as plain data, with id and identity; ValueError if it is damaged."""
    import yaml

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, if available
    try:
        text = read_file(folder / "config.yaml").decode()
        depth = 0
        for event in yaml.parse(text, loader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_DEPTH:  # reading takes quadratic time
                raise ValueError("it is not what a run writes: nested too deep")
            if isinstance(event, yaml.AliasEvent):  # a few could expand to gigabytes
                raise ValueError("a frozen config contains no alias")
            if isinstance(event, yaml.ScalarEvent) and "${" in event.value:
                # OmegaConf would resolve it, even from the environment.
                raise ValueError("a frozen config contains no ${…}")
        content = yaml.load(text, loader)
    except (OSError, yaml.YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())[:200]) from None
    except (LookupError, AttributeError, TypeError, OverflowError):  # `!!int ''`
        raise ValueError("it is not what a run writes: a value does not fit its type") from None
    if not isinstance(content, dict):
        raise ValueError("it is not what a run writes: not a map")
    return content


def list_environments(content: object) -> list[dict[str, Any]]:
    """Return from environment.json where a run began, then where it went on, if elsewhere."""
    if not isinstance(content, dict):
        return []
    resumed = content.get("resumed")
    later = resumed if isinstance(resumed, list) else []
    return [content, *(environment for environment in later if isinstance(environment, dict))]


def environment_value(content: object, part: str, key: str) -> str | None:
    """Return a value of environment.json: in turn, if the run went on with others; None if none."""
    parts = (environment.get(part) for environment in list_environments(content))
    return join_in_turn(part.get(key) for part in parts if isinstance(part, dict))


def join_in_turn(values: Iterable[object]) -> str | None:
    """Return the distinct values from the start of a run to its end; None if there are none."""
    return ", then ".join(dict.fromkeys(str(value) for value in values if value)) or None


def read_result(folder: Path) -> dict[str, Any] | None:
    """Return the result of a run that has ended; None if there is none, or it is damaged."""
    result = read_json(folder / "result.json")
    return result if isinstance(result, dict) and _is_valid(result) else None


def seal_result(result: Mapping[str, Any], metrics: Path) -> dict[str, Any]:
    """Return the result with checksums of the metrics and of itself."""
    metrics_sha256 = sha256(read_file(metrics)) if metrics.exists() else None
    content = {**result, "metrics_sha256": metrics_sha256}
    return {**content, "sha256": _seal(content)}


def _seal(result: Mapping[str, Any]) -> str:
    return hash_json({key: value for key, value in result.items() if key != "sha256"})


def sha256(content: bytes) -> str:
    """Return the SHA-256 of some bytes in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value is a plausible number: no bool, infinity or NaN."""
    return type(value) in (int, float) and abs(value) < 1e18  # False for NaN


def _is_valid(result: Mapping[str, Any]) -> bool:
    loss, status = result.get("loss"), result.get("status")
    if result.get("sha256") not in (None, _seal(result)):  # older results have none
        return False
    if status not in ("done", "diverged", "failed") or not isinstance(loss, dict):
        return False
    numbers = [result.get("tokens"), result.get("seconds")]
    numbers += [result.get("packed", 1), result.get("program_runs", 1)]
    numbers.append(result.get("test_tokens") or 0)  # None: the whole split
    if status == "done":
        numbers += [loss.get("val"), 0 if loss.get("test", "") is None else loss.get("test")]
    if status == "diverged":
        numbers.append(result.get("diverged_at"))
    return all(map(is_number, numbers))
