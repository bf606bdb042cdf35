"""Torch's attention under vmap: one call for all, which torch itself would repeat for each.

Shape suffixes as in dispatch.py.
"""

from typing import Any

from torch import Tensor
from torch.autograd.function import Function
from torch.nn import functional as F

_enabled = False


class enabled:  # noqa: N801 - a context manager, which is called like a function
    """Context of a vmapped call."""

    def __enter__(self) -> None:
        global _enabled
        _enabled = True

    def __exit__(self, *error: object) -> None:
        global _enabled
        _enabled = False


def attention(
    q_BHTE: Tensor,
    k_BHSE: Tensor,
    v_BHSV: Tensor,
    bias_BHTS: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float,
) -> Tensor:
    """Return what torch's attention returns, by the kernel that is selected."""
    if not _enabled:
        return F.scaled_dot_product_attention(
            q_BHTE, k_BHSE, v_BHSV, bias_BHTS, dropout, is_causal=causal, scale=scale
        )
    assert not dropout
    o_BHTV: Tensor = _Attention.apply(q_BHTE, k_BHSE, v_BHSV, bias_BHTS, causal, scale)  # type: ignore[no-untyped-call]
    return o_BHTV


class _Attention(Function):
    """Attention whose `vmap` is differentiable, so that it needs no backward of its own."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, bias: Any, causal: bool, scale: float) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, bias, is_causal=causal, scale=scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
        *tensors, causal, scale = args
        count = info.batch_size

        def merge(x: Tensor | None, dim: int | None) -> Tensor | None:
            if x is None:
                return None
            x = x.expand(count, *x.shape) if dim is None else x.movedim(dim, 0)
            return x.flatten(0, 1)

        q, k, v, bias = (merge(*both) for both in zip(tensors, in_dims[:4], strict=True))
        assert q is not None
        assert k is not None
        assert v is not None
        o = F.scaled_dot_product_attention(q, k, v, bias, is_causal=causal, scale=scale)
        return o.unflatten(0, (count, -1)), 0
