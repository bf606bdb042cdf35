"""The circuits as matrices: one put into the form of another, and how far they are apart."""

import torch
from torch import Tensor

from qkablate.attention.ov import OV
from qkablate.attention.projection.moments import with_bias
from qkablate.attention.qk import QK


def convert(source: QK, target: QK) -> float:
    """Set `target` to the scores of `source`, or to what of them its form holds; what is lost, as a
    part of the norm. Raises Meaningless where a circuit is no matrix or cannot be set.
    """
    b_HDD, u_HD = scaled_circuit(source)
    if u_HD is not None:  # a form without biases loses it, and that is told
        u_HD = u_HD / target.scale if target.spec.bias else None
    target.set_circuit_(b_HDD / target.scale, u_HD)
    return _part(distance(source, target), b_HDD)


def scaled_circuit(qk: QK) -> tuple[Tensor, Tensor | None]:
    """B_h and u_h with the scale in them: what the scores are."""
    b_HDD, u_HD = qk.circuit()
    return b_HDD.detach() * qk.scale, None if u_HD is None else u_HD.detach() * qk.scale


def distance(one: QK, other: QK) -> Tensor:
    """Frobenius norm of the difference of the scores' matrices, biases included."""
    return (with_bias(*scaled_circuit(one)) - with_bias(*scaled_circuit(other))).norm()


def convert_ov(source: OV, source_qk: QK, target: OV, target_qk: QK) -> float:
    """Set `target` to what `source` writes, or to what of it its form can hold; what is lost."""
    m_HDD = source.circuit(source_qk).detach()
    target.set_circuit_(m_HDD)
    return _part((target.circuit(target_qk).detach() - m_HDD).norm(), m_HDD)


def _part(lost: Tensor, whole: Tensor) -> float:
    """0 of nothing is 0."""
    return float(lost / whole.norm().clamp(min=torch.finfo(whole.dtype).tiny))
