"""From the words of `qkablate sweep` to what is asked: settings, controls, and a grid of values."""

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

from qkablate.cli.hydra.app import is_group, one_line, refuse_odd, register
from qkablate.config import (
    Config,
    ControlConfig,
    EngineConfig,
    GridConfig,
    SweepConfig,
    check,
    check_sweep,
    conf_dir,
    explain,
    flatten,
    keys,
    nearest_key,
    resolve,
)
from qkablate.config.sweep import SWEEP_KEYS, as_word
from qkablate.errors import UserError, nearest

MOST_VALUES = 1_000_000  # of one key
# Of these there is one for the whole sweep.
_ONE = ("out", "device", "threads")
_OF_ALL = ("track.", "diagnose.")


@dataclass(frozen=True)
class Asked:
    """A sweep as the user wants it, not yet expanded."""

    settings: SweepConfig
    controls: dict[str, ControlConfig]
    choices: dict[str, list[str]]  # key → its values as they are typed; several make an axis
    axes: list[str]  # the keys that the user or the sweep's file varies

    def count(self) -> int:
        """How many runs that makes, before anything is left out."""
        number = len(self.controls)
        for values in self.choices.values():
            number *= len(values)
        return number


@contextmanager
def composing() -> Iterator["Composer"]:
    """Hydra, opened once for many configs."""
    import hydra

    register()
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        yield Composer()


@dataclass
class Composer:
    """Configs from words; Hydra composes once for every choice of groups."""

    _bases: dict[tuple[str, ...], Any] = field(default_factory=dict)
    _values: dict[str, Any] = field(default_factory=dict)

    def ask(self, words: list[str], given: GridConfig | None = None) -> Asked:
        """What the words ask for, each looked at on its own; of a grid that is `given`, besides."""
        own: list[str] = []
        grid: list[str] = []
        for word in words:
            key, equals, _ = word.lstrip("+").partition("=")
            if not equals or not key or word.startswith("-"):
                raise UserError(f"'{word}' is not key=value, as in variant=standard,merged_w")
            refuse_odd(word)
            word = word.lstrip("+")
            several = len(self._choice(word)[1]) > 1
            (own if _is_own(key) else grid).append(word)
            if several and (_is_own(key) or key in _ONE or key.startswith(_OF_ALL)):
                raise UserError(f"'{word}': a sweep has one value of {key}")
        settings = self._settings(own)
        if given is not None:
            settings = replace(settings, sweep=given)
            check_sweep(settings)
        written = [
            _word(key, value)
            for key, value in {**settings.sweep.fixed, **settings.sweep.axes}.items()
        ]
        choices: dict[str, list[str]] = {}
        for word in written + grid:
            key, values = self._choice(word)
            choices[key] = values
        typed = [word.partition("=")[0] for word in grid]
        names = choices.pop("control", ["none"])
        control_words = [word for word in own if word.startswith("control.")]
        controls = {
            name: self._settings([f"control={name}", *control_words]).control for name in names
        }
        if control_words and set(names) == {"none"}:
            raise UserError(f"'{control_words[0]}' has no meaning with control=none")
        axes = [*settings.sweep.axes, *(key for key in typed if key not in settings.sweep.axes)]
        axes = [key for key in axes if key in choices]
        if not axes:
            raise UserError(
                "the grid is empty: give sweep=quick, or axes such as"
                " variant=standard,merged_w seed=range(3)"
            )
        return Asked(settings, controls, choices, axes)

    def config(self, words: dict[str, str]) -> Config:
        """The checked config that the words make, as `qkablate train` would."""
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        groups = tuple(f"{key}={value}" for key, value in words.items() if is_group(key))
        typed = copy.deepcopy(self._base(groups))
        try:
            for key, value in words.items():
                if not is_group(key):
                    OmegaConf.update(typed, key, self._value(key, value), force_add=False)
            config = OmegaConf.to_object(typed)
        except OmegaConfBaseException as error:
            raise UserError(explain(error)) from None
        assert isinstance(config, Config)
        check(config)
        return resolve(config)

    def _base(self, groups: tuple[str, ...]) -> Any:
        import hydra
        from hydra.errors import HydraException
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        if groups not in self._bases:
            try:
                composed = hydra.compose("train", list(groups))
                plain = OmegaConf.to_container(OmegaConf.masked_copy(composed, _ours(composed)))
                self._bases[groups] = OmegaConf.merge(OmegaConf.structured(Config), plain)
            except (HydraException, OmegaConfBaseException, ValueError) as error:  # variant=1
                raise UserError(one_line(error)) from None
        return self._bases[groups]

    def _settings(self, words: list[str]) -> SweepConfig:
        import hydra
        from hydra.errors import HydraException
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        for word in words:
            key, _, value = word.partition("=")
            if key == "engine.sbatch" and not value.startswith("{"):
                raise UserError(f"{key}: '{value}' is no map, as {{constraint: a100}} is")
        try:
            # A map that is open to any key: Hydra adds to it only what has the plus.
            words = [f"+{word}" if word.startswith("engine.sbatch") else word for word in words]
            composed = hydra.compose("sweep", words)
            plain = OmegaConf.to_container(
                OmegaConf.masked_copy(composed, _ours(composed)), resolve=True
            )
            settings = OmegaConf.to_object(
                OmegaConf.merge(OmegaConf.structured(SweepConfig), plain)
            )
        except (HydraException, OmegaConfBaseException, ValueError) as error:  # control=1
            raise UserError(one_line(error, {*flatten(SweepConfig())})) from None
        assert isinstance(settings, SweepConfig)
        check_sweep(settings)
        return settings

    def _choice(self, word: str) -> tuple[str, list[str]]:
        """A key and the values it is given."""
        from hydra.core.global_hydra import GlobalHydra
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from hydra.errors import HydraException

        parser = OverridesParser.create(GlobalHydra.instance().config_loader())
        try:
            override = parser.parse_overrides([word])[0]
            key = override.get_key_element()
            if override.is_delete() or "@" in key:
                raise UserError(f"'{word}': write key=value")
            if not override.is_sweep_override():
                return key, [override.get_value_element_as_str()]
            if not override.is_discrete_sweep():
                raise UserError(f"'{word}': a grid has values, not an interval")
            some = itertools.islice(override.sweep_string_iterator(), MOST_VALUES + 1)
            values = list(dict.fromkeys(some))
        except (HydraException, ValueError) as error:  # range(0,1,0)
            raise UserError(one_line(error)) from None
        if len(values) > MOST_VALUES:
            raise UserError(f"'{word}': these are more than {MOST_VALUES:,} values")
        if not values:
            raise UserError(f"'{word}': there is no value in it")
        return key, values

    def _value(self, key: str, text: str) -> Any:
        """The value that the text stands for."""
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from hydra.errors import HydraException

        word = f"{key}={text}"
        if word not in self._values:
            try:
                self._values[word] = OverridesParser.create().parse_override(word).value()
            except HydraException as error:
                raise UserError(one_line(error)) from None
        return self._values[word]


