"""Cross-entropy of the output projection in blocks, for logits that do not fit in memory at once.

Shape suffixes: N answers, D d_model, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from qkablate.attention.kernels.matmul import linear

LOGITS_PER_BLOCK = 2**25  # 128 MiB in fp32; changing it changes the rounding
IGNORE_INDEX = -100  # the target of a position that does not count


def rows_per_block(vocabulary: int) -> int:
    """Return the number of answers per block."""
    return max(1, LOGITS_PER_BLOCK // vocabulary)


def blocked_loss(x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
    """Return the mean cross-entropy of x weightᵀ in nats.

    The gradient is computed block by block in the forward pass, so that every logit is computed
    once and none is stored.
    """
    kind = x_ND.device.type
    half = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x_ND.dtype
    with torch.autocast(kind, enabled=False):
        loss: Tensor = _BlockedLoss.apply(x_ND, weight_VD, targets_N, half)  # type: ignore[no-untyped-call]
    return loss


class _BlockedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, half: torch.dtype
    ) -> Tensor:
        sums = torch.promote_types(half, torch.float32)
        x, weight = x_ND.to(half), weight_VD.to(half)
        dx_ND, dw_VD = torch.empty_like(x_ND), torch.zeros_like(weight_VD, dtype=sums)
        total = x_ND.new_zeros((), dtype=sums)
        size = rows_per_block(len(weight_VD))
        for begin in range(0, len(x_ND), size):
            rows = slice(begin, begin + size)
            logits_NV = linear(x[rows], weight).to(sums)
            total += F.cross_entropy(logits_NV, targets_N[rows], reduction="sum")
            # The gradient of the sum: probabilities, minus one for the correct token. It is divided
            # by the number of answers at the end, because such small numbers underflow in 16 bits.
            d_NV = logits_NV.softmax(-1)
            counts_N = targets_N[rows] != IGNORE_INDEX
            target_N1 = targets_N[rows].where(counts_N, 0)[:, None]
            d_NV.scatter_add_(1, target_N1, torch.full_like(target_N1, -1, dtype=sums))
            d_NV = d_NV.mul_(counts_N[:, None]).to(half)
            dx_ND[rows] = linear(d_NV, weight.T)
            dw_VD += linear(d_NV.T, x[rows].T)
        count = (targets_N != IGNORE_INDEX).sum()
        ctx.save_for_backward(dx_ND, dw_VD.to(weight_VD.dtype), count)
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx_ND, dw_VD, count = ctx.saved_tensors
        share = grad / count
        return dx_ND * share, dw_VD * share, None, None
