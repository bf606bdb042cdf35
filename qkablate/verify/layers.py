"""Checks of any layer: cost formulas, caches, causality, and its circuits as matrices."""

import copy

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from qkablate.attention import Attention, Cache
from qkablate.attention.kernels.dispatch import attend
from qkablate.attention.projection import project as circuits
from qkablate.attention.qk.merged import MergedQK
from qkablate.attention.qk.unprojected import Uniform
from qkablate.models.cost import compute_attention_cost
from qkablate.verify.check import (
    Deviation,
    center_rows,
    check,
    has_circuit,
    largest,
    max_violation,
    probe_loss,
    rel_diff,
    scores,
)

DECODER = ("decoder",)


@check(
    "parameters",
    "the formula gives the number of parameters",
    lambda layer: bool(layer.qk.params and layer.ov.params and not layer.qk.spec.bias),
)
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    counted = sum(p.numel() for p in layer.parameters())
    return Deviation(abs(counted - sum(part.count_params() for part in layer.parts)), tolerance=0)


@check("FLOPs", "the formula agrees with torch's FlopCounterMode")
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    plain = copy.copy(layer)
    # FlopCounterMode counts all matmuls of these kernels.
    plain.kernel = "static" if layer.kernel == "static" else "folded"
    batch, length, _ = x_BTD.shape
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        plain(x_BTD, causal=False)
    tokens = batch * length
    cost = compute_attention_cost(layer, keys=length, context=length, tokens_per_pass=tokens)
    return Deviation(abs(counter.get_total_flops() - round(cost.flops * tokens)), tolerance=0)


@check("KV cache", "the formula gives the size of a decoder's cache", sites=DECODER)
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    cache = Cache(x_BTD.shape[1])
    layer(x_BTD, cache=cache)
    cached = cache.bytes_per_token() // x_BTD.element_size()
    return Deviation(abs(cached - layer.cached_per_token), tolerance=0)


@check("decoding", "decoding token by token equals a full forward pass", sites=DECODER)
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    cache = Cache(x_BTD.shape[1])
    first = x_BTD.shape[1] // 2
    pieces = [x_BTD[:, :first], *x_BTD[:, first:].split(1, dim=1)]
    decoded_BTD = torch.cat([layer(piece, cache=cache) for piece in pieces], 1)
    return Deviation(rel_diff(decoded_BTD, layer(x_BTD)))


@check("causality", "outputs depend on earlier tokens and not on later ones", sites=DECODER)
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    half = x_BTD.shape[1] // 2
    later_BTD, earlier_BTD = x_BTD.clone(), x_BTD.clone()
    later_BTD[:, half:].square_()
    earlier_BTD[:, 0] += 1
    out_BTD = layer(x_BTD)
    depends = rel_diff(layer(earlier_BTD)[:, -1], out_BTD[:, -1]) > 1e-9
    residual = rel_diff(layer(later_BTD)[:, :half], out_BTD[:, :half])
    return Deviation(residual if depends else 1.0)


@check("B_h", "the scores are scale · (x_iᵀ B_h x_j + u_h·x_j), up to a shift per row", has_circuit)
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    b_HDD, u_HD = layer.qk.circuit()
    x_B1TD = x_BTD.unsqueeze(1)
    s_BHTS = x_B1TD @ b_HDD @ x_B1TD.mT
    if u_HD is not None:
        s_BHTS = s_BHTS + (x_B1TD @ u_HD.unsqueeze(-1)).mT
    ours = center_rows(scores(layer, x_BTD))
    return Deviation(rel_diff(ours, center_rows(layer.scale * s_BHTS)))


@check("M_h", "the layer writes Σ_h A_h X M_h, up to a constant")
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    m_HDD = layer.ov.circuit(layer.qk)
    averaged_BHTD = layer.weights(x_BTD) @ x_BTD.unsqueeze(1)
    written_BTD = layer(x_BTD) - layer(torch.zeros_like(x_BTD))
    return Deviation(rel_diff(written_BTD, (averaged_BHTD @ m_HDD).sum(1)))


@check(
    "merged twin", "merged with W_h = B_h gives the same outputs and input gradients", has_circuit
)
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    merged = MergedQK(layer.qk.spec).to(x_BTD)
    circuits.convert(layer.qk, merged)
    results = []
    for qk in (layer.qk, merged):
        x_BTD = x_BTD.detach().requires_grad_()
        q_BHTE, k_BGSE = qk(x_BTD, x_BTD)
        v_BGSV = layer.ov.values(x_BTD, layer.qk.keys(x_BTD))
        o_BHTV = attend(q_BHTE, k_BGSE, v_BGSV, scale=qk.scale, causal=True, kernel="folded")
        out_BTD = layer.ov.write(o_BHTV)
        results.append((out_BTD, *torch.autograd.grad(probe_loss(out_BTD), x_BTD)))
    residual = largest(*(rel_diff(ours, theirs) for ours, theirs in zip(*results, strict=True)))
    return Deviation(residual, length=x_BTD.shape[1] * x_BTD.shape[-1])


