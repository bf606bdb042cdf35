"""The checks of any layer: what it costs, what it may see, and that its circuit is what it says."""

import copy

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from qkablate.attention import Attention, Cache
from qkablate.attention.kernels.dispatch import attend
from qkablate.attention.projection import convert as circuits
from qkablate.attention.qk.contentless import Uniform
from qkablate.attention.qk.merged import MergedQK
from qkablate.models.cost import attention_cost
from qkablate.verify.check import (
    Found,
    apart,
    check,
    largest,
    pull,
    scores,
    up_to_a_row_shift,
    worst,
)


def has_circuit(layer: Attention) -> bool:
    return not layer.no_circuit


@check(
    "parameters",
    "the formula counts what is there",
    lambda layer: bool(layer.qk.params and layer.ov.params and not layer.qk.spec.bias),
)
def _(layer: Attention, x_BTD: Tensor) -> Found:
    parts = [part for part in (layer.qk, layer.ov, layer.norm) if part is not None]
    counted = sum(p.numel() for p in layer.parameters())
    return Found(abs(counted - sum(part.count() for part in parts)), tolerance=0)


@check("FLOPs", "the formula counts what torch's FlopCounterMode counts")
def _(layer: Attention, x_BTD: Tensor) -> Found:
    plain = copy.copy(layer)
    plain.kernel = "static" if layer.kernel == "static" else "folded"  # which hides no product
    batch, length, _ = x_BTD.shape
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        plain(x_BTD, causal=False)
    tokens = batch * length
    cost = attention_cost(layer, keys=length, context=length, tokens_per_pass=tokens)
    return Found(abs(counter.get_total_flops() - round(cost.flops * tokens)), tolerance=0)


@check("KV cache", "the formula counts what a decoder keeps")
def _(layer: Attention, x_BTD: Tensor) -> Found:
    cache = Cache(x_BTD.shape[1])
    layer(x_BTD, cache=cache)
    kept = cache.bytes_per_token() // x_BTD.element_size()
    return Found(abs(kept - layer.cached_per_token), tolerance=0)


@check("decoding", "token by token from the cache = all at once")
def _(layer: Attention, x_BTD: Tensor) -> Found:
    cache = Cache(x_BTD.shape[1])
    first = x_BTD.shape[1] // 2
    pieces = [x_BTD[:, :first], *x_BTD[:, first:].split(1, dim=1)]
    decoded_BTD = torch.cat([layer(piece, cache=cache) for piece in pieces], 1)
    return Found(apart(decoded_BTD, layer(x_BTD)), length=x_BTD.shape[-1])


@check("causality", "what comes later changes nothing, and what comes before does")
def _(layer: Attention, x_BTD: Tensor) -> Found:
    half = x_BTD.shape[1] // 2
    later_BTD, earlier_BTD = x_BTD.clone(), x_BTD.clone()
    later_BTD[:, half:].square_()
    earlier_BTD[:, 0] += 1
    out_BTD = layer(x_BTD)
    seen = apart(layer(earlier_BTD)[:, -1], out_BTD[:, -1]) > 1e-9
    residual = apart(layer(later_BTD)[:, :half], out_BTD[:, :half])
    return Found(residual if seen else 1.0, length=x_BTD.shape[-1])


@check(
    "B_h", "the scores are scale · (x_iᵀ B_h x_j + u_h·x_j), but for a shift per row", has_circuit
)
def _(layer: Attention, x_BTD: Tensor) -> Found:
    b_HDD, u_HD = layer.qk.circuit()
    x_B1TD = x_BTD.unsqueeze(1)
    s_BHTS = x_B1TD @ b_HDD @ x_B1TD.mT
    if u_HD is not None:
        s_BHTS = s_BHTS + (x_B1TD @ u_HD.unsqueeze(-1)).mT
    ours = up_to_a_row_shift(scores(layer, x_BTD))
    return Found(apart(ours, up_to_a_row_shift(layer.scale * s_BHTS)), length=x_BTD.shape[-1])


@check("M_h", "the layer writes Σ_h A_h X M_h, up to a constant")
def _(layer: Attention, x_BTD: Tensor) -> Found:
    m_HDD = layer.ov.circuit(layer.qk)
    averaged_BHTD = layer.weights(x_BTD) @ x_BTD.unsqueeze(1)
    written_BTD = layer(x_BTD) - layer(torch.zeros_like(x_BTD))
    return Found(apart(written_BTD, (averaged_BHTD @ m_HDD).sum(1)), length=x_BTD.shape[-1])


