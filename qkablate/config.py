"""The schema of a run: typed, strict, and resolved once. Imports nothing heavy.

`load` turns what Hydra composed into a checked Config; `resolve` replaces every `auto` that does
not depend on the machine. Device, precision, compile and threads are resolved in training.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qkablate.errors import UserError, nearest


@dataclass
class VariantConfig:
    name: str = "standard"
    qk: str = "separate"
    ov: str = "separate"
    norm: str = "none"
    mask_self: bool = False
    rank: int | str | None = "auto"
    groups: int | str | None = "auto"
    init: str = "matched"
    lr: str = "matched"
    file: str | None = None


@dataclass
class ModelConfig:
    layers: int = 4
    d_model: int = 128
    heads: int = 4
    context: int = 64
    mlp_ratio: float = 4.0
    dropout: float = 0.0
    bias: bool = False
    position: str = "learned"
    norm: str = "pre"
    attention_skip: bool = True
    init: str = "gpt2"


@dataclass
class AttentionConfig:
    kernel: str = "auto"


@dataclass
class DataConfig:
    source: str = "stdlib"
    path: str | None = None
    tokenizer: str = "bytes"
    val_tokens: int = 65536
    test_tokens: int = 65536
    cache: str = "auto"


@dataclass
class TrainConfig:
    steps: int | str = "auto"
    tokens: int | None = None
    batch_size: int = 16
    accumulate: int = 1
    eval_every: int = 250
    checkpoint_every: int = 250


@dataclass
class OptimConfig:
    lr: float = 1e-3
    schedule: str = "cosine"
    warmup: int | str = "auto"
    cooldown: float | str = "auto"
    lr_final: float = 0.1
    weight_decay: float = 0.1
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    clip: float = 1.0


@dataclass
class SeedsConfig:
    init: int = 0
    data: int = 0
    dropout: int = 0


@dataclass
class TrackConfig:
    wandb: str = "auto"
    project: str | None = None
    entity: str | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)
    log_every: int = 10


@dataclass
class Config:
    variant: VariantConfig = field(default_factory=VariantConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    seed: int = 0
    seeds: SeedsConfig = field(default_factory=SeedsConfig)
    precision: str = "auto"
    device: str = "auto"
    compile: bool | str = "auto"
    threads: int | str = "auto"
    deterministic: bool = False
    track: TrackConfig = field(default_factory=TrackConfig)
    out: str = "outputs"


CHOICES = {
    "variant.init": ("matched", "naive"),
    "variant.lr": ("matched", "same"),
    "variant.norm": ("none", "qk", "unit_keys"),
    "attention.kernel": ("auto", "math", "flash", "efficient", "folded"),
    "model.position": ("learned", "none", "alibi", "rope"),
    "model.norm": ("pre", "none"),
    "model.init": ("gpt2", "linear"),
    "data.source": ("stdlib", "text"),
    "data.tokenizer": ("bytes", "chars"),
    "optim.schedule": ("cosine", "wsd"),
    "precision": ("auto", "fp32", "bf16", "fp16"),
    "track.wandb": ("auto", "online", "offline", "disabled"),
}

_BIG = 2**53
# key: least, most.
RANGES: dict[str, tuple[float, float]] = {
    "variant.rank": (1, 2**20),
    "variant.groups": (1, 2**20),
    "model.layers": (1, 10_000),
    "model.d_model": (1, 2**20),
    "model.heads": (1, 2**20),
    "model.context": (1, 2**24),
    "model.mlp_ratio": (0.01, 1000),
    "model.dropout": (0, 0.99),
    "data.val_tokens": (2, _BIG),
    "data.test_tokens": (2, _BIG),
    "train.steps": (1, _BIG),
    "train.tokens": (1, _BIG),
    "train.batch_size": (1, 2**24),
    "train.accumulate": (1, 2**20),
    "train.eval_every": (1, _BIG),
    "train.checkpoint_every": (1, _BIG),
    "optim.lr": (1e-12, 1000),
    "optim.warmup": (0, _BIG),
    "optim.cooldown": (0, 1),
    "optim.lr_final": (0, 1),
    "optim.weight_decay": (0, 1000),
    "optim.clip": (0, 1000),
    "seed": (0, _BIG),
    "seeds.init": (0, _BIG),
    "seeds.data": (0, _BIG),
    "seeds.dropout": (0, _BIG),
    "threads": (1, 4096),
    "track.log_every": (1, _BIG),
}
# Where a word may stand in a number's place.
WORDS = dict.fromkeys(
    ("variant.rank", "variant.groups", "train.steps", "optim.warmup", "optim.cooldown", "threads"),
    "auto",
)
# Circuits that leave a number open, and what `auto` makes of it: the least that is not standard's.
RANKS: dict[str, Callable[[ModelConfig], int]] = {
    "low_rank": lambda model: max(1, model.d_model // model.heads // 2),
    "collaborative": lambda model: max(1, model.d_model // 4),
}
GROUPED = ("grouped",)


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
    for key, allowed in CHOICES.items():
        if values[key] not in allowed:
            hint = nearest(str(values[key]), allowed)
            raise UserError(f"{key}: '{values[key]}' is not one of {', '.join(allowed)}{hint}")
    for key, (least, most) in RANGES.items():
        _check_number(key, values[key], least, most, WORDS.get(key))
    model, train, optim = config.model, config.train, config.optim
    if model.d_model % model.heads:
        some = [h for h in range(1, model.d_model + 1) if model.d_model % h == 0 and h <= 64]
        raise UserError(
            f"model.heads: {model.heads} does not divide model.d_model={model.d_model}"
            f" (allowed: {', '.join(map(str, some))})"
        )
    _check_variant(config.variant, model)
    if train.tokens is not None and train.steps != "auto":
        raise UserError("train.tokens: give train.steps or train.tokens, not both")
    if optim.schedule != "wsd" and optim.cooldown != "auto":
        raise UserError(f"optim.cooldown: schedule={optim.schedule} has none; only wsd has")
    if round(model.mlp_ratio * model.d_model) < 1:
        raise UserError(f"model.mlp_ratio: {model.mlp_ratio} leaves the MLP without a single unit")
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        raise UserError(f"optim.betas: {optim.betas} are not two numbers from 0 to below 1")
    if config.compile not in (True, False, "auto"):
        raise UserError(f"compile: '{config.compile}' is not one of auto, true, false")
    if not _is_device(config.device):
        hint = nearest(config.device, ("auto", "cpu", "cuda", "mps"))
        raise UserError(
            f"device: '{config.device}' is not one of auto, cpu, cuda, cuda:N, mps{hint}"
        )
    if config.data.source == "text" and not config.data.path:
        raise UserError("data.path: data=text needs data.path=FILE_OR_FOLDER")
    if config.data.source == "stdlib" and config.data.path:
        raise UserError("data.path: data=stdlib reads no path; write data=text data.path=…")
    if not re.fullmatch(r"\w[\w+-]*", config.variant.name):
        raise UserError(
            f"variant.name: '{config.variant.name}' is not made of letters, digits, _, + and -"
        )
    if not config.out:
        raise UserError("out: give a folder")


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
        raise UserError(f"optim.warmup: {warmup} is not below the {steps} steps of training")
    cooldown = optim.cooldown
    if cooldown == "auto":
        cooldown = 0.2 if optim.schedule == "wsd" else 0.0
    return dataclasses.replace(
        config,
        variant=resolve_variant(config.variant, config.model),
        train=dataclasses.replace(train, steps=steps, tokens=None),
        optim=dataclasses.replace(optim, warmup=warmup, cooldown=cooldown),
    )


def resolve_variant(variant: VariantConfig, model: ModelConfig) -> VariantConfig:
    """With numbers for rank and groups where the circuits have them, and a name that is true."""
    rank, groups = variant.rank, variant.groups
    if rank == "auto":
        rank = RANKS[variant.qk](model) if variant.qk in RANKS else None
    if groups == "auto":
        half = [g for g in range(1, model.heads // 2 + 1) if model.heads % g == 0]
        groups = max(half, default=1) if {variant.qk, variant.ov} & {*GROUPED} else None
    variant = dataclasses.replace(variant, rank=rank, groups=groups)
    return dataclasses.replace(variant, name=variant_name(variant))


def variant_name(variant: VariantConfig) -> str:
    """The name that tells the truth: the user's own, the catalogue's for these circuits, or
    'qk+ov'; with the rank or the number of groups, where those were open."""
    ours = dataclasses.asdict(variant)
    known = {
        name: entry
        for name, entry in variants().items()
        if all(ours[key] == value for key, value in entry.items() if key != "name")
    }
    # mqa is gqa with one group: the entry that says most.
    name = max(known, key=lambda name: (len(known[name]), name == variant.name), default="")
    entry = known.get(name, {})
    numbers = "".join(
        f"_{key[0]}{ours[key]}"
        for key in ("rank", "groups")
        if ours[key] is not None and key not in entry
    )
    if variant.name.removesuffix(numbers) not in variants():
        name = variant.name.removesuffix(numbers)
    elif not name:
        sides = [variant.qk] if variant.ov == "separate" else [variant.qk, variant.ov]
        if variant.file is not None and sides[0] == "separate":  # the file brings the other side
            del sides[0]
        norm = {"none": "", "qk": "qk_norm"}.get(variant.norm, variant.norm)
        parts = (*sides, norm, "mask_self" if variant.mask_self else "")
        name = "+".join(part for part in parts if part)
    return name + numbers


@functools.cache
def variants() -> dict[str, dict[str, Any]]:
    """The catalogue: variant name → what its file says, read from conf/variant."""
    from omegaconf import OmegaConf

    plain = {"ov": "separate", "norm": "none", "mask_self": False}
    files = sorted((conf_dir() / "variant").glob("*.yaml"))
    entries: list[Any] = [OmegaConf.to_container(OmegaConf.load(file)) for file in files]
    said = [{key: value for key, value in entry.items() if value != "auto"} for entry in entries]
    return {entry["name"]: plain | entry for entry in said}


def conf_dir() -> Path:
    """conf/ inside an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    return next(path for path in (package / "conf", package.parent / "conf") if path.is_dir())


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """'model.d_model' → value, for every leaf."""
    leaves: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            leaves |= flatten(value, f"{prefix}{item.name}.")
        else:
            leaves[prefix + item.name] = value
    return leaves


