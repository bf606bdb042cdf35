"""Exact softmax attention for keys as wide as the stream, in Triton.

The online softmax of FlashAttention (Dao et al., 2022), with the width E of keys and queries read
in parts, so that no width is too large. Neither the weights nor a gradient of the key per head are
in memory. The backward pass computes the scores anew for every part of E of a gradient, and sums
in a fixed order, so that it is deterministic.

Imports triton: the only module that does, and imported only where it is used.

Shape suffixes: B batch, H heads, G key heads, Y value heads, T queries, S keys, E width of the
scores, V of the values.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from qkablate.attention.kernels.blocked import matmul_dtype

# Of a row's width: with others the compiled kernels were wrong on an H100 in 16 bits (Triton 3.6).
# In fp32, too, so that there is one way.
_ALIGNMENT = 16


def wide_attention(
    q_BHTE: Tensor, k_BGSE: Tensor, v_BYSV: Tensor, scale: float, causal: bool, bias: Tensor | None
) -> Tensor:
    """Return softmax(scale · q kᵀ + bias) v as o_BHTV.

    The bias, BHTS, HTS or TS, gets no gradient.
    """
    half, value_width = matmul_dtype(q_BHTE), v_BYSV.shape[-1]
    with torch.autocast(q_BHTE.device.type, enabled=False):
        inputs = (_with_dense_rows(_aligned(x.to(half))) for x in (q_BHTE, k_BGSE, v_BYSV))
        o_BHTV: Tensor = _Wide.apply(*inputs, scale, causal, bias)
    return o_BHTV[..., :value_width]


def _aligned(x: Tensor) -> Tensor:
    """Return x with zeros up to a width that the kernels can read; they change no score."""
    missing = -x.shape[-1] % _ALIGNMENT
    return pad(x, (0, missing)) if missing else x


def _with_dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class _Wide(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BHTE: Tensor,
        k_BGSE: Tensor,
        v_BYSV: Tensor,
        scale: float,
        causal: bool,
        bias: Tensor | None,
    ) -> Tensor:
        batch, heads, queries, _ = q_BHTE.shape
        # BTHV in memory, so that joining the heads needs no copy.
        o_BHTV = q_BHTE.new_empty(batch, queries, heads, v_BYSV.shape[-1]).transpose(1, 2)
        lse_BHT = torch.empty(batch, heads, queries, dtype=torch.float32, device=q_BHTE.device)
        arguments = _arguments(q_BHTE, k_BGSE, v_BYSV, scale, causal, bias)
        rows = triton.cdiv(queries, arguments["TILE"])
        _forward[(batch * heads, rows)](
            **arguments, OUT=o_BHTV, LSE=lse_BHT, **_strides("o", o_BHTV), num_warps=4
        )
        ctx.scale, ctx.causal = scale, causal
        ctx.save_for_backward(q_BHTE, k_BGSE, v_BYSV, bias, o_BHTV, lse_BHT)
        return o_BHTV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_BHTV: Tensor) -> tuple[Tensor | None, ...]:
        q_BHTE, k_BGSE, v_BYSV, bias, o_BHTV, lse_BHT = ctx.saved_tensors
        batch, heads, _, width = q_BHTE.shape
        do_BHTV = _with_dense_rows(do_BHTV.to(o_BHTV.dtype))
        delta_BHT = (do_BHTV.float() * o_BHTV.float()).sum(-1).contiguous()
        dq_BHTE, dk_BGSE, dv_BYSV = (
            torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_BHTE, k_BGSE, v_BYSV)
        )
        arguments = _arguments(q_BHTE, k_BGSE, v_BYSV, ctx.scale, ctx.causal, bias)
        arguments |= {"DO": do_BHTV, "LSE": lse_BHT, "DELTA": delta_BHT, **_strides("o", do_BHTV)}
        parts = triton.cdiv(width, arguments["PART"])
        rows, columns = (triton.cdiv(x.shape[2], arguments["TILE"]) for x in (q_BHTE, k_BGSE))
        _dq[(batch * heads, rows, parts)](**arguments, DQ=dq_BHTE, num_warps=8)
        _dk[(batch * k_BGSE.shape[1], columns, parts)](**arguments, DK=dk_BGSE, num_warps=8)
        del arguments["PART"]
        _dv[(batch * v_BYSV.shape[1], columns)](**arguments, DV=dv_BYSV, num_warps=4)
        return dq_BHTE, dk_BGSE, dv_BYSV, None, None, None


def _arguments(
    q_BHTE: Tensor, k_BGSE: Tensor, v_BYSV: Tensor, scale: float, causal: bool, bias: Tensor | None
) -> dict[str, Any]:
    """Return the arguments that all kernels share."""
    batch, heads, queries, width = q_BHTE.shape
    keys, value_width = k_BGSE.shape[2], v_BYSV.shape[-1]
    is_half = q_BHTE.dtype != torch.float32
    tables = {"Q": q_BHTE, "K": k_BGSE, "V": v_BYSV}
    if bias is None:
        bias_BHTS = q_BHTE.new_empty(()).expand(batch, heads, queries, keys)  # is not read
    else:
        bias_BHTS = bias.expand(batch, heads, queries, keys)
    strides = _strides("q", q_BHTE) | _strides("k", k_BGSE) | _strides("v", v_BYSV)
    strides |= _strides("a", bias_BHTS) | {"as_": bias_BHTS.stride(3)}
    return {
        **tables,
        "A": bias_BHTS,
        **strides,
        **{"heads": heads, "queries": queries, "keys": keys, "width": width},
        **{"value_width": value_width, "scale": scale},
        "G": k_BGSE.shape[1],
        "Y": v_BYSV.shape[1],
        "CAUSAL": causal,
        "BIASED": bias is not None,
        "TILE": 64 if is_half else 32,
        "STEP": 64 if is_half else 32,
        "PART": 128 if is_half else 64,
        "VALUES": max(16, triton.next_power_of_2(value_width)),
    }


def _strides(name: str, x: Tensor) -> dict[str, int]:
    return {f"{name}{axis}": x.stride(i) for i, axis in enumerate("bht")}


# fmt: off
@triton.jit
def _tile_scores(
    q_row, k_row, a_row, as_, t, s, queries, keys, width, scale,
    CAUSAL: tl.constexpr, BIASED: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
):
    """Return the scores of a tile, queries by keys; −∞ where there is no key."""
    scores = tl.zeros((TILE, TILE), tl.float32)
    for begin in range(0, width, STEP):
        e = begin + tl.arange(0, STEP)
        q = tl.load(q_row[:, None] + e[None, :], (t < queries)[:, None] & (e < width)[None, :], 0.0)
        k = tl.load(k_row[:, None] + e[None, :], (s < keys)[:, None] & (e < width)[None, :], 0.0)
        scores += tl.dot(q, tl.trans(k), input_precision="ieee")
    scores *= scale
    visible = (t < queries)[:, None] & (s < keys)[None, :]
    if BIASED:
        scores += tl.load(a_row[:, None] + s[None, :] * as_, visible, 0.0).to(tl.float32)
    if CAUSAL:
        visible = visible & (s[None, :] <= t[:, None])
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def _forward(
    Q, K, V, A, OUT, LSE, qb, qh, qt, kb, kh, kt, vb, vh, vt, ab, ah, at, as_, ob, oh, ot,
    heads, queries, keys, width, value_width, scale, G: tl.constexpr, Y: tl.constexpr,
    CAUSAL: tl.constexpr, BIASED: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
    PART: tl.constexpr, VALUES: tl.constexpr,
):
    """Compute the output of a tile of queries of one head."""
    b, h = tl.program_id(0).to(tl.int64) // heads, tl.program_id(0).to(tl.int64) % heads
    t = tl.program_id(1) * TILE + tl.arange(0, TILE)
    c = tl.arange(0, VALUES)
    q_row = Q + b * qb + h * qh + t.to(tl.int64) * qt
    a_row = A + b * ab + h * ah + t.to(tl.int64) * at
    highest = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    sums = tl.zeros((TILE, VALUES), tl.float32)
    end = tl.minimum(keys, (tl.program_id(1) + 1) * TILE) if CAUSAL else keys
    for begin in range(0, end, TILE):
        s = begin + tl.arange(0, TILE)
        k_row = K + b * kb + (h * G // heads) * kh + s.to(tl.int64) * kt
        scores = _tile_scores(
            q_row, k_row, a_row, as_, t, s, queries, keys, width, scale, CAUSAL, BIASED, TILE, STEP
        )
        new = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(new == float("-inf"), 0.0, new)  # −∞ − −∞ is no number
        weights, shrink = tl.exp(scores - base[:, None]), tl.exp(highest - base)
        v_row = V + b * vb + (h * Y // heads) * vh + s.to(tl.int64) * vt
        is_value = (s < keys)[:, None] & (c < value_width)[None, :]
        v = tl.load(v_row[:, None] + c[None, :], is_value, 0.0)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        highest = new
    o_row = OUT + b * ob + h * oh + t.to(tl.int64) * ot
    is_output = (t < queries)[:, None] & (c < value_width)[None, :]
    output = sums / total[:, None]
    tl.store(o_row[:, None] + c[None, :], output.to(OUT.dtype.element_ty), is_output)
    tl.store(LSE + (b * heads + h) * queries + t, highest + tl.log(total), t < queries)


@triton.jit
def _tile_gradient(
    q_row, k_row, v_row, a_row, do_row, lse_row, delta_row, as_, t, s,
    queries, keys, width, value_width, scale,
    CAUSAL: tl.constexpr, BIASED: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Return the weights of a tile, the gradient of its scores, and that of the output."""
    c = tl.arange(0, VALUES)
    scores = _tile_scores(
        q_row, k_row, a_row, as_, t, s, queries, keys, width, scale, CAUSAL, BIASED, TILE, STEP
    )
    lse = tl.load(lse_row + t, t < queries, 0.0)
    delta = tl.load(delta_row + t, t < queries, 0.0)
    weights = tl.exp(scores - lse[:, None])
    is_value, is_output = c < value_width, (t < queries)[:, None]
    do = tl.load(do_row[:, None] + c[None, :], is_output & is_value[None, :], 0.0)
    v = tl.load(v_row[:, None] + c[None, :], (s < keys)[:, None] & is_value[None, :], 0.0)
    weights_gradient = tl.dot(do, tl.trans(v), input_precision="ieee")
    return weights, weights * (weights_gradient - delta[:, None]) * scale, do


