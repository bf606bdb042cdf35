"""The runs that split a gap: a trained model put into another form and healed, the same model going
on as it is, and the other form from scratch. Their configs and their data; nothing here trains.

What the trained run's id is made of is taken from its folder. All else there is a stranger's word,
and comes from the user: paths, caches, threads, the index of a GPU, whatever W&B is told.
"""

import dataclasses
import shlex
from collections.abc import Collection
from typing import Any

from qkablate.config import Config, DataConfig, StartConfig, check, flatten
from qkablate.data import TASKS, Data, corpus, open_data
from qkablate.errors import UserError, printable
from qkablate.runs.run import label
from qkablate.training.warm_start.restore import Restored

STEPS = 200
# Of the parent's peak rate. At its end a schedule has come down to a tenth; to mend a projection,
# circuits have to move again, and a full peak would undo what the parent has learned.
RATE = 0.3
# What may be given beside the variant; all else is the parent's.
MAY = (
    *("train", "optim", "attention", "diagnose", "track", "device", "precision", "products"),
    *("compile", "threads", "deterministic", "out", "seeds.data", "seeds.dropout"),
    *("data.cache", "data.path", "data.name", "data.files"),
)
# Where text is read from: of the trained run's no more than its word.
_PLACES = ("path", "name", "files")
# The user's to say, or the default: no part of a run's id.
_OURS = {
    *("track", "threads", "diagnose", "data.cache", "train.checkpoint_every"),
    "train.checkpoint_activations",
}
# What is settled for a device, or for a precision, is settled anew with another.
_WITH = {"device": ("precision", "products", "compile"), "precision": ("products",)}


def rate(parent: Config) -> float:
    return float(f"{RATE * parent.optim.lr:.6g}")


def composed(parent: Config, given: Collection[str], steps: int) -> list[str]:
    """The words, beside those that were given, that make a config of the parent's size."""
    words = [f"model.{key}={value}".lower() for key, value in vars(parent.model).items()]
    words.append(f"train.steps={steps}")
    if not {"train", "train.eval_every"} & {*given}:  # which diagnose.every may follow
        words.append(f"train.eval_every={parent.train.eval_every}")
    if parent.data.source in TASKS or {f"data.{key}" for key in _PLACES} & {*given}:
        words.append(f"data={parent.data.source}")
    if not {"optim", "optim.schedule"} & {*given}:
        words.append(f"optim.schedule={parent.optim.schedule}")
    if not {"optim", "optim.lr"} & {*given}:
        words.append(f"optim.lr={rate(parent)!r}")
    return words


def check_given(given: Collection[str]) -> None:
    """UserError for a key that is the parent's to say."""
    for key in given:
        root = key.partition(".")[0]
        if key in ("train.steps", "train.tokens"):
            raise UserError(f"{key}: write heal.steps={STEPS}, the steps of healing")
        if root != "variant" and key not in MAY and root not in MAY:
            raise UserError(
                f"{key}: is what the trained run was trained with; beside variant, heal.steps and"
                f" {', '.join(MAY)} can be given"
            )


def healed(parent: Restored, wish: Config, given: Collection[str], variant: bool) -> Config:
    """The parent's config for a healing run, with what was given taken of the `wish`: in the form
    of its `variant`, or in the parent's own.
    """
    own = {*given} | {key for word in given for key in _WITH.get(word, ())} | _OURS
    own |= {"train.steps", "optim.lr", "optim.schedule", "optim.warmup", "optim.cooldown"}
    own -= {key for key in own if key.partition(".")[0] == "variant"}
    if variant:
        own.add("variant")
    config = _with(parent.config, wish, own)
    # Both runs of all seeds are one group; their arms tell them apart.
    group = wish.track.group or f"healed-{label(parent.config).rpartition('-s')[0]}"
    return dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, tokens=None, shard=False),
        start=StartConfig(run=str(parent.folder)),
        track=dataclasses.replace(wish.track, group=group),
        device=config.device if "device" in given else config.device.partition(":")[0],
        out=wish.out,
    )


def scratch(parent: Restored, wish: Config, given: Collection[str]) -> Config:
    """The run of the other form that its parent's training would have made."""
    config = _with(parent.config, wish, _OURS | {key for key in given if key.startswith("data.")})
    return dataclasses.replace(
        config,
        variant=wish.variant,
        track=dataclasses.replace(wish.track, group=None, job_type=None, tags=[]),
        device=config.device.partition(":")[0],
        out=wish.out,
    )


def data_of(parent: Restored, config: Config, given: Collection[str]) -> Data:
    """What the parent learned, known by its fingerprint in the user's own cache. No path or name
    that stands in the parent's folder is read; the user has to give it.
    """
    asked, context = config.data, config.model.context
    check(Config(data=asked))
    if asked.source in TASKS:
        return open_data(asked, context)
    places = [key for key in _PLACES if getattr(asked, key) is not None]
    if not all(f"data.{key}" in given for key in places) or not places:
        cache = corpus.cache_dir(asked)
        found = corpus.find(str(parent.identity.get("data_fingerprint")), cache)
        if found is not None:
            return found
        if places:
            name, words = parent.folder.resolve().name, _places(parent.config.data)
            raise UserError(
                f"data.{places[0]}: what '{name}' learned is not prepared in '{cache}'; give"
                f" data.cache=FOLDER, or, to read what it says it has read, {words}"
            )
    corpus.look(asked)
    return open_data(asked, context)


def _places(data: DataConfig) -> str:
    """The words that say where a text comes from."""
    known = {key: getattr(data, key) for key in _PLACES}
    words = [f"data.{key}={value}" for key, value in known.items() if value is not None]
    return " ".join(" ".join(printable(shlex.quote(word)).split()) for word in words)


def _with(config: Config, other: Config, keys: Collection[str]) -> Config:
    """The config with these keys, leaves or whole parts, of another."""
    parts: dict[str, Any] = {}
    for part, value in vars(config).items():
        theirs = getattr(other, part)
        if part in keys or not dataclasses.is_dataclass(value):
            parts[part] = theirs if part in keys else value
        else:
            own = {k: getattr(theirs, k) for k in vars(theirs) if f"{part}.{k}" in keys}
            parts[part] = dataclasses.replace(value, **own)  # type: ignore[type-var]
    return Config(**parts)


def check_alike(parents: list[Restored]) -> None:
    """UserError for several runs that are not one arm with several seeds."""
    names = [one.folder.resolve().name for one in parents]
    apart = {"seed", "seeds", "out", "start", "device", *_OURS, *(f"data.{k}" for k in _PLACES)}
    known = [flatten(one.config) | {"data": one.identity["data_fingerprint"]} for one in parents]
    for name, theirs in zip(names[1:], known[1:], strict=True):
        for key, value in known[0].items():
            if not {key, key.partition(".")[0]} & apart and theirs[key] != value:
                raise UserError(
                    f"'{names[0]}' and '{name}' differ in {key} ({value} and {theirs[key]}):"
                    " several runs are one arm with several seeds"
                )
    seeds = [one.config.seed for one in parents]
    for place, seed in enumerate(seeds):
        if seed in seeds[:place]:
            twin = names[seeds.index(seed)]
            raise UserError(
                f"'{twin}' and '{names[place]}' share seed {seed}: several runs are one arm with"
                " several seeds"
            )
