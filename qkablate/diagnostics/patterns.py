"""Measures of attention: spread of the scores, attended positions, induction heads.

Shape suffixes: B sequences, T queries, S keys, H heads, L layers.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from qkablate.models.base import AttentionLayer, Model

MEASURES = (
    *("score_std", "score_max", "entropy", "self", "first", "previous", "sink"),
    *("induction", "repeat_previous"),
)


def compute_patterns(s_BHTS: Tensor) -> dict[str, Tensor]:
    """Return the measures of scores that are −∞ where masked.

    Only queries that see two positions or more are counted; NaN if there are none.

    score_std  standard deviation of the visible scores of a query, pooled over queries
    score_max  the largest score
    entropy    of the weights of a query, in nats; mean over queries, like the following
    self       weight on the query's own position
    first      weight on the first position
    previous   weight on the preceding position
    sink       see `sink`
    """
    a_BHTS, visible_BHTS = s_BHTS.softmax(-1), s_BHTS != -torch.inf
    num_visible_BHT = visible_BHTS.sum(-1)
    counts_BHT = (num_visible_BHT > 1).to(s_BHTS.dtype)
    queries_H = counts_BHT.sum((0, 2))

    def mean(x_BHT: Tensor) -> Tensor:
        return (x_BHT * counts_BHT).sum((0, 2)) / queries_H

    visible_scores_BHTS = s_BHTS.where(visible_BHTS, 0.0)
    mean_BHT1 = (visible_scores_BHTS.sum(-1) / num_visible_BHT).unsqueeze(-1)
    square_BHTS = (visible_scores_BHTS - mean_BHT1).square().where(visible_BHTS, 0.0)
    freedom_H = (num_visible_BHT - 1).clamp(min=0).sum((0, 2))
    return {
        "score_std": (square_BHTS.sum((0, 2, 3)) / freedom_H).sqrt(),
        "score_max": s_BHTS.amax((0, 2, 3)),
        "entropy": mean(torch.special.entr(a_BHTS).sum(-1)),
        "self": mean(a_BHTS.diagonal(dim1=-2, dim2=-1)),
        "first": mean(a_BHTS[..., 0]),
        "previous": mean(pad(a_BHTS.diagonal(-1, -2, -1), (1, 0))),  # 0 for the first query
        "sink": sink(a_BHTS, num_visible_BHT),
    }


def sink(a_BHTS: Tensor, num_visible_BHT: Tensor) -> Tensor:
    """Return the attention to the strongest sink, beyond uniform attention; mean over sequences.

    The sink is the position of the first half that gets the most weight from the queries of the
    second half, on average. 0 is uniform attention, near 1 all weight is on one position, and below
    0 the first half gets less than its share.
    """
    half = a_BHTS.shape[-1] // 2
    if not half:
        return a_BHTS.new_full(a_BHTS.shape[1:2], torch.nan)
    received_BHS = a_BHTS[:, :, half:, :half].mean(2)
    uniform_BH = (1 / num_visible_BHT[:, :, half:]).mean(2)
    return (received_BHS.amax(-1) - uniform_BH).mean(0)


def compute_repeat_patterns(s_BHTS: Tensor) -> dict[str, Tensor]:
    """Return the measures of scores on a repeated block of tokens.

    induction        weight from a token of the second copy on the successor of its first occurrence
                     (Elhage et al., 2021; Olsson et al., 2022)
    repeat_previous  weight on the preceding position, which induction needs in an earlier layer
    """
    block = s_BHTS.shape[-1] // 2
    if block < 2:  # the successor is the token itself
        nan_H = s_BHTS.new_full(s_BHTS.shape[1:2], torch.nan)
        return {"induction": nan_H, "repeat_previous": nan_H}
    a_BHTS = s_BHTS.softmax(-1)
    # Entry t of this diagonal is the weight of the query block − 1 + t on the key t.
    after_BHT = a_BHTS.diagonal(1 - block, -2, -1)[..., 1:]
    return {
        "induction": after_BHT.mean((0, 2)),
        "repeat_previous": a_BHTS.diagonal(-1, -2, -1).mean((0, 2)),
    }


@torch.no_grad()
def attention_weights(model: Model, tokens_T: Tensor) -> Tensor:
    """Return the attention weights A_LHTS of all layers and heads for one sequence."""
    layers = model.attention_inputs(tokens_T.unsqueeze(0))
    return torch.stack([attention_scores(*layer)[0].softmax(-1) for layer in layers])


def attention_scores(layer: AttentionLayer, inputs: tuple[Tensor, ...]) -> Tensor:
    """Return S_BHTS in the precision of the weights, whatever that of the inputs."""
    dtype = layer.module.qk.like.dtype
    return layer.module.scores(*(x.to(dtype) for x in inputs), causal=layer.causal)
