"""Declaration of config keys: default, help, bounds, choices and roles, beside the field."""

import copy
import dataclasses
import enum
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from qkablate.errors import UserError, not_one_of

BIG = 2**53  # the largest integer that every reader of JSON keeps exact


class Role(enum.Flag):
    """Role of a key: what it is part of. Every key has a role; most have several."""

    IDENTITY = enum.auto()  # the value is hashed into the run's id
    CONTENT = enum.auto()  # the id hashes what it leads to: fingerprint, file, resolved kernel
    ARM = enum.auto()  # shared by the runs of an arm
    RUN = enum.auto()  # distinguishes the runs of an arm: seeds and the learning rate
    VARIANT = enum.auto()  # defines the variant; a baseline does not inherit it
    LOCAL = enum.auto()  # changes no number: paths, threads, logging, checkpoints
    ONE_PER_SWEEP = enum.auto()  # the runs of a sweep share one value
    PAIR_FREE = enum.auto()  # may differ between the two runs of a pair
    FINETUNE = enum.auto()  # `qkablate project` accepts it; all else is the parent's
    GRID = enum.auto()  # of a sweep: which runs there are
    LAUNCH = enum.auto()  # of a sweep: where and how its runs are executed


# The usual combinations.
PARAMETER = Role.IDENTITY | Role.ARM
TRAINING = PARAMETER | Role.FINETUNE
VARYING = Role.IDENTITY | Role.RUN
LOCAL = Role.LOCAL | Role.FINETUNE
LOGGING = LOCAL | Role.ONE_PER_SWEEP


@dataclass(frozen=True)
class Key:
    """The meaning of one config key."""

    help: str
    role: Role
    bounds: tuple[float, float] | None = None  # of a number, or of each number of a list
    choices: tuple[str, ...] = ()  # the words that are allowed; with bounds, beside a number
    used_by: tuple[str, ...] = ()  # the data sources or engines that have the key

    def allowed(self, value: Any = 0) -> str:
        """Describe the allowed numbers in reply to `value`."""
        assert self.bounds is not None
        least, most = self.bounds
        text = f"a number from {least} to {most}"
        if most == BIG:
            text = f"{least} or more"
            if isinstance(value, int | float) and value > most:
                text = f"at most {most}"
        return ", ".join([*self.choices, f"or {text}"]) if self.choices else text

    def check(self, name: str, value: Any) -> None:
        """Raise UserError for a value that is out of bounds or none of the choices."""
        if value is None or isinstance(value, list) or value in self.choices:
            return
        if self.bounds is None:
            if not self.choices:
                return
            problem = not_one_of(str(value), self.choices, "qkablate train --help")
            raise UserError(f"{name}: {problem}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"{name}: '{value}' is not {self.allowed()}")
        if not self.bounds[0] <= value <= self.bounds[1]:  # false for nan, too
            raise UserError(f"{name}: {value} is not {self.allowed(value)}")


def key(default: Any, help: str, role: Role, **meaning: Any) -> Any:
    """Declare a field: its default, its help in one phrase, its role and the rest of its Key.

    The choices follow a help that ends in a colon. A number whose default is auto may be auto.
    """
    if default == "auto" and "bounds" in meaning:
        meaning.setdefault("choices", ("auto",))
    if help.endswith(":"):
        help += f" {', '.join(meaning['choices'])}"
    metadata = {"key": Key(help, role, **meaning)}
    if isinstance(default, list | dict):
        return field(default_factory=partial(copy.copy, default), metadata=metadata)
    return field(default=default, metadata=metadata)


# Declarations of keys with the usual roles.
data_key = partial(key, role=Role.CONTENT | Role.ARM)
parameter_key = partial(key, role=PARAMETER)
training_key = partial(key, role=TRAINING)
variant_key = partial(key, role=TRAINING | Role.VARIANT)
logging_key = partial(key, role=LOGGING)
grid_key = partial(key, role=Role.GRID)
launch_key = partial(key, role=Role.LAUNCH)


def section(kind: type[Any]) -> Any:
    """Declare a section: a dataclass of keys."""
    return field(default_factory=kind)


def key_table(config: type[Any], prefix: str = "") -> dict[str, Key]:
    """Return {'model.d_model': its meaning, …} for every key of a config class."""
    table: dict[str, Key] = {}
    for item in dataclasses.fields(config):
        name = prefix + item.name
        if "key" in item.metadata:
            table[name] = item.metadata["key"]
        elif isinstance(item.default_factory, type):
            table |= key_table(item.default_factory, f"{name}.")
        else:
            raise TypeError(f"{name} of {config.__name__} is not declared with key()")
    return table


def keys_by_user(config: type[Any], users: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Return the keys of a section that each data source or engine uses."""
    table = key_table(config)
    return {user: tuple(k for k, info in table.items() if user in info.used_by) for user in users}


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return {'model.d_model': value, …} for every key of a config."""
    leaves: dict[str, Any] = {}
    for name, value in vars(config).items():
        is_section = dataclasses.is_dataclass(value)
        leaves |= flatten(value, f"{prefix}{name}.") if is_section else {prefix + name: value}
    return leaves
