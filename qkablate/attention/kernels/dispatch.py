"""Softmax attention by the fastest exact kernel for the shapes.

The kernel is chosen once from the shapes and then forced: there is no silent fallback to a kernel
with different rounding. Its name is recorded and is part of the id of a run.

flash      torch's fused kernel; the narrower of keys and values is padded with zeros
efficient  torch's memory-efficient CUDA kernel; widths may differ, any float type
math       torch's unfused reference implementation
folded     batched matmuls with mask and scale inside the first one; heads that share a key are
           folded into the query length, so that their scores are one matmul with it
blocked    folded in blocks of queries (blocked.py): half the FLOPs, and memory for one block
static     scores that do not depend on content: one softmax for the whole batch

Shape suffixes as in qk/base.py, and R heads per key head.
"""

from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad

from qkablate.attention.kernels import vmapped
from qkablate.attention.kernels.blocked import blocked_attention, fold, matmul_dtype

# Context lengths from which blocks are faster on a CPU (not measured on GPUs, where they must be
# requested): for heads that share a wide key or value, for separate heads, for the latter in bf16.
MIN_BLOCKED_SHARED, MIN_BLOCKED, MIN_BLOCKED_BF16 = 128, 256, 512
_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


class KernelOptions(TypedDict, total=False):
    """Options of a layer that decide its kernel; no parameter is moved or cast."""

    device: str
    half: bool  # 16-bit numbers
    kernel: str  # auto: the fastest
    padding: bool  # some of the keys may be padding


@dataclass(frozen=True)
class Shapes:
    """Properties of a layer that decide which kernels support it and which is the fastest."""

    heads: int
    key_heads: int
    value_heads: int
    width: int  # of the score product
    value_width: int
    device: str
    half: bool  # 16-bit matmuls, on a device whose flash kernel supports them
    dropout: float
    score_bias: bool = False  # something is added to the scores, or keys may be padding
    learned_bias: bool = False  # and needs a gradient
    context: int = 0  # maximal number of positions


def choose_kernel(shapes: Shapes) -> str:
    """Return the kernel for these shapes.

    A wide key (or value) shared by all heads is folded, in blocks where the context is long; small
    differences in width are padded for a fused kernel.
    """
    width, value_width, device = shapes.width, shapes.value_width, shapes.device
    context = 0 if shapes.dropout else shapes.context  # blocks do not support dropout
    if width == 0:
        return "static"
    if shapes.learned_bias:
        return "folded"
    wide_key = shapes.key_heads == 1 and width > value_width
    wide_value = shapes.value_heads == 1 and value_width > width
    if shapes.heads > 1 and (wide_key or wide_value):
        return "blocked" if device == "cpu" and context >= MIN_BLOCKED_SHARED else "folded"
    if device == "cpu":
        if width > value_width or shapes.dropout:
            return "blocked" if context >= MIN_BLOCKED else "folded"
        if shapes.half and context:  # flash is slow in bf16
            return "blocked" if context >= MIN_BLOCKED_BF16 else "folded"
        return "flash"
    if device == "cuda" and width % 8 == value_width % 8 == 0:
        fits = shapes.half and width <= value_width <= 256 and not shapes.score_bias
        return "flash" if fits else "efficient"
    return "math"


