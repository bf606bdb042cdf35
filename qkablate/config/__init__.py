"""The schema of a run: typed, strict, and resolved once. Imports nothing heavy.

`load` turns what Hydra composed into a checked Config; `resolve` replaces every `auto` that does
not depend on the machine. Device, precision, compile and threads are resolved in training.
"""

import dataclasses
import math
import re
from collections.abc import Collection
from typing import Any

from qkablate.config.schema import (
    BIG,
    BPE_SIZE,
    CHOICES,
    DATA_KEYS,
    RANGES,
    TEXT_SOURCES,
    WORDS,
    Config,
    DataConfig,
    DiagnoseConfig,
    ModelConfig,
    OptimConfig,
    StartConfig,
    TrackConfig,
    TrainConfig,
    VariantConfig,
    flatten,
    from_plain,
    keys,
    nearest_key,
)
from qkablate.config.sweep import (
    ENGINE_KEYS,
    ControlConfig,
    EngineConfig,
    GridConfig,
    SweepConfig,
    check_sweep,
)
from qkablate.config.variant import check_variant, conf_dir, resolve_variant, variants
from qkablate.errors import Impossible, UserError, nearest, refuse_secrets

__all__ = [
    "CHOICES",
    "DATA_KEYS",
    "ENGINE_KEYS",
    "RANGES",
    "TEXT_SOURCES",
    "Config",
    "ControlConfig",
    "DataConfig",
    "DiagnoseConfig",
    "EngineConfig",
    "GridConfig",
    "ModelConfig",
    "OptimConfig",
    "StartConfig",
    "SweepConfig",
    "TrackConfig",
    "TrainConfig",
    "VariantConfig",
    "check",
    "check_sweep",
    "conf_dir",
    "explain",
    "flatten",
    "from_plain",
    "keys",
    "load",
    "nearest_key",
    "resolve",
    "resolve_variant",
    "variants",
]


