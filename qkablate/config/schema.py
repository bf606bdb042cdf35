"""The schema of a run: every key a user may set, with its default and its meaning (see keys.py)."""

from dataclasses import dataclass

from qkablate.config.data import DataConfig
from qkablate.config.keys import (
    BIG,
    LOCAL,
    LOGGING,
    TRAINING,
    VARYING,
    Role,
    key,
    logging_key,
    parameter_key,
    section,
    training_key,
    variant_key,
)


@dataclass
class VariantConfig:
    """The parametrization of the QK and the OV circuit."""

    name: str = key(
        "standard", "name of the variant, in labels", Role.ARM | Role.VARIANT | Role.FINETUNE
    )
    qk: str = variant_key("separate", "parametrization of the QK circuit")
    ov: str = variant_key("separate", "parametrization of the OV circuit")
    norm: str = variant_key(
        "none",
        "qk: queries and keys of length one, and a learned gain of each head; unit_keys: keys of"
        " length one (Reformer):",
        choices=("none", "qk", "unit_keys"),
    )
    mask_self: bool = variant_key(False, "true: no token attends to itself")
    rank: int | str | None = variant_key(
        "auto",
        "rank of a low-rank circuit; auto: d_head / 2 for qk=low_rank, d_model / 4 for latent and"
        " collaborative",
        bounds=(1, 2**20),
    )
    groups: int | str | None = variant_key(
        "auto",
        "number of groups of heads that share keys and values; auto: the largest proper divisor of"
        " model.heads",
        bounds=(1, 2**20),
    )
    rope_dims: int | None = variant_key(
        None,
        "with model.position=rope: separate dimensions of each head that are rotated; null: half of"
        " d_head for qk=latent, otherwise the circuit's own queries and keys are rotated",
        bounds=(2, 2**20),
    )
    init: str = training_key(
        "matched",
        "matched: scores start as large as standard's; naive: default initialization;"
        " symmetric: matched, but W_q = W_k at the start",
        choices=("matched", "naive", "symmetric"),
    )
    lr: int | float | str = training_key(
        "between",
        "learning-rate multiplier of the changed circuit (of QK if neither has a matched one): a"
        " number, or same (1), matched (the circuit moves as fast as standard's) or between (their"
        " geometric mean)",
        bounds=(1e-6, 1e6),
        choices=("between", "matched", "same"),
    )
    sites: str = variant_key(
        "all",
        "attention layers that carry the variant, the others are standard's: all, or some of"
        " encoder, decoder, cross, joined by +",
    )
    file: str | None = key(
        None,
        "Python file with circuits of your own",
        Role.CONTENT | Role.ARM | Role.VARIANT | Role.FINETUNE,
    )


@dataclass
class ModelConfig:
    """The size and shape of the transformer around the attention layers."""

    form: str = parameter_key(
        "decoder",
        "GPT, bidirectional encoder, or translator:",
        choices=("decoder", "encoder", "encoder_decoder"),
    )
    encoder_layers: int | None = parameter_key(
        None,
        "blocks of the encoder of form=encoder_decoder; null: as many as model.layers",
        bounds=(1, 10_000),
    )
    encoder_d_model: int | None = parameter_key(
        None,
        "width of the encoder's stream of form=encoder_decoder; null: model.d_model",
        bounds=(1, 2**20),
    )
    source: int | None = parameter_key(
        None,
        "longest source of form=encoder_decoder, in tokens; null: as long as model.context",
        bounds=(1, 2**24),
    )
    layers: int = parameter_key(4, "transformer blocks", bounds=(1, 10_000))
    d_model: int = parameter_key(128, "width of the residual stream", bounds=(1, 2**20))
    heads: int = parameter_key(4, "attention heads per layer", bounds=(1, 2**20))
    context: int = parameter_key(64, "context length in tokens", bounds=(1, 2**24))
    mlp_ratio: float = parameter_key(
        4.0,
        "MLP width / d_model; of mlp=swiglu, which has a third matrix, 2/3 of it; 0: no MLP",
        bounds=(0, 1000),
    )
    mlp: str = parameter_key(
        "gelu",
        "activation; gelu_tanh is GPT-2's, relu2 is ReLU², swiglu is gated at equal parameters:",
        choices=("gelu", "gelu_tanh", "relu2", "swiglu"),
    )
    dropout: float = parameter_key(0.0, "dropout probability", bounds=(0, 0.99))
    bias: bool = parameter_key(False, "biases in all linear maps and norms")
    tied: bool = parameter_key(
        True, "false: the output head has a matrix of its own, not the embedding's"
    )
    embedding_width: int | None = parameter_key(
        None,
        "width of the token embedding, mapped to d_model and back; null: d_model, without a map",
        bounds=(1, 2**20),
    )
    embedding_std: float = parameter_key(
        0.02, "initial standard deviation of the token embedding", bounds=(0, 1000)
    )
    position: str = parameter_key(
        "learned", "positions:", choices=("learned", "none", "alibi", "rope")
    )
    position_std: float = parameter_key(
        0.02, "initial standard deviation of position=learned", bounds=(0, 1000)
    )
    rope_theta: float = parameter_key(
        10000.0, "base of the wavelengths of position=rope", bounds=(1, 1e12)
    )
    norm: str = parameter_key("pre", "norm before each sublayer:", choices=("pre", "none"))
    norm_kind: str = parameter_key(
        "layer", "LayerNorm, or RMSNorm without biases:", choices=("layer", "rms")
    )
    norm_eps: float = parameter_key(
        1e-5, "added to the variance, or mean square, in each norm", bounds=(0, 1)
    )
    attention_skip: bool = parameter_key(True, "false: the attention's output replaces its input")
    init: str = parameter_key(
        "gpt2",
        "gpt2 (σ = 0.02, residual-scaled), linear (torch's default for nn.Linear)",
        choices=("gpt2", "linear"),
    )


