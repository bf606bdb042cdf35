"""The checks of circuits whose scores are symmetric.

Shape suffixes as in qkablate/attention/qk/base.py.
"""

import torch
from torch import Tensor

from qkablate.attention import Attention
from qkablate.attention.modifiers import UnitKeys
from qkablate.attention.qk.merged import SymmetricQK
from qkablate.attention.qk.shared import SharedQK, SymDiag
from qkablate.attention.spec import by_head
from qkablate.verify.check import Found, apart, check, largest, scores, worst
from qkablate.verify.factors import nuclear


def _is_shared(layer: Attention) -> bool:
    return type(layer.qk) is SharedQK


@check("shared norm", "‖W‖_F² = ‖W Wᵀ‖_*: plain decay is nuclear decay", _is_shared)
def _(layer: Attention, x_BTD: Tensor) -> Found:
    assert isinstance(layer.qk, SharedQK)
    w_HDK = by_head(layer.qk.w_k, layer.qk.spec.heads)
    return Found(apart(w_HDK.square().sum((1, 2)), nuclear(w_HDK, w_HDK)), x_BTD.shape[-1])


def _symmetric(layer: Attention) -> bool:
    if isinstance(layer.qk, SymmetricQK) and layer.qk.spec.bias:
        return False  # its u is no part of W
    if isinstance(layer.qk, SymDiag) and layer.position == "rope":
        return False  # a diagonal between two rotations does not commute with them
    return type(layer.qk) in (SharedQK, SymDiag, SymmetricQK) and not isinstance(
        layer.norm, UnitKeys
    )


@check("symmetric", "S = Sᵀ without a mask, also with rope", _symmetric)
def _(layer: Attention, x_BTD: Tensor) -> Found:
    s_BHTS = scores(layer, x_BTD)
    return Found(apart(s_BHTS, s_BHTS.mT), length=x_BTD.shape[-1])


@check(
    "positive",
    "no negative eigenvalue, and |S_ij| ≤ √(S_ii S_jj)",
    lambda layer: _is_shared(layer) and not isinstance(layer.norm, UnitKeys),
)
def _(layer: Attention, x_BTD: Tensor) -> Found:
    s_BHTS = scores(layer, x_BTD)
    value_BHT = torch.linalg.eigvalsh((s_BHTS + s_BHTS.mT) / 2)
    own_BHT = s_BHTS.diagonal(dim1=-2, dim2=-1)
    bound_BHTS = (own_BHT.unsqueeze(-1) * own_BHT.unsqueeze(-2)).sqrt()
    over = worst((s_BHTS.abs() - bound_BHTS) / own_BHT.max())
    under = worst(-value_BHT[..., 0] / value_BHT[..., -1])
    return Found(largest(over, under), length=x_BTD.shape[-1])


@check(
    "own score",
    "with normed keys a token scores itself highest (why Reformer masks it)",
    lambda layer: _is_shared(layer) and layer.norm is not None,
)
def _(layer: Attention, x_BTD: Tensor) -> Found:
    s_BHTS = scores(layer, x_BTD) * torch.sign(_gain(layer))
    own_BHT1 = s_BHTS.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    return Found(worst((s_BHTS - own_BHT1) / own_BHT1.max()), x_BTD.shape[-1])


def _gain(layer: Attention) -> Tensor:
    gain = getattr(layer.norm, "gain", None)
    return torch.ones(1, 1, 1) if gain is None else gain.detach().view(-1, 1, 1)
