"""Checks of limits in which one variant equals another.

Shape suffixes as in qkablate/attention/qk/base.py.
"""

import copy
import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from qkablate.attention import Attention
from qkablate.attention.ov.factored import GroupedOV, MergedOV, SeparateOV
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


def _rebuilt(layer: Attention, qk: type, ov: type | None = None, **changes: object) -> Attention:
    """Return a layer of other circuits with the same sizes, dtype and device."""
    spec = dataclasses.replace(layer.qk.spec, **changes)  # type: ignore[arg-type]
    rebuilt = Attention(spec, qk, ov or type(layer.ov)).to(layer.qk.like)
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


def _same(one: Attention, other: Attention, x_BTD: Tensor, tolerance: float = 1e-10) -> Deviation:
    return Deviation(rel_diff(one(x_BTD), other(x_BTD)), x_BTD.shape[-1], tolerance)


@check("rank d_head", "low rank at rank d_head equals standard bit for bit", has_qk(LowRankQK))
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    low = _rebuilt(layer, LowRankQK, SeparateOV, rank=layer.qk.spec.d_head)
    standard = _rebuilt(layer, SeparateQK, SeparateOV)
    _copy_shared_(standard, low)
    return _same(low, standard, x_BTD, tolerance=0)


@check(
    "one head",
    "with one head, no W_q (or W_k) equals merged with W = W_kᵀ (or W_q)",
    has_qk(NoQ, NoK),
)
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    one = _rebuilt(layer, type(layer.qk), SeparateOV, heads=1, bias=False)
    merged = _rebuilt(layer, MergedQK, SeparateOV, heads=1, bias=False)
    _copy_shared_(merged.ov, one.ov)
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
    ours = _rebuilt(layer, CollaborativeQK, SeparateOV, rank=spec.d_model, bias=False)
    standard = _rebuilt(layer, SeparateQK, SeparateOV, bias=False)
    _copy_shared_(standard, ours)
    assert isinstance(ours.qk, CollaborativeQK)
    eye_H1D = torch.eye(spec.heads).repeat_interleave(spec.d_head, 1).unsqueeze(1)
    with torch.no_grad():
        ours.qk.mix.copy_(eye_H1D)
    return _same(ours, standard, x_BTD)


@check(
    "g = h", "as many groups as heads equals standard; one group repeats one key", has_qk(GroupedQK)
)
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    heads = layer.qk.spec.heads
    standard = _rebuilt(layer, SeparateQK, SeparateOV)
    all_groups = _rebuilt(layer, GroupedQK, GroupedOV, groups=heads)
    _copy_shared_(all_groups, standard)
    one_group = _rebuilt(layer, GroupedQK, GroupedOV, groups=1)
    _copy_shared_(standard.qk, one_group.qk)
    _copy_shared_(standard.ov, one_group.ov)
    residual = rel_diff(all_groups(x_BTD), _same_heads(standard, all_groups)(x_BTD))
    with torch.no_grad():
        for name in ("w_k", "b_k"):
            if getattr(standard.qk, name) is not None:
                wide = getattr(one_group.qk, name)
                getattr(standard.qk, name).copy_(torch.cat([wide] * heads, -1))
        for name in ("w_v", "b_v"):
            if getattr(standard.ov, name) is not None:
                wide = getattr(one_group.ov, name)
                getattr(standard.ov, name).copy_(torch.cat([wide] * heads, -1))
    return Deviation(
        largest(residual, rel_diff(one_group(x_BTD), standard(x_BTD))), x_BTD.shape[-1]
    )


def _same_heads(standard: Attention, grouped: Attention) -> Attention:
    copied = copy.deepcopy(standard)
    _copy_shared_(copied, grouped)
    return copied


@check("U = 1", "U = 1 equals shared_qk; a skew U makes S antisymmetric", has_qk(SymPairwise))
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    ours = _rebuilt(layer, SymPairwise, SeparateOV, bias=False)
    shared = _rebuilt(layer, SharedQK, SeparateOV, bias=False)
    _copy_shared_(shared, ours)
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
    ours = _rebuilt(layer, FourMatrixQK, SeparateOV)
    standard = _rebuilt(layer, SeparateQK, SeparateOV)
    _copy_shared_(standard, ours)
    assert isinstance(ours.qk, FourMatrixQK)
    assert isinstance(standard.qk, SeparateQK)
    with torch.no_grad():
        standard.qk.w_q.copy_(ours.qk.a_q @ ours.qk.w_q)
        standard.qk.w_k.copy_(ours.qk.a_k @ ours.qk.w_k)
    return _same(ours, standard, x_BTD)


@check("precision twin", "standard_reassociated equals standard", has_qk(ReassociatedQK))
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    standard = _rebuilt(layer, SeparateQK, type(layer.ov))
    reassociated = _rebuilt(layer, ReassociatedQK, type(layer.ov))
    _copy_shared_(standard, reassociated)
    return _same(reassociated, standard, x_BTD)


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
