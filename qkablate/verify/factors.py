"""Checks of products of factors: gradients, norms, biases, order of matmuls.

Shape suffixes as in qkablate/attention/qk/base.py.
"""

import copy

import torch
from torch import Tensor

from qkablate.attention import Attention
from qkablate.attention.linalg import truncated_svd
from qkablate.attention.ov.factored import FourOV, SeparateOV
from qkablate.attention.projection import project as circuits
from qkablate.attention.qk.factored import LowRankQK, ReassociatedQK, SeparateQK, WideQK
from qkablate.attention.qk.merged import MergedQK
from qkablate.attention.tensors import by_head
from qkablate.verify.check import Deviation, check, largest, max_violation, probe_loss, rel_diff

STANDARD_FAMILY = (SeparateQK, LowRankQK, WideQK, ReassociatedQK)


def is_factored(layer: Attention) -> bool:
    """Return whether the scores are a product of free W_q and W_k, and keys are not values."""
    return (
        isinstance(layer.qk, SeparateQK) and not layer.no_circuit_reason and layer.ov.cached != "k"
    )


def is_standard_family(layer: Attention) -> bool:
    """Return whether the QK circuit is standard's, perhaps of another rank or order."""
    return is_factored(layer) and type(layer.qk) in STANDARD_FAMILY


def qk_factors(layer: Attention) -> tuple[SeparateQK, Tensor, Tensor]:
    """Return the QK circuit with W_q and W_k by head."""
    assert isinstance(layer.qk, SeparateQK)
    qk = layer.qk
    # `key_heads` and `width` of ReassociatedQK describe its keys, x; its factors are standard's.
    width = qk.w_q.shape[1] // qk.spec.heads
    return qk, by_head(qk.w_q, qk.spec.heads), by_head(qk.w_k, qk.w_k.shape[1] // width)


def gradients(layer: Attention, x_BTD: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of a fixed loss of the output; zeros where it does not depend on one."""
    return torch.autograd.grad(probe_loss(layer(x_BTD)), parameters, materialize_grads=True)


@check("gradients", "∂W_q = (∂W) W_k and ∂W_k = (∂W)ᵀ W_q of the merged W", is_standard_family)
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    qk, w_q_HDE, w_k_HDE = qk_factors(layer)
    merged = MergedQK(qk.spec).to(x_BTD)
    circuits.convert(qk, merged)
    grads = []
    merged_parameters = [merged.w_qk] if merged.u is None else [merged.w_qk, merged.u]
    for form, parameters in ((qk, [qk.w_q, qk.w_k]), (merged, merged_parameters)):
        q_BHTE, k_BGSE = form(x_BTD, x_BTD)
        weights = (form.scale * q_BHTE @ k_BGSE.mT).softmax(-1)
        grads.append(torch.autograd.grad(probe_loss(weights), parameters))
    ratio = qk.scale / merged.scale
    (d_q, d_k), (d_w, *d_u) = grads
    g_HDD = by_head(d_w, qk.spec.heads) * ratio
    expected_k = g_HDD.mT @ w_q_HDE
    if d_u and qk.b_q is not None:  # W_k also enters u = W_k b_q
        d_u_HD1 = d_u[0].view(qk.spec.heads, -1, 1) * ratio
        expected_k = expected_k + d_u_HD1 @ qk.b_q.view(qk.spec.heads, 1, -1)
    residual = largest(
        rel_diff(by_head(d_q, qk.spec.heads), g_HDD @ w_k_HDE),
        rel_diff(by_head(d_k, qk.spec.heads), expected_k),
    )
    return Deviation(residual, length=x_BTD.shape[1] * x_BTD.shape[-1])


@check(
    "nuclear norm",
    "½(‖W_q‖² + ‖W_k‖²) ≥ ‖W_q W_kᵀ‖_*, with equality if balanced",
    is_standard_family,
)
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    _, w_q_HDE, w_k_HDE = qk_factors(layer)
    nuclear_H = nuclear_norm(w_q_HDE, w_k_HDE)
    half_H = (w_q_HDE.square().sum((1, 2)) + w_k_HDE.square().sum((1, 2))) / 2
    too_small = max_violation((nuclear_H - half_H) / nuclear_H)
    left, right = truncated_svd(w_q_HDE @ w_k_HDE.mT, w_q_HDE.shape[-1])
    balanced_H = (left.square().sum((1, 2)) + right.square().sum((1, 2))) / 2
    return Deviation(largest(too_small, rel_diff(balanced_H, nuclear_H)))


def nuclear_norm(w_q_HDE: Tensor, w_k_HDE: Tensor) -> Tensor:
    """Return the nuclear norm of W_q W_kᵀ per head, from E × E matrices where smaller."""
    r_q, r_k = (torch.linalg.qr(w)[1] for w in (w_q_HDE, w_k_HDE))
    values_HE: Tensor = torch.linalg.svdvals(r_q @ r_k.mT)
    return values_HE.sum(-1)


def _has_key_bias(layer: Attention) -> bool:
    return is_factored(layer) and type(layer.qk) is not ReassociatedQK and layer.qk.spec.bias


@check("key bias", "b_k does not change the output and has zero gradient", _has_key_bias)
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.get_parameter("qk.b_k").add_(1)
    biases = (layer.get_parameter(f"qk.{name}") for name in ("b_k", "b_q"))
    d_k, d_q = gradients(layer, x_BTD, *biases)
    too_large = max_violation(d_k.abs() / d_q.abs().max())
    residual = largest(rel_diff(other(x_BTD), layer(x_BTD)), too_large)
    return Deviation(residual, length=x_BTD.shape[1] * x_BTD.shape[-1])


@check(
    "value bias",
    "b_v is equivalent to adding b_v W_o to b_o",
    lambda layer: type(layer.ov) is SeparateOV and layer.qk.spec.bias,
)
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    other = copy.deepcopy(layer)
    w_o, b_v, b_o = (other.ov.get_parameter(name) for name in ("w_o", "b_v", "b_o"))
    with torch.no_grad():
        b_o.add_(b_v @ w_o)
        b_v.zero_()
    return Deviation(rel_diff(other(x_BTD), layer(x_BTD)))


@check("absorbed", "(A X) W_v = A (X W_v)", lambda layer: isinstance(layer.ov, SeparateOV))
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    ov, a_BHTS = layer.ov, layer.weights(x_BTD)
    assert isinstance(ov, SeparateOV)
    per_head = ov.spec.heads // ov.value_heads
    w_v_HDV = by_head(ov.w_v, ov.value_heads).repeat_interleave(per_head, 0)
    average_BHTD = a_BHTS @ x_BTD.unsqueeze(1)
    if isinstance(ov, FourOV):
        average_BHTD = average_BHTD @ ov.a_v
    o_BHTV = average_BHTD @ w_v_HDV
    if ov.b_v is not None:  # the weights sum to 1
        o_BHTV = o_BHTV + ov.b_v.view(ov.value_heads, 1, -1).repeat_interleave(per_head, 0)
    return Deviation(rel_diff(ov.write(o_BHTV), layer(x_BTD)))
