"""Checked configs from `key=value` words: for sweeps, and for verbs that train nothing."""

import copy
import functools
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from qkablate.compose.register import register
from qkablate.compose.words import expand_words, format_error, is_group, sets_key, split_words
from qkablate.config import (
    KEYS,
    Config,
    build_config,
    check_digits,
    conf_dir,
    config_names,
    explain,
    no_such_key,
    to_typed,
    variants,
)
from qkablate.errors import UserError, print_stderr

T = TypeVar("T")
_USER = "command-line"  # Hydra's name of the folder that --config-dir gives


def make_config(words: Mapping[str, str], name: str = "train", *, resolved: bool = True) -> Config:
    """Return the checked config that {key: value} makes, as `qkablate train` would."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    typed = _compose_groups(name, {key: value for key, value in words.items() if is_group(key)})
    for key, value in words.items():
        if is_group(key):
            continue
        if key not in KEYS and key not in vars(Config()):
            raise UserError(no_such_key(key))
        check_digits(key, value)
        try:
            OmegaConf.update(typed, key, parse_value(f"{key}={value}"), force_add=False)
        except OmegaConfBaseException as error:
            raise UserError(explain(error)) from None
    return build_config(typed, resolved=resolved)


@functools.lru_cache(maxsize=100_000)
def parse_value(word: str) -> Any:
    """Return the value that a word gives its key."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(word).value()
    except HydraException as error:
        raise UserError(format_error(error)) from None


def _compose_groups(name: str, groups: Mapping[str, str]) -> Any:
    """Return a new container of conf/<name>.yaml with these files of its groups.

    The files of conf/train.yaml's groups are sections of it: Hydra composes it once, in a tenth of
    a second, and each choice replaces its section.
    """
    folders = [
        x.path.removeprefix("file://") for x in _search_path() if x.provider in ("main", _USER)
    ]
    is_ours = name == "train" and folders == [str(conf_dir())]
    sections = {key: _load_section(key, value) for key, value in groups.items()}
    if not is_ours or any(section is None for section in sections.values()):
        return copy.deepcopy(compose(name, Config, [f"{k}={value}" for k, value in groups.items()]))
    typed = copy.deepcopy(compose(name, Config, []))
    for key, section in sections.items():
        typed[key] = section
    return typed


@functools.cache
def _load_section(group: str, name: str) -> Any:
    """Return the section of a config that a file of conf/ makes; None for a group of no section."""
    from omegaconf import OmegaConf

    if group not in vars(Config()) or name not in config_names(group):
        return None
    defaults = OmegaConf.structured(getattr(Config(), group))
    return OmegaConf.merge(defaults, OmegaConf.load(conf_dir() / group / f"{name}.yaml"))


def _search_path() -> list[Any]:
    """Return the folders in which Hydra looks for config files now."""
    from hydra.core.global_hydra import GlobalHydra

    return list(GlobalHydra.instance().config_loader().get_search_path().get_path())


def compose(name: str, schema: type[Any], words: list[str], known: Collection[str] = KEYS) -> Any:
    """Compose conf/<name>.yaml with some words, typed by its schema; not to be changed."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    mistakes = (HydraException, OmegaConfBaseException, YAMLError, ValueError, OverflowError)
    try:
        folders = tuple(map(str, _search_path()))
        return _compose(name, schema, tuple(words), folders)  # type: ignore[arg-type]
    except (*mistakes, OSError) as error:
        raise UserError(format_error(error, known)) from None


@functools.lru_cache(maxsize=1000)
def _compose(name: str, schema: type[Any], words: tuple[str, ...], folders: tuple[str, ...]) -> Any:
    """Compose a config once per process; its files are those of the current folders."""
    import hydra

    return to_typed(hydra.compose(name, list(words)), schema)


@contextmanager
def open_hydra(config_dir: str | None = None) -> Iterator[None]:
    """Initialize Hydra once for many configs, also with a folder of the user's config files.

    As with Hydra's own --config-dir, the user's files come first.
    """
    import hydra
    from hydra._internal.hydra import Hydra
    from hydra.core.global_hydra import GlobalHydra

    register()
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        if config_dir is not None:
            path = GlobalHydra.instance().config_loader().get_search_path()
            path.prepend(_USER, f"file://{os.path.abspath(config_dir)}")
            GlobalHydra.instance().clear()
            Hydra.create_main_hydra2("qkablate", path)
        yield


@dataclass(frozen=True)
class Job:
    """One combination of the values given: its config, and the words that make it."""

    config: Config
    words: list[str]


def compose_jobs(
    words: list[str], *, of_all_variants: bool = False, resolved: bool = True
) -> list[Job]:
    """Return a checked config for every combination of the values given.

    With `of_all_variants`, words that choose no variant stand for each of them. What is not
    `resolved` may be `auto`.
    """
    implied = []  # not typed by the user: no message mentions it
    if of_all_variants and not sets_key(words, "variant"):
        implied = [f"variant={','.join(variants())}"]
    with open_hydra():
        return for_each_job(
            expand_words([*implied, *words]),
            lambda job: Job(make_config(split_words(job), resolved=resolved), job),
            skipped=len(implied),
        )


def for_each_job(
    jobs: list[list[str]], make: Callable[[list[str]], T], skipped: int = 0
) -> list[T]:
    """Call `make` with the words of every job; an error names those after `skipped` that vary."""
    common = set.intersection(*map(set, jobs)) if jobs else set()
    results = []
    for job in jobs:
        try:
            results.append(make(job))
        except UserError as error:
            varied = [word for word in job[skipped:] if word not in common]
            raise UserError(f"{error} (in {' '.join(varied)})" if varied else str(error)) from None
    return results


def build_jobs(jobs: list[Job], build: Callable[[Config], T]) -> list[tuple[Job, T]]:
    """Build something from the config of every job, circuits of the user's files included.

    An unsupported combination is reported and left out; a single one is an error.
    """
    from qkablate.models.catalogue import resolve_circuits

    kept = []
    for job in jobs:
        try:
            config, _ = resolve_circuits(job.config)
            kept.append((Job(config, job.words), build(config)))
        except UserError as error:
            if len(jobs) == 1:
                raise
            print_stderr(f"left out: {error}")
    if not kept:
        raise UserError("no requested variant supports this size")
    return kept


def choose_next(jobs: list[Job]) -> Job:
    """Return the job to go on with: the first that is not the baseline."""
    return next((job for job in jobs if job.config.variant.name != "standard"), jobs[0])


def training_commands(job: Job) -> list[list[str]]:
    """Return the command that trains a job, with a task where the default text is not for it."""
    if job.config.model.form == "decoder" or sets_key(job.words, "data"):
        return [["train", *job.words]]
    has_context = any(word.lstrip("+").startswith("model.context=") for word in job.words)
    return [] if has_context else [["train", *job.words, "data=reverse"]]
