"""Shell completion: Hydra's, with the verb in front.

Hydra's scripts call `qkablate -sc query=bash` with the line so far in COMP_LINE. The verb is taken
out of that line, so that Hydra completes the rest from the verb's own configuration. A verb without
one says in `words()` what can be typed after it.
"""

import contextlib
import io
import os
from collections.abc import Iterable
from importlib import import_module

from qkablate.cli import VERBS
from qkablate.config import conf_dir
from qkablate.errors import UserError

SHELLS = ("bash", "zsh", "fish")


def main(argv: list[str]) -> int:
    """`-sc install=bash`, `-sc uninstall=bash`, `-sc query=bash`."""
    words = [word for word in argv[1:] if word]
    action, _, shell = (words[0] if words else "").partition("=")
    if action not in ("install", "uninstall", "query") or shell not in SHELLS:
        raise UserError(f"-sc: write -sc install=SHELL, with SHELL one of {', '.join(SHELLS)}")
    if action != "query":
        return _ask_hydra("train", f"{action}={shell}")
    before, _, after = os.environ.get("COMP_LINE", "").lstrip().partition(" ")
    verb, space, rest = after.lstrip().partition(" ")
    if not space:
        flags = ["--help", "--version"] if verb.startswith("-") else []
        _offer(verb, (*VERBS, *flags), shell)
        return 0
    if verb not in VERBS:
        return 0
    if not (conf_dir() / f"{verb}.yaml").is_file():
        offered = getattr(import_module(f"qkablate.cli.{verb}"), "words", tuple)
        _offer(rest.rpartition(" ")[2], offered(), shell)
        return 0
    os.environ["COMP_LINE"] = f"{before} {rest}"
    with contextlib.redirect_stderr(io.StringIO()):  # a half-typed word is no error to show
        return _ask_hydra(verb, f"query={shell}")


def _offer(begun: str, words: Iterable[str], shell: str) -> None:
    matches = [word for word in words if word.startswith(begun)]
    print((" " if shell != "fish" else "\n").join(matches))


def _ask_hydra(verb: str, request: str) -> int:
    import sys

    import hydra

    from qkablate.cli.hydra.app import register
    from qkablate.config import conf_dir

    register()
    sys.argv = ["qkablate", "-sc", request]  # the name under which the shell knows us
    main_ = hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=verb)
    main_(lambda _: None)()
    return 0
