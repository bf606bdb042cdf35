"""What the attention does: how far scores spread, what is looked at, heads that go on with repeats.

Shape suffixes: B sequences, T queries, S keys, H heads, L layers.
"""

import torch
from torch import Tensor

from qkablate.attention import Attention
from qkablate.models.gpt import GPT

MEASURES = (
    *("score_std", "score_max", "entropy", "self", "first", "previous", "sink"),
    *("induction", "repeat_previous"),
)


def patterns(s_BHTS: Tensor) -> dict[str, Tensor]:
    """Of the scores that softmax sees, −∞ where a position is hidden. A query counts where it sees
    two positions or more; NaN where there is none.

    score_std  of the visible scores of a query about their mean, pooled over queries
    score_max  the largest of all
    entropy    of a query's weights, in nats; mean, as of all that follow
    self       weight on the query's own position
    first      on the first position
    previous   on the position before
    sink       see there
    """
    a_BHTS, visible_BHTS = s_BHTS.softmax(-1), s_BHTS != -torch.inf
    seen_BHT = visible_BHTS.sum(-1)
    counts_BHT = (seen_BHT > 1).to(s_BHTS.dtype)
    queries_H = counts_BHT.sum((0, 2))

    def mean(x_BHT: Tensor) -> Tensor:
        return (x_BHT * counts_BHT).sum((0, 2)) / queries_H

    known_BHTS = s_BHTS.where(visible_BHTS, 0.0)
    middle_BHT1 = (known_BHTS.sum(-1) / seen_BHT).unsqueeze(-1)
    square_BHTS = (known_BHTS - middle_BHT1).square().where(visible_BHTS, 0.0)
    freedom_H = (seen_BHT - 1).clamp(min=0).sum((0, 2))
    return {
        "score_std": (square_BHTS.sum((0, 2, 3)) / freedom_H).sqrt(),
        "score_max": s_BHTS.amax((0, 2, 3)),
        "entropy": mean(torch.special.entr(a_BHTS).sum(-1)),
        "self": mean(a_BHTS.diagonal(dim1=-2, dim2=-1)),
        "first": mean(a_BHTS[..., 0]),
        "previous": mean(_previous(a_BHTS)),
        "sink": sink(a_BHTS, seen_BHT),
    }


def sink(a_BHTS: Tensor, seen_BHT: Tensor) -> Tensor:
    """What the later half of the queries give to the position of the earlier half that they give
    most, on average, beyond an equal share (1 of as many as a query sees); mean over sequences.
    0 is uniform attention, near 1 all looks at one position, below 0 at none of them.
    """
    half = a_BHTS.shape[-1] // 2
    if not half:
        return a_BHTS.new_full(a_BHTS.shape[1:2], torch.nan)
    received_BHS = a_BHTS[:, :, half:, :half].mean(2)
    equal_BH = (1 / seen_BHT[:, :, half:]).mean(2)
    return (received_BHS.amax(-1) - equal_BH).mean(0)


def repeat_patterns(s_BHTS: Tensor) -> dict[str, Tensor]:
    """Of the scores on a block of tokens that comes twice.

    induction        weight that the second copy gives to what came after a token's first coming
                     (Elhage et al., 2021; Olsson et al., 2022)
    repeat_previous  weight on the position before, which such a head needs below itself
    """
    block = s_BHTS.shape[-1] // 2
    if block < 2:  # what comes after is the token itself
        nan_H = s_BHTS.new_full(s_BHTS.shape[1:2], torch.nan)
        return {"induction": nan_H, "repeat_previous": nan_H}
    a_BHTS = s_BHTS.softmax(-1)
    # Entry t of this diagonal is the query block − 1 + t, which looks at the key t.
    after_BHT = a_BHTS.diagonal(1 - block, -2, -1)[..., 1:]
    return {
        "induction": after_BHT.mean((0, 2)),
        "repeat_previous": a_BHTS.diagonal(-1, -2, -1).mean((0, 2)),
    }


@torch.no_grad()
def attention_weights(model: GPT, tokens_T: Tensor) -> Tensor:
    """A_LHTS: the attention of every layer and head for one row of tokens."""
    layers = model.streams(tokens_T.unsqueeze(0))
    return torch.stack([scores(layer, x_BTD)[0].softmax(-1) for layer, x_BTD in layers])


def scores(layer: Attention, x_BTD: Tensor) -> Tensor:
    """S_BHTS in the weights' own precision, whatever x was computed in."""
    return layer.scores(x_BTD.to(layer.qk.like.dtype))


def _previous(a_BHTS: Tensor) -> Tensor:
    """Of every query; the first has none."""
    return torch.nn.functional.pad(a_BHTS.diagonal(-1, -2, -1), (1, 0))
