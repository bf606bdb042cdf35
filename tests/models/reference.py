"""Reference implementation of encoders and decoders around the attention of naive.py."""

import math
from typing import Any

import torch
from torch import Tensor

from tests.attention import naive


def norm(x: Tensor, module: Any) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    scaled = centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    normed: Tensor = scaled * module.weight
    return normed


def after_mlp(x: Tensor, block: Any) -> Tensor:
    hidden = norm(x, block.norm_2) @ block.mlp.up.weight.T
    hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
    result: Tensor = x + hidden @ block.mlp.down.weight.T
    return result


def logits(x: Tensor, model: Any) -> Tensor:
    found: Tensor = norm(x, model.norm) @ model.token_embedding.weight.T
    return found


def encoded(tokens_BS: Tensor, embedding: Any, table: Any, blocks: Any) -> Tensor:
    """Return the stream after the blocks of an encoder."""
    x: Tensor = embedding.weight[tokens_BS] + table.weight[: tokens_BS.shape[1]]
    for block in blocks:
        x = x + naive.attention(block.attention, norm(x, block.norm_1), None, causal=False)
        x = after_mlp(x, block)
    return x


def encoder(model: Any, tokens_BT: Tensor) -> Tensor:
    """Return the logits of an encoder alone."""
    x = encoded(tokens_BT, model.token_embedding, model.position_embedding, model.blocks)
    return logits(x, model)


def encoder_decoder(model: Any, source_BS: Tensor, tokens_BT: Tensor) -> Tensor:
    """Return the logits of the target's next tokens."""
    embedding = model.source_token_embedding or model.token_embedding
    y = encoded(source_BS, embedding, model.source_position_embedding, model.encoder)
    y = norm(y, model.encoder_norm)
    x = (
        model.token_embedding.weight[tokens_BT]
        + model.position_embedding.weight[: tokens_BT.shape[1]]
    )
    for block in model.blocks:
        x = x + naive.attention(block.attention, norm(x, block.norm_1), None, causal=True)
        x = x + naive.attention(block.cross_attention, norm(x, block.norm_cross), y, causal=False)
        x = after_mlp(x, block)
    return logits(x, model)
