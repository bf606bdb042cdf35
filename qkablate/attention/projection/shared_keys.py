"""Keys that are values, too: the directions of the stream that serve scores and outputs best.

Shape suffixes as in project.py; G groups of heads that share keys, P heads of a group, R the width
of a key, V of a value, K of what the heads of a group read.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from qkablate.attention.linalg import find_basis, truncated_svd
from qkablate.attention.projection.moments import Moments, isotropic_moments, sqrt_and_inverse


def find_keys(
    goal_HLD: Tensor,
    m_HDC: Tensor,
    moments: Moments,
    groups: int,
    width: int,
    reads_HDE: Tensor | None = None,
) -> Tensor:
    """Return w_GDR, from whose keys y w_g scores and outputs are predicted with small errors.

    The measure is the sum of both squared errors, relative to those of all heads. Scores and
    outputs weight the stream by other moments. With either for both, the best directions are
    leading eigenvectors; of the two, each group keeps the better, which a search can improve still.
    These eigenvectors lie in the span of what the heads of the group read, `reads_HDE`: given it,
    they are sought there. The columns are orthonormal, and zero beyond the width of the stream.
    """
    assert moments.z_HDD is not None
    keys_GDD, z_HDD = moments.key_covariance().unsqueeze(0), moments.z_HDD
    heads = len(m_HDC) // groups
    basis_HDK = None if reads_HDE is None else find_basis(reads_HDE, heads)
    if basis_HDK is not None and basis_HDK.shape[-1] < width:
        basis_HDK = None
    if basis_HDK is not None:
        goal_HLD, m_HDC = goal_HLD @ basis_HDK, basis_HDK.mT @ m_HDC
        z_HDD = basis_HDK.mT @ z_HDD @ basis_HDK
        keys_GDD = basis_HDK[::heads].mT @ keys_GDD @ basis_HDK[::heads]
    squares_GPDD, z_GPDD, of_outputs_GPDD = (
        value_HDD.unflatten(0, (groups, heads))
        for value_HDD in (goal_HLD.mT @ moments.x_LL @ goal_HLD, z_HDD, m_HDC @ m_HDC.mT)
    )
    circuits = [
        _WeightedCircuit(squares_GPDD, keys_GDD.unsqueeze(1)),
        _WeightedCircuit(of_outputs_GPDD, z_GPDD),
    ]
    both_GDD = circuits[0].squares_GPDD.sum(1) + circuits[1].squares_GPDD.sum(1)
    candidates, errors = [], []
    for basis_GDD in (keys_GDD, z_GPDD.mean(1)):
        root_GDD, inverse_GDD = sqrt_and_inverse(basis_GDD)
        leading_GDR = torch.linalg.eigh(root_GDD @ both_GDD @ root_GDD)[1].flip(-1)[..., :width]
        w_GDR = torch.linalg.qr(inverse_GDD @ leading_GDR).Q
        candidates.append(pad(w_GDR, (0, width - w_GDR.shape[-1])))
        errors.append(circuits[0].errors(w_GDR) + circuits[1].errors(w_GDR))
    best_GDR = torch.where((errors[1] < errors[0])[:, None, None], candidates[1], candidates[0])
    return best_GDR if basis_HDK is None else basis_HDK[::heads] @ best_GDR


class _WeightedCircuit:
    """The scores or the outputs: what they take from the stream, and its moments."""

    def __init__(self, squares_GPDD: Tensor, moment_GPDD: Tensor) -> None:
        power = (squares_GPDD * moment_GPDD).sum().clamp(min=torch.finfo(moment_GPDD.dtype).tiny)
        self.squares_GPDD, self.moment_GPDD = squares_GPDD / power, moment_GPDD

    def errors(self, w_GDR: Tensor) -> Tensor:
        """Return the squared error of each group when the stream is predicted from its keys."""
        seen_GPDR = self.moment_GPDD @ w_GDR.unsqueeze(1)
        inverse_GPRR = torch.linalg.pinv(w_GDR.unsqueeze(1).mT @ seen_GPDR, hermitian=True)
        held_GPRR = inverse_GPRR @ (seen_GPDR.mT @ self.squares_GPDD @ seen_GPDR)
        held_G = held_GPRR.diagonal(dim1=-2, dim2=-1).sum((1, 2))
        error_G: Tensor = (self.squares_GPDD * self.moment_GPDD).sum((1, 2, 3)) - held_G
        return error_G


def _regress(moment_DD: Tensor, w_DR: Tensor, target_DC: Tensor) -> Tensor:
    """Return the least-squares prediction of y @ target from y @ w, as RC."""
    weighted_RD = w_DR.mT @ moment_DD
    inverse_RR = torch.linalg.pinv(weighted_RD @ w_DR, hermitian=True)
    solution_RC: Tensor = inverse_RR @ weighted_RD @ target_DC
    return solution_RC


def fit_queries(goal_HLD: Tensor, w_GDR: Tensor, moments: Moments, rank: int) -> Tensor:
    """Return left_HLR of this rank, whose products with the keys y w_g are near the scores."""
    keys_DD = moments.key_covariance()
    w_HDR = w_GDR.repeat_interleave(len(goal_HLD) // len(w_GDR), 0)
    left_HLR = _regress(keys_DD, w_HDR, goal_HLD.mT).mT
    return _truncate(moments.x_LL, left_HLR, w_HDR.mT @ keys_DD @ w_HDR, rank)


def fit_outputs(m_HDC: Tensor, v_HDV: Tensor, moments: Moments | None, rank: int) -> Tensor:
    """Return w_HVC of this rank, whose products with averages of y v_h are near the outputs."""
    moments = moments or isotropic_moments(len(m_HDC), m_HDC[0].mT)
    assert moments.z_HDD is not None
    w_HVC = _regress(moments.z_HDD, v_HDV, m_HDC)
    identity_CC = torch.eye(m_HDC.shape[-1]).to(m_HDC)
    return _truncate(v_HDV.mT @ moments.z_HDD @ v_HDV, w_HVC, identity_CC, rank)


def _truncate(left_AA: Tensor, m_HAB: Tensor, right_BB: Tensor, rank: int) -> Tensor:
    """Return the nearest matrices of a rank, where both sides are weighted by moments."""
    if rank >= min(m_HAB.shape[-2:]):
        return m_HAB
    (left, left_inverse), (right, right_inverse) = map(sqrt_and_inverse, (left_AA, right_BB))
    u_HAK, v_HBK = truncated_svd(left @ m_HAB @ right, rank)
    nearest_HAB: Tensor = left_inverse @ u_HAK @ (right_inverse @ v_HBK).mT
    return nearest_HAB
