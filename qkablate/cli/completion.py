"""Shell completion: Hydra's, with the verb in front.

Hydra's scripts call `qkablate -sc query=bash` with the line so far in COMP_LINE. The verb is taken
out of that line, so that Hydra completes `key=value` words from the verb's own configuration.
Flags, names and other words come from the verb's parser.
"""

import contextlib
import io
import os
from collections.abc import Iterable

from qkablate.cli import VERBS, load_verb
from qkablate.cli.names import known_names
from qkablate.config import conf_dir
from qkablate.errors import UserError

SHELLS = ("bash", "zsh", "fish")


def main(argv: list[str]) -> int:
    """Run `-sc install=bash`, `-sc uninstall=bash` or `-sc query=bash`."""
    words = [word for word in argv[1:] if word]
    action, _, shell = (words[0] if words else "").partition("=")
    if action not in ("install", "uninstall", "query") or shell not in SHELLS:
        raise UserError(f"-sc: write -sc install=SHELL, with SHELL one of {', '.join(SHELLS)}")
    if action != "query":
        return _run_hydra("train", f"{action}={shell}")
    before, _, after = os.environ.get("COMP_LINE", "").lstrip().partition(" ")
    verb, space, rest = after.lstrip().partition(" ")
    typed = rest.rpartition(" ")[2] if space else verb
    if not space:
        flags = ["--help", "--version"] if verb.startswith("-") else []
        _print_matches(typed, (*VERBS, *flags), shell)
    elif verb not in VERBS:
        pass
    elif (conf_dir() / f"{verb}.yaml").is_file() and not typed.startswith("-"):
        os.environ["COMP_LINE"] = f"{before} {rest}"
        with contextlib.redirect_stderr(io.StringIO()):  # a half-typed word is not an error
            return _run_hydra(verb, f"query={shell}")
    else:
        parser = load_verb(verb).PARSER
        names = [name for kind in parser.kinds for name in known_names(kind)]
        _print_matches(typed, [*names, *parser.words, *parser.flags], shell)
    return 0


def _print_matches(typed: str, words: Iterable[str], shell: str) -> None:
    matches = [word for word in words if word.startswith(typed)]
    print((" " if shell != "fish" else "\n").join(matches))


def _run_hydra(verb: str, request: str) -> int:
    from qkablate.cli.hydra.app import call_hydra

    # "qkablate" is the name under which the shell knows the command.
    call_hydra(verb, ["qkablate", "-sc", request], lambda _: None)
    return 0
