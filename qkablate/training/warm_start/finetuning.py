"""Training a trained run further, as it is or in another variant: its config and its data.

Of the trained run's folder, which is untrusted, only what its id is made of is used; the user gives
paths, caches, threads, GPU index and W&B settings.
"""

import dataclasses
import shlex
from collections.abc import Callable, Collection
from typing import Any

from qkablate.config import (
    Config,
    DataConfig,
    InitFromConfig,
    Role,
    check,
    flatten,
    has_role,
    is_key,
    keys_with,
    names_of,
)
from qkablate.config.data import COLUMNS, HUB_KEYS, source_words
from qkablate.config.sweep import as_quoted, as_word
from qkablate.data import TASKS, Data, corpus, find_data, open_data
from qkablate.errors import UserError, sanitize
from qkablate.runs.run import find_run, label
from qkablate.training.warm_start.restore import RestoredRun
from qkablate.training.warm_start.start import restore_parent

Compose = Callable[[list[str]], Config]  # from overrides to a config

DEFAULT_STEPS = 200
# Of the parent's peak rate. Its schedule ended at a tenth; to repair a projection, circuits have to
# move again, but the full peak would undo what the parent has learned.
LR_FACTOR = 0.3
# Where text is read from; the parent's values are only shown to the user.
_SOURCES = ("path", "name", "files")
# Never the parent's: no part of a run's id.
USER_KEYS = {*keys_with(Role.LOCAL)}
# The keys that are resolved again for another device or precision.
_DEPENDENT_KEYS = {
    "device": ("precision", "matmul", "compile"),
    "precision": ("matmul",),
    "optim.optimizer": ("optim.momentum",),
}


def keys_of(overrides: list[str]) -> list[str]:
    """Return the keys that overrides set."""
    return [override.partition("=")[0].lstrip("+") for override in overrides]


def restore_parents(runs: list[str], overrides: list[str], out: str) -> list[RestoredRun]:
    """Restore the trained runs, without weights; UserError unless they are seeds of one arm."""
    folders = [find_run(run, out) for run in runs]
    parents = [restore_parent(InitFromConfig(run=str(folder)), out) for folder in folders]
    _check_overrides(keys_of(overrides), has_data=not any(p.is_imported for p in parents))
    _check_same_arm(parents)
    return parents


def compose_finetuning(
    parent: RestoredRun, overrides: list[str], steps: int, out: str, compose: Compose
) -> Config:
    """Return the config that the user requests for a model of the parent's size."""
    if parent.is_imported:
        added = _make_imported_overrides(parent.config, overrides, steps)
    else:
        added = _make_overrides(parent.config, keys_of(overrides), steps)
    return compose([*overrides, *added, f"out={as_quoted(out)}"])


def finetune_lr(parent: Config) -> float:
    """Return the default learning rate of fine-tuning."""
    return float(f"{LR_FACTOR * parent.optim.lr:.6g}")


def _make_overrides(parent: Config, set_keys: Collection[str], steps: int) -> list[str]:
    """Return the overrides, besides those given, for a config of the parent's size."""
    overrides = [f"model.{key}={as_word(value)}" for key, value in vars(parent.model).items()]
    overrides.append(f"train.steps={steps}")
    has_place = any(key.startswith("data.") and key != "data.cache" for key in set_keys)
    if parent.data.source in TASKS or has_place:
        words = source_words(parent.data).items()
        overrides += [f"{key}={value}" for key, value in words if key not in set_keys]
    defaults = {
        "train.eval_every": parent.train.eval_every,  # diagnostics.every may depend on it
        "optim.optimizer": parent.optim.optimizer,
        "optim.schedule": parent.optim.schedule,
        "optim.lr": finetune_lr(parent),
    }
    for key, value in defaults.items():
        if not {key, key.partition(".")[0]} & {*set_keys}:
            overrides.append(f"{key}={value}")
    return overrides


def _make_imported_overrides(parent: Config, overrides: list[str], steps: int) -> list[str]:
    """Return the same for an imported run: its size, its tokens, and a rate of fine-tuning."""
    given = dict(override.split("=", 1) for override in overrides if "=" in override)
    added = [f"model.{key}={as_word(value)}" for key, value in vars(parent.model).items()]
    added.append(f"train.steps={steps}")
    is_text = not given.get("data", "stdlib").startswith(tuple(TASKS))
    if parent.data.tokenizer is not None and is_text and "data.tokenizer" not in given:
        added.append(f"data.tokenizer={parent.data.tokenizer}")
    if not {"optim.lr", "optim"} & {*given}:
        added.append(f"optim.lr={finetune_lr(parent)}")
    return added


def _check_overrides(set_keys: Collection[str], *, has_data: bool) -> None:
    """Raise UserError for a key that only the parent determines; it may have data or not."""
    for key in set_keys:
        if not has_data and key.partition(".")[0] in ("data", "seed", "seeds"):
            continue
        if key == "optim":
            raise UserError(
                "optim: write optim.optimizer=muon or adamw; the other settings are the run's"
            )
        if key in ("train.steps", "train.tokens"):
            raise UserError(
                f"{key}: write finetune.steps={DEFAULT_STEPS}, the steps of fine-tuning"
            )
        if is_key(key) and not has_role(key, Role.FINETUNE):
            raise UserError(
                f"{key}: is fixed by the trained run (allowed: finetune.steps,"
                f" {', '.join(names_of(Role.FINETUNE))})"
            )


