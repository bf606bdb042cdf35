"""Sizes of a layer, and the base class of its circuits."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

# Of `params`: d_model, that of the keys, heads, d_head, rank, groups, context, source, rope_dims.
FORMULA_LETTERS = "dehkrgTSp"


@dataclass(frozen=True)
class Spec:
    """Sizes and initial scale of one attention layer."""

    d_model: int
    heads: int
    bias: bool = False
    sigma: float = 0.02  # initial standard deviation of W_q, W_k and W_v in the standard variant
    residual: float = 1.0  # W_o is initialized at this multiple of sigma (GPT-2: 1/√(2 layers))
    init: str = "matched"  # matched: start where standard does; naive: default initialization
    symmetric: bool = False  # W_q starts as a copy of W_k (Saponati et al., 2025)
    rank: int | None = None  # width of the score product, where a circuit lets it vary
    groups: int | None = None  # number of key and value heads, where heads share them
    rope_dims: int = 0  # width of rotated queries and keys beside those of the circuit
    context: int | None = None  # longest sequence, where a circuit has a table of positions
    source: int | None = None  # the same of the keys' stream in cross-attention; None: one stream
    causal: bool = True  # no query sees later keys
    d_source: int | None = None  # width of the keys' stream in cross-attention; None: d_model
    source_sigma: float | None = None  # sigma of the matrices that read it; None: sigma

    @property
    def is_cross(self) -> bool:
        """True if the keys are of another stream, so that no token meets itself."""
        return self.source is not None

    @property
    def d_head(self) -> int:
        return self.d_model // self.heads

    @property
    def d_keys(self) -> int:
        """Width of the stream of the keys and values."""
        return self.d_source or self.d_model

    @property
    def score_std(self) -> float:
        """Standard deviation of standard's initial scores for normalized streams (‖x‖² = d)."""
        return self.sigma**2 * self.d_model * self.key_ratio

    @property
    def projection_std(self) -> float:
        """Standard deviation of the initial entries of x W for normalized x."""
        return self.sigma * math.sqrt(self.d_model)

    @property
    def key_std(self) -> float:
        """Standard deviation of the initial entries of y W, for the stream y of the keys."""
        return (self.source_sigma or self.sigma) * math.sqrt(self.d_keys)

    @property
    def key_ratio(self) -> float:
        """Length of a standard key relative to that of a query; 1 for streams of one width."""
        return self.key_std / self.projection_std

    @property
    def key_speed(self) -> float:
        """Initial Σ|gradient| of standard's W_k relative to that of W_q; 1 for one width."""
        return self.d_keys / self.d_model / self.key_ratio


@dataclass(frozen=True)
class CircuitLr:
    """Learning rates of the circuits: matched multipliers to a power, and a factor of QK's."""

    power: float = 1.0
    qk: float = 1.0


MATCHED_LR = CircuitLr()


class Draw(Protocol):
    """Draws the initial value of a tensor of a circuit from its name alone.

    The scale is that of a matrix with `fan_in` rows (default: the rows of the shape).
    """

    def __call__(
        self, name: str, shape: Sequence[int], *, residual: bool = False, fan_in: int | None = None
    ) -> Tensor: ...


class UnsupportedCombination(ValueError):
    """Raised where options cannot be combined or a form cannot hold a given circuit."""


class UnsupportedKernel(UnsupportedCombination):
    """Raised where an attention kernel cannot compute a layer."""


TensorMap = Callable[[Tensor], Tensor]


def _identity(x_NRC: Tensor) -> Tensor:
    return x_NRC


def _split(x_RC: Tensor, dim: int, count: int) -> Tensor:
    """Cut a matrix along a dimension into NRC."""
    return torch.stack(x_RC.chunk(count, dim))


def _join(x_NRC: Tensor, dim: int) -> Tensor:
    """Set matrices side by side along a dimension."""
    return torch.cat(x_NRC.unbind(), dim)


