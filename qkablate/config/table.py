"""The table of a run's keys, and what is derived from it."""

import dataclasses
import math
import re
from collections.abc import Collection
from typing import Any

from qkablate.config.keys import Key, Role, key_table
from qkablate.config.schema import Config
from qkablate.config.sweep import SWEEP_KEYS
from qkablate.errors import UserError, nearest_hint

KEYS = key_table(Config)
_ALL = KEYS | SWEEP_KEYS
_MAX_DIGITS = 300  # more do not fit into a float

# Sections that older files lack, as if they had them: those runs began without diagnostics.
_SINCE = {"init_from": {}, "diagnostics": {"every": 0}}


def keys_with(role: Role) -> list[str]:
    """Return the keys of a run with one of the roles."""
    return [name for name, info in KEYS.items() if info.role & role]


def is_key(name: str) -> bool:
    """Return whether there is such a key or section, of a run or a sweep."""
    return bool(_matches(name))


def has_role(name: str, role: Role) -> bool:
    """Return whether a key of a run or a sweep, or every key of a section, has one of the roles."""
    return is_key(name) and all(info.role & role for info in _matches(name))


def _matches(name: str) -> list[Key]:
    return [
        info
        for known, info in _ALL.items()
        if known == name or known.startswith(f"{name}.") or name.startswith(f"{known}.")
    ]


def names_of(role: Role) -> list[str]:
    """Return the keys with one of the roles; a section is named if all its keys have the role."""
    sections = ((name.partition(".")[0], name) for name in keys_with(role))
    return list(dict.fromkeys(part if has_role(part, role) else name for part, name in sections))


def from_plain(content: dict[str, Any]) -> Config:
    """Return the config that `dataclasses.asdict` turned into `content`."""
    config, parts = Config(), dict[str, Any]()
    for item in dataclasses.fields(Config):
        own, value = getattr(config, item.name), (_SINCE | content)[item.name]
        kind: Any = type(own)
        parts[item.name] = kind(**value) if dataclasses.is_dataclass(own) else value
    return Config(**parts)


def check_digits(key: str, value: str) -> None:
    """Reject a number of hundreds of digits, which overflows wherever it is converted."""
    info = _ALL.get(key)
    if info is not None and info.bounds is None:  # a text may have any digits
        return
    problem = f"is not {info.allowed(10**_MAX_DIGITS)}" if info else "is out of bounds"
    for digits in re.findall(r"\d[\d_]*", value):
        if len(digits) > _MAX_DIGITS:
            raise UserError(f"{key}: a number of {len(digits)} digits {problem}")
    for number in re.findall(r"\d[\d_]*(?:\.\d*)?[eE]\+?\d+", value):
        if info and math.isinf(float(number.replace("_", ""))):
            raise UserError(f"{key}: {number} {problem}")


# Keys that had another name once: an error about the old name names the new one.
RENAMED = {
    "products": "matmul",
    "start": "init_from",
    "train.shard": "train.fsdp",
    "train.accumulate": "train.grad_accum",
    "train.read_test": "train.evaluate_test",
    "diagnose": "diagnostics",
    "track": "tracking",
    "control.knob": "control.adjust",
    "per_gpu": "runs_per_gpu",
    "heal": "finetune",
    "data.payload": "data.copy_length",
    "sweep.where": "sweep.filter",
    "model.activation": "model.mlp",
}


def no_such_key(name: str, known: Collection[str] = ()) -> str:
    """Return the error about a key that is not among the `known` ones (default: those of a run).

    It names a renamed key, the verb that has the key, or the nearest known one; `lr` is optim.lr.
    """
    known = list(known or KEYS)
    if keys := [key for key in known if key.startswith(f"{name}.")]:
        return f"{name}: is a section; give one of its keys, as {keys[0]}"
    if "." not in name:
        known += [key.partition(".")[0] for key in known]
    for old, new in RENAMED.items():
        if name in (old, old.rpartition(".")[2]) or name.startswith(f"{old}."):
            new += name.removeprefix(old) if name.startswith(old) else ""
            if (verb := _verb_with(new)) and new not in known:
                return f"{name}: is now {new}, a key of qkablate {verb}"
            return f"{name}: there is no such key (nearest: {new})"
    if (verb := _verb_with(name)) and name not in known:
        return f"{name}: is a key of qkablate {verb}"
    own = ", ".join(key for key in known if key.endswith(f".{name}"))
    hint = f" (nearest: {own})" if own else nearest_hint(name, known)
    return f"{name}: there is no such key{hint}"


def _verb_with(name: str) -> str | None:
    """Return the verb that has a key or section that is none of a run's."""
    if name in ("finetune", "finetune.steps"):
        return "project"
    if name == "scale":
        return "claim run"
    return "sweep" if any(f"{key}.".startswith(f"{name}.") for key in SWEEP_KEYS) else None