def load(composed: Any) -> Config:
    """A checked Config from what Hydra composed."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        # As a plain container: a typed node would take an added key along, unseen.
        given = OmegaConf.masked_copy(composed, [key for key in composed if key != "hydra"])
        plain = OmegaConf.create(OmegaConf.to_container(given, resolve=True))
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), plain))
    except OmegaConfBaseException as error:
        raise UserError(explain(error)) from None
    assert isinstance(config, Config)
    check(config)
    return resolve(config)


def check(config: Config) -> None:
    """Every rule that needs neither the machine nor the data."""
    values = flatten(config)
    refuse_secrets(values)
    for key, allowed in CHOICES.items():
        if values[key] is not None and values[key] not in allowed:
            hint = nearest(str(values[key]), allowed)
            raise UserError(f"{key}: '{values[key]}' is not one of {', '.join(allowed)}{hint}")
    for key, (least, most) in RANGES.items():
        _check_number(key, values[key], least, most, WORDS.get(key))
    model, train, optim = config.model, config.train, config.optim
    if model.d_model % model.heads:
        some = [h for h in range(1, model.d_model + 1) if model.d_model % h == 0 and h <= 64]
        raise Impossible(
            f"model.heads: {model.heads} does not divide model.d_model={model.d_model}"
            f" (allowed: {', '.join(map(str, some))})"
        )
    check_variant(config.variant, model)
    if train.tokens is not None and train.steps != "auto":
        raise UserError("train.tokens: give train.steps or train.tokens, not both")
    if optim.schedule != "wsd" and optim.cooldown != "auto":
        raise Impossible(f"optim.cooldown: schedule={optim.schedule} has none; only wsd has")
    if model.mlp_ratio and round(model.mlp_ratio * model.d_model) < 1:
        raise Impossible(
            f"model.mlp_ratio: {model.mlp_ratio} leaves the MLP without a single unit"
            " (0 takes it out)"
        )
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        raise UserError(f"optim.betas: {optim.betas} are not two numbers from 0 to below 1")
    if config.compile not in (True, False, "auto"):
        raise UserError(f"compile: '{config.compile}' is not one of auto, true, false")
    if not _is_device(config.device):
        hint = nearest(config.device, ("auto", "cpu", "cuda", "mps"))
        raise UserError(
            f"device: '{config.device}' is not one of auto, cpu, cuda, cuda:N, mps{hint}"
        )
    _check_data(config.data)
    if not re.fullmatch(r"\w[\w+-]*", config.variant.name):
        raise UserError(
            f"variant.name: '{config.variant.name}' is not made of letters, digits, _, + and -"
        )
    _check_start(config.start)
    if not config.out:
        raise UserError("out: give a folder")
    if config.variant.file == "":
        raise UserError("variant.file: give a path")


def _check_start(start: StartConfig) -> None:
    """Found by `run`; what else is known of it must be what a run writes."""
    if start.run == "":
        raise UserError("start.run: give a run: its folder, or how its name or its id begins")
    for key, form in (("id", r"[0-9a-f]{12}"), ("weights", r"[0-9a-f]{64}")):
        value = getattr(start, key)
        if value is not None and not re.fullmatch(form, str(value)):
            digits = re.sub(r".*\{(\d+)\}", r"\1", form)
            raise UserError(f"start.{key}: '{value}' is not {digits} digits from 0 to f")
    given = [key for key in ("id", "weights", "step") if getattr(start, key) is not None]
    if given and start.run is None:
        raise UserError(f"start.{given[0]}: is that of a run to begin from; give start.run, too")


_NEEDED = {"text": ("path", "FILE_OR_FOLDER"), "hub": ("name", "NAME_ON_THE_HUB")}


def _check_data(data: DataConfig) -> None:
    """That every key given belongs to the source, and what it needs is there."""
    source = data.source
    own = DATA_KEYS[source]
    for key, value in vars(data).items():
        if key not in ("source", *own) and value is not None:
            known = [k for k in own if k != "cache"]
            hint = " (write data=text data.path=…)" if key == "path" else ""
            raise UserError(
                f"data.{key}: data={source} has no such key{hint}; it has {', '.join(known)}"
            )
    if source in _NEEDED and not getattr(data, (needed := _NEEDED[source])[0]):
        raise UserError(f"data.{needed[0]}: data={source} needs data.{needed[0]}={needed[1]}")
    if source in TEXT_SOURCES:
        for key in ("tokenizer", "cache"):
            if not getattr(data, key):
                raise UserError(f"data.{key}: data={source} needs one")
        if data.vocab_size is not None and data.tokenizer != "bpe":
            raise UserError(
                "data.vocab_size: is that of data.tokenizer=bpe;"
                f" the vocabulary of data.tokenizer={data.tokenizer} is what it is"
            )
        if data.vocab_size is not None and data.vocab_size < 257:
            raise UserError(
                "data.vocab_size: 257 at least for bpe: 256 bytes and the end of a text"
            )
        try:
            re.compile(data.document_start or "")
        except re.error as error:
            raise UserError(f"data.document_start: is no regular expression: {error}") from None
        return
    for key in own:
        if getattr(data, key) is None:
            raise UserError(f"data.{key}: data={source} needs a number")


def resolve(config: Config) -> Config:
    """Replace every `auto` that does not depend on the machine."""
    train, optim = config.train, config.optim
    steps = train.steps
    if steps == "auto":
        per_step = train.batch_size * train.accumulate * config.model.context
        steps = 1000 if train.tokens is None else math.ceil(train.tokens / per_step)
    assert isinstance(steps, int)
    warmup = min(1000, steps // 20) if optim.warmup == "auto" else optim.warmup
    assert isinstance(warmup, int)
    if warmup and warmup >= steps:
        raise Impossible(f"optim.warmup: {warmup} is not below the {steps} steps of training")
    cooldown = optim.cooldown
    if cooldown == "auto":
        cooldown = 0.2 if optim.schedule == "wsd" else 0.0
    data = config.data
    if data.tokenizer == "bpe" and data.vocab_size is None:
        data = dataclasses.replace(data, vocab_size=BPE_SIZE)
    every = train.eval_every if config.diagnose.every == "auto" else config.diagnose.every
    return dataclasses.replace(
        config,
        data=data,
        variant=resolve_variant(config.variant, config.model),
        train=dataclasses.replace(train, steps=steps, tokens=None),
        optim=dataclasses.replace(optim, warmup=warmup, cooldown=cooldown),
        diagnose=dataclasses.replace(config.diagnose, every=every),
    )


_WHAT = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}
_WHAT |= {"Union[int, str]": "a whole number or auto", "Union[float, str]": "a number or auto"}
_WHAT |= {"Union[bool, str]": "true, false or auto"}
# Which of two equal unions is shown depends on which one anybody wrote first.
_WHAT |= {re.sub(r"\[(\w+), (\w+)\]", r"[\2, \1]", kind): what for kind, what in _WHAT.items()}


def explain(error: BaseException, known: Collection[str] = ()) -> str:
    """One line for what OmegaConf refused, in a config of the `known` keys: those of a run, if
    unsaid.
    """
    known = known or keys()
    key = str(getattr(error, "full_key", "") or "").partition("[")[0]
    lines = str(getattr(error, "msg", None) or error).split("\n")
    # OmegaConf adds lines on where it stands in its own types.
    text = " ".join(x.strip() for x in lines if not re.match(r"\s*\w+(_key: |_type=)", x)).strip()
    if key and key not in known and not any(k.startswith(f"{key}.") for k in known):
        return f"{key}: there is no such key{nearest_key(key)}"
    types = r"[Vv]alue '(.*)' of type '.*' (?:could not be converted to|.* type hint) '?([^']+)'?"
    found = re.match(types, text) or re.match(r"[Vv]alue '(.*)' is not a valid (bool)", text)
    kind = re.sub(r"^Optional\[(.*)\]$", r"\1", found[2]) if found else ""
    if found and kind in _WHAT:
        return f"{key}: '{found[1]}' is not {_WHAT[kind]}"
    if "not Optional" in text:
        return f"{key}: null is not a value"
    if "ListConfig" in text:
        return f"{key}: a list is written [a,b]"
    return f"{key}: {text[:1].lower()}{text[1:]}" if key else text


def _check_number(key: str, value: Any, least: float, most: float, word: str | None) -> None:
    if value is None or (word is not None and value == word):
        return
    allowed = f"{least} or more" if most == BIG else f"a number from {least} to {most}"
    if word is not None:
        allowed = f"{word}, or {allowed}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UserError(f"{key}: '{value}' is not {allowed}")
    if most == BIG and value > most:
        allowed = f"at most {most}"
    if not (math.isfinite(value) and least <= value <= most):
        raise UserError(f"{key}: {value} is not {allowed}")


def _is_device(name: str) -> bool:
    kind, colon, index = name.partition(":")
    if colon:
        return kind == "cuda" and index.isdecimal()
    return kind in ("auto", "cpu", "cuda", "mps")
