"""Checks of limits in which one variant equals another.

Shape suffixes as in qkablate/attention/qk/base.py.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qkablate.attention import OV, QK, Attention
from qkablate.attention.ov.factored import FourOV, GroupedOV, MergedOV, SeparateOV
from qkablate.attention.ov.unprojected import NoO
from qkablate.attention.qk.factored import (
    CollaborativeQK,
    FourMatrixQK,
    GroupedQK,
    LowRankQK,
    ReassociatedQK,
    SeparateQK,
)
from qkablate.attention.qk.merged import MergedQK
from qkablate.attention.qk.shared import SharedQK, SymPairwise
from qkablate.attention.qk.unprojected import NoK, NoQ
from qkablate.verify.check import Deviation, check, largest, rel_diff, scores


def has_qk(*kinds: type) -> Callable[[Attention], bool]:
    """Return a predicate for layers with one of these QK circuits."""
    return lambda layer: type(layer.qk) in kinds


def _twins(
    layer: Attention,
    qk: type[QK],
    ov: type[OV] = SeparateOV,
    twin: tuple[type[QK], type[OV]] = (SeparateQK, SeparateOV),
    **changes: Any,
) -> tuple[Attention, Attention]:
    """Return a layer of these circuits, and its twin with the parameters that both share.

    Both have random values, and the sizes, dtype and device of `layer` except for `changes`.
    """
    spec = dataclasses.replace(layer.qk.spec, source=None, **changes)  # self-attention
    first, second = (Attention(spec, *pair).to(layer.qk.like) for pair in ((qk, ov), twin))
    with torch.no_grad():
        for rebuilt in (first, second):
            generator = torch.Generator().manual_seed(0)
            for parameter in rebuilt.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(noise / spec.d_model**0.5)
        shared = dict(first.named_parameters())
        for name, parameter in second.named_parameters():
            if name in shared and shared[name].shape == parameter.shape:
                parameter.copy_(shared[name])
    return first, second


def _same(one: Attention, other: Attention, x_BTD: Tensor, tolerance: float = 1e-10) -> Deviation:
    return Deviation(rel_diff(one(x_BTD), other(x_BTD)), tolerance=tolerance)


@check("rank d_head", "low rank at rank d_head equals standard bit for bit", has_qk(LowRankQK))
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    return _same(*_twins(layer, LowRankQK, rank=layer.qk.spec.d_head), x_BTD, tolerance=0)


@check(
    "one head",
    "with one head, no W_q (or W_k) equals merged with W = W_kᵀ (or W_q)",
    has_qk(NoQ, NoK),
)
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    twin = MergedQK, SeparateOV
    one, merged = _twins(layer, type(layer.qk), twin=twin, heads=1, bias=False)
    assert isinstance(one.qk, (NoQ, NoK))
    assert isinstance(merged.qk, MergedQK)
    w_DD = one.qk.w_k.T if isinstance(one.qk, NoQ) else one.qk.w_q
    with torch.no_grad():
        merged.qk.w_qk.copy_(w_DD * (one.scale / merged.scale))
    return _same(one, merged, x_BTD)


@check(
    "one-hot mixing",
    "at rank d_model with one-hot mixing it equals standard",
    has_qk(CollaborativeQK),
)
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    spec = layer.qk.spec
    ours, standard = _twins(layer, CollaborativeQK, rank=spec.d_model, bias=False)
    eye_H1D = torch.eye(spec.heads).repeat_interleave(spec.d_head, 1).unsqueeze(1)
    with torch.no_grad():
        ours.get_parameter("qk.mix").copy_(eye_H1D)
    return _same(ours, standard, x_BTD)


@check(
    "g = h", "as many groups as heads equals standard; one group repeats one key", has_qk(GroupedQK)
)
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    heads = layer.qk.spec.heads
    all_groups = _same(*_twins(layer, GroupedQK, GroupedOV, groups=heads), x_BTD)
    shared, standard = _twins(layer, GroupedQK, GroupedOV, groups=1)
    with torch.no_grad():
        for name, parameter in standard.named_parameters():
            if name in ("qk.w_k", "qk.b_k", "ov.w_v", "ov.b_v"):
                parameter.copy_(torch.cat([shared.get_parameter(name)] * heads, -1))
    one_group = _same(shared, standard, x_BTD)
    return Deviation(largest(all_groups.residual, one_group.residual))


@check("U = 1", "U = 1 equals shared_qk; a skew U makes S antisymmetric", has_qk(SymPairwise))
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    ours, shared = _twins(layer, SymPairwise, twin=(SharedQK, SeparateOV), bias=False)
    assert isinstance(ours.qk, SymPairwise)
    with torch.no_grad():
        skew = ours.qk.u - ours.qk.u.mT
        ours.qk.u.copy_(torch.eye(skew.shape[-1]))
        equal = _same(ours, shared, x_BTD)
        ours.qk.u.copy_(skew)
        s_BHTS = scores(ours, x_BTD)
    return Deviation(largest(equal.residual, rel_diff(s_BHTS, -s_BHTS.mT)))


@check("folding", "the four factors fold into two: A_q W_q and A_k W_k", has_qk(FourMatrixQK))
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    ours, standard = _twins(layer, FourMatrixQK)
    assert isinstance(ours.qk, FourMatrixQK)
    assert isinstance(standard.qk, SeparateQK)
    with torch.no_grad():
        standard.qk.w_q.copy_(ours.qk.a_q @ ours.qk.w_q)
        standard.qk.w_k.copy_(ours.qk.a_k @ ours.qk.w_k)
    return _same(ours, standard, x_BTD)


@check(
    "folding of values",
    "the three factors fold into two: A_v W_v",
    lambda layer: type(layer.ov) is FourOV,
)
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    ours, standard = _twins(layer, SeparateQK, FourOV)
    assert isinstance(ours.ov, FourOV)
    assert isinstance(standard.ov, SeparateOV)
    with torch.no_grad():
        standard.ov.w_v.copy_(ours.ov.a_v @ ours.ov.w_v)
    return _same(ours, standard, x_BTD)


@check("precision twin", "standard_reassociated equals standard", has_qk(ReassociatedQK))
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    ov = type(layer.ov)
    return _same(*_twins(layer, ReassociatedQK, ov, twin=(SeparateQK, ov)), x_BTD)


@check(
    "one value head",
    "with one head it equals standard with W_v' = W_v W_o",
    lambda layer: type(layer.ov) in (NoO, MergedOV),
)
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    ours, standard = _twins(layer, SeparateQK, type(layer.ov), heads=1, bias=False)
    with torch.no_grad():
        ours.ov.set_circuit_(standard.ov.circuit(standard.qk))
    return _same(ours, standard, x_BTD)
