"""The grammar of `key=value` words, and the mistakes in them as one line."""

import itertools
import math
import os
import re
import traceback
from collections import Counter
from collections.abc import Collection
from typing import Any

from qkablate.config import KEYS, check_digits, conf_dir, config_names, explain, no_such_key
from qkablate.errors import UserError, find_nearest, not_one_of

MAX_JOBS = 10_000  # of one command: each is checked before the first one starts
MAX_VALUES = 1_000_000  # of one key
# The commands that list the files of a group; those of most are in the help of `train`.
_LISTS = {"variant": "qkablate variants", "data": "qkablate data list"}
_LISTS |= {"sweep": "qkablate sweep --help"}
# Functions of Hydra that give a key several values, with an example of each.
_FUNCTIONS = {"range": "range(5)", "choice": "choice(a,b)", "glob": "glob(*)"}
_MOST_NAMES = 12  # keys of a section that a message lists
_MAX_NAME = 200  # bytes of a file's name, with room for its suffix


def is_group(key: str) -> bool:
    """Return whether the key chooses a file of conf/, as `variant` does."""
    return "." not in key and os.path.isdir(conf_dir() / key)  # any text may be given as a key


def check_word(word: str) -> None:
    """Reject what Hydra accepts or fails on without a clear message.

    It would merge the files of a list, look for files of any name, and overflow at long numbers.
    """
    key, equals, value = word.lstrip("+").partition("=")
    chosen = value.split(",") if is_group(key) else []
    for name in (key, *chosen):
        if len(name.encode("utf-8", "surrogatepass")) > _MAX_NAME:
            raise UserError(f"'{name[:40]}…' is too long for a key or for one of its choices")
    info = KEYS.get(key)
    if equals and not value and (is_group(key) or (info and (info.bounds or info.choices))):
        raise UserError(f"{key}: a value is missing")
    if value.endswith(","):
        raise UserError(f"'{word}': no space after the comma: {key}=a,b")
    if "null" in chosen:
        raise UserError(f"{key}: null is not a value")
    if value.startswith("[") and is_group(key):
        names = value.strip("[]").replace(" ", "")
        raise UserError(f"{key}: '{value}' is a list; several values are written {key}={names}")
    check_digits(key, value)


def _describe_bare_word(word: str) -> str:
    """Return what is wrong with a word that is not key=value."""
    groups = {group: config_names(group) for group in ("variant", "data", "model", "optim")}
    for group, names in groups.items():
        if word in names:
            return f"'{word}' is not key=value; write {group}={word}"
    for group, names in groups.items():
        if nearest := find_nearest(word, names):
            return f"'{word}' is not key=value (nearest: {group}={nearest})"
    return f"'{word}' is not key=value, as in variant=merged_w"


def parse_values(word: str, limit: int = MAX_VALUES) -> tuple[str, list[str]]:
    """Return the key of a word, and the values it is given: `seed=range(3)` has three."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, equals, _ = word.partition("=")
    if not equals or not key.lstrip("+") or word.startswith("-"):
        raise UserError(_describe_bare_word(word))
    check_word(word)
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())
    try:
        override = parser.parse_overrides([word])[0]
        key = override.get_key_element()
        if override.is_delete() or "@" in key:
            raise UserError(f"'{word}': write key=value")
        if not override.is_sweep_override():
            return key, [override.get_value_element_as_str()]
        if not override.is_discrete_sweep():
            raise UserError(f"'{word}': give single values, not an interval")
        values = list(itertools.islice(override.sweep_string_iterator(), limit + 1))
    except (HydraException, ValueError, OverflowError) as error:  # range(0,1,0)
        raise UserError(format_error(error)) from None
    if len(values) > limit:
        raise UserError(f"'{word}': these are more than {limit:,} values")
    if not values:
        raise UserError(f"'{word}': there is no value in it")
    value, count = Counter(values).most_common(1)[0]
    if count > 1:  # a seed for another would leave fewer runs than meant
        raise UserError(f"{key.lstrip('+')}: {value} is given more than once")
    return key, values


def expand_words(words: list[str]) -> list[list[str]]:
    """Return the words of every combination of values, in the order of Hydra's basic sweeper."""
    parsed = [parse_values(word, MAX_JOBS) for word in words]
    if math.prod(len(values) for _, values in parsed) > MAX_JOBS:
        raise UserError(f"these are more than {MAX_JOBS:,} jobs")
    choices = [[f"{key}={value}" for value in values] for key, values in parsed]
    return [list(job) for job in itertools.product(*choices)]


def split_words(words: list[str]) -> dict[str, str]:
    """Return {key: value} of words without sweeps; a group can be chosen once."""
    choices: dict[str, str] = {}
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        if key in choices and is_group(key):
            raise UserError(f"{key}: chosen twice, '{choices[key]}' and '{value}'")
        choices[key] = value
    return choices


def refuse_repeated(words: list[str]) -> None:
    """Raise UserError for two choices of a variant or sweep, of which the first would be lost.

    Of other keys the last value counts, as in Hydra: scripts append to the words of others.
    """
    chosen: dict[str, str] = {}
    for word in words:
        key, equals, value = word.lstrip("+").partition("=")
        if equals and key in ("variant", "sweep") and chosen.setdefault(key, value) != value:
            instead = "; several are written variant=a,b" if key == "variant" else ""
            raise UserError(f"{key}: chosen twice, '{chosen[key]}' and '{value}'{instead}")


