"""The OV circuit: ways to parametrise what a key position writes,  write_h(j) = x_jᵀ M_h.

Shape suffixes as in qk.py, and V for the width of a head's value.
"""

import torch
from torch import Tensor, nn

from qkablate.attention.qk import by_head, project, split_heads
from qkablate.attention.spec import Draw, Spec


class OV(nn.Module):
    """Base of the OV circuits: values from the key/value stream, and the way back to d_model."""

    equation = ""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.width = spec.d_head  # V

    def values(self, y_BSD: Tensor, k_BGSE: Tensor) -> Tensor:
        """v_BHSV. The keys are offered, for circuits that use them as values."""
        raise NotImplementedError

    def write(self, o_BHTV: Tensor) -> Tensor:
        """From the heads' averages to what the layer adds to the residual stream."""
        raise NotImplementedError

    def init_(self, draw: Draw) -> None:
        """Set every parameter, from draws by name."""
        raise NotImplementedError

    def circuit(self) -> Tensor:
        """M_HDD."""
        raise NotImplementedError

    def flops_per_token(self) -> int:
        """Forward FLOPs of the projections, per token (2 per multiply-add)."""
        return sum(2 * p.numel() for p in self.parameters() if p.dim() == 2)


class SeparateOV(OV):
    """Standard attention: M_h = W_v,h W_o,h."""

    equation = "M_h = W_v W_o"

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        inner = spec.heads * spec.d_head
        self.w_v = nn.Parameter(torch.empty(spec.d_model, inner))
        self.w_o = nn.Parameter(torch.empty(inner, spec.d_model))
        self.b_v = nn.Parameter(torch.empty(inner)) if spec.bias else None
        self.b_o = nn.Parameter(torch.empty(spec.d_model)) if spec.bias else None

    def values(self, y_BSD: Tensor, k_BGSE: Tensor) -> Tensor:
        return split_heads(project(y_BSD, self.w_v, self.b_v), self.spec.heads)

    def write(self, o_BHTV: Tensor) -> Tensor:
        return project(o_BHTV.transpose(1, 2).flatten(2), self.w_o, self.b_o)

    @torch.no_grad()
    def init_(self, draw: Draw) -> None:
        for name, parameter in self.named_parameters():
            parameter.copy_(draw(name, tuple(parameter.shape), residual=name == "w_o"))

    def circuit(self) -> Tensor:
        w_o_HVD = self.w_o.unflatten(0, (self.spec.heads, -1))
        return by_head(self.w_v, self.spec.heads) @ w_o_HVD


OV_CIRCUITS: dict[str, type[OV]] = {"separate": SeparateOV}
