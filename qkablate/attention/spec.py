"""What a circuit is built from, and what all circuits have in common."""

import math
import re
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from qkablate.attention.kernels.matmul import linear


@dataclass(frozen=True)
class Spec:
    """Sizes and starting scale of one attention layer."""

    d_model: int
    heads: int
    bias: bool = False
    sigma: float = 0.02  # standard deviation of standard's W_q, W_k and W_v at the start
    residual: float = 1.0  # W_o starts at this part of sigma (GPT-2: 1/√(2 layers))
    init: str = "matched"  # matched: start where standard starts; naive: as one writes it at first
    rank: int | None = None  # width of the score product, where a circuit leaves it open
    groups: int | None = None  # key and value heads, where heads share them
    context: int | None = None  # longest sequence, where a circuit has a table of positions

    @property
    def d_head(self) -> int:
        return self.d_model // self.heads

    @property
    def score_std(self) -> float:
        """Spread of standard's scores at the start, for normed x (‖x‖² = d)."""
        return self.sigma**2 * self.d_model

    @property
    def length(self) -> float:
        """Size of an entry of x W at the start, for normed x."""
        return self.sigma * math.sqrt(self.d_model)


class Draw(Protocol):
    """Draws the starting value of the tensor called `name` in this circuit, by that name alone, as
    large as an entry of a matrix with `fan_in` rows (if not said: with the rows it has).
    """

    def __call__(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        residual: bool = False,
        fan_in: int | None = None,
    ) -> Tensor: ...


class Meaningless(ValueError):
    """A combination that has no meaning, or a form that cannot hold what it is given: why."""


class Circuit(nn.Module):
    """Base of the QK and the OV circuits."""

    equation: ClassVar[str] = ""
    removes: ClassVar[str] = ""  # of standard's matrices
    source: ClassVar[str] = ""  # the paper or discussion it comes from
    # Parameters without biases, in d (d_model), h (heads), k (d_head = d/h), r (rank), g (groups)
    # and T (context). It is shown to users, and `count` evaluates it.
    params: str = ""
    uses: ClassVar[tuple[str, ...]] = ()  # which of rank, groups it reads from the spec
    factors = 2  # matrices in the product: each decays, so the product decays that many times
    match = "exact"  # how well the start meets standard's: exact, spread or none
    has_places = False  # head h is tied to slice h of the stream: heads cannot change places

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        # Holds nothing; it knows dtype and device also where there is no parameter.
        self.register_buffer("like", torch.empty(0), persistent=False)
        self.like: Tensor

    @torch.no_grad()
    def init_(self, draw: Draw) -> None:
        """Set every parameter, from draws by name."""
        for name, parameter in self.named_parameters():
            parameter.copy_(draw(name, tuple(parameter.shape)))

    def lr_multiplier(self) -> float:
        """What makes the circuit move as far per Adam step as standard's: the first step lowers a
        loss by η Σ|gradient|, and that sum is standard's.
        """
        return 1.0

    def bias_lr_multiplier(self) -> float:
        """The same for what the vectors do."""
        return 1.0

    @property
    def decay(self) -> float:
        """Weight decay of each matrix: standard's two take one each, so f factors take 2/f."""
        return 2 / self.factors

    def flops_per_token(self) -> int:
        """Forward FLOPs of the projections, per token (2 per multiply-add)."""
        return sum(2 * p.numel() for p in self.parameters() if p.dim() == 2)

    def flops_per_pass(self) -> int:
        """Forward FLOPs that a pass costs whatever its number of tokens."""
        return 0

    def count(self) -> int:
        """What `params` comes to."""
        spec = self.spec
        sizes = {"d": spec.d_model, "h": spec.heads, "k": spec.d_head}
        sizes |= {"r": spec.rank or 0, "g": spec.groups or 0, "T": spec.context or 0}
        written = re.sub(r"(?<=[\w²)]) (?=[\w(])", " * ", self.params).replace("²", "**2")
        return int(eval(written, {"__builtins__": {}}, sizes))

    @property
    def no_circuit(self) -> str:
        """Why the circuit is no d × d matrix; empty where it is one."""
        return ""


def split_heads(x_BTF: Tensor, heads: int) -> Tensor:
    """(B, T, H·E) → (B, H, T, E)."""
    return x_BTF.unflatten(-1, (heads, -1)).transpose(1, 2)


def project(x_BTD: Tensor, w_DF: Tensor, b_F: Tensor | None = None) -> Tensor:
    """x W (+ b), with the weight in the row-vector convention of the equations."""
    return linear(x_BTD, w_DF.T, b_F)


def by_head(w_DF: Tensor, heads: int) -> Tensor:
    """(D, H·E) → (H, D, E): the matrix of each head."""
    return w_DF.unflatten(1, (heads, -1)).transpose(0, 1)


def side_by_side(w_HDE: Tensor) -> Tensor:
    """(H, D, E) → (D, H·E), the way back."""
    return w_HDE.transpose(0, 1).flatten(1)


def matrix(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(rows, columns))


def vector(spec: Spec, size: int) -> nn.Parameter | None:
    """A bias, where the model has biases."""
    return nn.Parameter(torch.empty(size)) if spec.bias else None


def truncated_svd(m_HDC: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best m ≈ left_HDR right_HCRᵀ, balanced: leftᵀ left = rightᵀ right."""
    u, s, vh = torch.linalg.svd(m_HDC, full_matrices=False)
    root = s[..., :rank].sqrt().unsqueeze(-2)
    left, right = u[..., :rank] * root, vh.mT[..., :rank] * root
    missing = max(0, rank - s.shape[-1])
    return nn.functional.pad(left, (0, missing)), nn.functional.pad(right, (0, missing))
