"""The schema of a run: every key a user may set, what it may be, and what it is when unsaid."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from qkablate.errors import nearest


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
    """Each source has some of these keys (DATA_KEYS); the others are null."""

    source: str = "stdlib"
    path: str | None = None
    name: str | None = None
    files: str | None = None
    subset: str | None = None
    revision: str | None = None
    split: str | None = None
    field: str | None = None
    document_start: str | None = None
    tokenizer: str | None = "bytes"
    vocab_size: int | None = None
    max_tokens: int | None = None
    pairs: int | None = None
    segment: int | None = None
    payload: int | None = None
    cycle: int | None = None
    kinds: int | None = None
    depth: int | None = None
    val_tokens: int = 65536
    test_tokens: int = 65536
    cache: str | None = "auto"


@dataclass
class TrainConfig:
    steps: int | str = "auto"
    tokens: int | None = None
    batch_size: int = 16
    accumulate: int = 1
    eval_every: int = 250
    checkpoint_every: int = 250
    read_test: bool = True
    checkpoint_activations: bool = False
    shard: bool = False


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
class StartConfig:
    """The trained run that this one begins from; all null: it begins from fresh weights."""

    run: str | None = None
    id: str | None = None
    weights: str | None = None
    step: int | None = None


@dataclass
class SeedsConfig:
    init: int = 0
    data: int = 0
    dropout: int = 0


@dataclass
class DiagnoseConfig:
    every: int | str = "auto"


@dataclass
class TrackConfig:
    wandb: str = "auto"
    project: str | None = None
    entity: str | None = None
    group: str | None = None
    job_type: str | None = None
    tags: list[str] = field(default_factory=list)
    artifacts: bool = False
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
    start: StartConfig = field(default_factory=StartConfig)
    precision: str = "auto"
    products: str = "auto"
    device: str = "auto"
    compile: bool | str = "auto"
    threads: int | str = "auto"
    deterministic: bool = False
    diagnose: DiagnoseConfig = field(default_factory=DiagnoseConfig)
    track: TrackConfig = field(default_factory=TrackConfig)
    out: str = "outputs"


_TEXT = ("tokenizer", "vocab_size", "max_tokens", "val_tokens", "test_tokens", "cache")
_HUB = ("name", "files", "subset", "revision", "split", "field", "document_start")
_TASK = ("val_tokens", "test_tokens")
# What each source of data is made of: the keys of `data` that it reads.
DATA_KEYS: dict[str, tuple[str, ...]] = {
    "stdlib": _TEXT,
    "text": ("path", "field", *_TEXT),
    "hub": (*_HUB, *_TEXT),
    "recall": ("vocab_size", "pairs", *_TASK),
    "induction": ("vocab_size", "segment", *_TASK),
    "copy": ("vocab_size", "payload", *_TASK),
    "reverse": ("vocab_size", "payload", *_TASK),
    "directed": ("vocab_size", "cycle", *_TASK),
    "dyck": ("kinds", "depth", *_TASK),
}
TEXT_SOURCES = ("stdlib", "text", "hub")
TOKENIZERS = ("bytes", "chars", "bpe", "gpt2", "cl100k_base", "o200k_base")
BPE_SIZE = 8192  # where data.vocab_size does not say it

CHOICES = {
    "variant.init": ("matched", "naive"),
    "variant.lr": ("matched", "same"),
    "variant.norm": ("none", "qk", "unit_keys"),
    "attention.kernel": ("auto", "math", "flash", "efficient", "folded", "blocked"),
    "model.position": ("learned", "none", "alibi", "rope"),
    "model.norm": ("pre", "none"),
    "model.init": ("gpt2", "linear"),
    "data.source": tuple(DATA_KEYS),
    "data.tokenizer": TOKENIZERS,  # of text; a task has none
    "optim.schedule": ("cosine", "wsd"),
    "precision": ("auto", "fp32", "bf16", "fp16"),
    "products": ("auto", "torch", "onednn"),
    "track.wandb": ("auto", "online", "offline", "disabled"),
}

BIG = 2**53
# key: least, most.
RANGES: dict[str, tuple[float, float]] = {
    "variant.rank": (1, 2**20),
    "variant.groups": (1, 2**20),
    "model.layers": (1, 10_000),
    "model.d_model": (1, 2**20),
    "model.heads": (1, 2**20),
    "model.context": (1, 2**24),
    "model.mlp_ratio": (0, 1000),
    "model.dropout": (0, 0.99),
    "data.vocab_size": (2, 2**24),
    "data.max_tokens": (1, BIG),
    "data.pairs": (1, 2**20),
    "data.segment": (2, 2**20),
    "data.payload": (1, 2**20),
    "data.cycle": (3, 2**20),
    "data.kinds": (1, 2**16),
    "data.depth": (1, 2**20),
    "data.val_tokens": (2, BIG),
    "data.test_tokens": (2, BIG),
    "train.steps": (1, BIG),
    "train.tokens": (1, BIG),
    "train.batch_size": (1, 2**24),
    "train.accumulate": (1, 2**20),
    "train.eval_every": (1, BIG),
    "train.checkpoint_every": (1, BIG),
    "optim.lr": (1e-12, 1000),
    "optim.warmup": (0, BIG),
    "optim.cooldown": (0, 1),
    "optim.lr_final": (0, 1),
    "optim.weight_decay": (0, 1000),
    "optim.clip": (0, 1000),
    "seed": (0, BIG),
    "seeds.init": (0, BIG),
    "seeds.data": (0, BIG),
    "seeds.dropout": (0, BIG),
    "start.step": (0, BIG),
    "threads": (1, 4096),
    "diagnose.every": (0, BIG),
    "track.log_every": (1, BIG),
}
# Where a word may stand in a number's place.
WORDS = dict.fromkeys(
    (
        *("variant.rank", "variant.groups", "train.steps", "optim.warmup", "optim.cooldown"),
        *("threads", "diagnose.every"),
    ),
    "auto",
)


# Sections that older files lack, as if they had them: those runs began without diagnostics.
_SINCE = {"start": {}, "diagnose": {"every": 0}}


def from_plain(content: dict[str, Any]) -> Config:
    """The config that `dataclasses.asdict` made this of."""
    config, parts = Config(), dict[str, Any]()
    for item in dataclasses.fields(Config):
        own, value = getattr(config, item.name), (_SINCE | content)[item.name]
        kind: Any = type(own)
        parts[item.name] = kind(**value) if dataclasses.is_dataclass(own) else value
    return Config(**parts)


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
