"""Softmax attention by the fastest exact kernel for the shapes.

The kernel is chosen once (choice.py) and then forced: in training there is no silent fallback to a
kernel with different rounding. Its name is recorded and is part of the id of a run.

flash      torch's fused kernel; the narrower of keys and values is padded with zeros
cudnn      the same of cuDNN, on CUDA
efficient  torch's memory-efficient CUDA kernel; widths may differ, any float type
math       torch's unfused reference implementation
folded     batched matmuls with mask and scale inside the first one; heads that share a key are
           folded into the query length, so that their scores are one matmul with it
blocked    folded in blocks of queries (blocked.py): half the FLOPs, and memory for one block
wide       a Triton kernel for keys as wide as the stream (wide.py), with no weights in memory
static     scores that do not depend on content: one softmax for the whole batch

Shape suffixes as in qk/base.py, and R heads per key head.
"""

import contextlib

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad

from qkablate.attention.kernels import vmapped
from qkablate.attention.kernels.blocked import blocked_attention, fold, matmul_dtype

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
# The same by torch's flags, which take an eighth of the time of `sdpa_kernel`.
_FLAGS = {
    "flash": (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    "cudnn": (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
    "efficient": (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    "math": (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
}
_ALIGNMENT = 16  # of a row of the bias, which torch's kernel for CUDA needs


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
    if kernel == "wide":
        from qkablate.attention.kernels.wide import wide_attention  # needs triton

        assert not dropout
        return wide_attention(q_BHTE, k_BGSE, v_BGSV, scale, causal, bias)
    if kernel == "folded":
        return _folded(q_BHTE, k_BGSE, v_BGSV, scale, causal, bias, dropout)
    if kernel in ("flash", "cudnn") and q_BHTE.is_cuda and matmul_dtype(q_BHTE).itemsize > 2:
        kernel = "math"  # a model for 16 bits that is looked at in full precision
    (batch, heads, queries), value_width = q_BHTE.shape[:3], v_BGSV.shape[-1]
    k_BHSE, v_BHSV = _per_head(k_BGSE, heads), _per_head(v_BGSV, heads)
    if kernel in ("flash", "cudnn"):  # zeros change neither scores nor values
        missing = value_width - q_BHTE.shape[-1]
        if missing > 0:
            q_BHTE, k_BHSE = pad(q_BHTE, (0, missing)), pad(k_BHSE, (0, missing))
        elif missing < 0:
            v_BHSV = pad(v_BHSV, (0, -missing))
    if bias is not None:
        bias = bias + causal_mask(bias.expand(*bias.shape[:-2], queries, -1)) if causal else bias
        # Cast and aligned before it is expanded: torch would copy it for all heads and sequences.
        bias = bias.to(matmul_dtype(q_BHTE))
        bias = align_rows(bias) if kernel == "efficient" else bias
        bias = bias.expand(batch, heads, queries, -1)
    causal = causal and bias is None
    with force_backend(kernel):
        o_BHTV = vmapped.attention(q_BHTE, k_BHSE, v_BHSV, bias, dropout, causal, scale)
    return o_BHTV[..., :value_width]


def force_backend(kernel: str) -> contextlib.AbstractContextManager[object]:
    """Return a context in which torch has no other backend of scaled dot-product attention."""
    if torch.compiler.is_compiling():  # which knows this one
        return sdpa_kernel(_BACKENDS[kernel])
    return _OneBackend(kernel)


class _OneBackend:
    """The flags of torch's backends, changed on entry and restored on exit."""

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel

    def __enter__(self) -> None:
        kernel = self.kernel
        self.changed = [
            enable
            for name, (is_enabled, enable) in _FLAGS.items()
            if is_enabled() != (name == kernel)
        ]
        forced = _FLAGS[kernel][1]
        for enable in self.changed:
            enable(enable is forced)

    def __exit__(self, *error: object) -> None:
        forced = _FLAGS[self.kernel][1]
        for enable in self.changed:
            enable(enable is not forced)


def align_rows(bias: Tensor) -> Tensor:
    """Return the bias with all strides but the last divisible by 16, copied once if need be."""
    missing = -bias.shape[-1] % _ALIGNMENT
    return pad(bias, (0, missing))[..., : bias.shape[-1]] if missing else bias


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
    if mask.shape[-2] == 1 and (mask.dim() == 2 or (mask.dim() == 4 and mask.shape[1] == 1)):
        # The same for all rows.
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