def unsupported_reason(kernel: str, shapes: Shapes) -> str:
    """Return why a requested kernel does not support these shapes; empty if it does."""
    widths = (shapes.width, shapes.value_width)
    odd = any(width % 8 for width in widths)
    if shapes.width == 0 and kernel in ("flash", "efficient"):
        return f"{kernel} needs queries and keys, and this variant has none"
    if kernel == "efficient" and shapes.device != "cuda":
        return "efficient is a CUDA kernel"
    if kernel == "efficient" and odd:
        return f"efficient needs widths divisible by 8, not {widths[0]} and {widths[1]}"
    if kernel == "blocked" and (shapes.dropout or shapes.learned_bias or shapes.width == 0):
        what = "dropout" if shapes.dropout else "learned score biases"
        return f"blocked does not support {what if shapes.width else 'variants without queries'}"
    if kernel != "flash":
        return ""
    if shapes.device not in ("cpu", "cuda"):
        return f"flash is not available on {shapes.device}"
    if shapes.learned_bias:
        return "flash does not support learned score biases"
    if shapes.device == "cpu":
        return "flash does not support dropout on a CPU" if shapes.dropout else ""
    if not shapes.half or shapes.score_bias or odd or max(widths) > 256:
        return "flash needs 16 bits, widths divisible by 8 up to 256, and no score bias"
    return ""


