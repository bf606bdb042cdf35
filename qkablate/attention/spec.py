"""What a circuit is built from."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Spec:
    """Sizes and starting scale of one attention layer."""

    d_model: int
    heads: int
    bias: bool = False
    sigma: float = 0.02  # standard deviation of standard's W_q and W_k at the start
    init: str = "matched"  # matched: start where standard starts; naive: as one writes it at first

    @property
    def d_head(self) -> int:
        return self.d_model // self.heads


class Draw(Protocol):
    """Draws the starting value of the tensor called `name` in this circuit, by that name alone."""

    def __call__(self, name: str, shape: tuple[int, ...], *, residual: bool = False) -> Tensor: ...
