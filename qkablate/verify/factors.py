"""The checks of circuits that are products of factors: gradients, norms, biases, order of products.

Shape suffixes as in qkablate/attention/qk/base.py.
"""

import copy

import torch
from torch import Tensor

from qkablate.attention import Attention
from qkablate.attention.ov.factored import SeparateOV
from qkablate.attention.projection import convert as circuits
from qkablate.attention.qk.factored import LowRankQK, ReassociatedQK, SeparateQK, WideQK
from qkablate.attention.qk.merged import MergedQK
from qkablate.attention.spec import by_head, truncated_svd
from qkablate.verify.check import Found, apart, check, largest, pull, worst

PLAIN = (SeparateQK, LowRankQK, WideQK, ReassociatedQK)


def factored(layer: Attention) -> bool:
    """W_q and W_k, free, and nothing but a product between them and the scores."""
    return isinstance(layer.qk, SeparateQK) and not layer.no_circuit and layer.ov.cached != "k"


def plain(layer: Attention) -> bool:
    return factored(layer) and type(layer.qk) in PLAIN


def factors(layer: Attention) -> tuple[SeparateQK, Tensor, Tensor]:
    assert isinstance(layer.qk, SeparateQK)
    qk = layer.qk
    # The twin's `key_heads` and `width` are those of its keys, x; its factors are standard's.
    width = qk.w_q.shape[1] // qk.spec.heads
    return qk, by_head(qk.w_q, qk.spec.heads), by_head(qk.w_k, qk.w_k.shape[1] // width)


def gradients(layer: Attention, x_BTD: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(pull(layer(x_BTD)), parameters)


@check("gradients", "∂W_q = (∂W) W_k and ∂W_k = (∂W)ᵀ W_q of the merged W", plain)
def _(layer: Attention, x_BTD: Tensor) -> Found:
    qk, w_q_HDE, w_k_HDE = factors(layer)
    merged = MergedQK(qk.spec).to(x_BTD)
    circuits.convert(qk, merged)
    grads = []
    own = [merged.w_qk] if merged.u is None else [merged.w_qk, merged.u]
    for form, parameters in ((qk, [qk.w_q, qk.w_k]), (merged, own)):
        q_BHTE, k_BGSE = form(x_BTD, x_BTD)
        weights = (form.scale * q_BHTE @ k_BGSE.mT).softmax(-1)
        grads.append(torch.autograd.grad(pull(weights), parameters))
    ratio = qk.scale / merged.scale
    (d_q, d_k), (d_w, *d_u) = grads
    g_HDD = by_head(d_w, qk.spec.heads) * ratio
    expected_k = g_HDD.mT @ w_q_HDE
    if d_u and qk.b_q is not None:  # W_k stands in u = W_k b_q, too
        d_u_HD1 = d_u[0].view(qk.spec.heads, -1, 1) * ratio
        expected_k = expected_k + d_u_HD1 @ qk.b_q.view(qk.spec.heads, 1, -1)
    residual = largest(
        apart(by_head(d_q, qk.spec.heads), g_HDD @ w_k_HDE),
        apart(by_head(d_k, qk.spec.heads), expected_k),
    )
    return Found(residual, length=x_BTD.shape[1] * x_BTD.shape[-1])


@check("nuclear norm", "½(‖W_q‖² + ‖W_k‖²) ≥ ‖W_q W_kᵀ‖_*, equal when balanced", plain)
def _(layer: Attention, x_BTD: Tensor) -> Found:
    _, w_q_HDE, w_k_HDE = factors(layer)
    nuclear_H = nuclear(w_q_HDE, w_k_HDE)
    half_H = (w_q_HDE.square().sum((1, 2)) + w_k_HDE.square().sum((1, 2))) / 2
    too_small = worst((nuclear_H - half_H) / nuclear_H)
    left, right = truncated_svd(w_q_HDE @ w_k_HDE.mT, w_q_HDE.shape[-1])
    balanced_H = (left.square().sum((1, 2)) + right.square().sum((1, 2))) / 2
    return Found(largest(too_small, apart(balanced_H, nuclear_H)), length=x_BTD.shape[-1])


def nuclear(w_q_HDE: Tensor, w_k_HDE: Tensor) -> Tensor:
    """Sum of singular values of W_q W_kᵀ, from E × E where that is smaller."""
    r_q, r_k = (torch.linalg.qr(w)[1] for w in (w_q_HDE, w_k_HDE))
    return torch.linalg.svdvals(r_q @ r_k.mT).sum(-1)


@check(
    "key bias",
    "b_k changes no output and has no gradient",
    lambda layer: factored(layer) and type(layer.qk) is not ReassociatedQK and layer.qk.spec.bias,
)
def _(layer: Attention, x_BTD: Tensor) -> Found:
    other = copy.deepcopy(layer)
    qk, _, _ = factors(other)
    assert qk.b_k is not None
    with torch.no_grad():
        qk.b_k.add_(1)
    own, _, _ = factors(layer)
    assert own.b_k is not None
    assert own.b_q is not None
    d_k, d_q = gradients(layer, x_BTD, own.b_k, own.b_q)
    residual = largest(apart(other(x_BTD), layer(x_BTD)), worst(d_k.abs() / d_q.abs().max()))
    return Found(residual, length=x_BTD.shape[1] * x_BTD.shape[-1])


@check(
    "value bias",
    "b_v is b_o shifted by b_v W_o",
    lambda layer: type(layer.ov) is SeparateOV and layer.qk.spec.bias,
)
def _(layer: Attention, x_BTD: Tensor) -> Found:
    other = copy.deepcopy(layer)
    ov = other.ov
    assert isinstance(ov, SeparateOV)
    assert ov.b_v is not None
    assert ov.b_o is not None
    with torch.no_grad():
        ov.b_o.add_(ov.b_v @ ov.w_o)
        ov.b_v.zero_()
    return Found(apart(other(x_BTD), layer(x_BTD)), length=x_BTD.shape[-1])


@check("absorbed", "(A X) W_v = A (X W_v)", lambda layer: isinstance(layer.ov, SeparateOV))
def _(layer: Attention, x_BTD: Tensor) -> Found:
    ov, a_BHTS = layer.ov, layer.weights(x_BTD)
    assert isinstance(ov, SeparateOV)
    per_head = ov.spec.heads // ov.value_heads
    w_v_HDV = by_head(ov.w_v, ov.value_heads).repeat_interleave(per_head, 0)
    o_BHTV = (a_BHTS @ x_BTD.unsqueeze(1)) @ w_v_HDV
    if ov.b_v is not None:  # the weights sum to one
        o_BHTV = o_BHTV + ov.b_v.view(ov.value_heads, 1, -1).repeat_interleave(per_head, 0)
    return Found(apart(ov.write(o_BHTV), layer(x_BTD)), x_BTD.shape[-1])
