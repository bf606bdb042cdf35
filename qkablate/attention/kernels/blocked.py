"""Exact softmax attention in blocks of queries, for keys and values that heads share.

A block of queries reads the keys up to its rows end only, so a causal window costs half the FLOPs.
In a long context the weights are recomputed for the gradient, so that one block of them is in
memory at a time. Heads that share a key are folded into the query length, as in `folded`.

Shape suffixes: B batch, H heads, G key (or value) heads, T queries, S keys, E width of the scores,
V of the values; F the R = H / G heads of a key by the queries of a block, N = B · G.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Queries per block; changing them changes the rounding. Fewer where heads share a key or a value,
# because those heads are computed in one product.
BLOCK, SHARED_BLOCK = 128, 64
# Queries up to which all weights are saved for the gradient: about the activations of an MLP.
MAX_SAVED_QUERIES = 512


def blocked_attention(
    q_BHTE: Tensor, k_BGSE: Tensor, v_BGSV: Tensor, scale: float, causal: bool, bias: Tensor | None
) -> Tensor:
    """Return softmax(scale · q kᵀ + bias) v as o_BHTV.

    The bias, BHTS, HTS or TS, gets no gradient.
    """
    if bias is not None:
        bias = bias.expand(*bias.shape[:-2], q_BHTE.shape[2], -1)
    half = matmul_dtype(q_BHTE)
    with torch.autocast(q_BHTE.device.type, enabled=False):
        inputs = (x.to(half) for x in (q_BHTE, k_BGSE, v_BGSV))
        o_BHTV: Tensor = _Blocked.apply(*inputs, scale, causal, bias)  # type: ignore[no-untyped-call]
    return o_BHTV


def matmul_dtype(x: Tensor) -> torch.dtype:
    """Return the type that a matmul of x is computed in, under autocast or not."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BHTE: Tensor,
        k_BGSE: Tensor,
        v_BGSV: Tensor,
        scale: float,
        causal: bool,
        bias: Tensor | None,
    ) -> Tensor:
        batch, heads, queries, _ = q_BHTE.shape
        # BTHV in memory, so that joining the heads needs no copy.
        o_BHTV = q_BHTE.new_empty(batch, queries, heads, v_BGSV.shape[-1]).transpose(1, 2)
        # Contiguous, since each block reads a slice of them.
        k_NSE, v_NSV = (x.flatten(0, 1).contiguous() for x in (k_BGSE, v_BGSV))
        save, saved = queries <= MAX_SAVED_QUERIES and any(ctx.needs_input_grad), []
        for rows, visible in _blocks(q_BHTE, k_BGSE, v_BGSV, causal):
            q, k = q_BHTE[:, :, rows], k_NSE[:, visible]
            a_BHTS = _weights(q, k, scale, causal, bias, rows)
            o_BHTV[:, :, rows] = _product(a_BHTS, v_NSV[:, visible])
            saved += [a_BHTS] if save else []
        ctx.scale, ctx.causal = scale, causal
        ctx.save_for_backward(q_BHTE, k_BGSE, v_BGSV, bias, *saved)
        return o_BHTV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_BHTV: Tensor) -> tuple[Tensor | None, ...]:
        q_BHTE, k_BGSE, v_BGSV, bias, *saved = ctx.saved_tensors
        scale, dq_BHTE = ctx.scale, torch.empty_like(q_BHTE)
        # Sums over blocks are fp32 for 16-bit inputs, too.
        sums = torch.promote_types(q_BHTE.dtype, torch.float32)
        k_NSE, v_NSV = (x.flatten(0, 1).contiguous() for x in (k_BGSE, v_BGSV))
        dk_NSE, dv_NSV = (torch.zeros_like(x, dtype=sums) for x in (k_NSE, v_NSV))
        for block, (rows, visible) in enumerate(_blocks(q_BHTE, k_BGSE, v_BGSV, ctx.causal)):
            q, do = q_BHTE[:, :, rows], do_BHTV[:, :, rows]
            k, v = k_NSE[:, visible], v_NSV[:, visible]
            a_BHTS = saved[block] if saved else _weights(q, k, scale, ctx.causal, bias, rows)
            _add_over_queries(dv_NSV[:, visible], a_BHTS, do)
            ds_BHTS = torch._softmax_backward_data(_product(do, v.mT), a_BHTS, -1, a_BHTS.dtype)
            dq_BHTE[:, :, rows] = _product(ds_BHTS, k, scale)
            _add_over_queries(dk_NSE[:, visible], ds_BHTS, q, scale)
        dk_BGSE = dk_NSE.view(k_BGSE.shape).to(k_BGSE.dtype)
        dv_BGSV = dv_NSV.view(v_BGSV.shape).to(v_BGSV.dtype)
        return dq_BHTE, dk_BGSE, dv_BGSV, None, None, None


def _blocks(
    q_BHTE: Tensor, k_BGSE: Tensor, v_BGSV: Tensor, causal: bool
) -> Iterator[tuple[slice, slice]]:
    """Yield the queries of each block and the keys visible to them."""
    (heads, queries), keys = q_BHTE.shape[1:3], k_BGSE.shape[2]
    size = BLOCK if k_BGSE.shape[1] == v_BGSV.shape[1] == heads else SHARED_BLOCK
    for begin in range(0, queries, size):
        end = min(begin + size, queries)
        yield slice(begin, end), slice(0, end if causal else keys)


def _weights(
    q_BHTE: Tensor, k_NSE: Tensor, scale: float, causal: bool, bias: Tensor | None, rows: slice
) -> Tensor:
    scores_BHTS = _product(q_BHTE, k_NSE.mT, scale)
    if bias is not None:
        scores_BHTS += bias[..., rows, : scores_BHTS.shape[-1]]
    if causal:
        diagonal_BHTS = scores_BHTS[..., rows.start :]  # the only keys that need a mask
        diagonal_BHTS += diagonal_BHTS.new_full(diagonal_BHTS.shape[2:], -torch.inf).triu_(1)
    return scores_BHTS.softmax(-1)  # computed in fp32, also of 16 bits


def _product(x_BHTE: Tensor, y_NEV: Tensor, scale: float = 1.0) -> Tensor:
    """Return scale · x y, where several heads of x share one of y."""
    x_NFE = fold(x_BHTE, len(y_NEV))
    product_NFV = torch.baddbmm(x_BHTE.new_zeros(()), x_NFE, y_NEV, beta=0, alpha=scale)
    return product_NFV.view(*x_BHTE.shape[:-1], y_NEV.shape[-1])


def _add_over_queries(sum_NSE: Tensor, x_BHTS: Tensor, y_BHTE: Tensor, scale: float = 1.0) -> None:
    """Add scale · xᵀ y, summed over the queries and over the heads that share a key."""
    x_NFS, y_NFE = fold(x_BHTS, len(sum_NSE)), fold(y_BHTE, len(sum_NSE))
    if sum_NSE.dtype == x_NFS.dtype:
        sum_NSE.baddbmm_(x_NFS.mT, y_NFE, alpha=scale)
    else:
        sum_NSE += torch.baddbmm(y_NFE.new_zeros(()), x_NFS.mT, y_NFE, beta=0, alpha=scale)


def fold(x_BHTE: Tensor, n: int) -> Tensor:
    """Return x_NFE: the heads that share a key, with their queries, as rows of one matrix."""
    x_BGRTE = torch.unflatten(x_BHTE, 1, (n // x_BHTE.shape[0], -1))
    return x_BGRTE.flatten(2, 3).flatten(0, 1)
