"""Cost of a variant by formula: parameters, FLOPs, score memory, KV cache.

The formulas are those of the circuits; tests compare them with measured counts. FLOPs count 2 per
multiply-add of every matmul, the output projection included; softmax, norms and activations are not
counted. A causal query attends to (T + 1)/2 keys on average, and only those are counted. In an
encoder and in cross-attention a query attends to all keys. An encoder–decoder's FLOPs are per token
of the target, which pays for the source that is as long as the config says.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from qkablate.attention import Attention
from qkablate.config import Config, ModelConfig, flatten
from qkablate.config.variant import SITES, stream_width
from qkablate.models.base import AttentionLayer, Model
from qkablate.models.catalogue import encoder_layers
from qkablate.models.gpt import GPT
from qkablate.models.mlp import MLP, SwiGLU, count_matrix_elements


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
    layer: Attention,
    *,
    keys: float,
    context: int,
    tokens_per_pass: float,
    source: int | None = None,
) -> AttentionCost:
    """Return the cost of a layer per query, each of which attends to `keys` keys on average.

    A layer with a source has cross-attention: keys and values are of the tokens of the source.
    """
    parts = [part for part in layer.parts if part is not layer.norm]
    projections: float = sum(part.flops_per_token() for part in parts)
    if source is not None:
        projections = sum(part.flops_per_query() for part in parts)
        projections += sum(part.flops_per_key() for part in parts) * source / context
    per_pass, heads = sum(part.flops_per_pass() for part in parts), layer.qk.spec.heads
    return AttentionCost(
        params=sum(p.numel() for p in layer.parameters()),
        projections=projections + per_pass / tokens_per_pass,
        scores=2 * heads * layer.width * keys,
        values=2 * heads * layer.value_width * keys,
        cached=layer.cached_per_token,
        score_numel=heads * context * (context if source is None else source),
    )


def mean_causal_keys(context: int) -> float:
    """Return how many keys a query of a causal window attends to on average, itself included."""
    return (context + 1) / 2


def _cost_of(
    model: Model, layer: AttentionLayer, tokens_per_pass: float, *, masked: bool
) -> AttentionCost:
    """Return the cost of a layer of a model, with FLOPs per token of the target."""
    source, context = model.input_lengths()[0], model.config.context
    in_encoder = layer.site == "encoder"
    queries, keys = (source if in_encoder else context), (context if layer.causal else source)
    per_target = queries / context
    cost = compute_attention_cost(
        layer.module,
        keys=mean_causal_keys(keys) if layer.causal and not masked else keys,
        context=queries,
        tokens_per_pass=tokens_per_pass * per_target,
        source=None if layer.is_self else source,
    )
    return dataclasses.replace(
        cost,
        projections=cost.projections * per_target,
        scores=cost.scores * per_target,
        values=cost.values * per_target,
    )


def forward_flops_per_token(
    model: Model, tokens_per_pass: float, answer_fraction: float = 1.0, *, masked: bool = False
) -> float:
    """Return the forward FLOPs of the model per token, of the target where there is a source.

    Only `answer_fraction` of the positions reaches the output projection. With `masked` the keys
    that a causal query does not see count, too, as for a kernel that computes their scores.
    """
    source, context = model.input_lengths()[0], model.config.context
    flops = 2.0 * answer_fraction * model.output_weight.numel()
    for layer in model.attention_layers():
        flops += _cost_of(model, layer, tokens_per_pass, masked=masked).flops
    for name, module in model.named_modules():
        if isinstance(module, GPT):
            maps = module.embedding_maps()
            flops += sum(2 * part.weight.numel() * tokens for part, tokens in maps) / context
        elif isinstance(module, MLP | SwiGLU):
            per_target = source / context if name.startswith("encoder.") else 1
            flops += 2 * per_target * count_matrix_elements(module)
    return flops


def training_flops_per_token(
    model: Model, tokens_per_pass: float, answer_fraction: float = 1.0
) -> float:
    """Return forward and backward FLOPs; the backward pass of a matmul costs two matmuls."""
    return 3 * forward_flops_per_token(model, tokens_per_pass, answer_fraction)


def cached_by_site(model: Model) -> dict[str, int]:
    """Return how many numbers a decoder caches per token of its context, and of its source.

    All layers read the same source, so that those which cache the stream itself share one copy.
    """
    numbers, copies = dict.fromkeys(SITES[model.config.form], 0), 0
    for layer in model.attention_layers():
        if layer.site != "encoder":
            numbers[layer.site] += layer.module.cached_per_token
        if layer.site == "cross" and "x" in (layer.module.qk.cached, layer.module.ov.cached):
            copies += 1
    if copies:
        numbers["cross"] -= (copies - 1) * stream_width(model.config, "encoder")
    return numbers


def describe_cost(config: Config, model: Model, vocabulary: int) -> list[dict[str, Any]]:
    """Return the sizes and the cost of a config's model by name, for a table: a row per site.

    FLOPs are per token of the target; what is not of a layer is of the whole model in each row.
    """
    context, source = config.model.context, model.input_lengths()[0]
    tokens_per_pass = config.train.batch_size * context
    number_bytes = 4 if config.precision == "fp32" else 2
    layers = {layer.site: layer for layer in reversed(model.attention_layers())}
    cached, rows = cached_by_site(model), []
    for site in SITES[config.model.form]:
        layer = _cost_of(model, layers[site], tokens_per_pass, masked=False)
        rows.append(
            {
                "variant": config.variant.name,
                "site": site,
                "d_model": stream_width(config.model, site),
                "heads": config.model.heads,
                "layers": (
                    encoder_layers(config.model) if site == "encoder" else config.model.layers
                ),
                "context": context,
                "source": source if len(layers) > 1 else None,
                "vocabulary": vocabulary,
                "params": model.parameter_counts()["total"],
                "attention_params_per_layer": layer.params,
                "projection_flops_per_token": layer.projections,
                "score_flops_per_token": layer.scores,
                "value_flops_per_token": layer.values,
                "forward_flops_per_token": forward_flops_per_token(model, tokens_per_pass),
                "training_flops_per_token": training_flops_per_token(model, tokens_per_pass),
                "training_flops_ratio": 1.0,  # to the first row of the table
                # Of one sequence in one layer.
                "score_matrix_bytes": layer.score_numel * number_bytes,
                "kv_bytes_per_token": cached[site] * number_bytes,
            }
        )
    return rows


def varied_values(configs: list[Config]) -> list[dict[str, Any]]:
    """Return, for each config, the values of the keys besides the variant in which they differ."""
    flat = [flatten(config) for config in configs]
    # How often a run is evaluated follows from its other keys, and is part of no cost.
    ignored = ("variant.", "train.eval_", "train.test_tokens", "diagnostics.every")
    keys = [key for key in flat[0] if not key.startswith(ignored)]
    differing = [key for key in keys if len({str(values[key]) for values in flat}) > 1]
    if "seed" in differing:  # which sets the three seeds
        differing = [key for key in differing if not key.startswith("seeds.")]
    return [{key: values[key] for key in differing} for values in flat]


MAX_DECOMPOSITION = 2**37  # a few minutes


def decomposition_steps(model: ModelConfig) -> int:
    """Return the order of the steps that decompose every B_h of a layer: d³ per head."""
    return model.heads * max(model.d_model, stream_width(model, "encoder")) ** 3
