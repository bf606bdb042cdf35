"""Measures of attention: spread of the scores, attended positions, induction heads, rounding.

Shape suffixes: B sequences, T queries, S keys, H heads, L layers, D d_model, E width of q and k.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from qkablate.attention import Attention
from qkablate.models.base import AttentionLayer, Model

MEASURES = (
    *("score_std", "score_max", "entropy", "self", "first", "previous", "sink"),
    *("induction", "repeat_previous"),
)
ROUNDING_MEASURES = ("rounding", "rounding_fp64")
ROUNDING_TOKENS = 64  # a ratio of norms needs no more, and fp64 is slow


def compute_patterns(
    s_BHTS: Tensor, *, is_self: bool = True, query_mask_BT: Tensor | None = None
) -> dict[str, Tensor | None]:
    """Return the measures of scores that are −∞ where masked.

    Only queries that see two positions or more are counted, and where there is a mask, those that
    are no padding; NaN if there are none. Queries and keys of two sequences have no own, previous
    or earlier position.

    score_std  standard deviation of the visible scores of a query, pooled over queries
    score_max  the largest score
    entropy    of the weights of a query, in nats; mean over queries, like the following
    self       weight on the query's own position
    first      weight on the first position
    previous   weight on the preceding position
    sink       see `sink`
    """
    a_BHTS, visible_BHTS = s_BHTS.softmax(-1), s_BHTS != -torch.inf
    if query_mask_BT is not None:
        visible_BHTS = visible_BHTS & query_mask_BT[:, None, :, None]
    num_visible_BHT = visible_BHTS.sum(-1)
    counts_BHT = (num_visible_BHT > 1).to(s_BHTS.dtype)
    queries_H = counts_BHT.sum((0, 2))

    def mean(x_BHT: Tensor) -> Tensor:
        return (x_BHT * counts_BHT).sum((0, 2)) / queries_H

    visible_scores_BHTS = s_BHTS.where(visible_BHTS, 0.0)
    mean_BHT1 = (visible_scores_BHTS.sum(-1) / num_visible_BHT).unsqueeze(-1)
    square_BHTS = (visible_scores_BHTS - mean_BHT1).square().where(visible_BHTS, 0.0)
    freedom_H = (num_visible_BHT - 1).clamp(min=0).sum((0, 2))
    found: dict[str, Tensor | None] = {
        "score_std": (square_BHTS.sum((0, 2, 3)) / freedom_H).sqrt(),
        "score_max": s_BHTS.where(visible_BHTS, -torch.inf).amax((0, 2, 3)),
        "entropy": mean(torch.special.entr(a_BHTS).sum(-1)),
        "first": mean(a_BHTS[..., 0]),
    }
    if is_self:
        found["self"] = mean(a_BHTS.diagonal(dim1=-2, dim2=-1))
        found["previous"] = mean(pad(a_BHTS.diagonal(-1, -2, -1), (1, 0)))  # 0 for the first query
        found["sink"] = sink(a_BHTS, num_visible_BHT, query_mask_BT)
    return found


def sink(a_BHTS: Tensor, num_visible_BHT: Tensor, query_mask_BT: Tensor | None = None) -> Tensor:
    """Return the attention to the strongest sink, beyond uniform attention; mean over sequences.

    The sink is the position of the first half that gets the most weight from the queries of the
    second half, on average. 0 is uniform attention, near 1 all weight is on one position, and below
    0 the first half gets less than its share. Queries that see nothing are not counted, nor
    sequences without another one. The halves are those of a sequence without its padding, which is
    at the end.
    """
    if query_mask_BT is not None:
        rows = zip(a_BHTS, num_visible_BHT, query_mask_BT.sum(1).tolist(), strict=True)
        sinks = [sink(a_HTS[None, :, :n, :n], num_HT[None, :, :n]) for a_HTS, num_HT, n in rows]
        return torch.stack(sinks).nanmean(0)
    half = a_BHTS.shape[-1] // 2
    if not half:
        return a_BHTS.new_full(a_BHTS.shape[1:2], torch.nan)
    counts_BHT = num_visible_BHT[:, :, half:] > 0
    queries_BH = counts_BHT.sum(2)
    received_BHTS = a_BHTS[:, :, half:, :half].where(counts_BHT[..., None], 0.0)
    received_BHS = received_BHTS.sum(2) / queries_BH[..., None]
    uniform_BH = (1 / num_visible_BHT[:, :, half:]).where(counts_BHT, 0.0).sum(2) / queries_BH
    return (received_BHS.amax(-1) - uniform_BH).nanmean(0)


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


def compute_rounding(
    layer: Attention,
    x_BTD: Tensor,
    autocast: Callable[[], AbstractContextManager[Any]],
    mask_BT: Tensor | None = None,
) -> dict[str, Tensor | None]:
    """Return the relative difference of two orders of multiplication by head, and that in fp64.

    The orders are X (W_q W_kᵀ) Xᵀ and (X W_q)(X W_k)ᵀ, equal in exact arithmetic. What they differ
    by in the precision of training is what a merged matrix can change by rounding alone.

    None for circuits without two factors, and where a norm or a rotation lies between them. Where
    the mask is false, x is padding, which is at the end of a sequence.
    """
    factors = layer.qk.low_rank_factors() if not layer.qk.no_circuit_reason else None
    if factors is None or layer.norm is not None or layer.position == "rope":
        return dict.fromkeys(ROUNDING_MEASURES)
    rows = ROUNDING_TOKENS // x_BTD.shape[1]
    if mask_BT is not None:
        rows = int((mask_BT.sum(1).cumsum(0) <= ROUNDING_TOKENS).sum())
        x_BTD = x_BTD.masked_fill(~mask_BT[..., None], 0)  # whose scores are 0 in both orders
    x_BTD = x_BTD[: max(1, rows), :ROUNDING_TOKENS]
    with autocast():
        rounded_H = _difference(x_BTD, *factors)
    device = "cpu" if x_BTD.device.type == "mps" else x_BTD.device  # which has no fp64
    exact_H = _difference(*(part.to(device, torch.float64) for part in (x_BTD, *factors)))
    return {"rounding": rounded_H, "rounding_fp64": exact_H}


def _difference(x_BTD: Tensor, left_HDE: Tensor, right_HDE: Tensor) -> Tensor:
    x_B1TD = x_BTD.unsqueeze(1)
    separate_BHTT = (x_B1TD @ left_HDE) @ (x_B1TD @ right_HDE).mT
    merged_BHTT = (x_B1TD @ (left_HDE @ right_HDE.mT)) @ x_B1TD.mT
    # The norms are taken in fp32 at least: in 16 bits they would add rounding of their own.
    wide = torch.promote_types(separate_BHTT.dtype, torch.float32)
    separate_BHTT, merged_BHTT = separate_BHTT.to(wide), merged_BHTT.to(wide)
    squares_H = [s.square().sum((0, 2, 3)) for s in (merged_BHTT - separate_BHTT, separate_BHTT)]
    return (squares_H[0] / squares_H[1]).sqrt()


@torch.no_grad()
def attention_weights(model: Model, *inputs_T: Tensor) -> list[Tensor]:
    """Return the attention weights A_HTS of each layer for one sequence, or one pair."""
    layers = model.attention_inputs(*(tokens_T.unsqueeze(0) for tokens_T in inputs_T))
    return [attention_scores(*layer)[0].softmax(-1) for layer in layers]


def attention_scores(
    layer: AttentionLayer, inputs: tuple[Tensor, ...], key_mask_BS: Tensor | None = None
) -> Tensor:
    """Return S_BHTS in the precision of the weights, whatever that of the inputs."""
    dtype = layer.module.qk.like.dtype
    x_BTD, y_BSD = inputs[0].to(dtype), inputs[1].to(dtype) if len(inputs) == 2 else None
    return layer.module.scores(x_BTD, y_BSD, key_mask_BS, causal=layer.causal)
