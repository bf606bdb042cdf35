"""Convert one circuit into the form of another, and measure the distance between circuits."""

import torch
from torch import Tensor

from qkablate.attention.ov import OV
from qkablate.attention.projection.moments import with_bias
from qkablate.attention.qk import QK


def convert(source: QK, target: QK) -> float:
    """Set `target` to the scores of `source`, as far as it can hold them; return the relative loss.

    Raises UnsupportedCombination where a circuit is not a matrix or cannot be set.
    """
    b_HDD, u_HD = scaled_circuit(source)
    if u_HD is not None:  # a form without biases loses it, which counts as loss
        u_HD = u_HD / target.scale if target.spec.bias else None
    target.set_circuit_(b_HDD / target.scale, u_HD)
    return _relative(distance(source, target), b_HDD)


def scaled_circuit(qk: QK) -> tuple[Tensor, Tensor | None]:
    """Return B_h and u_h multiplied by the scale of the scores."""
    b_HDD, u_HD = qk.circuit()
    return b_HDD.detach() * qk.scale, None if u_HD is None else u_HD.detach() * qk.scale


def distance(first: QK, second: QK) -> Tensor:
    """Return the Frobenius distance of the matrices of the scores, biases included."""
    difference_HLD = with_bias(*scaled_circuit(first)) - with_bias(*scaled_circuit(second))
    norm: Tensor = torch.linalg.vector_norm(difference_HLD)
    return norm


def convert_ov(source: OV, source_qk: QK, target: OV, target_qk: QK) -> float:
    """Set `target` to what `source` writes, as far as it can hold it; return the relative loss."""
    m_HDD = source.circuit(source_qk).detach()
    target.set_circuit_(m_HDD)
    return _relative(torch.linalg.vector_norm(target.circuit(target_qk).detach() - m_HDD), m_HDD)


def _relative(error: Tensor, circuit: Tensor) -> float:
    """Return the error relative to the norm of the circuit; 0 of 0 is 0."""
    norm = torch.linalg.vector_norm(circuit).clamp(min=torch.finfo(circuit.dtype).tiny)
    return float(error / norm)