@triton.jit
def _dq(
    Q, K, V, A, DO, LSE, DELTA, DQ,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, ab, ah, at, as_, ob, oh, ot,
    heads, queries, keys, width, value_width, scale, G: tl.constexpr, Y: tl.constexpr,
    CAUSAL: tl.constexpr, BIASED: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
    PART: tl.constexpr, VALUES: tl.constexpr,
):
    """Compute a part of E of the gradient of a tile of queries of one head."""
    b, h = tl.program_id(0).to(tl.int64) // heads, tl.program_id(0).to(tl.int64) % heads
    t = tl.program_id(1) * TILE + tl.arange(0, TILE)
    e = tl.program_id(2) * PART + tl.arange(0, PART)
    q_row = Q + b * qb + h * qh + t.to(tl.int64) * qt
    a_row = A + b * ab + h * ah + t.to(tl.int64) * at
    do_row = DO + b * ob + h * oh + t.to(tl.int64) * ot
    first = (b * heads + h) * queries
    sums = tl.zeros((TILE, PART), tl.float32)
    end = tl.minimum(keys, (tl.program_id(1) + 1) * TILE) if CAUSAL else keys
    for begin in range(0, end, TILE):
        s = begin + tl.arange(0, TILE)
        k_row = K + b * kb + (h * G // heads) * kh + s.to(tl.int64) * kt
        v_row = V + b * vb + (h * Y // heads) * vh + s.to(tl.int64) * vt
        _, gradient, _ = _tile_gradient(
            q_row, k_row, v_row, a_row, do_row, LSE + first, DELTA + first, as_, t, s,
            queries, keys, width, value_width, scale, CAUSAL, BIASED, TILE, STEP, VALUES,
        )
        k = tl.load(k_row[:, None] + e[None, :], (s < keys)[:, None] & (e < width)[None, :], 0.0)
        sums += tl.dot(gradient.to(k.dtype), k, input_precision="ieee")
    rows = DQ + (first + t.to(tl.int64)) * width
    is_query = (t < queries)[:, None] & (e < width)[None, :]
    tl.store(rows[:, None] + e[None, :], sums.to(DQ.dtype.element_ty), is_query)


@triton.jit
def _dk(
    Q, K, V, A, DO, LSE, DELTA, DK,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, ab, ah, at, as_, ob, oh, ot,
    heads, queries, keys, width, value_width, scale, G: tl.constexpr, Y: tl.constexpr,
    CAUSAL: tl.constexpr, BIASED: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
    PART: tl.constexpr, VALUES: tl.constexpr,
):
    """Compute a part of E of the gradient of a tile of keys, summed over the heads of the key."""
    b, g = tl.program_id(0).to(tl.int64) // G, tl.program_id(0).to(tl.int64) % G
    s = tl.program_id(1) * TILE + tl.arange(0, TILE)
    e = tl.program_id(2) * PART + tl.arange(0, PART)
    k_row = K + b * kb + g * kh + s.to(tl.int64) * kt
    sums = tl.zeros((TILE, PART), tl.float32)
    for member in range(0, heads // G):
        h = g * (heads // G) + member
        v_row = V + b * vb + (h * Y // heads) * vh + s.to(tl.int64) * vt
        first = (b * heads + h) * queries
        for begin in range(tl.program_id(1) * TILE if CAUSAL else 0, queries, TILE):
            t = begin + tl.arange(0, TILE)
            q_row = Q + b * qb + h * qh + t.to(tl.int64) * qt
            a_row = A + b * ab + h * ah + t.to(tl.int64) * at
            do_row = DO + b * ob + h * oh + t.to(tl.int64) * ot
            _, gradient, _ = _tile_gradient(
                q_row, k_row, v_row, a_row, do_row, LSE + first, DELTA + first, as_, t, s,
                queries, keys, width, value_width, scale, CAUSAL, BIASED, TILE, STEP, VALUES,
            )
            is_query = (t < queries)[:, None] & (e < width)[None, :]
            q = tl.load(q_row[:, None] + e[None, :], is_query, 0.0)
            sums += tl.dot(tl.trans(gradient.to(q.dtype)), q, input_precision="ieee")
    rows = DK + ((b * G + g) * keys + s.to(tl.int64)) * width
    is_key = (s < keys)[:, None] & (e < width)[None, :]
    tl.store(rows[:, None] + e[None, :], sums.to(DK.dtype.element_ty), is_key)


@triton.jit
def _dv(
    Q, K, V, A, DO, LSE, DELTA, DV,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, ab, ah, at, as_, ob, oh, ot,
    heads, queries, keys, width, value_width, scale, G: tl.constexpr, Y: tl.constexpr,
    CAUSAL: tl.constexpr, BIASED: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Compute the gradient of a tile of values, summed over the heads of the value."""
    b, y = tl.program_id(0).to(tl.int64) // Y, tl.program_id(0).to(tl.int64) % Y
    s = tl.program_id(1) * TILE + tl.arange(0, TILE)
    c = tl.arange(0, VALUES)
    v_row = V + b * vb + y * vh + s.to(tl.int64) * vt
    sums = tl.zeros((TILE, VALUES), tl.float32)
    for member in range(0, heads // Y):
        h = y * (heads // Y) + member
        k_row = K + b * kb + (h * G // heads) * kh + s.to(tl.int64) * kt
        first = (b * heads + h) * queries
        for begin in range(tl.program_id(1) * TILE if CAUSAL else 0, queries, TILE):
            t = begin + tl.arange(0, TILE)
            q_row = Q + b * qb + h * qh + t.to(tl.int64) * qt
            a_row = A + b * ab + h * ah + t.to(tl.int64) * at
            do_row = DO + b * ob + h * oh + t.to(tl.int64) * ot
            weights, _, do = _tile_gradient(
                q_row, k_row, v_row, a_row, do_row, LSE + first, DELTA + first, as_, t, s,
                queries, keys, width, value_width, scale, CAUSAL, BIASED, TILE, STEP, VALUES,
            )
            sums += tl.dot(tl.trans(weights.to(do.dtype)), do, input_precision="ieee")
    rows = DV + ((b * Y + y) * keys + s.to(tl.int64)) * value_width
    is_value = (s < keys)[:, None] & (c < value_width)[None, :]
    tl.store(rows[:, None] + c[None, :], sums.to(DV.dtype.element_ty), is_value)
