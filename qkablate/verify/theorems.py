"""Theorems on random numbers, for `standard`. Suffixes as in qkablate/attention/qk/base.py."""

import torch
from torch import Tensor
from torch.nn.functional import gelu

from qkablate.attention import Attention
from qkablate.attention.kernels.dispatch import attend
from qkablate.attention.ov.factored import SeparateOV
from qkablate.attention.ov.unprojected import NoO, NoVO
from qkablate.attention.qk.factored import SeparateQK
from qkablate.attention.qk.unprojected import NoQ
from qkablate.attention.spec import Spec
from qkablate.verify.check import Deviation, center_rows, check, largest, max_violation, rel_diff


def is_standard(layer: Attention) -> bool:
    """Return whether both circuits are standard's, without a norm."""
    return type(layer.qk) is SeparateQK and type(layer.ov) is SeparateOV and layer.norm is None


def random_numbers(like: Tensor, *shape: int, seed: int = 0) -> Tensor:
    """Return fixed normal numbers of the dtype of `like`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(like)


@check(
    "any weights", "for d_head ≥ T every positive stochastic A is a softmax of scores", is_standard
)
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    """Check theorem 1 of Bhojanapalli et al. (2020) by construction, and its bound.

    Up to a shift per row log A has rank at most d_head, so d_head = 1 ties the rows of two tokens.
    """
    length = 4
    spec = Spec(d_model=6, heads=1)
    qk = SeparateQK(spec).to(x_BTD)
    x_TD = torch.linalg.qr(random_numbers(x_BTD, 6, length))[0].T
    a_TS = random_numbers(x_BTD, length, length, seed=1).softmax(-1)
    inverse_DT = torch.linalg.pinv(x_TD)
    with torch.no_grad():
        qk.set_circuit_((inverse_DT @ a_TS.log() @ inverse_DT.T / qk.scale).unsqueeze(0))
    q_BHTE, k_BGSE = qk(x_TD.unsqueeze(0), x_TD.unsqueeze(0))
    residual = rel_diff((qk.scale * q_BHTE @ k_BGSE.mT).softmax(-1)[0, 0], a_TS)
    narrow = SeparateQK(Spec(d_model=6, heads=6)).to(x_BTD)
    with torch.no_grad():
        for seed, parameter in enumerate(narrow.parameters(), 2):
            parameter.copy_(random_numbers(x_BTD, 6, 6, seed=seed))
    q_BHTE, k_BGSE = narrow(x_TD.unsqueeze(0), x_TD.unsqueeze(0))
    log_BHTS = (narrow.scale * q_BHTE @ k_BGSE.mT).log_softmax(-1)
    size_BHN = torch.linalg.svdvals(center_rows(log_BHTS))
    too_many = max_violation(size_BHN[..., 1] / size_BHN[..., 0])
    return Deviation(largest(residual, too_many), length=length * 6)


@check("row shift", "softmax is invariant to a shift of a row of scores", is_standard)
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    q_BHTE, k_BGSE = layer.qk(x_BTD, x_BTD)
    v_BGSV = layer.ov.values(x_BTD, k_BGSE)
    length = x_BTD.shape[1]
    shift_TS = random_numbers(x_BTD, length, 1).expand(-1, length)
    outputs = (
        attend(q_BHTE, k_BGSE, v_BGSV, scale=1, causal=True, kernel=layer.kernel, bias=bias)
        for bias in (shift_TS, None)
    )
    return Deviation(rel_diff(*outputs))


@check(
    "decay",
    "weight decay on two factors zeros small singular values, on one matrix it only shrinks them",
    is_standard,
)
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    """Minimize two penalized losses by gradient descent.

    ‖A Bᵀ − diag(s)‖² + λ/2 (‖A‖² + ‖B‖²) is minimal where each singular value is max(0, s − λ/2),
    ‖W − diag(s)‖² + λ/2 ‖W‖² where it is s / (1 + λ/2).
    """
    decay = 0.6
    s = torch.tensor([0.2, 0.4, 0.6, 0.8, 1.0]).to(x_BTD)
    a, b = (0.5 * random_numbers(x_BTD, 5, 5, seed=i) for i in (0, 1))
    w = random_numbers(x_BTD, 5, 5, seed=2)
    for _ in range(2000):
        error = 2 * (a @ b.T - s.diag())
        a, b = a - 0.1 * (error @ b + decay * a), b - 0.1 * (error.T @ a + decay * b)
        w = w - 0.1 * (2 * (w - s.diag()) + decay * w)
    truncated = rel_diff(torch.linalg.svdvals(a @ b.T).flip(0), (s - decay / 2).clamp(min=0))
    shrunk = rel_diff(torch.linalg.svdvals(w).flip(0), s / (1 + decay / 2))
    return Deviation(largest(truncated, shrunk), length=25)


@check(
    "bare block",
    "without skip and norm W_q and W_o (or W_v and W_o) fold into the adjacent MLPs; with them not",
    is_standard,
)
def _(layer: Attention, x_BTD: Tensor) -> Deviation:
    """Check theorem 4.1 of Karbevski & Mijoski (2025), after Graef (2024).

    The network is MLP, attention, MLP, with x = z W_down.
    """
    spec = Spec(d_model=12, heads=3, sigma=1.0, init="naive")
    full = Attention(spec, SeparateQK, SeparateOV).to(x_BTD)
    with torch.no_grad():
        for seed, parameter in enumerate(full.parameters()):
            parameter.copy_(random_numbers(x_BTD, 12, 12, seed=seed) / 12**0.5)
    down_DD, up_DD = (random_numbers(x_BTD, 12, 12, seed=9 + i) / 12**0.5 for i in (0, 1))
    z_BTD = gelu(random_numbers(x_BTD, 2, 7, 12, seed=11))
    qk, ov = full.qk, full.ov
    assert isinstance(qk, SeparateQK)
    assert isinstance(ov, SeparateOV)
    expected_BTD = gelu(full(z_BTD @ down_DD) @ up_DD)
    residuals, violations = [], []
    for basis_DD, forms in ((qk.w_q, (NoQ, NoO)), (ov.w_v, (SeparateQK, NoVO))):
        back_DD = torch.linalg.inv(basis_DD)
        bare = Attention(spec, *forms).to(x_BTD)
        with torch.no_grad():
            for name, parameter in bare.named_parameters():
                if name in ("qk.w_q", "qk.w_k", "ov.w_v"):
                    parameter.copy_(back_DD @ full.get_parameter(name))
            if isinstance(bare.ov, NoVO):
                bare.ov.gain.fill_(1)
        x_BTD_, y_BTD = z_BTD @ down_DD, z_BTD @ (down_DD @ basis_DD)
        folded_DD = ov.w_o @ up_DD
        residuals.append(rel_diff(gelu(bare(y_BTD) @ folded_DD), expected_BTD))
        # With a skip and a norm the stream that is added is in the wrong basis.
        with_skip_BTD = gelu((x_BTD_ + full(_layer_norm(x_BTD_))) @ up_DD)
        violations.append(
            rel_diff(gelu((y_BTD + bare(_layer_norm(y_BTD))) @ folded_DD), with_skip_BTD)
        )
    return Deviation(largest(*residuals) if min(violations) > 1e-2 else 1.0, length=12 * 12)


def _layer_norm(x_BTD: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x_BTD, x_BTD.shape[-1:])
