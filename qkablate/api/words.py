"""Python values as the `key=value` words of the command line."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from qkablate.config import Config, Role, config_names, flatten, has_role
from qkablate.config.sweep import SWEEP_KEYS, SweepConfig, as_quoted
from qkablate.errors import UserError

_DEFAULTS = flatten(SweepConfig()) | flatten(Config())


def format_words(keys: Mapping[str, Any], *, axes: bool = False) -> list[str]:
    """Return a word for every key; with `axes`, a sequence of values is an axis of a sweep."""
    return [_format_word(key, value, axes) for key, value in keys.items()]


def reject_unnamed(function: str, unnamed: Sequence[object]) -> None:
    """Raise UserError for an argument without its key, and say how to write it."""
    if not unnamed:
        return
    value = unnamed[0]
    if isinstance(value, Mapping):
        raise UserError(f"{function}: a dictionary of keys is written {function}(**settings)")
    name = value if isinstance(value, str) else "no_q"
    key = next((group for group in ("variant", "sweep") if name in config_names(group)), "variant")
    raise UserError(f"{function}: {value!r} needs its key, as in {function}({key}={name!r})")


def _format_word(key: str, value: Any, axes: bool) -> str:
    if hasattr(value, "tolist"):  # an array or a number of NumPy or PyTorch
        value = value.tolist()
    if isinstance(value, range | tuple):
        value = list(value)
    if not isinstance(value, list):
        return f"{key}={_format(key, value)}"
    is_list_key = isinstance(_DEFAULTS.get(key), list)
    if not axes or key in SWEEP_KEYS or has_role(key, Role.ONE_PER_SWEEP):
        several = not axes and not is_list_key
        if several:
            raise UserError(f"{key}: {value} are several values; qkablate.sweep trains a run each")
        return f"{key}={_format(key, value)}"
    if is_list_key and not any(isinstance(item, list | tuple) for item in value):
        return f"{key}={_format(key, value)}"
    if not value:
        raise UserError(f"{key}: there is no value in it")
    return f"{key}={','.join(_format(key, item) for item in value)}"


def _format(key: str, value: Any) -> str:
    """Format one value, quoted where Hydra would interpret it."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, list | tuple):
        return f"[{','.join(_format(key, item) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{name}: {_format(key, item)}' for name, item in value.items())}}}"
    if value is None or isinstance(value, bool | int | float | str):
        return as_quoted(value)
    kind = type(value).__name__
    raise UserError(f"{key}: a {kind} is not text, a number, a boolean, None, a list or a dict")
