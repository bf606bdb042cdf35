"""Attention layers of any variant as standard ones, where both compute the same function.

Queries, keys and values of at most d_head dimensions are copied as maps, so that positions may
rotate them; wider ones are factorized, which is exact if their rank allows it.

Shape suffixes: N basis (0 and the unit vectors), H heads, G key or value heads, E width.
"""

import copy

import torch
from torch import Tensor
from torch.nn.functional import pad

from qkablate.attention import Attention
from qkablate.attention.linalg import affine_basis
from qkablate.attention.projection.project import convert, is_same_form
from qkablate.attention.qk import QK
from qkablate.attention.spec import UnsupportedCombination
from qkablate.attention.tensors import concat_heads

TOLERANCE = 1e-9  # relative error in fp64 of a factorization that counts as exact


@torch.no_grad()
def standardize(source: Attention, target: Attention) -> None:
    """Set a standard layer, in fp64, so that it computes what `source` does.

    Raises UnsupportedCombination with the reason where no standard layer does.
    """
    if source.norm is not None:
        raise UnsupportedCombination("its queries or keys are normalized")
    if source.rope_dims is not None:
        raise UnsupportedCombination("only some dimensions of its queries are rotated")
    if source.mask_self:
        raise UnsupportedCombination("no token attends to itself")
    if type(source.qk).score_bias is not QK.score_bias:
        raise UnsupportedCombination("its scores have a learned table of positions")
    if is_same_form(source, target):
        target.load_state_dict(source.state_dict())
        return
    source = copy.deepcopy(source).double()
    _set_scores(source, target)
    _set_output(source, target)


def _set_scores(source: Attention, target: Attention) -> None:
    qk, standard = source.qk, target.qk
    heads, width = qk.spec.heads, qk.spec.d_head
    is_rotated = source.rope is not None
    if qk.width > width or (is_rotated and qk.width != width):
        if is_rotated:
            raise UnsupportedCombination(
                f"its queries, rotated by their positions, are {qk.width} wide and not {width}"
            )
        loss = convert(qk, standard)
        if not loss < TOLERANCE:
            raise UnsupportedCombination(
                f"B_h has a higher rank than d_head={width}: the best standard layer has a relative"
                f" error of {loss:.2g}"
            )
        return
    x_1ND = affine_basis(qk.like, qk.spec.d_model)
    q_HNE, k_GNE = qk.queries(x_1ND)[0] * (source.scale / target.scale), qk.keys(x_1ND)[0]
    k_HNE = k_GNE.repeat_interleave(heads // k_GNE.shape[0], 0)
    for name, map_HNE in {"q": q_HNE, "k": k_HNE}.items():
        _set_map(standard, name, pad(map_HNE, (0, width - qk.width)))


def _set_output(source: Attention, target: Attention) -> None:
    ov, standard = source.ov, target.ov
    heads, width = ov.spec.heads, ov.spec.d_head
    if ov.width > width:
        goal_HDD = ov.circuit(source.qk)
        standard.set_circuit_(goal_HDD)
        standard.set_output_bias_(ov.output_bias(source.qk))
        error = torch.linalg.vector_norm(standard.circuit(target.qk) - goal_HDD)
        loss = float(error / torch.linalg.vector_norm(goal_HDD).clamp(min=1e-300))
        if not loss < TOLERANCE:
            raise UnsupportedCombination(
                f"M_h has a higher rank than d_head={width}: the best standard layer has a relative"
                f" error of {loss:.2g}"
            )
        return
    x_1ND = affine_basis(ov.like, ov.spec.d_model)
    v_GNV = ov.values(x_1ND, source.qk.keys(x_1ND))[0]
    v_HNV = v_GNV.repeat_interleave(heads // v_GNV.shape[0], 0)
    _set_map(standard, "v", pad(v_HNV, (0, width - ov.width)))
    # What each head writes for each unit vector, while the others write nothing.
    one_head = torch.eye(heads)[..., None, None] * torch.eye(ov.width)
    one_head_HHVV = one_head.to(ov.like)
    nothing_1HVV = torch.zeros_like(one_head_HHVV[:1])
    w_HVD = ov.write(one_head_HHVV) - ov.write(nothing_1HVV)
    weights = dict(standard.named_parameters())
    weights["w_o"].copy_(pad(w_HVD, (0, 0, 0, width - ov.width)).flatten(0, 1))
    if "b_o" in weights:
        weights["b_o"].copy_(ov.write(nothing_1HVV)[0, 0])


def _set_map(circuit: torch.nn.Module, name: str, map_HNE: Tensor) -> None:
    """Set w and b of one side from the images of 0 and of the unit vectors."""
    weights = dict(circuit.named_parameters())
    weights[f"w_{name}"].copy_(concat_heads(map_HNE[:, 1:] - map_HNE[:, :1]))
    if f"b_{name}" in weights:
        weights[f"b_{name}"].copy_(map_HNE[:, 0].flatten())