@check("merged twin", "merged with W_h = B_h: outputs and gradients of the input", has_circuit)
def _(layer: Attention, x_BTD: Tensor) -> Found:
    merged = MergedQK(layer.qk.spec).to(x_BTD)
    circuits.convert(layer.qk, merged)
    results = []
    for qk in (layer.qk, merged):
        x_BTD = x_BTD.detach().requires_grad_()
        q_BHTE, k_BGSE = qk(x_BTD, x_BTD)
        v_BGSV = layer.ov.values(x_BTD, layer.qk.keys(x_BTD))
        o_BHTV = attend(q_BHTE, k_BGSE, v_BGSV, scale=qk.scale, causal=True, kernel="folded")
        out_BTD = layer.ov.write(o_BHTV)
        results.append((out_BTD, *torch.autograd.grad(pull(out_BTD), x_BTD)))
    residual = largest(*(apart(ours, theirs) for ours, theirs in zip(*results, strict=True)))
    return Found(residual, length=x_BTD.shape[1] * x_BTD.shape[-1])


@check(
    "rank",
    "no head's scores have a higher rank than its factors are wide",
    lambda layer: (
        has_circuit(layer) and layer.qk.cached == "k" and layer.qk.width < layer.qk.spec.d_model
    ),
)
def _(layer: Attention, x_BTD: Tensor) -> Found:
    bound = layer.qk.width
    generator = torch.Generator().manual_seed(0)
    longer_1TD = torch.randn(1, bound + 8, x_BTD.shape[-1], generator=generator).to(x_BTD)
    size_BHN = torch.linalg.svdvals(up_to_a_row_shift(scores(layer, longer_1TD)))
    return Found(worst(size_BHN[..., bound] / size_BHN[..., 0]), length=x_BTD.shape[-1])


@check(
    "symmetric part", "‖sym B‖² / ‖B‖² = ½ (1 + tr B² / ‖B‖²), from the thin halves", has_circuit
)
def _(layer: Attention, x_BTD: Tensor) -> Found:
    q_HDE, k_HDE, _ = layer.qk.halves()
    b_HDD, _ = layer.qk.circuit()
    size_H = b_HDD.square().sum((1, 2))
    direct_H = ((b_HDD + b_HDD.mT) / 2).square().sum((1, 2)) / size_H
    cross_HEE = k_HDE.mT @ q_HDE
    trace_H = cross_HEE.mT.mul(cross_HEE).sum((1, 2))
    thin_H = ((k_HDE.mT @ k_HDE) * (q_HDE.mT @ q_HDE)).sum((1, 2))
    # Parts of 1: where B is antisymmetric both are 0, and not to be divided by.
    one = torch.ones(())
    return Found(apart(0.5 * (1 + trace_H / thin_H), direct_H, one), length=x_BTD.shape[-1] ** 2)


@check(
    "no content",
    "scores without content: other text, same weights",
    lambda layer: layer.qk.width == 0,
)
def _(layer: Attention, x_BTD: Tensor) -> Found:
    weights_BHTS = layer.weights(x_BTD)
    return Found(apart(weights_BHTS, layer.weights(x_BTD.flip(1) + 1)))


@check(
    "averages",
    "no scores: A_ij = 1/(i + 1)",
    lambda layer: type(layer.qk) is Uniform and not layer.mask_self and layer.position != "alibi",
)
def _(layer: Attention, x_BTD: Tensor) -> Found:
    weights_BHTS = layer.weights(x_BTD)
    count_T1 = torch.arange(1, x_BTD.shape[1] + 1, device=x_BTD.device).unsqueeze(1)
    expected_TS = torch.ones_like(weights_BHTS[0, 0]).tril() / count_T1
    return Found(apart(weights_BHTS, expected_TS.expand_as(weights_BHTS)))


@check("self mask", "no token but a lonely one sees itself", lambda layer: layer.mask_self)
def _(layer: Attention, x_BTD: Tensor) -> Found:
    own_BHT = layer.weights(x_BTD).diagonal(dim1=-2, dim2=-1)
    return Found(worst(own_BHT[..., 1:]), tolerance=0)
