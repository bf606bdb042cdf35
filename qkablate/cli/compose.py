"""Configs for verbs that train nothing: `key=value` words, several values of a key with commas."""

from typing import Any

from qkablate.cli.hydra_app import one_line, register
from qkablate.config import Config, conf_dir, load
from qkablate.errors import UserError, nearest


def take_flags(
    argv: list[str], alone: tuple[str, ...], with_value: tuple[str, ...] = ()
) -> tuple[dict[str, str], list[str]]:
    """The verb's own flags, and the other words."""
    flags: dict[str, str] = {}
    rest: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        if not word.startswith("-"):
            rest.append(word)
        elif flag in with_value:
            value = value if equals else words.pop(0) if words else ""
            if not value:
                raise UserError(f"{flag}: a value is missing")
            flags[flag] = value
        elif flag not in alone:
            known = sorted({*alone, *with_value})
            raise UserError(f"'{flag}' is not one of {', '.join(known)}{nearest(flag, known)}")
        elif equals:
            raise UserError(f"{flag} takes no value, and '{value}' was given")
        else:
            flags[flag] = ""
    return flags, rest


def configs(words: list[str]) -> list[Config]:
    """A checked config for every combination of the values given, as `train -m` would make them."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from hydra.utils import get_class
    from omegaconf.errors import OmegaConfBaseException

    for word in words:
        if "=" not in word or word.startswith("="):
            raise UserError(f"'{word}' is not key=value, as in variant=merged_w")
    register()
    basic: Any = get_class("hydra._internal.core_plugins.basic_sweeper.BasicSweeper")
    job = ""
    try:
        with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
            parser = OverridesParser.create(GlobalHydra.instance().config_loader())
            (jobs,) = basic.split_arguments(parser.parse_overrides(words), None)
            found = []
            for overrides in jobs:
                job = f" (in {' '.join(overrides)})" if len(jobs) > 1 else ""
                found.append(load(hydra.compose("train", list(overrides))))
            return found
    except (UserError, HydraException, OmegaConfBaseException) as error:
        raise UserError(one_line(error) + job) from None


def varies(words: list[str], key: str) -> bool:
    """Whether the user chose a `key`, or anything in it."""
    return any(word.lstrip("+").partition("=")[0].partition(".")[0] == key for word in words)