def keys() -> list[str]:
    """Every key a user may set."""
    return list(flatten(Config()))


def nearest_key(word: str) -> str:
    """' (nearest: x)' among the keys and groups; `lr` means optim.lr."""
    own = ", ".join(key for key in keys() if key.endswith(f".{word}"))
    return f" (nearest: {own})" if own else nearest(word, {*keys(), *vars(Config())})


_WHAT = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false"}
_WHAT |= {"Union[int, str]": "a whole number or auto", "Union[float, str]": "a number or auto"}
_WHAT |= {"Union[bool, str]": "true, false or auto"}


def explain(error: BaseException) -> str:
    """One line for what OmegaConf refused."""
    key = str(getattr(error, "full_key", "") or "").partition("[")[0]
    lines = str(getattr(error, "msg", None) or error).split("\n")
    # OmegaConf adds lines on where it stands in its own types.
    text = " ".join(x.strip() for x in lines if not re.match(r"\s*\w+(_key: |_type=)", x)).strip()
    if key and key not in keys() and not any(k.startswith(f"{key}.") for k in keys()):
        return f"{key}: there is no such key{nearest_key(key)}"
    types = r"[Vv]alue '(.*)' of type '.*' (?:could not be converted to|.* type hint) '?([^']+)'?"
    if (found := re.match(types, text)) and found[2] in _WHAT:
        return f"{key}: '{found[1]}' is not {_WHAT[found[2]]}"
    if "not Optional" in text:
        return f"{key}: null is not a value"
    if "ListConfig" in text:
        return f"{key}: a list is written [a,b]"
    return f"{key}: {text[:1].lower()}{text[1:]}" if key else text


