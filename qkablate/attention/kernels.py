"""attend(): softmax attention by the cheapest exact algorithm for the shapes, under a name.

The name is chosen once, from shapes alone, and then forced: nothing falls back in silence to an
algorithm with other rounding. A run records the name, and it is part of the run's id.

flash      torch's fused kernel; queries, keys and values of one width
efficient  torch's memory-efficient CUDA kernel; widths may differ, any float type
math       scores, softmax and average written out (by torch)
folded     keys shared by all heads: heads are folded into the query length, so that all scores are
           ONE batched product against the one key (5 × faster than expanding the key)

Shape suffixes as in qk.py.
"""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import dropout as dropout_
from torch.nn.functional import scaled_dot_product_attention

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def choose_kernel(
    *,
    heads: int,
    key_heads: int,
    width: int,
    value_width: int,
    device: str,
    half: bool,
    dropout: float,
) -> str:
    """The kernel for these shapes: `width` of the score product, `value_width` of a value.

    `half` says that products are 16 bits wide, on a device whose flash kernel takes them.
    """
    if key_heads == 1 and heads > 1:
        return "folded"
    if device == "cpu":
        return "flash" if width == value_width and not dropout else "math"
    if device == "cuda" and width % 8 == value_width % 8 == 0:
        return "flash" if half and width == value_width <= 256 else "efficient"
    return "math"


def attend(
    q_BHTE: Tensor,
    k_BGSE: Tensor,
    v_BHSV: Tensor,
    *,
    scale: float,
    causal: bool,
    kernel: str,
    dropout: float = 0.0,
) -> tuple[Tensor, str]:
    """softmax(scale · q kᵀ) v as o_BHTV, and the name of the kernel that made it."""
    if kernel == "folded":
        return _folded(q_BHTE, k_BGSE, v_BHSV, scale, causal, dropout), kernel
    k_BHSE = k_BGSE.expand(-1, q_BHTE.shape[1], -1, -1)
    with sdpa_kernel(_BACKENDS[kernel]):
        o_BHTV = scaled_dot_product_attention(
            q_BHTE, k_BHSE, v_BHSV, dropout_p=dropout, is_causal=causal, scale=scale
        )
    return o_BHTV, kernel


def _folded(
    q_BHTE: Tensor, k_B1SE: Tensor, v_BHSV: Tensor, scale: float, causal: bool, dropout: float
) -> Tensor:
    _, heads, queries, _ = q_BHTE.shape
    k_BES = k_B1SE.squeeze(1).mT
    # The mask enters the product as its addend and the scale as its factor: no further pass.
    mask_TS = k_BES.new_zeros(queries, k_BES.shape[-1])
    if causal:
        mask_TS = mask_TS.fill_(-torch.inf).triu_(1)
    scores_BFS = torch.baddbmm(
        mask_TS.repeat(heads, 1), q_BHTE.flatten(1, 2), k_BES, alpha=scale
    )  # F = H·T
    weights_BHTS = scores_BFS.softmax(-1).unflatten(1, (heads, queries))
    return dropout_(weights_BHTS, dropout) @ v_BHSV
