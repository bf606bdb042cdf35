"""Strict reading of JSON: texts into plain data, plain data into typed dataclasses."""

import dataclasses
import functools
import hashlib
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text; ValueError for anything else, also if nested too deep."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def hash_json(value: object) -> str:
    """Return the SHA-256 of a value's JSON with sorted keys, in hexadecimal."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def from_json(kind: type[T], value: object, where: str = "") -> T:
    """Return plain data as a dataclass, or as another type of JSON.

    ValueError names the place of an unknown key, a missing key or a value of another type. A field
    whose metadata has `from_json` is converted by that function.
    """
    converted: T = _convert(kind, value, where)
    return converted


def _convert(kind: Any, value: Any, where: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind) and type(value) is dict:
        return _dataclass(kind, value, where)
    if origin in (Union, UnionType):
        for option in arguments:
            with suppress(ValueError):
                return _convert(option, value, where)
    elif origin in (list, tuple) and type(value) is list:
        return origin(_convert(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    elif origin in (dict, Mapping) and type(value) is dict:
        return {key: _convert(arguments[1], item, _join(where, key)) for key, item in value.items()}
    elif (
        (origin is Literal and value in arguments)
        or (kind is float and type(value) in (int, float) and abs(value) <= sys.float_info.max)
        or (kind in (str, int, bool, type(None)) and type(value) is kind)
    ):
        return value
    name = getattr(kind, "__name__", str(kind)) if origin is None else str(kind)
    raise ValueError(f"{where or 'it'} is not of type {name}")


def _dataclass(kind: Any, value: dict[str, Any], where: str) -> Any:
    fields, hints = _fields(kind)
    converted = {}
    for key, item in value.items():
        if key not in fields:
            raise ValueError(f"{_join(where, key)} is not a known key")
        convert = fields[key].metadata.get("from_json")
        converted[key] = convert(item) if convert else _convert(hints[key], item, _join(where, key))
    try:
        return kind(**converted)
    except TypeError:
        missing = (key for key in fields if key not in value)
        raise ValueError(f"{_join(where, next(missing, '?'))} is missing") from None


@functools.cache
def _fields(kind: Any) -> tuple[dict[str, dataclasses.Field[Any]], dict[str, Any]]:
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    return fields, get_type_hints(kind)


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key