def _check_variant(variant: VariantConfig, model: ModelConfig) -> None:
    if isinstance(variant.rank, int) and variant.rank > model.d_model:
        raise UserError(
            f"variant.rank: {variant.rank} is above model.d_model={model.d_model},"
            " and no matrix of that width has a higher rank"
        )
    if isinstance(variant.groups, int) and model.heads % variant.groups:
        some = [g for g in range(1, model.heads + 1) if model.heads % g == 0 and g <= 64]
        raise UserError(
            f"variant.groups: {variant.groups} does not divide model.heads={model.heads}"
            f" (allowed: {', '.join(map(str, some))})"
        )
    own = {entry[side] for entry in variants().values() for side in ("qk", "ov")}
    if variant.file is not None or not {variant.qk, variant.ov} <= own:
        return  # a circuit from outside says itself what it uses
    for key, holders, used in (
        ("rank", RANKS, variant.qk in RANKS),
        ("groups", GROUPED, bool({variant.qk, variant.ov} & {*GROUPED})),
    ):
        given = getattr(variant, key)
        if given not in ("auto", None) and not used:
            raise UserError(
                f"variant.{key}: {given} given, but qk={variant.qk}, ov={variant.ov} have none"
                f" ({', '.join(holders)} would)"
            )


def _check_number(key: str, value: Any, least: float, most: float, word: str | None) -> None:
    if value is None or (word is not None and value == word):
        return
    allowed = f"{least} or more" if most == _BIG else f"a number from {least} to {most}"
    if word is not None:
        allowed = f"{word}, or {allowed}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UserError(f"{key}: '{value}' is not {allowed}")
    if most == _BIG and value > most:
        allowed = f"at most {most}"
    if not (math.isfinite(value) and least <= value <= most):
        raise UserError(f"{key}: {value} is not {allowed}")


def _is_device(name: str) -> bool:
    kind, colon, index = name.partition(":")
    if colon:
        return kind == "cuda" and index.isdecimal()
    return kind in ("auto", "cpu", "cuda", "mps")