def attend(
    q_BHTE: Tensor,
    k_BGSE: Tensor,
    v_BGSV: Tensor,
    *,
    scale: float,
    causal: bool,
    kernel: str,
    bias: Tensor | None = None,
    key_mask_BS: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Return softmax(scale · q kᵀ + bias) v as o_BHTV; the bias is BHTS, HTS or TS.

    Keys and values may have fewer heads than the queries, each shared by equally many. Keys where
    the mask is false are padding: finite numbers, which change nothing.
    """
    if key_mask_BS is not None:
        bias = _mask_keys(bias, key_mask_BS, q_BHTE)
    if kernel == "static":
        return _static(q_BHTE, v_BGSV, causal, bias, dropout)
    if kernel == "blocked":
        assert not dropout
        return blocked_attention(q_BHTE, k_BGSE, v_BGSV, scale, causal, bias)
    if kernel == "folded":
        return _folded(q_BHTE, k_BGSE, v_BGSV, scale, causal, bias, dropout)
    (batch, heads, queries), value_width = q_BHTE.shape[:3], v_BGSV.shape[-1]
    k_BHSE, v_BHSV = _per_head(k_BGSE, heads), _per_head(v_BGSV, heads)
    if kernel == "flash":  # zeros change neither scores nor values
        missing = value_width - q_BHTE.shape[-1]
        if missing > 0:
            q_BHTE, k_BHSE = pad(q_BHTE, (0, missing)), pad(k_BHSE, (0, missing))
        elif missing < 0:
            v_BHSV = pad(v_BHSV, (0, -missing))
    if bias is not None:
        bias = bias + causal_mask(bias.expand(*bias.shape[:-2], queries, -1)) if causal else bias
        bias = bias.to(q_BHTE.dtype).expand(batch, heads, queries, -1)
    causal = causal and bias is None
    with sdpa_kernel(_BACKENDS[kernel]):
        o_BHTV = vmapped.attention(q_BHTE, k_BHSE, v_BHSV, bias, dropout, causal, scale)
    return o_BHTV[..., :value_width]


def _mask_keys(bias: Tensor | None, key_mask_BS: Tensor, like: Tensor) -> Tensor:
    """Return the bias with a term, B11S, that leaves no weight to padding.

    Half of the lowest number and not −∞, so that a query that sees nothing else has finite weights.
    A sequence that is all padding is averaged, as one that has no padding.
    """
    exists_BS = key_mask_BS | ~key_mask_BS.any(-1, keepdim=True)
    lowest = torch.finfo(matmul_dtype(like)).min / 2
    padding_BS = like.new_zeros(exists_BS.shape).masked_fill(~exists_BS, lowest)
    padding_B11S = padding_BS[:, None, None]
    return padding_B11S if bias is None else bias + padding_B11S


def causal_mask(like_TS: Tensor, first: int = 0) -> Tensor:
    """Return −∞ for every key after the query, as TS; the first query has position `first`."""
    shape, kind = like_TS.shape[-2:], like_TS.dtype
    # Of no input, so that under vmap it is one mask for all.
    return torch.full(shape, -torch.inf, dtype=kind, device=like_TS.device).triu_(1 + first)


def _per_head(x_BGSE: Tensor, heads: int) -> Tensor:
    groups = x_BGSE.shape[1]
    if groups == 1:
        return x_BGSE.expand(-1, heads, -1, -1)
    return x_BGSE if groups == heads else x_BGSE.repeat_interleave(heads // groups, 1)


def _folded(
    q_BHTE: Tensor,
    k_BGSE: Tensor,
    v_BGSV: Tensor,
    scale: float,
    causal: bool,
    bias: Tensor | None,
    dropout: float,
) -> Tensor:
    (batch, groups, keys, _), (heads, queries) = k_BGSE.shape, q_BHTE.shape[1:3]
    per_group = heads // groups
    # baddbmm adds mask and bias and multiplies by the scale without another pass.
    mask = q_BHTE.new_zeros(queries if causal else 1, keys)
    mask = causal_mask(mask) if causal else mask
    mask = mask if bias is None else (mask + bias).to(q_BHTE.dtype)
    if mask.shape[-2] == 1 and (mask.dim() == 2 or mask.shape[-3] == 1):  # the same for all rows
        mask_FS = mask if mask.dim() == 2 else mask.expand(-1, groups, -1, -1).flatten(0, 1)
    elif mask.dim() == 2:
        mask_FS = mask.repeat(per_group, 1)
    elif mask.dim() == 4:
        mask_FS = fold(mask.expand(batch, heads, queries, -1), batch * groups)
    elif groups == 1:
        mask_FS = mask.flatten(0, 1)
    else:
        mask_FS = mask.unflatten(0, (groups, per_group)).flatten(1, 2).repeat(batch, 1, 1)
    k_NSE = k_BGSE.flatten(0, 1)
    scores_NFS = torch.baddbmm(mask_FS, fold(q_BHTE, len(k_NSE)), k_NSE.mT, alpha=scale)
    weights_NFS = F.dropout(scores_NFS.softmax(-1), dropout)
    return _average(weights_NFS.view(batch, heads, queries, keys), v_BGSV)


def _static(
    q_BHT0: Tensor, v_BGSV: Tensor, causal: bool, bias: Tensor | None, dropout: float
) -> Tensor:
    (batch, heads, queries), keys = q_BHT0.shape[:3], v_BGSV.shape[2]
    scores = v_BGSV.new_zeros(queries, keys, dtype=torch.promote_types(v_BGSV.dtype, torch.float32))
    scores = causal_mask(scores) if causal else scores
    scores = scores if bias is None else scores + bias
    weights = scores.softmax(-1).to(v_BGSV.dtype)
    if dropout or weights.dim() == 4:
        return _average(F.dropout(weights.expand(batch, heads, -1, -1), dropout), v_BGSV)
    # The weights are the same for every sequence, so one matmul averages the values of all.
    if weights.dim() == 2:
        o_TBGV = torch.tensordot(weights, v_BGSV, ([1], [2]))
        return _per_head(o_TBGV.movedim(0, 2), heads)
    groups = v_BGSV.shape[1]
    weights_GFS = weights.unflatten(0, (groups, -1)).flatten(1, 2)
    o_GFN = weights_GFS @ v_BGSV.permute(1, 2, 0, 3).flatten(2)  # N = B · V
    o_HTBV: Tensor = o_GFN.view(heads, queries, batch, -1)
    return o_HTBV.permute(2, 0, 1, 3)


def _average(weights_BHTS: Tensor, v_BGSV: Tensor) -> Tensor:
    heads, groups = weights_BHTS.shape[1], v_BGSV.shape[1]
    if groups == heads:
        return weights_BHTS @ v_BGSV
    o_BGFV = weights_BHTS.unflatten(1, (groups, -1)).flatten(2, 3) @ v_BGSV
    return torch.unflatten(o_BGFV, 2, (heads // groups, -1)).flatten(1, 2)
