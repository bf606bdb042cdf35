"""Headers of safetensors files, read without their tensors and checked against the file's size."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkablate.disk import open_file
from qkablate.errors import UserError, sanitize

DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1}
DTYPE_BYTES |= {"U8": 1, "BOOL": 1}
MAX_HEADER_BYTES = 2**24  # a model of 10,000 blocks has a tenth of it


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a file: its type and shape."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a safetensors file by name; UserError unless it has all their bytes."""
    name = sanitize(path.name)
    try:
        with open_file(path) as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise UserError(
                    f"{name}: it is not a safetensors file, or is cut off in its header"
                )
            header = json.loads(file.read(length).decode("utf-8"), object_pairs_hook=_read_map)
    except OSError as error:
        raise UserError(f"{name}: it cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UserError(
            f"{name}: it is not a safetensors file: its header is not JSON, or has a name twice"
        ) from None
    if not isinstance(header, dict):
        raise UserError(f"{name}: it is not a safetensors file: its header is not a map")
    header.pop("__metadata__", None)
    tensors, spans = {}, []
    for tensor, entry in header.items():
        info, span = _parse_entry(path, tensor, entry)
        tensors[tensor] = info
        spans.append(span)
    end = 0
    for start, stop in sorted(spans):
        if start != end:
            raise UserError(f"{name}: it is damaged: its tensors overlap, or leave gaps")
        end = stop
    if 8 + length + end != size:
        raise UserError(
            f"{name}: its header promises {8 + length + end:,} bytes, and it has {size:,}:"
            " it is cut off or damaged"
        )
    return tensors


def _read_map(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a map of JSON; ValueError if a key is there twice: readers differ in which counts."""
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a key is there twice")
    return content


def _parse_entry(path: Path, name: str, entry: Any) -> tuple[TensorInfo, tuple[int, int]]:
    """Return a tensor and the bytes that it occupies."""
    if isinstance(entry, Mapping):
        dtype: Any = entry.get("dtype")
        shape: Any = entry.get("shape")
        span: Any = entry.get("data_offsets")
        if (
            isinstance(dtype, str)
            and dtype in DTYPE_BYTES
            and _are_sizes(shape)
            and _are_sizes(span)
            and len(span) == 2
            and span[1] - span[0] == math.prod(shape) * DTYPE_BYTES[dtype]
        ):
            return TensorInfo(path, dtype, tuple(shape)), (span[0], span[1])
        if isinstance(dtype, str) and dtype not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise UserError(
                f"{sanitize(path.name)}: {sanitize(name[:80])} has type {sanitize(dtype[:20])}"
                f" (known: {known})"
            )
    raise UserError(f"{sanitize(path.name)}: {sanitize(name[:80])}: its entry is damaged")


def _are_sizes(values: Any) -> bool:
    """Return whether a value is a short list of sizes."""
    return (
        isinstance(values, list)
        and len(values) <= 8
        and all(type(value) is int and 0 <= value < 2**50 for value in values)
    )
