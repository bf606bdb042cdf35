"""A verb as a full Hydra application whose mistakes are one line and exit code 2."""

import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from qkablate.cli.arguments import key_hint
from qkablate.compose.register import register
from qkablate.compose.words import check_word, find_config_file, format_error
from qkablate.config import KEYS, Config, conf_dir
from qkablate.errors import UserError, nearest_hint, not_one_of

# Hydra's flags: those without a value, and those with one, of which some are a choice.
_SWITCHES = {"--help", "-h", "--hydra-help", "--resolve", "--run", "-r", "--multirun", "-m"}
_OF_TRAIN = {"--rerun", "--extend"}  # the verb's own, taken off before
_CHOICES = {"--cfg": ("job", "hydra", "all"), "-c": ("job", "hydra", "all")}
_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
_WITH_VALUE = {*_CHOICES, "--package", "-p", "--config-dir", "-cd", "--config-path", "-cp"}
_WITH_VALUE |= {"--config-name", "-cn"}


def run_hydra(verb: str, argv: list[str], task: Callable[[Any], Any]) -> None:
    """Run hydra.main over conf/<verb>.yaml."""
    argv = _sort_flags(argv)
    logging.raiseExceptions = False  # Hydra logs its --info; a closed pipe is no error
    before = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # lets exceptions through to us
    try:
        with _single_composition(argv):
            call_hydra(verb, [f"qkablate {verb}", *argv], task)
    except Exception as error:
        if isinstance(error, BrokenPipeError) or before[1] == "1" or not _raised_by_hydra(error):
            raise
        raise UserError(format_error(error)) from None
    finally:
        sys.argv = before[0]
        if before[1] is None:
            del os.environ["HYDRA_FULL_ERROR"]


def call_hydra(verb: str, argv: list[str], task: Callable[[Any], Any]) -> None:
    """Call hydra.main over conf/<verb>.yaml, as the program whose name and words are `argv`."""
    import hydra

    register()
    sys.argv = argv
    hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=verb)(task)()


@contextmanager
def _single_composition(argv: list[str]) -> Iterator[None]:
    """Spare Hydra the composition that looks for `hydra.mode`, unless somebody may have set it."""
    from hydra._internal.hydra import Hydra

    get_mode = Hydra.get_mode
    if not any(word.startswith(("hydra", "+hydra", "--config-", "-c")) for word in argv):
        Hydra.get_mode = lambda *args, **kwargs: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Hydra.get_mode = get_mode  # type: ignore[method-assign]


def _sort_flags(argv: list[str]) -> list[str]:
    """Put the flags before the overrides, as Hydra wants them; UserError for what is neither."""
    flags, overrides = [], []
    words = list(argv)
    while words:
        flag, equals, value = words.pop(0).partition("=")
        if not flag:
            raise UserError(f"'={value}' is not key=value, as in variant=merged_w, without spaces")
        check_word(f"{flag}{equals}{value}")
        if flag.startswith("~") and not flag.startswith("~hydra"):
            raise UserError(f"'{flag}': keys cannot be removed; write key=value")
        if equals and flag.startswith("-") and flag.lstrip("-") in {*KEYS, *vars(Config())}:
            raise UserError(f"'{flag}' is a key, not a flag: write {flag.lstrip('-')}={value}")
        if any(flag.lstrip("+").startswith(f"{key}.") for key in KEYS):
            raise UserError(
                f"{flag}: there is no such key (nearest: {flag.lstrip('+').rpartition('.')[0]})"
            )
        if not flag.startswith("-"):
            overrides.append(f"{flag}{equals}{value}")
        elif flag in _WITH_VALUE:
            value = value if equals else words.pop(0) if words else ""
            missing = not value or value.startswith("-")  # another flag is no value
            allowed = _CHOICES.get(flag, ("a value",) if missing else (value,))
            if value not in allowed:
                raise UserError(f"{flag}: '{value}' is not {' or '.join(allowed)}")
            flags += [flag, value]
        elif flag in ("--info", "-i"):  # its value may be omitted
            value = value if equals else words.pop(0) if words and words[0] in _INFO else "all"
            if value not in _INFO:
                raise UserError(f"{flag}: {not_one_of(value, _INFO)}")
            flags += [flag, value]
        elif flag not in _SWITCHES | _OF_TRAIN:
            if flag.replace("-", "") == "dryrun":
                raise UserError(
                    "'--dry-run' is a flag of `qkablate sweep`, which shows its plan; the config of"
                    " a run is shown by `qkablate train … --cfg job`"
                )
            known = sorted({*_SWITCHES, *_WITH_VALUE, "--info", *_OF_TRAIN} - {flag})
            hint = key_hint(flag)
            hint = f"; {hint}" if hint else nearest_hint(flag, known)
            raise UserError(f"'{flag}' is not a flag of this verb{hint}")
        elif equals:
            raise UserError(f"{flag} takes no value, and '{value}' was given")
        else:
            flags.append(flag)
    return [*flags, *overrides]


def _raised_by_hydra(error: Exception) -> bool:
    """Return whether Hydra, a plugin of it or OmegaConf raised the error: a mistake of the user."""
    if isinstance(error, UnicodeDecodeError):
        return bool(find_config_file(error)[0])
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    package = str(frames[-1].f_globals.get("__name__", "")).partition(".")[0]
    return package in ("hydra", "hydra_plugins", "omegaconf", "antlr4", "yaml", "optuna")