class Circuit(nn.Module):
    """Base of the QK and the OV circuits."""

    equation: ClassVar[str] = ""
    removes: ClassVar[str] = ""  # of the matrices of the standard variant
    source: ClassVar[str] = ""  # paper or discussion
    # Parameters without biases, in d (d_model), e (width of the keys' stream), h (heads), k (d_head
    # = d/h), r (rank), g (groups), p (rope_dims), T (context) and S (source). Shown to users and
    # evaluated by `count_params`.
    params: str = ""
    uses: ClassVar[tuple[str, ...]] = ()  # which of rank, groups it reads from the spec
    factors = 2  # matrices in the product; weight decay acts on each of them
    match = "exact"  # how well the initialization matches standard's: exact, spread or none
    naive_match: ClassVar[str] = ""  # the same for the default initialization, where it differs
    # Learning-rate multipliers of matrices and vectors that match the speed of standard's circuit:
    # the first Adam step lowers the loss by η Σ|gradient|; this makes that sum standard's.
    lr_multiplier = 1.0
    bias_lr_multiplier = 1.0
    scores_are_zero: ClassVar[bool] = False  # so that nothing of another form's can be kept
    no_circuit_reason = ""  # why the circuit is not a d × d matrix; empty if it is one
    one_width_reason: ClassVar[str] = ""  # why queries and keys need streams of one width
    # The matrices with those of the heads side by side, along this dimension, and the parameters of
    # two or three dimensions that multiply no vectors.
    head_dims: ClassVar[Mapping[str, int]] = MappingProxyType(
        {"w_q": 1, "w_k": 1, "w_qk": 1, "w_v": 1, "w_o": 0, "w_ov": 0}
    )
    tables: ClassVar[tuple[str, ...]] = ()
    is_by_head = True  # False: a latent stream is not mapped to heads, as a norm is of it
    has_head_slices = False  # head h is tied to slice h of the stream, so heads cannot be permuted

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        if spec.init == "naive":
            self.match = self.naive_match or self.match
        # Empty; gives dtype and device of circuits without parameters, too.
        self.register_buffer("like", torch.empty(0), persistent=False)
        self.like: Tensor

    @torch.no_grad()
    def init_(self, draw: Draw) -> None:
        """Set every parameter from draws by name; those named "w_o…" have the scale of W_o."""
        for name, parameter in self.named_parameters():
            parameter.copy_(draw(name, parameter.shape, residual=name.startswith("w_o")))
        self.adjust_init_()

    def adjust_init_(self) -> None:
        """Change the drawn values; for subclasses whose initialization differs."""

    def head_count(self, name: str) -> int:
        """Return how many heads a matrix of `head_dims` serves."""
        return self.spec.heads

    def matrices(self) -> Iterator[tuple[str, TensorMap, TensorMap]]:
        """Yield name, split and join of each parameter that consists of matrices.

        `split` cuts its gradient into matrices, NRC, one for each head that has its own; `join`
        makes an update of its shape of theirs.
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() not in (2, 3) or name in self.tables:
                continue
            if parameter.dim() == 3:
                yield name, _identity, _identity
                continue
            dim, count = self.head_dims.get(name, 0), self.head_count(name)
            count = count if name in self.head_dims and not parameter.shape[dim] % count else 1
            yield name, partial(_split, dim=dim, count=count), partial(_join, dim=dim)

    @property
    def decay(self) -> float:
        """Weight-decay multiplier of each matrix: standard's two have 1 each, f factors 2/f."""
        return 2 / self.factors

    def flops_per_token(self) -> int:
        """Return the forward FLOPs of the projections of one stream per token, 2 per multiply-add.

        In cross-attention they divide into those per query and those per key.
        """
        return sum(2 * p.numel() for p in self.parameters() if p.dim() == 2)

    def flops_per_key(self) -> int:
        """Return the FLOPs of a token that is only a key: of w_c, w_k, a_k, w_v and a_v."""
        matrices = ((name, p) for name, p in self.named_parameters() if p.dim() == 2)
        return sum(2 * p.numel() for name, p in matrices if name.endswith(("_c", "_k", "_v")))

    def flops_per_query(self) -> int:
        """Return the FLOPs of a token that is only a query."""
        return self.flops_per_token() - self.flops_per_key()

    def flops_per_pass(self) -> int:
        """Return the forward FLOPs of a pass that do not depend on its number of tokens."""
        return 0

    def count_params(self) -> int:
        """Evaluate the formula `params`."""
        spec, context = self.spec, self.spec.context or 0
        sizes = [spec.d_model, spec.d_keys, spec.heads, spec.d_head, spec.rank or 0]
        sizes += [spec.groups or 0, context, spec.source or context, spec.rope_dims]
        code = re.sub(r"(?<=[\w²)]) (?=[\w(])", " * ", self.params).replace("²", "**2")
        letters = dict(zip(FORMULA_LETTERS, sizes, strict=True))
        return int(eval(code, {"__builtins__": {}}, letters))