def finetune_config(
    parent: RestoredRun, requested: Config, set_keys: Collection[str], use_variant: bool
) -> Config:
    """Return the config that trains the parent on, in the requested variant or in its own.

    The `set_keys` are taken from the `requested` config, the others from the parent's.
    """
    # Both runs of all seeds are one group, told apart by their arms.
    group = requested.tracking.group or f"finetuned-{label(parent.config).rpartition('-s')[0]}"
    keys = {*set_keys} | {k for key in set_keys for k in _DEPENDENT_KEYS.get(key, ())} | USER_KEYS
    keys |= {"train.steps", "optim.lr", "optim.schedule", "optim.warmup", "optim.cooldown"}
    keys -= {key for key in keys if key.partition(".")[0] == "variant"}
    if "data.path" in keys:  # in place of a set of the Hub
        keys |= {f"data.{key}" for key in ("name", *HUB_KEYS)}
    elif "data.name" in keys:
        keys.add("data.path")
    if use_variant:
        keys.add("variant")
    config = replace_keys(parent.config, requested, keys)
    if parent.is_imported:  # the rest of its config is nobody's choice
        variant = requested.variant if use_variant else parent.config.variant
        config = dataclasses.replace(requested, model=parent.config.model, variant=variant)
    return dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, tokens=None, fsdp=False),
        init_from=InitFromConfig(run=str(parent.folder)),
        tracking=dataclasses.replace(config.tracking, group=group),
        device=config.device if "device" in set_keys else config.device.partition(":")[0],
    )


def open_parent_data(parent: RestoredRun, config: Config, set_keys: Collection[str]) -> Data:
    """Open the parent's data, found by fingerprint in the user's cache.

    No path or name in the parent's folder is read; the user has to give it.
    """
    data, model = config.data, config.model
    check(Config(data=data))
    if parent.is_imported:  # the user's choice
        corpus.check_available(data)
    if data.source in TASKS or parent.is_imported:
        return open_data(data, model)
    sources = [key for key in _SOURCES if getattr(data, key) is not None]
    if not all(f"data.{key}" in set_keys for key in sources) or not sources:
        cache = corpus.cache_dir(data)
        prepared = find_data(data, model, str(parent.identity.get("data_fingerprint")))
        if prepared is not None:
            return prepared
        if sources:
            name, words = parent.folder.resolve().name, _format_sources(parent.config.data)
            raise UserError(
                f"data.{sources[0]}: the data of '{name}' is not prepared in '{cache}'; give"
                f" data.cache=FOLDER or, to read what its config names, {words}"
            )
    corpus.check_available(data)
    return open_data(data, model)


def _format_sources(data: DataConfig) -> str:
    """Format the overrides that name a text."""
    values = {key: getattr(data, key) for key in _SOURCES}
    words = [f"data.{key}={value}" for key, value in values.items() if value is not None]
    return " ".join(" ".join(sanitize(shlex.quote(word)).split()) for word in words)


def replace_keys(config: Config, other: Config, keys: Collection[str]) -> Config:
    """Return the config with these keys, single ones or whole sections, of another."""
    sections: dict[str, Any] = {}
    for section, value in vars(config).items():
        replacement = getattr(other, section)
        if section in keys or not dataclasses.is_dataclass(value):
            sections[section] = replacement if section in keys else value
        else:
            changed = {k: v for k, v in vars(replacement).items() if f"{section}.{k}" in keys}
            sections[section] = dataclasses.replace(value, **changed)  # type: ignore[type-var]
    return Config(**sections)


def _check_same_arm(parents: list[RestoredRun]) -> None:
    """Raise UserError unless the runs are one arm with different seeds."""
    names = [parent.folder.resolve().name for parent in parents]
    ignored = {"seed", "seeds", "out", "init_from", "device", *USER_KEYS}
    ignored |= {f"data.{key}" for key in (*_SOURCES, *COLUMNS)}
    configs = [flatten(p.config) | {"data": p.identity["data_fingerprint"]} for p in parents]
    for name, config in zip(names[1:], configs[1:], strict=True):
        for key, value in configs[0].items():
            if not {key, key.partition(".")[0]} & ignored and config[key] != value:
                raise UserError(
                    f"'{names[0]}' and '{name}' differ in {key} ({value} and {config[key]}):"
                    " several runs must be one arm with several seeds"
                )
    by_seed: dict[int, str] = {}
    for parent, name in zip(parents, names, strict=True):
        seed = parent.config.seed
        if seed in by_seed:
            raise UserError(
                f"'{by_seed[seed]}' and '{name}' share seed {seed}: several runs must be one arm"
                " with several seeds"
            )
        by_seed[seed] = name
