"""Flags, keys and run names of the command line, shared by all verbs."""

import argparse
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from qkablate.disk import expand_user
from qkablate.errors import UserError, nearest_hint, not_one_of, sanitize, show_folder_as

if TYPE_CHECKING:
    from qkablate.config import Config
    from qkablate.training.warm_start.restore import RestoredRun

# The keys that name the circuits of a run that are not the program's own.
CIRCUIT_KEYS = ("variant.file", "variant.qk", "variant.ov")

_LONGEST_NUMBER = 17  # digits


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line that names the nearest flag.

    `{flags}` in the help text is replaced by the list of flags. Completion offers the flags, the
    names of runs, sweeps or claims (`kinds`), and other `words`.
    """

    def __init__(
        self, help_text: str, kinds: Iterable[str] = (), words: Iterable[str] = ()
    ) -> None:
        super().__init__(add_help=False, allow_abbrev=False, exit_on_error=False)
        self.kinds, self.words = kinds, words
        self._help_text = help_text
        self._converters: dict[str, Callable[[str], Any]] = {}
        self.add_argument("-h", "--help", action="help", help="show this text")

    def switch(self, flag: str, help: str) -> None:
        """Add a flag that takes no value."""
        self.add_argument(flag, action="store_true", help=help)

    def option(
        self, flag: str, metavar: str, help: str, convert: Callable[[str], Any] = str
    ) -> None:
        """Add a flag with a value; `convert` raises ValueError("a whole number") if it is none."""
        self._converters[flag] = convert
        self.add_argument(flag, metavar=metavar, help=help, action="append")

    @property
    def flags(self) -> list[str]:
        """The names of all flags."""
        return sorted(self._option_string_actions)

    def parse(self, argv: list[str]) -> argparse.Namespace:
        """Return the flags' values, and as `words` everything that is not a flag."""
        try:
            args, words = self.parse_known_args(argv)
        except argparse.ArgumentError as error:
            flag = (error.argument_name or "").rpartition("/")[2]
            if self._option_string_actions[flag].nargs == 0:
                raise UserError(f"{flag} takes no value") from None
            following = argv[argv.index(flag) + 1 :][:1] if flag in argv else []
            is_value = following and following[0].partition("=")[0] not in self.flags
            hint = f"; a value that begins with - is written {flag}=VALUE" if is_value else ""
            raise UserError(f"{flag}: a value is missing{hint}") from None
        for flag in self._converters:
            dest = self._option_string_actions[flag].dest
            setattr(args, dest, self._convert(flag, getattr(args, dest) or []))
        if unknown := [word.partition("=")[0] for word in words if word.startswith("-")]:
            # Commands about runs that exist take few keys.
            if hint := key_hint(unknown[0], self.words, trains=not self.kinds):
                raise UserError(f"'{unknown[0]}' is not a flag; {hint}")
            raise UserError(not_one_of(unknown[0], self.flags))
        for key, equals, value in (word.partition("=") for word in words):
            if equals and (flag := f"--{key}") in self.flags:  # no key has the name of a flag
                takes_value = self._option_string_actions[flag].nargs != 0
                written = f"{flag} {value}".strip() if takes_value else flag
                raise UserError(f"{sanitize(key)}: is a flag; write {sanitize(written)}")
        args.words = words
        return args

    def _convert(self, flag: str, texts: list[str]) -> Any:
        """Return the value of an option; a second, different one is an error."""
        if "" in texts:
            raise UserError(f"{flag}: a value is missing")
        values = [convert_value(flag, text, self._converters[flag]) for text in texts]
        for text, value in zip(texts, values, strict=True):
            if value != values[0]:
                raise UserError(f"{flag} is given twice: '{values[0]}' and '{text}'")
        return values[0] if values else None

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print with a usage line."""
        raise UserError(message)

    def format_help(self) -> str:
        """Return the help text with the list of flags."""
        formatter = argparse.HelpFormatter(self.prog, max_help_position=22, width=80)
        formatter.start_section(argparse.SUPPRESS)
        formatter.add_arguments(self._actions)
        formatter.end_section()
        return self._help_text.replace("{flags}\n", formatter.format_help())


def key_hint(flag: str, words: Iterable[str] = (), *, trains: bool = True) -> str:
    """Return how to write a flag that is a key, as in --variant, or the -m of `train`; or ''."""
    from qkablate.config import KEYS

    name = flag.lstrip("-").replace("-", "_")
    if flag in ("-m", "--multirun"):
        return "only `qkablate train` takes it; `qkablate sweep` is a grid already"
    if name == "resume" and trains:
        return "the same command resumes by itself"
    known = {key.partition(".")[0] for key in KEYS} | {*KEYS, "sweep", "control"}
    known |= {word.removesuffix("=") for word in words if word.endswith("=")}
    ends = [key for key in KEYS if re.fullmatch(rf"(train|optim|model)\.{re.escape(name)}", key)]
    if name not in known and len(ends) == 1 and trains:
        name = ends[0]
        known.add(name)
    return f"a key is written without dashes: {name}=VALUE" if name in known else ""


def choose_action(words: list[str], actions: Collection[str]) -> tuple[str, list[str]]:
    """Return the action that the first word names, and the other words."""
    action, *rest = words or [""]
    if action not in actions:
        raise UserError(not_one_of(action, actions))
    return action, rest


def whole_number(least: int = 0, most: int | None = None) -> Callable[[str], int]:
    """Return a converter to a whole number within bounds."""

    def convert(text: str) -> int:
        is_number = text.isascii() and text.isdecimal() and len(text) <= _LONGEST_NUMBER
        if not is_number or not least <= int(text) <= (math.inf if most is None else most):
            upper = "" if most is None else f" to {most}"
            raise ValueError(f"a whole number from {least}{upper}")
        return int(text)

    return convert


def one_of(choices: Collection[str]) -> Callable[[str], str]:
    """Return a converter that accepts these words only."""

    def convert(text: str) -> str:
        if text not in choices:
            raise UserError(not_one_of(text, choices))
        return text

    return convert


def folder(text: str) -> str:
    """Return a path if it is a folder."""
    if not os.path.isdir(text):
        raise ValueError("a folder")
    return text


def number(is_allowed: Callable[[float], bool], allowed: str) -> Callable[[str], float]:
    """Return a converter to a number within the bounds that the text `allowed` describes."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not is_allowed(value):
            raise ValueError(allowed)
        return value

    return convert


