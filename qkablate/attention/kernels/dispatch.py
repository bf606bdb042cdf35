"""attend(): softmax attention by the cheapest exact algorithm for the shapes, under a name.

The name is chosen once, from shapes alone, and then forced: nothing falls back in silence to an
algorithm with other rounding. A run records the name, and it is part of the run's id.

flash      torch's fused kernel; values or keys that are narrower are padded with zeros
efficient  torch's memory-efficient CUDA kernel; widths may differ, any float type
math       scores, softmax and average written out (by torch)
folded     the same as batched products with mask and scale inside the product; heads that share a
           key are folded into the query length, so that their scores are ONE product against it
blocked    the same in blocks of queries (blocked.py): half the products, and memory for one block
static     scores without content: one softmax for the whole batch

Shape suffixes as in qk/base.py, and R heads per key head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import dropout as dropout_
from torch.nn.functional import pad, scaled_dot_product_attention

from qkablate.attention.kernels.blocked import blocked

KERNELS = ("auto", "math", "flash", "efficient", "folded", "blocked")
# Positions from which blocks pay on a CPU (on a GPU nobody has timed them: `attention.kernel` asks
# for them), where heads share a wide key or value, where each has its own, and the latter in bf16.
LONG, LONGER, LONGEST = 128, 256, 512
_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclass(frozen=True)
class Shapes:
    """What decides which kernels can compute a layer, and which does it best."""

    heads: int
    key_heads: int
    value_heads: int
    width: int  # of the score product
    value_width: int
    device: str
    half: bool  # products of 16 bits, on a device whose flash kernel takes them
    dropout: float
    addend: bool = False  # something is added to the scores
    learned: bool = False  # and it has a gradient
    context: int = 0  # the most positions


def choose_kernel(shapes: Shapes) -> str:
    """The kernel for these shapes. A key (or value) that is wide because all heads share it is
    folded, in blocks where the context is long; what is a little narrower than the other is padded
    and fused.
    """
    width, value_width, device = shapes.width, shapes.value_width, shapes.device
    if width == 0:
        return "static"
    if shapes.learned:
        return "folded"
    wide_key = shapes.key_heads == 1 and width > value_width
    wide_value = shapes.value_heads == 1 and value_width > width
    if shapes.heads > 1 and (wide_key or wide_value):
        long = device == "cpu" and shapes.context >= LONG and not shapes.dropout
        return "blocked" if long else "folded"
    if device == "cpu" and (width > value_width or shapes.dropout):
        return "blocked" if shapes.context >= LONGER and not shapes.dropout else "folded"
    if device == "cpu" and shapes.half and shapes.context:  # flash is for fp32, and slow in bf16
        return "blocked" if shapes.context >= LONGEST else "folded"
    if device == "cpu":
        return "flash"
    if device == "cuda" and width % 8 == value_width % 8 == 0:
        fits = shapes.half and width <= value_width <= 256 and not shapes.addend
        return "flash" if fits else "efficient"
    return "math"


def why_not(kernel: str, shapes: Shapes) -> str:
    """Why a kernel that was asked for cannot compute this; empty if it can."""
    widths = (shapes.width, shapes.value_width)
    odd = any(width % 8 for width in widths)
    if shapes.width == 0 and kernel in ("flash", "efficient"):
        return f"{kernel} multiplies queries and keys, and there are none"
    if kernel == "efficient" and shapes.device != "cuda":
        return "efficient is a CUDA kernel"
    if kernel == "efficient" and odd:
        return f"efficient wants widths that 8 divides, not {widths[0]} and {widths[1]}"
    if kernel == "blocked" and (shapes.dropout or shapes.learned or shapes.width == 0):
        what = "dropout" if shapes.dropout else "gradient for what is added to the scores"
        return f"blocked has no {what}" if shapes.width else "blocked wants queries, and has none"
    if kernel != "flash":
        return ""
    if shapes.device not in ("cpu", "cuda"):
        return f"there is no flash kernel on {shapes.device}"
    if shapes.learned:
        return "flash has no gradient for what is added to the scores"
    if shapes.device == "cpu":
        return "flash has no dropout on a CPU" if shapes.dropout else ""
    if not shapes.half or shapes.addend or odd or max(widths) > 256:
        return "flash wants 16 bits, widths to 256 that 8 divides, and nothing added to the scores"
    return ""


def attend(
    q_BHTE: Tensor,
    k_BGSE: Tensor,
    v_BGSV: Tensor,
    *,
    scale: float,
    causal: bool,
    kernel: str,
    addend: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(scale · q kᵀ + addend) v as o_BHTV. The addend is HTS or TS; keys and values may have
    fewer heads than the queries, each shared by as many.
    """
    if kernel == "static":
        return _static(q_BHTE, v_BGSV, causal, addend, dropout)
    if kernel == "blocked":
        assert not dropout
        return blocked(q_BHTE, k_BGSE, v_BGSV, scale, causal, addend)
    if kernel == "folded":
        return _folded(q_BHTE, k_BGSE, v_BGSV, scale, causal, addend, dropout)
    heads, width, value_width = q_BHTE.shape[1], q_BHTE.shape[-1], v_BGSV.shape[-1]
    k_BHSE, v_BHSV = _per_head(k_BGSE, heads), _per_head(v_BGSV, heads)
    if kernel == "flash" and width != value_width:  # zeros add nothing to a score or a value
        missing = value_width - width
        if missing > 0:
            q_BHTE, k_BHSE = pad(q_BHTE, (0, missing)), pad(k_BHSE, (0, missing))
        else:
            v_BHSV = pad(v_BHSV, (0, -missing))
    if addend is not None:
        if causal:
            addend = addend + causal_mask(addend)
        addend = addend.to(q_BHTE.dtype).expand(q_BHTE.shape[0], heads, -1, -1)
    with sdpa_kernel(_BACKENDS[kernel]):
        o_BHTV = scaled_dot_product_attention(
            q_BHTE,
            k_BHSE,
            v_BHSV,
            attn_mask=addend,
            dropout_p=dropout,
            is_causal=causal and addend is None,
            scale=scale,
        )
    return o_BHTV[..., :value_width]


