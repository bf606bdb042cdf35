"""The QK circuit: ways to parametrise the scores  score_h(i, j) = scale · x_iᵀ B_h x_j.

A new one is a class with `forward`, `init_` and `circuit`, entered in QK_CIRCUITS.

Shape suffixes: B batch, T queries, S keys, D d_model, H heads, G key heads (H, or 1 shared by all),
K head size, E width of the score product.
"""

import math

import torch
from torch import Tensor, nn

from qkablate.attention.spec import Draw, Spec


def split_heads(x_BTF: Tensor, heads: int) -> Tensor:
    """(B, T, H·E) → (B, H, T, E)."""
    return x_BTF.unflatten(-1, (heads, -1)).transpose(1, 2)


class QK(nn.Module):
    """Base of the QK circuits. `forward` gives queries from one stream and keys from another."""

    factors = 2  # how many factors B_h has: each decays, so the product decays that many times
    match = "exact"  # how well the start meets standard's: exact, spread or none
    equation = ""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.width = spec.d_head  # E
        self.key_heads = spec.heads  # G
        self.scale = 1 / math.sqrt(spec.d_head)

    def forward(self, x_BTD: Tensor, y_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """q_BHTE from the query stream and k_BGSE from the key stream."""
        raise NotImplementedError

    def init_(self, draw: Draw) -> None:
        """Set every parameter, from draws by name."""
        raise NotImplementedError

    def lr_multiplier(self) -> float:
        """What makes the score map move as fast per Adam step as standard's."""
        return 1.0

    def bias_lr_multiplier(self) -> float:
        """The same for what the biases do to the scores."""
        return 1.0

    def circuit(self) -> tuple[Tensor, Tensor | None]:
        """B_HDD, and with biases u_HD: score = scale · (x_iᵀ B_h x_j + u_h·x_j), up to what
        softmax over j cannot see."""
        raise NotImplementedError

    def flops_per_token(self) -> int:
        """Forward FLOPs of the projections, per token (2 per multiply-add)."""
        return sum(2 * p.numel() for p in self.parameters() if p.dim() == 2)


class SeparateQK(QK):
    """Standard attention (Vaswani et al., 2017): B_h = W_q,h W_k,hᵀ, of rank at most d_head."""

    equation = "B_h = W_q W_kᵀ"

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.w_q = nn.Parameter(torch.empty(spec.d_model, spec.heads * spec.d_head))
        self.w_k = nn.Parameter(torch.empty(spec.d_model, spec.heads * spec.d_head))
        # b_k only shifts a row of scores, which softmax cannot see; GPT-2 has it, so it stays.
        self.b_q = nn.Parameter(torch.empty(spec.heads * spec.d_head)) if spec.bias else None
        self.b_k = nn.Parameter(torch.empty(spec.heads * spec.d_head)) if spec.bias else None

    def forward(self, x_BTD: Tensor, y_BSD: Tensor) -> tuple[Tensor, Tensor]:
        heads = self.spec.heads
        q_BHTE = split_heads(project(x_BTD, self.w_q, self.b_q), heads)
        k_BHSE = split_heads(project(y_BSD, self.w_k, self.b_k), heads)
        return q_BHTE, k_BHSE

    def init_(self, draw: Draw) -> None:
        draw_all_(self, draw)

    def circuit(self) -> tuple[Tensor, Tensor | None]:
        w_q_HDK, w_k_HDK = (by_head(w, self.spec.heads) for w in (self.w_q, self.w_k))
        if self.b_q is None:
            return w_q_HDK @ w_k_HDK.mT, None
        b_q_HK = self.b_q.unflatten(0, (self.spec.heads, -1))
        return w_q_HDK @ w_k_HDK.mT, (w_k_HDK @ b_q_HK.unsqueeze(-1)).squeeze(-1)


class MergedQK(QK):
    """One free d × d matrix per head instead of W_q W_kᵀ: B_h = W_h, of any rank.

    The keys are the stream itself, shared by all heads; `kernels.py` makes use of it. The scale is
    standard's 1/√d_head, so that W_h = W_q W_kᵀ is standard to the letter. With biases a head has
    u_h, which is all that b_q and b_k can do (u_h = W_k b_q).
    """

    factors = 1
    equation = "B_h = W, free d × d"

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.width, self.key_heads = spec.d_model, 1
        self.w_qk = nn.Parameter(torch.empty(spec.d_model, spec.heads * spec.d_model))
        self.u = nn.Parameter(torch.empty(spec.heads * spec.d_model)) if spec.bias else None
        if spec.init == "naive":
            self.match = "none"

    def forward(self, x_BTD: Tensor, y_BSD: Tensor) -> tuple[Tensor, Tensor]:
        return split_heads(project(x_BTD, self.w_qk, self.u), self.spec.heads), y_BSD.unsqueeze(1)

    def init_(self, draw: Draw) -> None:
        if self.spec.init == "naive":
            return draw_all_(self, draw)
        # Where standard starts: the product of the very tensors standard draws under these names.
        twin = SeparateQK(self.spec)
        twin.init_(draw)
        self.set_circuit_(*twin.circuit())

    @torch.no_grad()
    def set_circuit_(self, b_HDD: Tensor, u_HD: Tensor | None = None) -> None:
        """Take over a given B_h (and u_h): every d × d matrix can be represented."""
        self.w_qk.copy_(b_HDD.transpose(0, 1).flatten(1))
        if self.u is not None:
            self.u.copy_(torch.zeros_like(self.u) if u_HD is None else u_HD.flatten())
        elif u_HD is not None:
            raise ValueError("this circuit has no bias to hold u")

    def lr_multiplier(self) -> float:
        # One Adam step of W moves the scores √d / (2 k σ) times as far as one of W_q and W_k.
        return 2 * self.spec.d_head * self.spec.sigma / math.sqrt(self.spec.d_model)

    def bias_lr_multiplier(self) -> float:
        # Half of it: u takes the place of b_q alone, as softmax cannot see b_k.
        return self.lr_multiplier() / 2

    def circuit(self) -> tuple[Tensor, Tensor | None]:
        u_HD = None if self.u is None else self.u.unflatten(0, (self.spec.heads, -1))
        return by_head(self.w_qk, self.spec.heads), u_HD


class SharedQK(QK):
    """Q = K: B_h = W_h W_hᵀ, symmetric and positive. W is what standard calls W_k.

    At the start every token scores itself √k σ²d on average, and no scale of W can make that
    standard's zero while keeping the spread: the match is `none`.
    """

    match = "none"
    equation = "B_h = W_k W_kᵀ"

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.w_k = nn.Parameter(torch.empty(spec.d_model, spec.heads * spec.d_head))
        self.b_k = nn.Parameter(torch.empty(spec.heads * spec.d_head)) if spec.bias else None

    def forward(self, x_BTD: Tensor, y_BSD: Tensor) -> tuple[Tensor, Tensor]:
        q_BHTE = split_heads(project(x_BTD, self.w_k, self.b_k), self.spec.heads)
        if y_BSD is x_BTD:
            return q_BHTE, q_BHTE
        return q_BHTE, split_heads(project(y_BSD, self.w_k, self.b_k), self.spec.heads)

    def init_(self, draw: Draw) -> None:
        draw_all_(self, draw)

    def lr_multiplier(self) -> float:
        return math.sqrt(2)  # one matrix moves where standard moves two, independent, ones

    def circuit(self) -> tuple[Tensor, Tensor | None]:
        w_k_HDK = by_head(self.w_k, self.spec.heads)
        if self.b_k is None:
            return w_k_HDK @ w_k_HDK.mT, None
        b_k_HK = self.b_k.unflatten(0, (self.spec.heads, -1))
        return w_k_HDK @ w_k_HDK.mT, (w_k_HDK @ b_k_HK.unsqueeze(-1)).squeeze(-1)


class NoQ(QK):
    """No W_q (Karbevski & Mijoski, 2025): head h's query is its slice of x, B_h = E_h W_k,hᵀ.

    A slice of a normed x is 1/(σ√d) times as long as standard's query. The matched start puts that
    into the scale; naive leaves it out. What is left of the biases is b_k, as in standard.
    """

    factors = 1
    match = "spread"
    equation = "B_h = E_h W_kᵀ, queries are slices of x"

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.w_k = nn.Parameter(torch.empty(spec.d_model, spec.heads * spec.d_head))
        self.b_k = nn.Parameter(torch.empty(spec.heads * spec.d_head)) if spec.bias else None
        if spec.init == "matched":
            self.scale *= spec.sigma * math.sqrt(spec.d_model)
        else:
            self.match = "none"

    def forward(self, x_BTD: Tensor, y_BSD: Tensor) -> tuple[Tensor, Tensor]:
        heads = self.spec.heads
        return split_heads(x_BTD, heads), split_heads(project(y_BSD, self.w_k, self.b_k), heads)

    def init_(self, draw: Draw) -> None:
        draw_all_(self, draw)

    def lr_multiplier(self) -> float:
        # Unscaled, one step moves the scores 1/(2 σ√d) times as far as standard's; matched, half.
        spec = self.spec
        return 2.0 if spec.init == "matched" else 2 * spec.sigma * math.sqrt(spec.d_model)

    def circuit(self) -> tuple[Tensor, Tensor | None]:
        e_DD = torch.eye(self.spec.d_model, dtype=self.w_k.dtype, device=self.w_k.device)
        w_k_HDK = by_head(self.w_k, self.spec.heads)
        return by_head(e_DD, self.spec.heads) @ w_k_HDK.mT, None


QK_CIRCUITS: dict[str, type[QK]] = {
    "separate": SeparateQK,
    "merged": MergedQK,
    "shared": SharedQK,
    "no_q": NoQ,
}


def project(x_BTD: Tensor, w_DF: Tensor, b_F: Tensor | None) -> Tensor:
    """x W (+ b), with the weight in the row-vector convention of the equations."""
    return nn.functional.linear(x_BTD, w_DF.T, b_F)


def by_head(w_DF: Tensor, heads: int) -> Tensor:
    """(D, H·E) → (H, D, E): the matrix of each head."""
    return w_DF.unflatten(1, (heads, -1)).transpose(0, 1)


@torch.no_grad()
def draw_all_(circuit: nn.Module, draw: Draw) -> None:
    """Draw every parameter under its own name."""
    for name, parameter in circuit.named_parameters():
        parameter.copy_(draw(name, tuple(parameter.shape)))