@dataclass
class AttentionConfig:
    """The computation of attention."""

    kernel: str = key(
        "auto",
        "math, flash, cudnn, efficient: PyTorch's SDPA; folded: batched matmuls; blocked: the same"
        " in blocks of queries, with less memory; wide: in Triton, for keys as wide as the stream;"
        " auto: the fastest by shape, precision and GPU; portable: of those that every GPU has",
        Role.CONTENT | Role.PAIR_FREE | Role.FINETUNE,
        choices=(
            *("auto", "portable", "math", "flash", "cudnn", "efficient"),
            *("folded", "blocked", "wide"),
        ),
    )


@dataclass
class TrainConfig:
    """The training loop."""

    steps: int | str = training_key(
        "auto", "optimizer steps; auto: as many as train.tokens needs, or 1000", bounds=(1, BIG)
    )
    tokens: int | None = training_key(None, "tokens to train on, instead of steps", bounds=(1, BIG))
    batch_size: int = training_key(
        16, "windows of model.context tokens per forward pass", bounds=(1, 2**24)
    )
    grad_accum: int = training_key(1, "forward passes per step", bounds=(1, 2**20))
    eval_every: int | str = key(
        "auto",
        "steps between evaluations of the validation split; auto: equal intervals of at least"
        " 250 steps",
        TRAINING | Role.PAIR_FREE,
        bounds=(1, BIG),
    )
    eval_tokens: int | str = training_key(
        "auto",
        "validation tokens per evaluation; all: the whole split; auto: as many (at least 512) as"
        " keep these evaluations within 5 % of the training",
        bounds=(1, BIG),
        choices=("auto", "all"),
    )
    test_tokens: int | str = training_key(
        "auto",
        "test tokens to evaluate, from the beginning of the split; all: the whole split; auto:"
        " all, or with eval_tokens=auto as many (at least 1024) as keep evaluation, predictions"
        " and diagnostics within 10 % of the training",
        bounds=(1, BIG),
        choices=("auto", "all"),
    )
    checkpoint_every: int = key(
        250, "steps between checkpoints; kill -9 loses at most that many", LOCAL, bounds=(1, BIG)
    )
    vmap: int | str = key(
        1,
        "runs of a sweep that train as one program, with torch.func.vmap; 1: each alone; auto: many"
        " where that is faster",
        Role.CONTENT | Role.ARM | Role.ONE_PER_SWEEP | Role.FINETUNE,
        bounds=(1, 4096),
        choices=("auto",),
    )
    evaluate_test: bool = key(  # part of the identity where it is false
        True, "false: a tuning run, which never reads the test split", Role.IDENTITY | Role.FINETUNE
    )
    checkpoint_activations: bool = key(
        False, "true: recompute activations in the backward pass; less memory", LOCAL
    )
    fsdp: bool = key(
        False, "true: shard the model over torchrun's processes; needs compile=false", Role.FINETUNE
    )


@dataclass
class OptimConfig:
    """The optimizer and its schedule."""

    optimizer: str = training_key(
        "adamw",
        "adamw; muon: the matrices of the blocks by Muon, the rest by AdamW",
        choices=("adamw", "muon"),
    )

    lr: float = key(
        1e-3,
        "peak learning rate; variant.lr scales it for the changed circuit",
        VARYING | Role.FINETUNE,
        bounds=(1e-12, 1000),
    )
    schedule: str = training_key(
        "cosine",
        "cosine; wsd: warm-up, stable, decay; constant: warm-up, then the peak",
        choices=("cosine", "wsd", "constant"),
    )
    warmup: int | str = training_key(
        "auto", "warm-up steps; auto: 20 % of the steps, at most 2000", bounds=(0, BIG)
    )
    cooldown: int | float | str = training_key(
        "auto", "fraction of a wsd run in which the rate falls; auto: 0.2", bounds=(0, 1)
    )
    lr_final: float = training_key(0.1, "final learning rate / peak", bounds=(0, 1))
    weight_decay: float = training_key(0.1, "weight decay, on matrices only", bounds=(0, 1000))
    betas: list[float] = training_key([0.9, 0.95], "AdamW's β₁ and β₂", bounds=(0, 1))
    momentum: float = training_key(0.95, "Muon's momentum", bounds=(0, 1))
    clip: float = training_key(1.0, "largest gradient norm; 0: no clipping", bounds=(0, 1000))


