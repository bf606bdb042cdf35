"""Checks of limits in which one variant equals another.

Shape suffixes as in qkablate/attention/qk/base.py.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qkablate.attention import Attention
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


def _rebuilt(layer: Attention, qk: type, ov: type, **changes: Any) -> Attention:
    """Return a layer of other circuits with the same sizes, dtype and device."""
    spec = dataclasses.replace(layer.qk.spec, **changes)
    rebuilt = Attention(spec, qk, ov).to(layer.qk.like)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in rebuilt.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise / spec.d_model**0.5)
    return rebuilt


def _copy_shared_(target: torch.nn.Module, source: torch.nn.Module) -> None:
    """Copy the parameters that have the same name and shape."""
    parameters = dict(target.named_parameters())
    with torch.no_grad():
        for name, parameter in source.named_parameters():
            if name in parameters and parameters[name].shape == parameter.shape:
                parameters[name].copy_(parameter)


def _twins(
    layer: Attention, ours: type, theirs: type = SeparateQK, ov: type = SeparateOV, **changes: Any
) -> tuple[Attention, Attention]:
    """Return layers of two QK circuits; the second has the parameters that both share."""
    first, second = (_rebuilt(layer, qk, ov, **changes) for qk in (ours, theirs))
    _copy_shared_(second, first)
    return first, second


def _same(one: Attention, other: Attention, x_BTD: Tensor, tolerance: float = 1e-10) -> Deviation:
    return Deviation(rel_diff(one(x_BTD), other(x_BTD)), x_BTD.shape[-1], tolerance)


@check("rank d_head", "low rank at rank d_head equals standard bit for bit", has_qk(LowRankQK))
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    return _same(*_twins(layer, LowRankQK, rank=layer.qk.spec.d_head), x_BTD, tolerance=0)


@check(
    "one head",
    "with one head, no W_q (or W_k) equals merged with W = W_kᵀ (or W_q)",
    has_qk(NoQ, NoK),
)
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    one, merged = _twins(layer, type(layer.qk), MergedQK, heads=1, bias=False)
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
    standard = _rebuilt(layer, SeparateQK, SeparateOV)
    all_groups = _rebuilt(layer, GroupedQK, GroupedOV, groups=heads)
    _copy_shared_(all_groups, standard)
    residual = rel_diff(all_groups(x_BTD), standard(x_BTD))
    one_group = _rebuilt(layer, GroupedQK, GroupedOV, groups=1)
    _copy_shared_(standard, one_group)
    shared = dict(one_group.named_parameters())
    with torch.no_grad():
        for name, parameter in standard.named_parameters():
            if name in ("qk.w_k", "qk.b_k", "ov.w_v", "ov.b_v"):
                parameter.copy_(torch.cat([shared[name]] * heads, -1))
    residual = largest(residual, rel_diff(one_group(x_BTD), standard(x_BTD)))
    return Deviation(residual, x_BTD.shape[-1])


@check("U = 1", "U = 1 equals shared_qk; a skew U makes S antisymmetric", has_qk(SymPairwise))
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    ours, shared = _twins(layer, SymPairwise, SharedQK, bias=False)
    assert isinstance(ours.qk, SymPairwise)
    with torch.no_grad():
        skew = ours.qk.u - ours.qk.u.mT
        ours.qk.u.copy_(torch.eye(skew.shape[-1]))
        equal = _same(ours, shared, x_BTD)
        ours.qk.u.copy_(skew)
        s_BHTS = scores(ours, x_BTD)
    return Deviation(largest(equal.residual, rel_diff(s_BHTS, -s_BHTS.mT)), x_BTD.shape[-1])


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
    ours, standard = (_rebuilt(layer, SeparateQK, ov) for ov in (FourOV, SeparateOV))
    _copy_shared_(standard, ours)
    assert isinstance(ours.ov, FourOV)
    assert isinstance(standard.ov, SeparateOV)
    with torch.no_grad():
        standard.ov.w_v.copy_(ours.ov.a_v @ ours.ov.w_v)
    return _same(ours, standard, x_BTD)


@check("precision twin", "standard_reassociated equals standard", has_qk(ReassociatedQK))
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    return _same(*_twins(layer, ReassociatedQK, ov=type(layer.ov)), x_BTD)


@check(
    "one value head",
    "with one head it equals standard with W_v' = W_v W_o",
    lambda layer: type(layer.ov) in (NoO, MergedOV),
)
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    standard = _rebuilt(layer, SeparateQK, SeparateOV, heads=1, bias=False)
    ours = _rebuilt(layer, SeparateQK, type(layer.ov), heads=1, bias=False)
    _copy_shared_(ours.qk, standard.qk)
    ours.ov.set_circuit_(standard.ov.circuit(standard.qk).detach())
    return _same(ours, standard, x_BTD)
