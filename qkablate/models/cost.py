"""What a variant costs: parameters, FLOPs, score memory, KV cache. By formula, from the circuits'
own; tests hold them against the real counts.

FLOPs count 2 per multiply-add of every matrix product, the output head included; softmax, norms and
activations do not count. A causal query sees (T + 1)/2 keys on average, and only those count.
"""

from dataclasses import dataclass

from qkablate.attention import Attention
from qkablate.models.gpt import GPT, MLP


@dataclass(frozen=True)
class AttentionCost:
    """Of one layer; FLOPs are forward, per token."""

    params: int
    projections: float
    scores: float
    values: float
    cached: int  # numbers that a decoder keeps per token
    scores_held: int  # numbers of a whole score matrix, per sequence

    @property
    def flops(self) -> float:
        return self.projections + self.scores + self.values


def attention_cost(
    layer: Attention, *, keys: float, context: int, tokens_per_pass: float
) -> AttentionCost:
    """`keys` is how many keys a query sees on average."""
    qk, ov = layer.qk, layer.ov
    per_pass = qk.flops_per_pass() + ov.flops_per_pass()
    return AttentionCost(
        params=sum(p.numel() for p in layer.parameters()),
        projections=qk.flops_per_token() + ov.flops_per_token() + per_pass / tokens_per_pass,
        scores=2 * qk.spec.heads * qk.width * keys,
        values=2 * qk.spec.heads * ov.width * keys,
        cached=layer.cached_per_token,
        scores_held=qk.spec.heads * context**2,
    )


def mean_causal_keys(context: int) -> float:
    """How many keys a query of a causal window sees on average, itself included."""
    return (context + 1) / 2


def forward_flops_per_token(
    model: GPT, keys: float, tokens_per_pass: float, answers: float = 1.0
) -> float:
    """Of the whole model, when a query sees `keys` keys on average, and the part `answers` of the
    positions reaches the output projection.
    """
    context = model.config.context
    flops = 2.0 * answers * model.token_embedding.weight.numel()  # as output projection
    for module in model.modules():
        if isinstance(module, Attention):
            flops += attention_cost(
                module, keys=keys, context=context, tokens_per_pass=tokens_per_pass
            ).flops
        elif isinstance(module, MLP):
            flops += 2 * (module.up.weight.numel() + module.down.weight.numel())
    return flops


@dataclass(frozen=True)
class Cost:
    """Of a model; FLOPs per token, bytes at the width of one number."""

    params: dict[str, int]
    layer: AttentionCost
    forward: float
    training: float
    cache_bytes: int  # per token, all layers
    score_bytes: int  # of one sequence in one layer, where a kernel holds them


def cost(model: GPT, *, tokens_per_pass: float, number_bytes: int) -> Cost:
    context, keys = model.config.context, mean_causal_keys(model.config.context)
    layers = model.attentions()
    layer = attention_cost(layers[0], keys=keys, context=context, tokens_per_pass=tokens_per_pass)
    return Cost(
        params=model.ledger(),
        layer=layer,
        forward=forward_flops_per_token(model, keys, tokens_per_pass),
        training=training_flops_per_token(model, tokens_per_pass),
        cache_bytes=layer.cached * number_bytes * len(layers),
        score_bytes=layer.scores_held * number_bytes,
    )


def training_flops_per_token(model: GPT, tokens_per_pass: float, answers: float = 1.0) -> float:
    """Forward and backward: each product costs twice itself in the backward pass."""
    keys = mean_causal_keys(model.config.context)
    return 3 * forward_flops_per_token(model, keys, tokens_per_pass, answers)
