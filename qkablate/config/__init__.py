"""The config of a run: typed, strict, and resolved once. Imports nothing heavy.

`from_hydra` turns what Hydra composed into a checked Config; `resolve` replaces every `auto` that
does not depend on the machine. Device, precision, compile and threads are resolved in training.
"""

import dataclasses
import math
import re
from collections.abc import Collection
from typing import Any

from qkablate.config.data import (
    DATA_KEYS,
    TEXT_SOURCES,
    DataConfig,
    check_data,
    fill_vocab_size,
)
from qkablate.config.evaluation import (
    EVAL_COST,
    LEAST_EVAL_EVERY,
    choose_eval_tokens,
    read_limit,
)
from qkablate.config.keys import Role, flatten
from qkablate.config.schema import (
    Config,
    InitFromConfig,
    ModelConfig,
    OptimConfig,
    TrackingConfig,
    TrainConfig,
    VariantConfig,
)
from qkablate.config.sweep import ControlConfig, EngineConfig, GridConfig, SweepConfig
from qkablate.config.table import (
    KEYS,
    check_digits,
    from_plain,
    has_role,
    is_key,
    keys_with,
    names_of,
    no_such_key,
)
from qkablate.config.variant import (
    check_variant,
    conf_dir,
    config_names,
    list_divisors,
    mlp_units,
    resolve_variant,
    stream_width,
    variants,
)
from qkablate.disk import expand_user
from qkablate.errors import ImpossibleConfig, UserError, not_one_of, reject_secrets
from qkablate.table import format_list

__all__ = [
    "DATA_KEYS",
    "EVAL_COST",
    "KEYS",
    "TEXT_SOURCES",
    "Config",
    "ControlConfig",
    "DataConfig",
    "EngineConfig",
    "GridConfig",
    "InitFromConfig",
    "ModelConfig",
    "OptimConfig",
    "Role",
    "SweepConfig",
    "TrackingConfig",
    "TrainConfig",
    "VariantConfig",
    "build_config",
    "check",
    "check_digits",
    "conf_dir",
    "config_names",
    "explain",
    "flatten",
    "from_hydra",
    "from_plain",
    "has_role",
    "is_key",
    "keys_with",
    "names_of",
    "no_such_key",
    "read_limit",
    "resolve",
    "resolve_variant",
    "stream_width",
    "to_typed",
    "variants",
]


def from_hydra(composed: Any, *, resolved: bool = True) -> Config:
    """Return the checked config that Hydra composed; with `auto` where it is not `resolved`."""
    from omegaconf.errors import OmegaConfBaseException

    try:
        typed = to_typed(composed, Config)
    except OmegaConfBaseException as error:
        raise UserError(explain(error)) from None
    return build_config(typed, resolved=resolved)


def to_typed(composed: Any, schema: type[Any]) -> Any:
    """Type what Hydra composed by a schema; OmegaConf's error for a key that the schema lacks."""
    from omegaconf import OmegaConf

    own = OmegaConf.masked_copy(composed, [key for key in composed if key != "hydra"])
    plain = OmegaConf.create(OmegaConf.to_container(own))  # a typed node keeps any added key
    return OmegaConf.merge(OmegaConf.structured(schema), plain)


