"""Exact softmax attention in blocks of queries, for keys and values that heads share.

A block of queries sees the keys until its own end and no other, so that a causal window costs half
the products, and its scores are computed again for the gradient: no more than one block of them is
ever there. Heads that share a key are folded into the query length, as in `folded`.

Shape suffixes: B batch, H heads, G key (or value) heads, T queries, S keys, E width of the scores,
V of the values; F the R = H / G heads of a key by the queries of a block, N = B · G.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

QUERIES = 64  # of a block; another number is another rounding


def blocked(
    q_BHTE: Tensor,
    k_BGSE: Tensor,
    v_BGSV: Tensor,
    scale: float,
    causal: bool,
    addend: Tensor | None,
) -> Tensor:
    """softmax(scale · q kᵀ + addend) v as o_BHTV; the addend, HTS or TS, has no gradient."""
    kind = q_BHTE.device.type
    half = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else q_BHTE.dtype
    with torch.autocast(kind, enabled=False):
        inputs = (x.to(half) for x in (q_BHTE, k_BGSE, v_BGSV))
        o_BHTV: Tensor = _Blocked.apply(*inputs, scale, causal, addend)  # type: ignore[no-untyped-call]
    return o_BHTV


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BHTE: Tensor,
        k_BGSE: Tensor,
        v_BGSV: Tensor,
        scale: float,
        causal: bool,
        addend: Tensor | None,
    ) -> Tensor:
        o_BHTV = q_BHTE.new_empty(*q_BHTE.shape[:3], v_BGSV.shape[-1])
        for own, seen in _blocks(q_BHTE.shape[2], k_BGSE.shape[2], causal):
            k_BGSE_, v_BGSV_ = k_BGSE[:, :, seen], v_BGSV[:, :, seen]
            weights_BHTS = _weights(q_BHTE[:, :, own], k_BGSE_, scale, causal, addend, own)
            o_BHTV[:, :, own] = _product(weights_BHTS, v_BGSV_)
        ctx.save_for_backward(q_BHTE, k_BGSE, v_BGSV, o_BHTV, addend)
        ctx.scale, ctx.causal = scale, causal
        return o_BHTV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_BHTV: Tensor) -> tuple[Tensor | None, ...]:
        q_BHTE, k_BGSE, v_BGSV, o_BHTV, addend = ctx.saved_tensors
        dq_BHTE = torch.empty_like(q_BHTE)
        # Sums over blocks, in fp32 also of 16 bits.
        sums = torch.promote_types(q_BHTE.dtype, torch.float32)
        dk_BGSE, dv_BGSV = (torch.zeros_like(x, dtype=sums) for x in (k_BGSE, v_BGSV))
        for own, seen in _blocks(q_BHTE.shape[2], k_BGSE.shape[2], ctx.causal):
            q, k, v, do = (
                q_BHTE[:, :, own],
                k_BGSE[:, :, seen],
                v_BGSV[:, :, seen],
                do_BHTV[:, :, own],
            )
            weights_BHTS = _weights(q, k, ctx.scale, ctx.causal, addend, own)
            dv_BGSV[:, :, seen] += _sum_over_queries(weights_BHTS, do, v.shape[1])
            # What the softmax passes on: w (dw − Σ w dw), and Σ w dw = Σ o do.
            shift_BHT1 = (o_BHTV[:, :, own].to(sums) * do.to(sums)).sum(-1, keepdim=True)
            ds_BHTS = _product(do, v.mT).sub_(shift_BHT1).mul_(weights_BHTS).mul_(ctx.scale)
            dq_BHTE[:, :, own] = _product(ds_BHTS, k)
            dk_BGSE[:, :, seen] += _sum_over_queries(ds_BHTS, q, k.shape[1])
        return dq_BHTE, dk_BGSE.to(k_BGSE.dtype), dv_BGSV.to(v_BGSV.dtype), None, None, None


def _blocks(queries: int, keys: int, causal: bool) -> Iterator[tuple[slice, slice]]:
    """The queries of each block, and the keys that they see."""
    for begin in range(0, queries, QUERIES):
        end = min(begin + QUERIES, queries)
        yield slice(begin, end), slice(0, end if causal else keys)


def _weights(
    q_BHTE: Tensor, k_BGSE: Tensor, scale: float, causal: bool, addend: Tensor | None, own: slice
) -> Tensor:
    """The softmax of one block."""
    scores_BHTS = _product(q_BHTE, k_BGSE.mT, scale)
    if addend is not None:
        scores_BHTS += addend[..., own, : scores_BHTS.shape[-1]]
    if causal:
        own_BHTS = scores_BHTS[..., own.start :]  # the only keys that some of these do not see
        ahead_TS = torch.ones(own_BHTS.shape[2:], dtype=torch.bool, device=q_BHTE.device).triu(1)
        own_BHTS.masked_fill_(ahead_TS, -torch.inf)
    sums = torch.promote_types(scores_BHTS.dtype, torch.float32)
    return scores_BHTS.softmax(-1, dtype=sums).to(scores_BHTS.dtype)


def _product(x_BHTE: Tensor, y_BGEV: Tensor, scale: float = 1.0) -> Tensor:
    """scale · x y, where several heads of x share one of y."""
    x_NFE, y_NEV = _folded(x_BHTE, y_BGEV.shape[1]), y_BGEV.flatten(0, 1)
    found_NFV = torch.baddbmm(x_BHTE.new_zeros(()), x_NFE, y_NEV, beta=0, alpha=scale)
    return found_NFV.view(*x_BHTE.shape[:-1], y_BGEV.shape[-1])


def _sum_over_queries(x_BHTS: Tensor, y_BHTE: Tensor, groups: int) -> Tensor:
    """xᵀ y, added up over the queries and over the heads that share a key."""
    found_NSE = torch.bmm(_folded(x_BHTS, groups).mT, _folded(y_BHTE, groups))
    return found_NSE.unflatten(0, (-1, groups))


def _folded(x_BHTE: Tensor, groups: int) -> Tensor:
    """As x_NFE."""
    return x_BHTE.unflatten(1, (groups, -1)).flatten(2, 3).flatten(0, 1)