def _ours(composed: Any) -> list[str]:
    return [key for key in composed if key != "hydra"]


def _is_own(key: str) -> bool:
    """Whether a key belongs to the sweep, and not to its runs."""
    head = key.partition(".")[0]
    known = {"sweep", *SWEEP_KEYS}
    known |= {f"sweep.{item.name}" for item in fields(GridConfig)}
    known |= {f"control.{item.name}" for item in fields(ControlConfig)}
    known |= {f"engine.{item.name}" for item in fields(EngineConfig)} - {"engine.name"}
    if head == "engine" and key.startswith("engine.sbatch."):
        return True
    if head in ("sweep", "engine") or key.startswith("control."):
        if key in ("sweep.axes", "sweep.fixed"):
            raise UserError(f"{key}: on the command line an axis is written key=value,value")
        if key not in known:
            raise UserError(f"{key}: there is no such key{nearest(key, known)}")
        return True
    if "." not in key and key not in {*SWEEP_KEYS, "control", *vars(Config())}:
        own = [one for one in keys() if one.endswith(f".{key}")]
        hint = nearest(key, {*SWEEP_KEYS, "sweep", "control", *keys(), *vars(Config())})
        raise UserError(f"{key}: there is no such key{nearest_key(key) if own else hint}")
    return key in SWEEP_KEYS


def _word(key: str, value: Any) -> str:
    """What a sweep's file says, as a user would type it."""
    if isinstance(value, dict):
        raise UserError(f"sweep: the values of {key} are written 32,64 or range(3)")
    values = value if isinstance(value, list) else [value]
    return f"{key}={','.join(map(as_word, values))}"
