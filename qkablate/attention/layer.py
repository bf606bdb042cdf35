"""Where heads, mask and the two circuits meet. Shape suffixes as in qk.py."""

from torch import Tensor, nn

from qkablate.attention.kernels import attend, choose_kernel
from qkablate.attention.ov import OV
from qkablate.attention.qk import QK


class Attention(nn.Module):
    """Multi-head attention with any QK circuit and any OV circuit.

    Queries come from one stream, keys and values from another; self-attention gives one stream.
    """

    def __init__(
        self, qk: QK, ov: OV, *, device: str = "cpu", half: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.qk, self.ov, self.dropout = qk, ov, dropout
        self.kernel = choose_kernel(
            heads=qk.spec.heads,
            key_heads=qk.key_heads,
            width=qk.width,
            value_width=ov.width,
            device=device,
            half=half,
            dropout=dropout,
        )

    def forward(self, x_BTD: Tensor, y_BSD: Tensor | None = None, causal: bool = True) -> Tensor:
        y_BSD = x_BTD if y_BSD is None else y_BSD
        q_BHTE, k_BGSE = self.qk(x_BTD, y_BSD)
        o_BHTV, _ = attend(
            q_BHTE,
            k_BGSE,
            self.ov.values(y_BSD, k_BGSE),
            scale=self.qk.scale,
            causal=causal,
            kernel=self.kernel,
            dropout=self.dropout if self.training else 0.0,
        )
        return self.ov.write(o_BHTV)