def causal_mask(like_TS: Tensor, first: int = 0) -> Tensor:
    """−∞ for every key after the query, as TS; the queries are the positions from `first` on."""
    queries, keys = like_TS.shape[-2:]
    return like_TS.new_full((queries, keys), -torch.inf).triu_(1 + first)


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
    addend: Tensor | None,
    dropout: float,
) -> Tensor:
    (batch, groups, keys, _), (heads, queries) = k_BGSE.shape, q_BHTE.shape[1:3]
    per_group = heads // groups
    q_NFE = q_BHTE.unflatten(1, (groups, per_group)).flatten(2, 3).flatten(0, 1)  # N=B·G, F=R·T
    # Mask and addend enter the product as its addend, the scale as its factor: no further pass.
    mask = q_BHTE.new_zeros(queries, keys)
    if causal:
        mask = causal_mask(mask)
    if addend is not None:
        mask = (mask + addend).to(q_BHTE.dtype)
    if mask.dim() == 2:
        mask_FS = mask.repeat(per_group, 1)
    elif groups == 1:
        mask_FS = mask.flatten(0, 1)
    else:
        mask_FS = mask.unflatten(0, (groups, per_group)).flatten(1, 2).repeat(batch, 1, 1)
    scores_NFS = torch.baddbmm(mask_FS, q_NFE, k_BGSE.flatten(0, 1).mT, alpha=scale)
    weights_NFS = dropout_(scores_NFS.softmax(-1), dropout)
    return _average(weights_NFS.view(batch, heads, queries, keys), v_BGSV)


def _static(
    q_BHT0: Tensor, v_BGSV: Tensor, causal: bool, addend: Tensor | None, dropout: float
) -> Tensor:
    (batch, heads, queries), keys = q_BHT0.shape[:3], v_BGSV.shape[2]
    scores = v_BGSV.new_zeros(queries, keys, dtype=torch.promote_types(v_BGSV.dtype, torch.float32))
    if causal:
        scores = causal_mask(scores)
    if addend is not None:
        scores = scores + addend
    weights = scores.softmax(-1).to(v_BGSV.dtype)
    if dropout:
        return _average(dropout_(weights.expand(batch, heads, -1, -1), dropout), v_BGSV)
    # The same for every sequence, so that one product averages the values of all of them.
    if weights.dim() == 2:
        o_TBGV = torch.tensordot(weights, v_BGSV, ([1], [2]))
        return _per_head(o_TBGV.movedim(0, 2), heads)
    groups = v_BGSV.shape[1]
    weights_GFS = weights.unflatten(0, (groups, -1)).flatten(1, 2)
    o_GFN = weights_GFS @ v_BGSV.permute(1, 2, 0, 3).flatten(2)  # N = B · V
    return o_GFN.view(heads, queries, batch, -1).permute(2, 0, 1, 3)


def _average(weights_BHTS: Tensor, v_BGSV: Tensor) -> Tensor:
    """weights v, where heads that share values are folded together, too."""
    heads, groups = weights_BHTS.shape[1], v_BGSV.shape[1]
    if groups == heads:
        return weights_BHTS @ v_BGSV
    folded_BGFS = weights_BHTS.unflatten(1, (groups, -1)).flatten(2, 3)
    o_BGFV = folded_BGFS @ v_BGSV
    return o_BGFV.unflatten(2, (heads // groups, -1)).flatten(1, 2)