# The value of --margin.
margin = number(lambda nats: 0 < nats < 100, "a number of nats above 0 and below 100, such as 0.01")


def convert_value(name: str, text: str, convert: Callable[[str], Any]) -> Any:
    """Convert the value of a flag or of a `key=value` word."""
    try:
        return convert(text)
    except ValueError as error:
        raise UserError(f"{name}: '{sanitize(text[:40])}' is not {error}") from None
    except UserError as error:
        raise UserError(f"{name}: {error}") from None


def check_utf8(name: str, text: str) -> None:
    """Raise UserError for text whose bytes are not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"{name}: it is not UTF-8 text") from None


def take_out(words: Iterable[str], *, unpack: bool = True) -> tuple[list[str], str]:
    """Return the words without `out=FOLDER`, and the folder of runs, sweeps and claims.

    If the folder has archives alone, it is that of the unpacked ones, unless `unpack` is false.
    """
    from qkablate.config.sweep import unquoted

    folders = [word.removeprefix("out=") for word in words if word.startswith("out=")]
    out = unquoted(folders[-1]) if folders else "outputs"
    if not out:
        raise UserError("out: a value is missing; write out=FOLDER")
    path = expand_user("out", out)
    try:
        os.stat(path)
        if not os.path.isdir(path) and not out.endswith(".json.gz"):
            raise UserError(f"out: '{sanitize(out[:60])}' is a file")
    except FileNotFoundError:
        pass  # it is made when something is written
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(f"out: '{sanitize(out[:60])}' cannot be a folder: {reason}") from None
    return [word for word in words if not word.startswith("out=")], (
        unpacked(out) if unpack else out
    )


def refuse_missing(out: str) -> None:
    """Raise UserError if a folder does not exist that the user has named."""
    if out != "outputs" and not os.path.isdir(os.path.expanduser(out)):
        raise UserError(f"out: '{sanitize(out)}' does not exist")


def unpacked(folder: str) -> str:
    """Return the folder, or that of its archives, unpacked, where it has no runs of its own."""
    from qkablate.analysis.publication.archive import find_archives

    path = Path(os.path.expanduser(folder))
    if any(os.path.isdir(path / name) for name in ("runs", "sweeps", "claims")):
        return folder
    if not (paths := find_archives(folder)):
        return folder
    from qkablate.analysis.publication.unpack import unpack_archives

    found = str(unpack_archives(paths))
    show_folder_as(found, folder)
    return found


def claim_name(word: str) -> str:
    """Return the name of a claim that is given by its file, which has its name."""
    return Path(word).stem if word.endswith((".yaml", ".yml")) else word


def out_words(out: str) -> list[str]:
    """Return the words that name the folder `out` in a command."""
    return [] if out == "outputs" else [f"out={out}"]


def split_runs(words: Iterable[str]) -> tuple[list[str], list[str]]:
    """Separate the names of runs, which may be paths, from `key=value` words."""
    keys = [word for word in words if "=" in word and "/" not in word.partition("=")[0]]
    return [word for word in words if word not in keys], keys


def run_and_keys(
    words: Iterable[str], keys: Collection[str], usage: str, noun: str = "run"
) -> tuple[str, dict[str, str]]:
    """Return the one run (or model) and the values of `keys` that a command names."""
    runs, values = runs_and_keys(words, keys)
    if len(runs) != 1:
        count = f"{len(runs)} {noun}s given ({', '.join(runs)})" if runs else f"no {noun} given"
        raise UserError(f"{count}: write qkablate {usage}")
    return runs[0], values


def runs_and_keys(words: Iterable[str], keys: Collection[str]) -> tuple[list[str], dict[str, str]]:
    """Return the runs and the values of `keys` that a command names."""
    from qkablate.config.sweep import unquoted

    runs, pairs = split_runs(words)
    values: dict[str, str] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key not in keys:
            raise UserError(f"{key}: there is no such key{nearest_hint(key, keys)}")
        if key in values:
            raise UserError(f"{key}: given twice")
        if not value:
            raise UserError(f"{key}: is empty; leave it out for the default")
        is_read_here = key == "out" or key in CIRCUIT_KEYS  # Hydra reads the others
        values[key] = unquoted(value) if is_read_here else value
    return runs, values


def restore_run(run: str, values: Mapping[str, str], step: int | None = None) -> "RestoredRun":
    """Return the run that a command names, with the circuits and the `out` among its values."""
    from qkablate.runs.run import find_run

    folder = find_run(run, values.get("out", "outputs"))
    from qkablate.training.warm_start.restore import restore

    file, qk, ov = map(values.get, CIRCUIT_KEYS)
    return restore(folder, variant_file=file, qk=qk, ov=ov, step=step)


def propose_sample(config: "Config", words: list[str]) -> list[str]:
    """Return the command that shows what a run has learned: a sample, or the task's description.

    Of an imported run whose tokens are not known, no text can be shown.
    """
    from qkablate.config.data import TEXT_SOURCES, is_causal_text

    if config.data.source in TEXT_SOURCES and config.data.tokenizer is None:  # imported without
        run, *keys = words
        kept = [key for key in keys if key.startswith(("out=", *CIRCUIT_KEYS))]
        return ["inspect", run, *kept, "--variants"]
    if config.model.form != "decoder":
        return ["sample", *words, "--split", "test", "--show", "5"]
    if is_causal_text(config.data):
        return ["sample", *(word for word in words if not word.startswith(("data=", "data.")))]
    return ["data", "info", f"data={config.data.source}"]


def find_sweep_and_out(words: Iterable[str]) -> tuple[Path, str]:
    """Return the folder of the sweep that a command names, or of the newest, and the `out`."""
    from qkablate.sweeps.planning.manifest import find_sweep

    rest, out = take_out(words)
    if len(rest) > 1:
        raise UserError(f"'{rest[1]}': one sweep at a time, and '{rest[0]}' was given")
    return find_sweep(rest[0] if rest else None, out), out