@dataclass
class InitFromConfig:
    """The trained run that this one starts from, converted to this variant; all null: none."""

    run: str | None = key(
        None,
        "a trained run to start from: its folder, or the start of its name or id",
        Role.CONTENT,
    )
    id: str | None = key(
        None,
        "id of that run; with run, id, weights and step given, a finished run is found although the"
        " parent was deleted",
        Role.IDENTITY,
    )
    weights: str | None = key(
        None, "sha256 of its weights; null: those of its newest checkpoint", Role.IDENTITY
    )
    step: int | None = parameter_key(
        None, "steps it was trained for; the batch order continues after them", bounds=(0, BIG)
    )


@dataclass
class SeedsConfig:
    """The seeds of single sources of randomness, to vary one alone."""

    init: int = key(0, "seed of the initial weights", VARYING, bounds=(0, BIG))
    data: int = key(0, "seed of the order of the batches", VARYING | Role.FINETUNE, bounds=(0, BIG))
    dropout: int = key(0, "seed of dropout", VARYING | Role.FINETUNE, bounds=(0, BIG))


@dataclass
class DiagnosticsConfig:
    """Recording of circuits, attention and predictions during training; it changes no number."""

    every: int | str = logging_key(
        "auto", "steps between diagnostics; auto: train.eval_every; 0: never", bounds=(0, BIG)
    )


@dataclass
class TrackingConfig:
    """Logging, and the run's place in W&B."""

    wandb: str = logging_key(
        "auto",
        "online, offline, disabled; auto: WANDB_MODE, else online if W&B has a key, or offline",
        choices=("auto", "online", "offline", "disabled"),
    )
    project: str | None = logging_key(None, "W&B project; null: WANDB_PROJECT, or qkablate")
    entity: str | None = logging_key(None, "W&B entity; null: WANDB_ENTITY")
    group: str | None = logging_key(None, "W&B group; null: the arm, or the sweep")
    job_type: str | None = logging_key(None, "W&B job type; null: variant and size")
    tags: list[str] = logging_key([], "W&B tags in addition to the variant and the data")
    artifacts: bool = logging_key(False, "true: upload the last checkpoint to W&B, too")
    log_every: int = logging_key(10, "steps between rows of training metrics", bounds=(1, BIG))


@dataclass
class Config:
    """One run."""

    variant: VariantConfig = section(VariantConfig)
    model: ModelConfig = section(ModelConfig)
    attention: AttentionConfig = section(AttentionConfig)
    data: DataConfig = section(DataConfig)
    train: TrainConfig = section(TrainConfig)
    optim: OptimConfig = section(OptimConfig)
    seed: int = key(0, "seed of the run; the runs of a pair share it", VARYING, bounds=(0, BIG))
    seeds: SeedsConfig = section(SeedsConfig)
    init_from: InitFromConfig = section(InitFromConfig)
    precision: str = training_key(
        "auto",
        "fp32, bf16, fp16 (CUDA); auto: bf16 where it is faster",
        choices=("auto", "fp32", "bf16", "fp16"),
    )
    matmul: str = training_key(
        "auto",
        "torch, onednn (fp32 on a CPU); auto: onednn where torch is slow (AMD with AVX-512)",
        choices=("auto", "torch", "onednn"),
    )
    device: str = key(
        "auto", "cpu, cuda, cuda:N, mps", Role.IDENTITY | Role.ONE_PER_SWEEP | Role.FINETUNE
    )
    compile: bool | str = training_key(
        "auto",
        "true, false, graphs (CUDA graphs); auto: true on CUDA if the run is long enough to gain",
    )
    threads: int | str = key(
        "auto",
        "CPU threads; recorded, and reused when the run is resumed",
        LOGGING | Role.PAIR_FREE,
        bounds=(1, 4096),
    )
    deterministic: bool = training_key(False, "true: deterministic CUDA algorithms only")
    diagnostics: DiagnosticsConfig = section(DiagnosticsConfig)
    tracking: TrackingConfig = section(TrackingConfig)
    out: str = logging_key("outputs", "runs are in <out>/runs/<label>-<id>/")
