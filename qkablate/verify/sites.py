"""Checks of layers that are not a decoder's: an encoder's, and cross-attention of two streams.

Shape suffixes as in qkablate/attention/qk/base.py.
"""

import copy

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from qkablate.attention import Attention, Cache
from qkablate.attention.kernels.dispatch import attend
from qkablate.attention.projection import project as circuits
from qkablate.attention.qk.merged import MergedQK
from qkablate.models.cost import compute_attention_cost
from qkablate.verify.check import (
    Deviation,
    center_rows,
    check,
    has_circuit,
    largest,
    probe_loss,
    rel_diff,
    scores,
)
from qkablate.verify.factors import is_factored
from qkablate.verify.gauge import change_gauge

ENCODER, CROSS = ("encoder",), ("cross",)


@check("sees all", "outputs depend on earlier tokens and on later ones", sites=ENCODER)
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    out_BTD, depends = layer(x_BTD, causal=False), []
    for changed, seen in ((0, -1), (-1, 0)):
        other_BTD = x_BTD.clone()
        other_BTD[:, changed] += 1
        new_BTD = layer(other_BTD, causal=False)
        depends.append(rel_diff(new_BTD[:, seen], out_BTD[:, seen]) > 1e-9)
    return Deviation(0.0 if all(depends) else 1.0)


@check("both streams", "a query's output depends on all of the source and on no query", sites=CROSS)
def _(layer: Attention, x_BTD: Tensor, y_BSD: Tensor) -> Deviation:
    out_BTD = layer(x_BTD, y_BSD, causal=False)
    others_BTD = x_BTD.clone()
    others_BTD[:, 1:].square_()
    residual = rel_diff(layer(others_BTD, y_BSD, causal=False)[:, 0], out_BTD[:, 0])
    for position in (0, -1):
        source_BSD = y_BSD.clone()
        source_BSD[:, position] += 1
        new_BTD = layer(x_BTD, source_BSD, causal=False)
        changes_BT = (new_BTD - out_BTD).abs().amax(-1) / out_BTD.abs().max()
        if not changes_BT.min() > 1e-9:
            return Deviation(1.0)
    return Deviation(residual)


@check("FLOPs of two streams", "the formula agrees with torch's FlopCounterMode", sites=CROSS)
def _(layer: Attention, x_BTD: Tensor, y_BSD: Tensor) -> Deviation:
    plain = copy.copy(layer)
    plain.kernel = "static" if layer.kernel == "static" else "folded"  # whose matmuls are counted
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        plain(x_BTD, y_BSD, causal=False)
    queries, keys, tokens = x_BTD.shape[1], y_BSD.shape[1], x_BTD.shape[:2].numel()
    cost = compute_attention_cost(
        layer, keys=keys, context=queries, tokens_per_pass=tokens, source=keys
    )
    return Deviation(abs(counter.get_total_flops() - round(cost.flops * tokens)), tolerance=0)


@check("source cache", "the formula gives what a decoder caches per token of a source", sites=CROSS)
def _(layer: Attention, x_BTD: Tensor, y_BSD: Tensor) -> Deviation:
    cache = Cache(y_BSD.shape[1])
    layer(x_BTD, y_BSD, causal=False, cache=cache)
    cached = cache.bytes_per_token() // y_BSD.element_size()
    return Deviation(abs(cached - layer.cached_per_token), tolerance=0)


@check(
    "B_h of two streams",
    "the scores are scale · (x_iᵀ B_h y_j + u_h·y_j), up to a shift per row",
    has_circuit,
    sites=CROSS,
)
def _(layer: Attention, x_BTD: Tensor, y_BSD: Tensor) -> Deviation:
    b_HDD, u_HD = layer.qk.circuit()
    y_B1SD = y_BSD.unsqueeze(1)
    s_BHTS = x_BTD.unsqueeze(1) @ b_HDD @ y_B1SD.mT
    if u_HD is not None:
        s_BHTS = s_BHTS + (y_B1SD @ u_HD.unsqueeze(-1)).mT
    ours = center_rows(scores(layer, x_BTD, y_BSD))
    return Deviation(rel_diff(ours, center_rows(layer.scale * s_BHTS)))


@check("M_h of two streams", "the layer writes Σ_h A_h Y M_h, up to a constant", sites=CROSS)
def _(layer: Attention, x_BTD: Tensor, y_BSD: Tensor) -> Deviation:
    m_HDD = layer.ov.circuit(layer.qk)
    averaged_BHTD = layer.weights(x_BTD, y_BSD, causal=False) @ y_BSD.unsqueeze(1)
    nothing_BTD = layer(x_BTD, torch.zeros_like(y_BSD), causal=False)
    written_BTD = layer(x_BTD, y_BSD, causal=False) - nothing_BTD
    return Deviation(rel_diff(written_BTD, (averaged_BHTD @ m_HDD).sum(1)))


@check(
    "merged twin of two streams",
    "merged with W_h = B_h gives the same outputs and gradients of both streams",
    has_circuit,
    sites=CROSS,
)
def _(layer: Attention, x_BTD: Tensor, y_BSD: Tensor) -> Deviation:
    merged = MergedQK(layer.qk.spec).to(x_BTD)
    circuits.convert(layer.qk, merged)
    results = []
    for qk in (layer.qk, merged):
        streams = [stream.detach().requires_grad_() for stream in (x_BTD, y_BSD)]
        q_BHTE, k_BGSE = qk(*streams)
        v_BGSV = layer.ov.values(streams[1], layer.qk.keys(streams[1]))
        o_BHTV = attend(q_BHTE, k_BGSE, v_BGSV, scale=qk.scale, causal=False, kernel="folded")
        out_BTD = layer.ov.write(o_BHTV)
        gradients = torch.autograd.grad(probe_loss(out_BTD), streams, materialize_grads=True)
        results.append((out_BTD, *gradients))
    residual = largest(*(rel_diff(ours, theirs) for ours, theirs in zip(*results, strict=True)))
    return Deviation(residual, length=y_BSD.shape[1] * y_BSD.shape[-1])


@check(
    "gauge of two streams",
    "W_q A, W_k A⁻ᵀ (and W_v B, B⁻¹ W_o): different weights, same outputs",
    is_factored,
    sites=CROSS,
)
def _(layer: Attention, x_BTD: Tensor, y_BSD: Tensor) -> Deviation:
    outputs = (one(x_BTD, y_BSD, causal=False) for one in (change_gauge(layer), layer))
    return Deviation(rel_diff(*outputs), length=16 * x_BTD.shape[-1])
