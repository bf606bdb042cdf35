"""Small attention layers with random values."""

from typing import TypeVar

import torch

from qkablate.attention import OV_CIRCUITS, QK_CIRCUITS, Attention, Spec

M = TypeVar("M", bound=torch.nn.Module)
CONTEXT = 8
# Pairs of circuits that interact more than others.
CROSSED = [
    ("merged", "no_o"),
    ("merged", "merged"),
    ("grouped", "tied"),
    ("grouped", "grouped"),
    ("shared", "tied"),
    ("low_rank", "tied"),
    ("collaborative", "tied"),
    ("uniform", "no_v"),
    ("static", "merged"),
    ("no_k", "no_vo"),
    ("latent", "latent"),
    ("latent", "merged"),
]
PAIRS = [
    *((qk, "separate") for qk in QK_CIRCUITS),
    *(("separate", ov) for ov in OV_CIRCUITS if ov not in ("separate", "latent")),
    *CROSSED,
]


def some_spec(d: int = 12, heads: int = 3, **other) -> Spec:
    """Rank 6 is above the d_head of three heads and below that of one."""
    return Spec(d, heads, **{"sigma": 0.2, "rank": 6, "groups": 1, "context": CONTEXT} | other)


def randomized(module: M, dtype: torch.dtype = torch.float64) -> M:
    """Draw every parameter anew, biases and gains too."""
    torch.manual_seed(0)
    for parameter in module.to(dtype).parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


def random_layer(
    qk: str, ov: str = "separate", *, dtype: torch.dtype = torch.float64, **other
) -> Attention:
    options = ("norm", "mask_self", "position", "kernel", "dropout")
    given = {key: other.pop(key) for key in options if key in other}
    layer = Attention(some_spec(**other), QK_CIRCUITS[qk], OV_CIRCUITS[ov], **given)
    return randomized(layer, dtype)


def qk_for(ov: str) -> str:
    """Return standard's QK circuit, or that of the latent stream which the values are read from."""
    return "latent" if ov == "latent" else "separate"


def random_qk(name: str, **other):
    return randomized(QK_CIRCUITS[name](some_spec(**other)))


def stream(length: int, batch: int = 2, d: int = 12, dtype=torch.float64) -> torch.Tensor:
    """Return a fixed random x_BTD."""
    generator = torch.Generator().manual_seed(length)
    return torch.randn(batch, length, d, generator=generator, dtype=dtype)
