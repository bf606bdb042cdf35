"""Checks of circuits with symmetric scores.

Shape suffixes as in qkablate/attention/qk/base.py.
"""

import torch
from torch import Tensor

from qkablate.attention import Attention
from qkablate.attention.modifiers import UnitKeys
from qkablate.attention.qk.merged import SymmetricQK
from qkablate.attention.qk.shared import SharedQK, SymDiag
from qkablate.attention.spec import by_head
from qkablate.verify.check import Deviation, check, largest, max_violation, rel_diff, scores
from qkablate.verify.factors import nuclear_norm


def _is_shared(layer: Attention) -> bool:
    return type(layer.qk) is SharedQK


@check("shared norm", "‖W‖_F² = ‖W Wᵀ‖_*: weight decay penalizes the nuclear norm", _is_shared)
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    assert isinstance(layer.qk, SharedQK)
    w_HDK = by_head(layer.qk.w_k, layer.qk.spec.heads)
    return Deviation(
        rel_diff(w_HDK.square().sum((1, 2)), nuclear_norm(w_HDK, w_HDK)), x_BTD.shape[-1]
    )


def _symmetric(layer: Attention) -> bool:
    if isinstance(layer.qk, SymmetricQK) and layer.qk.spec.bias:
        return False  # its u is not part of W
    if isinstance(layer.qk, SymDiag) and layer.position == "rope":
        return False  # a diagonal between two rotations does not commute with them
    return type(layer.qk) in (SharedQK, SymDiag, SymmetricQK) and not isinstance(
        layer.norm, UnitKeys
    )


@check("symmetric", "S = Sᵀ without a mask, also with rope", _symmetric)
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    s_BHTS = scores(layer, x_BTD)
    return Deviation(rel_diff(s_BHTS, s_BHTS.mT), length=x_BTD.shape[-1])


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
    return Deviation(largest(over, under), length=x_BTD.shape[-1])


@check(
    "own score",
    "with unit keys each token scores highest with itself (hence Reformer's mask)",
    lambda layer: _is_shared(layer) and layer.norm is not None,
)
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    s_BHTS = scores(layer, x_BTD) * torch.sign(_gain(layer))
    own_BHT1 = s_BHTS.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    return Deviation(max_violation((s_BHTS - own_BHT1) / own_BHT1.max()), x_BTD.shape[-1])


def _gain(layer: Attention) -> Tensor:
    gain = getattr(layer.norm, "gain", None)
    return torch.ones(1, 1, 1) if gain is None else gain.detach().view(-1, 1, 1)
