"""Cost of a variant by formula: parameters, FLOPs, score memory, KV cache.

The formulas are those of the circuits; tests compare them with measured counts. FLOPs count 2 per
multiply-add of every matmul, the output projection included; softmax, norms and activations are not
counted. A causal query attends to (T + 1)/2 keys on average, and only those are counted.
"""

from dataclasses import dataclass
from typing import Any

from qkablate.attention import Attention
from qkablate.config import Config, ModelConfig, flatten
from qkablate.models.base import Model
from qkablate.models.gpt import GPT, MLP


@dataclass(frozen=True)
class AttentionCost:
    """Cost of one layer; FLOPs are forward, per token."""

    params: int
    projections: float
    scores: float
    values: float
    cached: int  # numbers that a decoder caches per token
    score_numel: int  # numbers of a full score matrix, per sequence

    @property
    def flops(self) -> float:
        return self.projections + self.scores + self.values


def compute_attention_cost(
    layer: Attention, *, keys: float, context: int, tokens_per_pass: float
) -> AttentionCost:
    """Return the cost of a layer whose queries attend to `keys` keys on average."""
    qk, ov = layer.qk, layer.ov
    per_pass = qk.flops_per_pass() + ov.flops_per_pass()
    return AttentionCost(
        params=sum(p.numel() for p in layer.parameters()),
        projections=qk.flops_per_token() + ov.flops_per_token() + per_pass / tokens_per_pass,
        scores=2 * qk.spec.heads * qk.width * keys,
        values=2 * qk.spec.heads * ov.width * keys,
        cached=layer.cached_per_token,
        score_numel=qk.spec.heads * context**2,
    )


def mean_causal_keys(context: int) -> float:
    """Return how many keys a query of a causal window attends to on average, itself included."""
    return (context + 1) / 2


def forward_flops_per_token(
    model: Model, keys: float, tokens_per_pass: float, answer_fraction: float = 1.0
) -> float:
    """Return the forward FLOPs of the model where queries attend to `keys` keys on average.

    Only `answer_fraction` of the positions reaches the output projection.
    """
    context = model.config.context
    flops = 2.0 * answer_fraction * model.output_weight.numel()
    for module in model.modules():
        if isinstance(module, Attention):
            flops += compute_attention_cost(
                module, keys=keys, context=context, tokens_per_pass=tokens_per_pass
            ).flops
        elif isinstance(module, GPT):
            flops += 2 * sum(part.weight.numel() for part in module.embedding_maps())
        elif isinstance(module, MLP):
            flops += 2 * (module.up.weight.numel() + module.down.weight.numel())
    return flops


def training_flops_per_token(
    model: Model, tokens_per_pass: float, answer_fraction: float = 1.0
) -> float:
    """Return forward and backward FLOPs; the backward pass of a matmul costs two matmuls."""
    keys = mean_causal_keys(model.config.context)
    return 3 * forward_flops_per_token(model, keys, tokens_per_pass, answer_fraction)


def describe_cost(config: Config, model: Model, vocabulary: int) -> dict[str, Any]:
    """Return the sizes and the cost of a config's model by name, for a table."""
    context, layers = config.model.context, model.attention_layers()
    keys, tokens_per_pass = mean_causal_keys(context), config.train.batch_size * context
    number_bytes = 4 if config.precision == "fp32" else 2
    layer = compute_attention_cost(
        layers[0].module, keys=keys, context=context, tokens_per_pass=tokens_per_pass
    )
    return {
        "variant": config.variant.name,
        "d_model": config.model.d_model,
        "heads": config.model.heads,
        "layers": config.model.layers,
        "context": context,
        "vocabulary": vocabulary,
        "params": model.parameter_counts()["total"],
        "attention_params_per_layer": layer.params,
        "projection_flops_per_token": layer.projections,
        "score_flops_per_token": layer.scores,
        "value_flops_per_token": layer.values,
        "forward_flops_per_token": forward_flops_per_token(model, keys, tokens_per_pass),
        "training_flops_per_token": training_flops_per_token(model, tokens_per_pass),
        "training_flops_ratio": 1.0,  # to the first row of the table
        "score_matrix_bytes": layer.score_numel * number_bytes,  # of one sequence in one layer
        "kv_bytes_per_token": layer.cached * number_bytes * len(layers),
    }


def varied_values(configs: list[Config]) -> list[dict[str, Any]]:
    """Return, for each config, the values of the keys besides the variant in which they differ."""
    flat = [flatten(config) for config in configs]
    # How often a run is evaluated follows from its other keys, and is part of no cost.
    ignored = ("variant.", "train.eval_every", "train.eval_tokens", "diagnostics.every")
    keys = [key for key in flat[0] if not key.startswith(ignored)]
    differing = [key for key in keys if len({str(values[key]) for values in flat}) > 1]
    if "seed" in differing:  # which sets the three seeds
        differing = [key for key in differing if not key.startswith("seeds.")]
    return [{key: values[key] for key in differing} for values in flat]


MAX_DECOMPOSITION = 2**37  # a few minutes


def decomposition_steps(model: ModelConfig) -> int:
    """Return the order of the steps that decompose every B_h of a layer: d³ per head."""
    return model.heads * model.d_model**3
