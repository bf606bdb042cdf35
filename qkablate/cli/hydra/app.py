"""A verb as a full Hydra application whose mistakes are one line and exit code 2."""

import logging
import os
import re
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from qkablate.config import CHOICES, Config, SweepConfig, conf_dir, explain, keys, nearest_key
from qkablate.errors import UserError, nearest

# Hydra's flags: those alone, and those with a value, of which some are a choice.
_ALONE = {"--help", "-h", "--hydra-help", "--resolve", "--run", "-r", "--multirun", "-m"}
_CHOICES = {"--cfg": ("job", "hydra", "all"), "-c": ("job", "hydra", "all")}
_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
_WITH_VALUE = {*_CHOICES, "--package", "-p", "--config-dir", "-cd", "--config-path", "-cp"}
_WITH_VALUE |= {"--config-name", "-cn"}
_LONGEST = 200  # bytes of a file's name, with room for its ending


def run_hydra(verb: str, argv: list[str], task: Callable[[Any], Any]) -> None:
    """hydra.main over conf/<verb>.yaml."""
    argv = _flags_first(argv)
    import hydra

    register()
    logging.raiseExceptions = False  # Hydra logs its --info; `| head` is no error to shout about
    before = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [f"qkablate {verb}", *argv]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra's way of letting exceptions through to us
    try:
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=verb)(task)()
    except Exception as error:
        if isinstance(error, BrokenPipeError) or before[1] == "1" or not _raised_by_hydra(error):
            raise
        raise UserError(one_line(error)) from None
    finally:
        sys.argv = before[0]
        if before[1] is None:
            del os.environ["HYDRA_FULL_ERROR"]


def register() -> None:
    """Tell Hydra and OmegaConf of the schema, and of names that cannot collide."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    ConfigStore.instance().store(name="schema", node=Config)
    ConfigStore.instance().store(name="sweep_schema", node=SweepConfig)

    def multirun_dir(out: str) -> str:
        name = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{uuid.uuid4().hex[:8]}"
        return str(Path(out).expanduser() / "multirun" / name)

    def choices() -> str:
        return "\n".join(f"{key}: {', '.join(words)}" for key, words in CHOICES.items())

    OmegaConf.register_new_resolver("multirun_dir", multirun_dir, use_cache=True, replace=True)
    OmegaConf.register_new_resolver("choices", choices, replace=True)


def _flags_first(argv: list[str]) -> list[str]:
    """Hydra wants all its flags on one side of the overrides; a user types them anywhere."""
    flags, overrides = [], []
    words = list(argv)
    while words:
        flag, equals, value = words.pop(0).partition("=")
        if not flag:
            raise UserError(f"'={value}' is not key=value, as in variant=merged_w")
        refuse_odd(f"{flag}{equals}{value}")
        if flag.startswith("~") and not flag.startswith("~hydra"):
            raise UserError(f"'{flag}': no key can be taken out; write key=value")
        if equals and flag.lstrip("-") in {*keys(), *vars(Config())} and flag.startswith("-"):
            raise UserError(f"'{flag}' is no flag but a key: write {flag.lstrip('-')}={value}")
        if any(flag.lstrip("+").startswith(f"{key}.") for key in keys()):
            raise UserError(f"{flag}: there is no such key{nearest_key(flag.rpartition('.')[0])}")
        if not flag.startswith("-"):
            overrides.append(f"{flag}{equals}{value}")
        elif flag in _WITH_VALUE:
            value = value if equals else words.pop(0) if words else ""
            missing = not value or value.startswith("-")  # another flag is no value of this one
            allowed = _CHOICES.get(flag, ("a value",) if missing else (value,))
            if value not in allowed:
                raise UserError(f"{flag}: '{value}' is not {' or '.join(allowed)}")
            flags += [flag, value]
        elif flag in ("--info", "-i"):  # its value may be left out
            value = value if equals else words.pop(0) if words and words[0] in _INFO else "all"
            if value not in _INFO:
                raise UserError(f"{flag}: '{value}' is not one of {', '.join(_INFO)}")
            flags += [flag, value]
        elif flag not in _ALONE | {"--rerun"}:
            known = sorted({*_ALONE, *_WITH_VALUE, "--info", "--rerun"} - {flag})
            raise UserError(f"'{flag}' is not a flag of this verb{nearest(flag, known)}")
        elif equals:
            raise UserError(f"{flag} takes no value, and '{value}' was given")
        else:
            flags.append(flag)
    return [*flags, *overrides]


def is_group(key: str) -> bool:
    """Whether the key chooses a file of conf/, as `variant` does."""
    return "." not in key and os.path.isdir(conf_dir() / key)  # of any key, however odd


def refuse_odd(word: str) -> None:
    """Hydra would merge a list of a group's files, the last one on top: nobody means that; of null
    it makes an error of its own; and it looks for files of any name, too long ones included.
    """
    key, _, value = word.lstrip("+").partition("=")
    chosen = value.split(",") if is_group(key) else []
    for name in (key, *chosen):
        if len(name.encode("utf-8", "surrogatepass")) > _LONGEST:
            raise UserError(f"'{name[:40]}…' is too long for a key or for one of its choices")
    if "null" in chosen:
        raise UserError(f"{key}: null is not a value")
    if value.startswith("[") and is_group(key):
        names = value.strip("[]").replace(" ", "")
        raise UserError(f"{key}: '{value}' is a list; several are written {key}={names}")


def _raised_by_hydra(error: Exception) -> bool:
    """Whether Hydra or OmegaConf refused something: they only see what the user wrote."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    package = str(frames[-1].f_globals.get("__name__", "")).partition(".")[0]
    return package in ("hydra", "omegaconf", "antlr4", "yaml")


def one_line(error: Exception, known: Collection[str] = ()) -> str:
    """What Hydra and OmegaConf say over several lines, of a config that has the `known` keys: those
    of a run, if unsaid.
    """
    known = known or keys()
    from hydra.errors import MissingConfigException, OverrideParseException

    text = str(error)
    if isinstance(error, UserError):
        return text
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        options = sorted(error.options or ())
        if not group:
            return f"there is no configuration called '{name}'"
        return f"{group}: '{name}' is not one of {', '.join(options)}{nearest(name, options)}"
    if isinstance(error, OverrideParseException):
        if "=" not in error.override:
            return f"'{error.override}' is not key=value, as in variant=merged_w"
        key, _, value = error.override.partition("=")
        hint = "a value with other signs than letters and digits is quoted"
        return f"""'{error.override}' cannot be read; {hint}: '{key}="{value.strip('"')}"'"""
    # Hydra wraps OmegaConf's complaint, or words its own about a key.
    cause = error.__cause__
    if found := re.search(r"Could not override '([\w.@/]+)'", text):
        key = found[1]
        if not any(one == key or one.startswith(f"{key}.") for one in known):
            return f"{key}: there is no such key{nearest_key(key)}"
    if found := re.search(r"[Aa]mbiguous value for argument '([^']+)'", text):
        return f"'{found[1]}' has several values: add -m for a run each; a list is written [a,b]"
    about = cause if cause is not None and hasattr(cause, "full_key") else error
    return explain(about, known)
