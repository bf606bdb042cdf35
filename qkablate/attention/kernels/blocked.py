"""Exact softmax attention in blocks of queries, for keys and values that heads share.

A block of queries sees the keys until its own end and no other, so that a causal window costs half
the products. In a long context its weights are computed again for the gradient: no more than one
block of them is ever there. Heads that share a key are folded into the query length, as in
`folded`.

Shape suffixes: B batch, H heads, G key (or value) heads, T queries, S keys, E width of the scores,
V of the values; F the R = H / G heads of a key by the queries of a block, N = B · G.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Queries of a block; other numbers are another rounding. Fewer where heads share a key or a value:
# theirs stand in one product.
ALONE, SHARED = 128, 64
# Queries up to which all weights are kept for the gradient: about the activations of an MLP.
KEPT = 512


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
        batch, heads, queries, _ = q_BHTE.shape
        # In memory as BTHV: whoever puts the heads side by side need not copy them.
        o_BHTV = q_BHTE.new_empty(batch, queries, heads, v_BGSV.shape[-1]).transpose(1, 2)
        k_NSE, v_NSV = _flat(k_BGSE), _flat(v_BGSV)
        keep, kept = queries <= KEPT and any(ctx.needs_input_grad), []
        for own, seen in _blocks(q_BHTE, k_BGSE, v_BGSV, causal):
            weights_BHTS = _weights(q_BHTE[:, :, own], k_NSE[:, seen], scale, causal, addend, own)
            o_BHTV[:, :, own] = _product(weights_BHTS, v_NSV[:, seen])
            kept += [weights_BHTS] if keep else []
        ctx.save_for_backward(q_BHTE, k_BGSE, v_BGSV, addend, *kept)
        ctx.scale, ctx.causal = scale, causal
        return o_BHTV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_BHTV: Tensor) -> tuple[Tensor | None, ...]:
        q_BHTE, k_BGSE, v_BGSV, addend, *kept = ctx.saved_tensors
        scale = ctx.scale
        dq_BHTE = torch.empty_like(q_BHTE)
        # Sums over blocks, in fp32 also of 16 bits.
        sums = torch.promote_types(q_BHTE.dtype, torch.float32)
        k_NSE, v_NSV = _flat(k_BGSE), _flat(v_BGSV)
        dk_NSE, dv_NSV = (torch.zeros_like(x, dtype=sums) for x in (k_NSE, v_NSV))
        for block, (own, seen) in enumerate(_blocks(q_BHTE, k_BGSE, v_BGSV, ctx.causal)):
            q, do, k, v = q_BHTE[:, :, own], do_BHTV[:, :, own], k_NSE[:, seen], v_NSV[:, seen]
            weights_BHTS = kept[block] if kept else _weights(q, k, scale, ctx.causal, addend, own)
            _add_over_queries(dv_NSV[:, seen], weights_BHTS, do)
            ds_BHTS = torch._softmax_backward_data(
                _product(do, v.mT), weights_BHTS, -1, weights_BHTS.dtype
            )
            dq_BHTE[:, :, own] = _product(ds_BHTS, k, scale)
            _add_over_queries(dk_NSE[:, seen], ds_BHTS, q, scale)
        dk_BGSE, dv_BGSV = (
            d.view(x.shape).to(x.dtype) for d, x in ((dk_NSE, k_BGSE), (dv_NSV, v_BGSV))
        )
        return dq_BHTE, dk_BGSE, dv_BGSV, None, None, None


def _blocks(
    q_BHTE: Tensor, k_BGSE: Tensor, v_BGSV: Tensor, causal: bool
) -> Iterator[tuple[slice, slice]]:
    """The queries of each block, and the keys that they see."""
    (heads, queries), keys = q_BHTE.shape[1:3], k_BGSE.shape[2]
    size = ALONE if k_BGSE.shape[1] == v_BGSV.shape[1] == heads else SHARED
    for begin in range(0, queries, size):
        end = min(begin + size, queries)
        yield slice(begin, end), slice(0, end if causal else keys)


def _weights(
    q_BHTE: Tensor, k_NSE: Tensor, scale: float, causal: bool, addend: Tensor | None, own: slice
) -> Tensor:
    """The softmax of one block."""
    scores_BHTS = _product(q_BHTE, k_NSE.mT, scale)
    if addend is not None:
        scores_BHTS += addend[..., own, : scores_BHTS.shape[-1]]
    if causal:
        own_BHTS = scores_BHTS[..., own.start :]  # the only keys that some of these do not see
        own_BHTS += own_BHTS.new_full(own_BHTS.shape[2:], -torch.inf).triu_(1)
    return scores_BHTS.softmax(-1)  # in fp32 inside, also of 16 bits


def _product(x_BHTE: Tensor, y_NEV: Tensor, scale: float = 1.0) -> Tensor:
    """scale · x y, where several heads of x share one of y."""
    x_NFE = _folded(x_BHTE, len(y_NEV))
    found_NFV = torch.baddbmm(x_BHTE.new_zeros(()), x_NFE, y_NEV, beta=0, alpha=scale)
    return found_NFV.view(*x_BHTE.shape[:-1], y_NEV.shape[-1])


def _add_over_queries(sum_NSE: Tensor, x_BHTS: Tensor, y_BHTE: Tensor, scale: float = 1.0) -> None:
    """Add scale · xᵀ y, summed over the queries and over the heads that share a key."""
    x_NFS, y_NFE = _folded(x_BHTS, len(sum_NSE)), _folded(y_BHTE, len(sum_NSE))
    if sum_NSE.dtype == x_NFS.dtype:
        sum_NSE.baddbmm_(x_NFS.mT, y_NFE, alpha=scale)
    else:
        sum_NSE += torch.baddbmm(y_NFE.new_zeros(()), x_NFS.mT, y_NFE, beta=0, alpha=scale)


def _flat(x_BGSE: Tensor) -> Tensor:
    """As x_NSE, its numbers side by side: each block reads a part of them again."""
    return x_BGSE.flatten(0, 1).contiguous()


def _folded(x_BHTE: Tensor, n: int) -> Tensor:
    """As x_NFE."""
    groups = n // x_BHTE.shape[0]
    return x_BHTE.unflatten(1, (groups, -1)).flatten(2, 3).flatten(0, 1)
