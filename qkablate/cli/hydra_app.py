"""A verb as a full Hydra application whose mistakes are one line and exit code 2."""

import logging
import os
import re
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qkablate.config import Config, conf_dir, explain, keys
from qkablate.errors import UserError, nearest

# Hydra's flags; a word after these is their value.
_WITH_VALUE = {"--cfg", "-c", "--package", "-p", "--config-dir", "-cd", "--config-path", "-cp"}
_WITH_VALUE |= {"--config-name", "-cn"}
_FLAGS = _WITH_VALUE | {"--help", "-h", "--hydra-help", "--resolve", "--run", "-r", "--multirun"}
_FLAGS |= {"-m", "--info", "-i", "--shell-completion", "-sc"}


def run_hydra(verb: str, argv: list[str], task: Callable[[Any], Any]) -> None:
    """hydra.main over conf/<verb>.yaml."""
    argv = _flags_first(argv)
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    register()
    logging.raiseExceptions = False  # Hydra logs its --info; `| head` is no error to shout about
    before = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [f"qkablate {verb}", *argv]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra's way of letting exceptions through to us
    try:
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=verb)(task)()
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        if before[1] == "1" or not _is_users_mistake(error):
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

    def multirun_dir(out: str) -> str:
        name = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{uuid.uuid4().hex[:8]}"
        return str(Path(out).expanduser() / "multirun" / name)

    OmegaConf.register_new_resolver("multirun_dir", multirun_dir, use_cache=True, replace=True)


def _flags_first(argv: list[str]) -> list[str]:
    """Hydra wants all its flags on one side of the overrides; a user types them anywhere."""
    flags, overrides = [], []
    words = iter(argv)
    for word in words:
        flag, equals, _ = word.partition("=")
        if not word.startswith("-"):
            overrides.append(word)
        elif flag not in _FLAGS:
            known = sorted({*_FLAGS, "--rerun"})
            raise UserError(f"'{flag}' is not a flag of this verb{nearest(flag, known)}")
        else:
            flags.append(word)
            if flag in _WITH_VALUE and not equals:
                flags.append(next(words, ""))
    return [*flags, *overrides]


def _is_users_mistake(error: Exception) -> bool:
    """A ValueError of ours is a bug, one of Hydra's own front end is about the flags."""
    if not isinstance(error, ValueError):
        return True
    return str(error).startswith(("Only one of", "The --resolve"))


def one_line(error: Exception) -> str:
    """What Hydra and OmegaConf say over several lines."""
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
        reason = text.strip().splitlines()[-1] if "See https" in text else text.splitlines()[0]
        reason = text.strip().splitlines()[0].rstrip(".") if "See https" in reason else reason
        return f"'{error.override}' cannot be read: {reason}"
    # Hydra wraps OmegaConf's complaint, or words its own about a key.
    cause = error.__cause__
    if found := re.search(r"Could not override '([\w.@/]+)'", text):
        key = found[1]
        if not any(known == key or known.startswith(f"{key}.") for known in keys()):
            return f"{key}: there is no such key{nearest(key, keys())}"
    if found := re.search(r"[Aa]mbiguous value for argument '([^']+)'", text):
        return f"'{found[1]}' has several values; for one run each add -m"
    if cause is not None and hasattr(cause, "full_key"):
        return explain(cause)
    return explain(error)