def build_config(typed: Any, *, resolved: bool = True) -> Config:
    """Return the checked config of a typed container; with `auto` where it is not `resolved`."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        config = OmegaConf.to_object(typed)
    except OmegaConfBaseException as error:
        raise UserError(explain(error)) from None
    assert isinstance(config, Config)
    check(config)
    return resolve(config) if resolved else config


def check(config: Config) -> None:
    """Check every rule that needs neither the machine nor the data."""
    values = flatten(config)
    reject_secrets(values)
    for name, key in KEYS.items():
        key.check(name, values[name])
    model, train, optim = config.model, config.train, config.optim
    if model.d_model % model.heads:
        raise ImpossibleConfig(
            f"model.heads: {model.heads} does not divide model.d_model={model.d_model}"
            f" (allowed: {list_divisors(model.d_model)})"
        )
    _check_form(model)
    check_variant(config.variant, model)
    if train.tokens is not None and train.steps != "auto":
        raise UserError("train.tokens: give train.steps or train.tokens, not both")
    if optim.schedule != "wsd" and optim.cooldown != "auto":
        raise ImpossibleConfig(
            f"optim.cooldown: has no effect with optim.schedule={optim.schedule}, only with wsd"
        )
    if optim.optimizer != "muon" and optim.momentum != OptimConfig().momentum:
        raise ImpossibleConfig(
            f"optim.momentum: has no effect with optim.optimizer={optim.optimizer}, only with muon"
        )
    if optim.momentum >= 1:
        raise UserError(f"optim.momentum: {optim.momentum} is not a number from 0 to below 1")
    if optim.schedule == "constant" and optim.lr_final != OptimConfig().lr_final:
        raise ImpossibleConfig("optim.lr_final: schedule=constant ends at its peak")
    if optim.schedule == "wsd" and not optim.cooldown and optim.lr_final != OptimConfig().lr_final:
        raise ImpossibleConfig("optim.lr_final: with optim.cooldown=0 the run ends at its peak")
    if model.norm == "none" and model.norm_kind != "layer":
        raise ImpossibleConfig(
            f"model.norm_kind: {model.norm_kind} has no effect with model.norm=none"
        )
    if model.norm == "none" and model.norm_eps != ModelConfig().norm_eps:
        raise ImpossibleConfig(
            f"model.norm_eps: {model.norm_eps} has no effect with model.norm=none"
        )
    if model.position != "rope" and model.rope_theta != ModelConfig().rope_theta:
        raise ImpossibleConfig(
            f"model.rope_theta: {model.rope_theta}, but only model.position=rope has wavelengths"
        )
    if model.position != "learned" and model.position_std != ModelConfig().position_std:
        raise ImpossibleConfig(
            f"model.position_std: {model.position_std}, but only model.position=learned has it"
        )
    if not model.mlp_ratio and model.mlp != "gelu":
        raise ImpossibleConfig(f"model.mlp: {model.mlp}, but model.mlp_ratio=0 removes the MLP")
    if model.mlp_ratio and mlp_units(model) < 1:
        raise ImpossibleConfig(
            f"model.mlp_ratio: {model.mlp_ratio} leaves the MLP without a single unit"
            " (0 removes the MLP)"
        )
    own_file = config.variant.file is not None  # its circuit may draw
    if not model.dropout and not own_file and config.seeds.dropout != config.seed:
        raise ImpossibleConfig(
            f"seeds.dropout: {config.seeds.dropout} has no effect with model.dropout=0"
        )
    are_numbers = all(isinstance(beta, int | float) for beta in optim.betas)
    if len(optim.betas) != 2 or not are_numbers or not all(0 <= beta < 1 for beta in optim.betas):
        raise UserError(f"optim.betas: {optim.betas} are not two numbers from 0 to below 1")
    if config.compile not in (True, False, "auto", "graphs"):
        raise UserError(f"compile: '{config.compile}' is not one of auto, true, false, graphs")
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", config.device, re.ASCII):
        devices = ("auto", "cpu", "cuda", "cuda:N", "mps")
        raise UserError(f"device: {not_one_of(config.device, devices)}")
    check_data(config.data)
    if not re.fullmatch(r"\w[\w+-]*", config.variant.name):
        raise UserError(
            f"variant.name: '{config.variant.name}' is not made of letters, digits, _, + and -"
        )
    _check_init_from(config.init_from)
    if not config.out:
        raise UserError("out: give a folder")
    expand_user("out", config.out)
    if config.variant.file == "":
        raise UserError("variant.file: give a path")


def _check_form(model: ModelConfig) -> None:
    """Check the keys that only some forms of the model have."""
    form = model.form
    if form != "encoder_decoder":
        for name in ("encoder_layers", "encoder_d_model", "source"):
            if getattr(model, name) is not None:
                raise ImpossibleConfig(
                    f"model.{name}: model.form={form} has none; only encoder_decoder has"
                )
    elif not model.attention_skip:
        raise ImpossibleConfig("model.attention_skip: model.form=encoder_decoder needs it")
    width = stream_width(model, "encoder")
    if width % model.heads:
        raise ImpossibleConfig(
            f"model.encoder_d_model: {width} is not a multiple of model.heads={model.heads}"
            f" (nearest: {max(1, round(width / model.heads)) * model.heads})"
        )
    if model.encoder_d_model and model.mlp_ratio and mlp_units(model, width) < 1:
        raise ImpossibleConfig(
            f"model.mlp_ratio: {model.mlp_ratio} leaves the encoder's MLP without a single unit"
        )
    if form != "decoder" and model.position == "alibi":
        raise ImpossibleConfig(
            "model.position: alibi does not tell what comes before from what comes after, which"
            f" model.form={form} needs; use learned, rope or none"
        )


def _check_init_from(init_from: InitFromConfig) -> None:
    """Check that init_from.run is given when its id, weights or step is, and the form of hashes."""
    if init_from.run == "":
        raise UserError("init_from.run: give a run: its folder, or how its name or id begins")
    for key, digits in (("id", 12), ("weights", 64), ("step", None)):
        value = getattr(init_from, key)
        if value is not None and digits and not re.fullmatch(rf"[0-9a-f]{{{digits}}}", value):
            raise UserError(f"init_from.{key}: '{value}' is not {digits} digits from 0 to f")
        if value is not None and init_from.run is None:
            raise UserError(f"init_from.{key}: needs the run to start from; give init_from.run")


def resolve(config: Config) -> Config:
    """Replace every `auto` that does not depend on the machine."""
    train, optim = config.train, config.optim
    steps = train.steps
    if steps == "auto":
        per_step = train.batch_size * train.grad_accum * config.model.context
        steps = 1000 if train.tokens is None else math.ceil(train.tokens / per_step)
    assert isinstance(steps, int)
    warmup = min(2000, steps // 5) if optim.warmup == "auto" else int(optim.warmup)
    if warmup and warmup >= steps:
        raise ImpossibleConfig(f"optim.warmup: {warmup} is not below the {steps} steps of training")
    default_cooldown = 0.2 if optim.schedule == "wsd" else 0.0
    cooldown = default_cooldown if optim.cooldown == "auto" else float(optim.cooldown)
    data = fill_vocab_size(config.data)
    parts = max(1, steps // LEAST_EVAL_EVERY)
    eval_every, eval_tokens, test_tokens = train.eval_every, train.eval_tokens, train.test_tokens
    if eval_every == "auto":
        eval_every = math.ceil(steps / parts)
    if test_tokens == "all" or (test_tokens == "auto" and eval_tokens != "auto"):
        test_tokens = data.test_tokens
    val_budget, test_budget = choose_eval_tokens(config, steps, parts)
    if eval_tokens == "auto":
        eval_tokens = val_budget
    elif eval_tokens == "all":
        eval_tokens = data.val_tokens
    if test_tokens == "auto":
        test_tokens = test_budget
    every = eval_every if config.diagnostics.every == "auto" else config.diagnostics.every
    model = config.model
    if model.encoder_d_model == model.d_model:
        model = dataclasses.replace(model, encoder_d_model=None)
    return dataclasses.replace(
        config,
        data=data,
        model=model,
        variant=resolve_variant(config.variant, config.model),
        train=dataclasses.replace(
            train,
            steps=steps,
            tokens=None,
            eval_every=eval_every,
            eval_tokens=min(int(eval_tokens), data.val_tokens),
            test_tokens=min(int(test_tokens), data.test_tokens),
        ),
        optim=dataclasses.replace(optim, warmup=warmup, cooldown=cooldown),
        diagnostics=dataclasses.replace(config.diagnostics, every=every),
    )


_TYPES = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}
_TYPES |= {"Union[int, str]": "a whole number", "Union[float, int, str]": "a number"}
_TYPES |= {"Union[bool, str]": "true, false, graphs"}  # of compile


def explain(error: BaseException, known: Collection[str] = ()) -> str:
    """Format an error of OmegaConf as one line; the `known` keys default to those of a run."""
    if isinstance(error, OverflowError):
        return "a number has too many digits"
    known = known or KEYS
    lines = str(getattr(error, "msg", None) or error).split("\n")
    named = [line.partition("full_key: ")[2] for line in lines if "full_key: " in line]
    key = str(getattr(error, "full_key", None) or "".join(named)).partition("[")[0]
    # OmegaConf adds lines about its own types.
    text = " ".join(x.strip() for x in lines if not re.match(r"\s*\w+(_key: |_type=)", x)).strip()
    is_known = key.startswith("hydra.") or any(f"{k}.".startswith(f"{key}.") for k in known)
    if key and not is_known:
        return no_such_key(key, known)
    types = r"[Vv]alue '(.*)' of type '.*' (?:could not be converted to|.* type hint) '?([^']+)'?"
    match = re.match(types, text) or re.match(r"[Vv]alue '(.*)' is not a valid (bool)", text)
    kind = re.sub(r"^Optional\[(.*)\]$", r"\1", match[2]) if match else ""
    # OmegaConf shows one of several equal unions, whichever was written first.
    kind = re.sub(r"\[(.*)\]", lambda m: f"[{', '.join(sorted(m[1].split(', ')))}]", kind)
    if match and kind in _TYPES:
        words = ((key in KEYS and KEYS[key].choices) or ("auto",)) if "str" in kind else ()
        is_whole = "int" in kind.lower() and re.fullmatch(r"-?\d+\.0", match[1])
        allowed = " or ".join([_TYPES[kind], *words])
        if is_whole:  # 1e3 was typed, perhaps
            return f"{key}: needs {allowed}; write {match[1][:-2]}"
        hint = "; several are 'seed=range(5)' or seed=0,1,2" if key == "seed" else ""
        return f"{key}: '{match[1]}' is not {allowed}{hint}"
    if "not Optional" in text or text.startswith("Invalid type assigned: NoneType"):
        return f"{key}: null is not a value"
    if re.search(r" to Dict\[|is not a subclass of|merge DictConfig with List", text):
        if names := [name.removeprefix(f"{key}.") for name in known if name.startswith(f"{key}.")]:
            hint = "; five seeds are 'seed=range(5)'" if key == "seeds" else ""
            return f"{key}: is a section, with the keys {format_list(names, 8)}{hint}"
        return f"{key}: not a map of keys to values".removeprefix(": ")
    if "ListConfig" in text:
        return f"{key}: a list is written [a,b]".removeprefix(": ")
    return f"{key}: {text[:1].lower()}{text[1:]}" if key else text
