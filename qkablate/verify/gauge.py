"""Gauge symmetries of a product, the quantities that they conserve, and symmetric scores.

Shape suffixes as in qkablate/attention/qk/base.py; L for d_model and one row of biases.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from qkablate.attention import Attention
from qkablate.attention.modifiers import QKNorm, UnitKeys
from qkablate.attention.ov.factored import SeparateOV
from qkablate.attention.qk.factored import SeparateQK
from qkablate.attention.qk.merged import SymmetricQK
from qkablate.attention.qk.shared import SharedQK, SymDiag
from qkablate.attention.tensors import by_head, concat_heads
from qkablate.verify.check import (
    Deviation,
    check,
    largest,
    max_violation,
    rel_diff,
    scores,
)
from qkablate.verify.factors import (
    gradients,
    is_factored,
    is_standard_family,
    nuclear_norm,
    qk_factors,
)
from qkablate.verify.twins import has_qk


def gauge_matrix(size: int, like: Tensor) -> Tensor:
    """Return a fixed invertible A with cond(A) = 4."""
    generator = torch.Generator().manual_seed(size)
    noise = torch.randn(2, size, size, generator=generator, dtype=torch.float64)
    (left, right), _ = torch.linalg.qr(noise)
    a_EE: Tensor = (left * torch.linspace(0.5, 2, size) @ right).to(like)
    return a_EE


def change_gauge(layer: Attention) -> Attention:
    """Return a copy with W_q A, W_k A⁻ᵀ, and where the values are factored W_v B, B⁻¹ W_o."""
    other = copy.deepcopy(layer)
    qk, w_q_HDE, w_k_GDE = qk_factors(other)
    a_EE = gauge_matrix(w_q_HDE.shape[-1], w_q_HDE)
    inverse_EE = torch.linalg.inv(a_EE).mT
    with torch.no_grad():
        _transform_(qk.w_q, qk.b_q, len(w_q_HDE), lambda w_HNE: w_HNE @ a_EE)
        _transform_(qk.w_k, qk.b_k, len(w_k_GDE), lambda w_GNE: w_GNE @ inverse_EE)
        if isinstance(ov := other.ov, SeparateOV):
            b_VV = gauge_matrix(ov.width, ov.w_v)
            _transform_(ov.w_v, ov.b_v, ov.value_heads, lambda w_GNV: w_GNV @ b_VV)
            w_o_HVD = torch.linalg.inv(b_VV) @ ov.w_o.unflatten(0, (ov.spec.heads, -1))
            ov.w_o.copy_(w_o_HVD.flatten(0, 1))
    return other


@check("gauge", "W_q A, W_k A⁻ᵀ (and W_v B, B⁻¹ W_o): different weights, same outputs", is_factored)
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    other = change_gauge(layer)
    return Deviation(rel_diff(other(x_BTD), layer(x_BTD)), length=16 * x_BTD.shape[-1])


def _transform_(
    w_DF: Tensor, b_F: Tensor | None, heads: int, transform: Callable[[Tensor], Tensor]
) -> None:
    """Transform the matrix of each head, and its bias as a further row."""
    w_DF.copy_(concat_heads(transform(by_head(w_DF, heads))))
    if b_F is not None:
        b_F.copy_(transform(b_F.view(heads, 1, -1)).flatten())


@check(
    "order of heads",
    "a permutation of the heads gives the same outputs",
    # Slices and ALiBi slopes are tied to the index of a head.
    lambda layer: (
        is_standard_family(layer) and type(layer.ov) is SeparateOV and layer.position != "alibi"
    ),
)
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    other = copy.deepcopy(layer)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if name != "ov.b_o":
                axis = 0 if name == "ov.w_o" else parameter.dim() - 1
                by_head_ = parameter.unflatten(axis, (layer.qk.spec.heads, -1))
                parameter.copy_(by_head_.flip(axis).flatten(axis, axis + 1))
    return Deviation(rel_diff(other(x_BTD), layer(x_BTD)))


@check("gauge gradient", "W_qᵀ ∂W_q = (W_kᵀ ∂W_k)ᵀ per key head, for any loss", is_factored)
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    q_side, k_side = _gauge_sides(layer, x_BTD)
    return Deviation(rel_diff(q_side, k_side.mT), length=x_BTD.shape[1] * x_BTD.shape[-1])


def _gauge_sides(layer: Attention, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """Return W_qᵀ ∂W_q and W_kᵀ ∂W_k per key head, with biases as a further row."""
    qk, w_q_HDE, w_k_GDE = qk_factors(layer)
    names = ["w_q", "w_k"] + (["b_q", "b_k"] if qk.spec.bias else [])
    values = [getattr(qk, name) for name in names]
    grads = gradients(layer, x_BTD, *values)
    sides = []
    for side, heads in enumerate((len(w_q_HDE), len(w_k_GDE))):
        w_LF, g_LF = (torch.cat([*map(torch.atleast_2d, t[side::2])]) for t in (values, grads))
        product_NEE = by_head(w_LF, heads).mT @ by_head(g_LF, heads)
        sides.append(product_NEE.unflatten(0, (len(w_k_GDE), -1)).sum(1))
    return sides[0], sides[1]


def _has_rope_factors(layer: Attention) -> bool:
    """Return whether only rope is between the factors, and keys are not values."""
    only_rope = layer.position == "rope" and layer.norm is None and layer.rope_dims is None
    return isinstance(layer.qk, SeparateQK) and only_rope and layer.ov.cached != "k"


@check(
    "rope gradient",
    "with rope only the trace and the rotation of each plane are conserved",
    _has_rope_factors,
)
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    q_GEE, k_GEE = _gauge_sides(layer, x_BTD)
    half = q_GEE.shape[-1] // 2
    a = torch.arange(half)

    def plane(m_GEE: Tensor) -> tuple[Tensor, Tensor]:
        trace = m_GEE[:, a, a] + m_GEE[:, a + half, a + half]
        return trace, m_GEE[:, a, a + half] - m_GEE[:, a + half, a]

    (trace_q, skew_q), (trace_k, skew_k) = plane(q_GEE), plane(k_GEE)
    size = q_GEE.abs().max()
    residual = largest(rel_diff(trace_q, trace_k, size), rel_diff(skew_q, -skew_k, size))
    return Deviation(residual, length=x_BTD.shape[1] * x_BTD.shape[-1])


@check(
    "rope gauge",
    "with rope the gauge is one complex number per plane: q z and k / z̄",
    _has_rope_factors,
)
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    other = copy.deepcopy(layer)
    qk, w_q_HDE, w_k_GDE = qk_factors(other)
    half = w_q_HDE.shape[-1] // 2
    size_P, angle_P = torch.linspace(0.5, 2, half).to(x_BTD), torch.linspace(0, 3, half).to(x_BTD)
    z = size_P * angle_P.cos(), size_P * angle_P.sin()
    inverse = z[0] / size_P**2, z[1] / size_P**2  # 1 / z̄ = z / |z|²

    def times(w_HNE: Tensor, re_P: Tensor, im_P: Tensor) -> Tensor:
        a, b = w_HNE.chunk(2, -1)
        return torch.cat([a * re_P - b * im_P, a * im_P + b * re_P], -1)

    with torch.no_grad():
        _transform_(qk.w_q, qk.b_q, len(w_q_HDE), lambda w_HNE: times(w_HNE, *z))
        _transform_(qk.w_k, qk.b_k, len(w_k_GDE), lambda w_GNE: times(w_GNE, *inverse))
    return Deviation(rel_diff(other(x_BTD), layer(x_BTD)), length=16 * x_BTD.shape[-1])


@check(
    "norm gradient",
    "under a norm the gradient is orthogonal to the weights: ⟨W_q, ∂W_q⟩ = 0 per head",
    lambda layer: (
        isinstance(layer.qk, SeparateQK)
        and isinstance(layer.norm, QKNorm)
        and layer.qk.width > 1  # a normalized scalar is constant
        and not layer.qk.spec.bias
        and layer.ov.cached != "k"
    ),
)
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    qk, w_q_HDE, _ = qk_factors(layer)
    (d_q,) = gradients(layer, x_BTD, qk.w_q)
    g_HDE = by_head(d_q, qk.spec.heads)
    inner_H = (w_q_HDE * g_HDE).sum((1, 2))
    size_H = w_q_HDE.norm(dim=(1, 2)) * g_HDE.norm(dim=(1, 2))
    return Deviation(max_violation((inner_H / size_H).abs()), length=x_BTD.shape[-1] ** 2)


@check(
    "value gradient",
    "W_vᵀ ∂W_v = ∂W_o W_oᵀ per value head",
    lambda layer: isinstance(layer.ov, SeparateOV),
)
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    ov = layer.ov
    assert isinstance(ov, SeparateOV)
    d_v, d_o = gradients(layer, x_BTD, ov.w_v, ov.w_o)
    heads, groups = ov.spec.heads, ov.value_heads
    left_GVV = by_head(ov.w_v, groups).mT @ by_head(d_v, groups)
    if ov.b_v is not None:
        (b_v,) = gradients(layer, x_BTD, ov.b_v)
        rows = [t.unflatten(0, (groups, -1)) for t in (ov.b_v, b_v)]
        left_GVV = left_GVV + rows[0].unsqueeze(2) * rows[1].unsqueeze(1)
    right_HVV = d_o.unflatten(0, (heads, -1)) @ ov.w_o.unflatten(0, (heads, -1)).mT
    right_GVV = right_HVV.unflatten(0, (groups, -1)).sum(1)
    return Deviation(rel_diff(left_GVV, right_GVV), length=x_BTD.shape[1] * x_BTD.shape[-1])


@check(
    "one step",
    "W_qᵀW_q − W_kᵀW_k after one step of gradient descent, exactly",
    # A bias would be a further row of its matrix, which the step changes, too.
    lambda layer: is_standard_family(layer) and not layer.qk.spec.bias,
)
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    eta, decay = 0.1, 0.3
    qk, w_q_HDE, w_k_HDE = qk_factors(layer)
    grads = gradients(layer, x_BTD, qk.w_q, qk.w_k)
    g_q, g_k = (by_head(g, qk.spec.heads) for g in grads)
    new_q, new_k = ((1 - eta * decay) * w - eta * g for w, g in ((w_q_HDE, g_q), (w_k_HDE, g_k)))
    expected = (1 - eta * decay) ** 2 * (w_q_HDE.mT @ w_q_HDE - w_k_HDE.mT @ w_k_HDE)
    expected = expected + eta**2 * (g_q.mT @ g_q - g_k.mT @ g_k)
    size = (w_q_HDE.mT @ w_q_HDE).abs().max()
    actual = new_q.mT @ new_q - new_k.mT @ new_k
    return Deviation(rel_diff(actual, expected, size))


_is_shared = has_qk(SharedQK)


@check("shared norm", "‖W‖_F² = ‖W Wᵀ‖_*: weight decay penalizes the nuclear norm", _is_shared)
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    w_HDK = by_head(layer.get_parameter("qk.w_k"), layer.qk.spec.heads)
    return Deviation(rel_diff(w_HDK.square().sum((1, 2)), nuclear_norm(w_HDK, w_HDK)))


def _symmetric(layer: Attention) -> bool:
    if isinstance(layer.qk, SymmetricQK) and layer.qk.spec.bias:
        return False  # its u is not part of W
    if isinstance(layer.qk, SymDiag) and layer.position == "rope":
        return False  # a diagonal between two rotations does not commute with them
    is_symmetric = type(layer.qk) in (SharedQK, SymDiag, SymmetricQK)
    return is_symmetric and not isinstance(layer.norm, UnitKeys)


@check("symmetric", "S = Sᵀ without a mask, also with rope", _symmetric)
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    s_BHTS = scores(layer, x_BTD)
    return Deviation(rel_diff(s_BHTS, s_BHTS.mT))


@check(
    "positive",
    "no eigenvalue is negative, and |S_ij| ≤ √(S_ii S_jj)",
    lambda layer: _is_shared(layer) and not isinstance(layer.norm, UnitKeys),
)
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    s_BHTS = scores(layer, x_BTD)
    value_BHT = torch.linalg.eigvalsh((s_BHTS + s_BHTS.mT) / 2)
    own_BHT = s_BHTS.diagonal(dim1=-2, dim2=-1)
    bound_BHTS = (own_BHT.unsqueeze(-1) * own_BHT.unsqueeze(-2)).sqrt()
    over = max_violation((s_BHTS.abs() - bound_BHTS) / own_BHT.max())
    under = max_violation(-value_BHT[..., 0] / value_BHT[..., -1])
    return Deviation(largest(over, under))


@check(
    "own score",
    "with unit keys each token scores highest with itself (hence Reformer's mask)",
    lambda layer: _is_shared(layer) and layer.norm is not None,
)
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    gain = getattr(layer.norm, "gain", None)
    sign = 1 if gain is None else gain.detach().sign().view(-1, 1, 1)
    s_BHTS = scores(layer, x_BTD) * sign
    own_BHT1 = s_BHTS.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    return Deviation(max_violation((s_BHTS - own_BHT1) / own_BHT1.max()))
