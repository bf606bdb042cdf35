"""The product of an input and a weight, and which library computes it."""

import torch
from torch import Tensor
from torch.nn import functional as F

SMALL = 20480  # numbers of an input: torch convolves no fewer through oneDNN

_onednn = False


def choose(name: str) -> None:
    """`torch`, or `onednn` for products in fp32 on a CPU; it holds for the whole process."""
    global _onednn
    assert name in ("torch", "onednn")
    _onednn = name == "onednn"


def chosen() -> str:
    return "onednn" if _onednn else "torch"


def linear(x_BTD: Tensor, w_FD: Tensor, b_F: Tensor | None = None) -> Tensor:
    """x Wᵀ + b, the weight as torch keeps it.

    In fp32 torch multiplies with MKL, which has no AVX-512 for CPUs other than Intel's. oneDNN has,
    and torch uses it to convolve: a convolution by one point is this product, in the same fp32.
    """
    if not _onednn or x_BTD.dtype != torch.float32 or x_BTD.numel() <= SMALL or not len(w_FD):
        return F.linear(x_BTD, w_FD, b_F)
    if x_BTD.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return F.linear(x_BTD, w_FD, b_F)
    # One image of B · T by 1 points with D channels, which lie side by side as they do in x. What
    # stands apart in a kernel of one point is nothing, but without it one thread gets no oneDNN.
    x_1DN1 = x_BTD.reshape(1, -1, 1, x_BTD.shape[-1]).permute(0, 3, 1, 2)
    y_1FN1 = F.conv2d(x_1DN1, w_FD[:, :, None, None], b_F, dilation=(1, 2))
    return y_1FN1.permute(0, 2, 3, 1).reshape(*x_BTD.shape[:-1], -1)


class Linear(torch.nn.Linear):
    """torch's own, with this product."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)
