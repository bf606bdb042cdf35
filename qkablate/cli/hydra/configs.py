"""Configs for verbs that train nothing: `key=value` words, several values of a key with commas."""

import os
import shlex
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

from qkablate.cli.hydra.app import one_line, refuse_odd, register
from qkablate.config import Config, conf_dir, load
from qkablate.errors import UserError, nearest, printable, tell

T = TypeVar("T")


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
            if flags.get(flag, value) != value:
                raise UserError(f"{flag} is given twice: '{flags[flag]}' and '{value}'")
            flags[flag] = value
        elif flag not in alone:
            known = sorted({*alone, *with_value})
            raise UserError(f"'{flag}' is not one of {', '.join(known)}{nearest(flag, known)}")
        elif equals:
            raise UserError(f"{flag} takes no value, and '{value}' was given")
        else:
            flags[flag] = ""
    return flags, rest


def take_out(words: list[str]) -> tuple[list[str], str]:
    """The words without `out=FOLDER`, and the folder that runs, sweeps and claims lie in."""
    given = [word.removeprefix("out=") for word in words if word.startswith("out=")]
    out = given[-1] if given else "outputs"
    if os.path.expanduser(out).startswith("~"):
        raise UserError(f"out: there is no home of '{out}'")
    try:
        os.stat(os.path.expanduser(out))
    except FileNotFoundError:
        pass  # it is made when something is written
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(f"out: '{printable(out[:60])}' cannot be a folder: {why}") from None
    return [word for word in words if not word.startswith("out=")], out


@dataclass(frozen=True)
class Job:
    """One combination of the values given: its config, and the words that make it."""

    config: Config
    words: list[str]


def jobs(words: list[str], implied: str = "") -> list[Job]:
    """A checked config for every combination of the values given, as `train -m` would make them.
    What is `implied` was not typed by the user, and no message speaks of it.
    """
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from hydra.utils import get_class
    from omegaconf.errors import OmegaConfBaseException

    for word in words:
        if "=" not in word or word.startswith("="):
            raise UserError(f"'{word}' is not key=value, as in variant=merged_w")
        refuse_odd(word)
    register()
    basic: Any = get_class("hydra._internal.core_plugins.basic_sweeper.BasicSweeper")
    job = ""
    try:
        with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
            parser = OverridesParser.create(GlobalHydra.instance().config_loader())
            parsed = parser.parse_overrides([implied] * bool(implied) + words)
            (combinations,) = basic.split_arguments(parsed, None)
            varying = [len({*column}) > 1 for column in zip(*combinations, strict=True)]
            varying[: bool(implied)] = [False] * bool(implied)
            found = []
            for overrides in combinations:
                told = [word for word, varies in zip(overrides, varying, strict=True) if varies]
                job = f" (in {' '.join(told)})" if told else ""
                found.append(Job(load(hydra.compose("train", list(overrides))), list(overrides)))
            return found
    except (UserError, HydraException, OmegaConfBaseException, ValueError) as error:
        raise UserError(one_line(error) + job) from None


def built(planned: list[Job], build: Callable[[Config], T]) -> list[tuple[Job, T]]:
    """What `build` makes of every job, circuits from outside included. What has no meaning is named
    and left out, but for one alone, which is refused.
    """
    from qkablate.models.catalogue import settle

    kept = []
    for job in planned:
        try:
            config, _ = settle(job.config)
            kept.append((Job(config, job.words), build(config)))
        except UserError as refused:
            if len(planned) == 1:
                raise
            tell(f"left out: {refused}")
    if not kept:
        raise UserError("none of these variants has a meaning at this size")
    return kept


def proposed(kept: list[Job]) -> Job:
    """The one to go on with: the first that is not the baseline."""
    return next((job for job in kept if job.config.variant.name != "standard"), kept[0])


def run_and_keys(words: list[str], keys: Collection[str], form: str) -> tuple[str, dict[str, str]]:
    """Of a command whose `form` is a run and some of these keys."""
    runs, given = [], dict[str, str]()
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or "/" in key:
            runs.append(word)
        elif key not in keys:
            raise UserError(f"{key}: there is no such key{nearest(key, keys)}")
        elif key in given:
            raise UserError(f"{key}: given twice")
        elif not value:
            raise UserError(f"{key}: is empty; leave it out for the default")
        else:
            given[key] = value
    if len(runs) != 1:
        told = f"{len(runs)} runs given ({', '.join(runs)})" if runs else "no run given"
        raise UserError(f"{told}: write qkablate {form}")
    return runs[0], given


def need_extra(extra: str, *names: str) -> None:
    """UserError where what an extra brings is not installed."""
    for name in names:
        try:
            import_module(name)
        except ImportError as error:
            raise UserError(
                f"this needs {error.name}, of the extra '{extra}': pip install 'qkablate[{extra}]'"
            ) from None


def next_commands(*commands: list[str]) -> None:
    """What one may type now."""
    print("\nNext", *(f"  {shlex.join(['qkablate', *words])}" for words in commands), sep="\n")


def varies(words: list[str], key: str) -> bool:
    """Whether the user chose a `key`, or anything in it."""
    return any(word.lstrip("+").partition("=")[0].partition(".")[0] == key for word in words)