@check(
    "latent",
    "keys by head, and queries that absorb W_k, give the same outputs and input gradients",
    lambda layer: layer.latent_qk is not None,
    sites=("decoder", "encoder", "cross"),
)
def _(layer: Attention, x_BTD: Tensor, y_BSD: Tensor | None = None) -> Deviation:
    x_BTD = x_BTD.detach().requires_grad_()
    keys_BSD = x_BTD if y_BSD is None else y_BSD
    v_BGSV = layer.ov.values(keys_BSD, layer.qk.keys(keys_BSD))
    v_BHSV = v_BGSV.repeat_interleave(layer.qk.spec.heads // v_BGSV.shape[1], 1)
    # The weights are of queries that absorb W_k, as a decoder's are; the layer computes by head.
    absorbed_BTD = layer.ov.write(layer.weights(x_BTD, y_BSD, causal=False) @ v_BHSV)
    both = (layer(x_BTD, y_BSD, causal=False), absorbed_BTD)
    grads = (torch.autograd.grad(probe_loss(out_BTD), x_BTD)[0] for out_BTD in both)
    return Deviation(largest(rel_diff(*both), rel_diff(*grads)), length=x_BTD.shape[1])


@check(
    "rank",
    "the rank of a head's scores is at most the width of its factors",
    lambda layer: (
        has_circuit(layer) and layer.qk.cached == "k" and layer.qk.width < layer.qk.spec.d_model
    ),
)
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    bound = layer.qk.width
    generator = torch.Generator().manual_seed(0)
    longer_1TD = torch.randn(1, bound + 8, x_BTD.shape[-1], generator=generator).to(x_BTD)
    size_BHN = torch.linalg.svdvals(center_rows(scores(layer, longer_1TD)))
    return Deviation(max_violation(size_BHN[..., bound] / size_BHN[..., 0]))


@check(
    "symmetric part",
    "‖sym B‖² / ‖B‖² = ½ (1 + tr B² / ‖B‖²), from the low-rank factors",
    has_circuit,
)
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    q_HDE, k_HDE, _ = layer.qk.affine_maps()
    b_HDD, _ = layer.qk.circuit()
    size_H = b_HDD.square().sum((1, 2))
    direct_H = ((b_HDD + b_HDD.mT) / 2).square().sum((1, 2)) / size_H
    cross_HEE = k_HDE.mT @ q_HDE
    trace_H = cross_HEE.mT.mul(cross_HEE).sum((1, 2))
    size_from_factors_H = ((k_HDE.mT @ k_HDE) * (q_HDE.mT @ q_HDE)).sum((1, 2))
    from_factors_H = 0.5 * (1 + trace_H / size_from_factors_H)
    # Relative to 1, because both sides are 0 where B is antisymmetric.
    residual = rel_diff(from_factors_H, direct_H, size=torch.ones(()))
    return Deviation(residual, length=x_BTD.shape[-1] ** 2)


@check(
    "no content", "attention weights do not depend on the text", lambda layer: layer.qk.width == 0
)
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    weights_BHTS = layer.weights(x_BTD)
    return Deviation(rel_diff(weights_BHTS, layer.weights(x_BTD.flip(1) + 1)), length=1)


@check(
    "averages",
    "without scores A_ij = 1/(i + 1)",
    lambda layer: type(layer.qk) is Uniform and not layer.mask_self and layer.position != "alibi",
    sites=DECODER,
)
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    weights_BHTS = layer.weights(x_BTD)
    count_T1 = torch.arange(1, x_BTD.shape[1] + 1, device=x_BTD.device).unsqueeze(1)
    expected_TS = torch.ones_like(weights_BHTS[0, 0]).tril() / count_T1
    return Deviation(rel_diff(weights_BHTS, expected_TS.expand_as(weights_BHTS)), length=1)


@check(
    "self mask",
    "no token attends to itself, except the first",
    lambda layer: layer.mask_self,
    sites=DECODER,
)
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    own_BHT = layer.weights(x_BTD).diagonal(dim1=-2, dim2=-1)
    return Deviation(max_violation(own_BHT[..., 1:]), tolerance=0)
