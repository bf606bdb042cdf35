"""Linear layers in fp32 on a CPU, computed by torch's BLAS or by oneDNN."""

import torch
from torch import Tensor
from torch.nn import functional as F

MIN_ONEDNN_NUMEL = 20480  # of the input; torch sends smaller convolutions to other kernels

_onednn = False


def set_backend(name: str) -> None:
    """Use `torch` or `onednn` for fp32 on a CPU, in the whole process."""
    global _onednn
    assert name in ("torch", "onednn")
    _onednn = name == "onednn"


def get_backend() -> str:
    """Return the backend in use."""
    return "onednn" if _onednn else "torch"


def linear(x_BTD: Tensor, w_FD: Tensor, b_F: Tensor | None = None) -> Tensor:
    """Return x Wᵀ + b, with the weight in torch's layout.

    In fp32 torch multiplies with MKL, which uses AVX-512 on Intel CPUs alone. oneDNN uses it on
    all, and torch uses oneDNN for convolutions: a 1 × 1 convolution is this product in fp32.
    """
    if (
        not _onednn
        or x_BTD.dtype != torch.float32
        or x_BTD.numel() <= MIN_ONEDNN_NUMEL
        or not len(w_FD)
        or x_BTD.device.type != "cpu"
        or torch.is_autocast_enabled("cpu")
    ):
        return F.linear(x_BTD, w_FD, b_F)
    # One image of B·T × 1 pixels with D channels, in the memory layout of x. A dilation does not
    # matter to a 1 × 1 kernel, but without it torch does not use oneDNN on a single thread.
    x_1DN1 = x_BTD.reshape(1, -1, 1, x_BTD.shape[-1]).permute(0, 3, 1, 2)
    y_1FN1 = F.conv2d(x_1DN1, w_FD[:, :, None, None], b_F, dilation=(1, 2))
    return y_1FN1.permute(0, 2, 3, 1).reshape(*x_BTD.shape[:-1], -1)


class Linear(torch.nn.Linear):
    """`torch.nn.Linear` with the backend of `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)