def sets_key(words: list[str], key: str) -> bool:
    """Return whether the words set a key, or anything in its section."""
    return any(word.lstrip("+").partition("=")[0].partition(".")[0] == key for word in words)


def format_error(error: Exception, known: Collection[str] = ()) -> str:
    """Format an error of Hydra or OmegaConf as one line; `known` keys default to those of a run."""
    known = known or KEYS
    from hydra.errors import MissingConfigException, OverrideParseException
    from yaml import YAMLError

    text = str(error)
    if isinstance(error, UserError):
        return text
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        options = sorted(error.options or ())
        if not group:
            return f"there is no configuration called '{name}'"
        file = name if name.endswith(".py") else f"{name}.py"
        if group == "variant" and (file == name or os.path.isfile(file)):
            return f"variant: '{name}' is not in the catalogue; your file is variant.file={file}"
        command = _LISTS.get(group, "qkablate train --help")
        if {*options} <= {*config_names(group)}:
            return f"{group}: {not_one_of(name, options, command)}"
        return f"{group}: {not_one_of(name, options, '')} (`{command}` lists those of qkablate)"
    if isinstance(error, OverrideParseException):
        if "=" not in error.override:
            return _describe_bare_word(error.override)
        key, _, value = error.override.partition("=")
        name, parenthesis, _ = value.partition("(")
        if parenthesis and (nearest := find_nearest(name, _FUNCTIONS)):
            hint = "" if name == nearest else f" (nearest: {nearest})"
            example = f"'{key}={_FUNCTIONS[nearest]}'"
            return f"{key}: '{value}'{hint} cannot be read; write it as in {example}"
        hint = "quote a value with special characters"
        if key == "sweep.filter":
            example = """'sweep.filter=["model.d_model > 32"]'"""
            return f"{key}: a list of predicates is written as in {example}"
        return f"""'{error.override}' cannot be read; {hint}: '{key}="{value.strip('"')}"'"""
    file, word = find_config_file(error)
    chosen = f"{word}: " if word else ""
    if isinstance(error, YAMLError):
        return f"{chosen}not YAML: {' '.join(text.split())}"
    if isinstance(error, UnicodeDecodeError) and file:
        return f"{chosen}'{file}' is not UTF-8 text"
    if isinstance(error, OSError):  # without a number it is OmegaConf's, about what is no map
        problem = error.strerror if error.errno else "not a map of keys to values"
        return f"{chosen}'{error.filename or file}': {problem}"
    if match := re.match(
        r"In '([^']+)': \w+ raised while composing config:\n(.*)", text, re.DOTALL
    ):
        return f"{match[1]}.yaml: {_explain_in_file(match[2], known)}"
    # Hydra wraps the error of OmegaConf, or words its own about a key.
    cause = error.__cause__
    if match := re.search(r"Could not override '([\w.@/]+)'", text):
        key = match[1]
        if not any(name == key or name.startswith(f"{key}.") for name in known):
            return no_such_key(key, known)
    if match := re.search(r"[Aa]mbiguous value for argument '([^']+)'", text):
        several = f"'{match[1]}' has several values: add -m for a run each"
        if match[1].startswith("variant.sites="):
            return f"{several}; sites of one run are joined by +, as encoder+cross"
        return f"{several}; a list is written [a,b]"
    if match := re.search(r"Sweep parameters '([^']+)' requires? --multirun", text):
        word = match[1].split(",")[0] if "(" not in match[1] else match[1]
        return (
            f"'{word}' has several values: `qkablate train` trains one run; add -m for a run each,"
            " or use `qkablate sweep`"
        )
    source: Any = cause if cause is not None and hasattr(cause, "full_key") else error
    return explain(source, known)


def find_config_file(error: Exception) -> tuple[str, str]:
    """Return the file that Hydra was reading, and the word that chose it; '' if there is none."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "load_config" and "full_path" in frame.f_locals:
            group, _, name = frame.f_locals["config_path"].rpartition("/")
            return frame.f_locals["full_path"], f"{group}={name}" if group else ""
    return "", ""


def _explain_in_file(text: str, known: Collection[str]) -> str:
    """Format OmegaConf's error about a file of the user."""
    problem = explain(ValueError(text), known)
    match = re.search(r"^Key '.*full_key: (\S+)", text, re.DOTALL)
    if match is None:
        return problem
    section = match[1].rpartition(".")[0]
    run_key = match[1].removeprefix("sweep.")
    if known is not KEYS and any(f"{key}.".startswith(f"{run_key}.") for key in KEYS):
        return f"{run_key} is a key of the runs; write it in axes or fixed"
    names = [key.removeprefix(f"{section}.") for key in known if key.startswith(f"{section}.")]
    names = names or list(dict.fromkeys(key.partition(".")[0] for key in known))
    return f"{problem}; allowed: {', '.join(names)}" if len(names) <= _MOST_NAMES else problem
