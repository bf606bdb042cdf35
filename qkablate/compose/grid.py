"""The request of a sweep, read from its words: settings, controls, and a grid of values."""

import math
from dataclasses import dataclass, replace
from typing import Any

from qkablate.compose.configs import compose
from qkablate.compose.words import is_group, parse_values
from qkablate.config import (
    KEYS,
    Config,
    ControlConfig,
    GridConfig,
    Role,
    SweepConfig,
    config_names,
    explain,
    has_role,
    no_such_key,
)
from qkablate.config.sweep import SWEEP_KEYS, as_word, check_sweep, control_name, list_also
from qkablate.errors import UserError, find_nearest
from qkablate.sweeps.planning.manifest import RUN_KEYS

ENGINE_KEYS = ("engine", "workers", "runs_per_gpu", "on_failure")


class EmptyGrid(UserError):
    """A sweep without an axis."""


@dataclass(frozen=True)
class SweepRequest:
    """A sweep as the user wants it, not yet expanded."""

    settings: SweepConfig
    controls: dict[str, ControlConfig]
    choices: dict[str, list[str]]  # key → its values as they are typed; several make an axis

    def count(self) -> int:
        """Return the number of runs, before anything is left out."""
        runs = math.prod(len(values) for key, values in self.choices.items() if key in RUN_KEYS)
        arms = [len(values) for key, values in self.choices.items() if key not in RUN_KEYS]
        is_grid = self.settings.sweep.design == "grid"
        cells = math.prod(arms) if is_grid else 1 + sum(number - 1 for number in arms)
        return len(self.controls) * runs * cells * (1 + len(list_also(self.settings.sweep)))


def read_request(words: list[str], grid: GridConfig | None = None) -> SweepRequest:
    """Read the words, each checked on its own; a given `grid` replaces that of the file."""
    settings_words: list[str] = []
    choices: dict[str, list[str]] = {}
    for word in words:
        if "=" not in word and (nearest := find_nearest(word, config_names("sweep"))):
            advice = f"; write sweep={word}" if nearest == word else f" (nearest: sweep={nearest})"
            raise UserError(f"'{word}' is not key=value{advice}")
        key, values = _parse(word)
        if word.startswith("+") and key not in KEYS and not is_group(key) and "." not in key:
            raise UserError(
                f"'{word}': a sweep accepts only qkablate's config groups; write the keys under"
                " `fixed:` in DIR/sweep/NAME.yaml, or use `qkablate train -m`"
            )
        if len(values) > 1 and (_is_own(key) or has_role(key, Role.ONE_PER_SWEEP)):
            raise UserError(f"'{word}': a sweep has one value of {key}")
        if _is_own(key):
            settings_words.append(word.lstrip("+"))
        else:
            choices[key] = values
    settings = _compose_settings(settings_words)
    if grid is not None:
        settings = replace(settings, sweep=grid)
        check_sweep(settings)
    typed = list(choices)
    from_file = {**settings.sweep.fixed, **settings.sweep.axes}
    for key in from_file:
        _check_axis(str(key))
    several = {*settings.sweep.axes, *(key for one in list_also(settings.sweep) for key in one)}
    for key in map(str, several):
        if has_role(key, Role.ONE_PER_SWEEP):
            raise UserError(f"{key}: a sweep has one value of it; give it under sweep.fixed")
    choices = dict(_parse(_word(key, value)) for key, value in from_file.items()) | choices
    names = choices.pop("control", ["none"])
    control_words = [word for word in settings_words if word.startswith("control.")]
    controls = dict(_read_control(name, control_words) for name in names)
    if control_words and set(names) == {"none"}:
        raise UserError(f"'{control_words[0]}' has no meaning with control=none")
    is_given = any(word.startswith("sweep.tuning_seeds=") for word in settings_words)
    if is_given and not settings.sweep.tune:
        raise UserError("sweep.tuning_seeds: has no meaning without sweep.tune=true")
    if not choices.keys() & {*settings.sweep.axes, *typed}:
        raise EmptyGrid(
            "the grid is empty: give sweep=quick, or axes such as"
            " variant=standard,merged_w 'seed=range(3)'"
        )
    return SweepRequest(settings, controls, choices)


def split_engine_words(words: list[str]) -> tuple[list[str], list[str]]:
    """Separate the words about where and how runs are trained from those about the runs."""
    own = [word for word in words if word.partition("=")[0].partition(".")[0] in ENGINE_KEYS]
    return own, [word for word in words if word not in own]


def _parse(word: str) -> tuple[str, list[str]]:
    key, values = parse_values(word)
    return key.lstrip("+"), values


def _compose_settings(words: list[str]) -> SweepConfig:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for word in words:
        key, _, value = word.partition("=")
        if key == "engine.sbatch" and not value.startswith("{"):
            raise UserError(f"{key}: '{value}' is not a map, as {{constraint: a100}} is")
    # engine.sbatch is a map that is open to any key: Hydra adds to it only with a plus.
    words = [f"+{word}" if word.startswith("engine.sbatch") else word for word in words]
    known = [*SWEEP_KEYS]
    try:
        settings = OmegaConf.to_object(compose("sweep", SweepConfig, words, known))
    except OmegaConfBaseException as error:
        raise UserError(explain(error, known)) from None
    assert isinstance(settings, SweepConfig)
    check_sweep(settings)
    return settings


def _is_own(key: str) -> bool:
    """Return whether a key belongs to the sweep, and not to its runs; UserError for no key."""
    if key in ("sweep.axes", "sweep.fixed"):
        raise UserError(f"{key}: on the command line an axis is written key=value,value")
    known = ["sweep", "engine", *(name for name in SWEEP_KEYS if name != "engine.name")]
    if key in known or key.startswith("engine.sbatch."):
        return True
    if key.startswith(("sweep.", "engine.", "control.")):
        raise UserError(no_such_key(key, known))
    known += ["control", *KEYS, *vars(Config())]
    if "." not in key and key not in known:
        raise UserError(no_such_key(key, known))
    return False


def _check_axis(key: str) -> None:
    """Raise UserError unless a key of a sweep's file belongs to its runs."""
    try:
        is_own = _is_own(key)
    except UserError as error:
        raise UserError(f"sweep.axes, sweep.fixed: {error}") from None
    if is_own:
        raise UserError(f"sweep.axes, sweep.fixed: {key} is a key of the sweep, not of its runs")


def _read_control(name: str, words: list[str]) -> tuple[str, ControlConfig]:
    """Return a control with its full name: `params`, or `params-d_model`."""
    if name == "none":  # the default
        return name, _compose_settings(words).control
    match, hyphen, adjust = name.partition("-")
    if hyphen and match == "none":
        raise UserError(
            f"control={name}: nothing is held equal, so no size is adjusted; set control=none"
        )
    if hyphen:
        if any(word.startswith("control.adjust=") for word in words):
            raise UserError(f"control={name} names the size to adjust; leave control.adjust out")
        words = [*words, f"control.adjust={adjust}"]
    control = _compose_settings([f"control={match}", *words]).control
    return control_name(control.match, control.adjust), control


def _word(key: str, value: Any) -> str:
    """Format an entry of a sweep's file as a user would type it."""
    if isinstance(value, dict):
        raise UserError(f"sweep: the values of {key} are written 32,64 or range(3)")
    values = value if isinstance(value, list) else [value]
    return f"{key}={','.join(map(as_word, values))}"
