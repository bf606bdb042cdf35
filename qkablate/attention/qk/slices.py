"""Queries or keys that are slices of the stream: head h reads x[h·k : (h + 1)·k] without a weight.

A slice of a normed x is 1/(σ√d) times as long as a projected query. The matched start puts that
into the scale. Shape suffixes as in base.py; E_h is the d × k matrix that takes head h's slice.
"""

import math

import torch
from torch import Tensor

from qkablate.attention.projection.moments import Seen, with_bias
from qkablate.attention.qk.base import QK
from qkablate.attention.spec import Spec, matrix, project, side_by_side, split_heads, vector


class NoQ(QK):
    """No W_q (Karbevski & Mijoski, 2025): B_h = E_h W_k,hᵀ. At one head that is merged_w.

    What is left of the biases is b_k, as in standard.
    """

    factors = 1
    has_places = True
    match = "spread"
    equation = "B_h = E_h W_kᵀ, q is a slice of x"
    params = "d²"
    removes = "W_q"
    source = "Karbevski & Mijoski"

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.w_k = matrix(spec.d_model, spec.heads * spec.d_head)
        self.b_k = vector(spec, spec.heads * spec.d_head)
        if spec.init == "matched":
            self.scale *= spec.length
        else:
            self.match = "none"

    def queries(self, x_BTD: Tensor) -> Tensor:
        return split_heads(x_BTD, self.spec.heads)

    def keys(self, y_BSD: Tensor) -> Tensor:
        return split_heads(project(y_BSD, self.w_k, self.b_k), self.spec.heads)

    @torch.no_grad()
    def set_circuit_(self, b_HDD: Tensor, u_HD: Tensor | None = None) -> None:
        """Only the rows of the head's own slice can be held."""
        heads, k = self.spec.heads, self.spec.d_head
        rows_HKD = torch.stack([b_HDD[h, h * k : (h + 1) * k] for h in range(heads)])
        self.w_k.copy_(side_by_side(rows_HKD.mT))
        if self.b_k is not None:
            self.b_k.zero_()

    @torch.no_grad()
    def set_nearest_(self, b_HDD: Tensor, u_HD: Tensor | None, seen: Seen) -> None:
        """The slice stands for the rest of x, too, as well as a linear map can guess it."""
        held_HDD = torch.zeros_like(b_HDD)
        for head, wanted_LD in enumerate(with_bias(b_HDD, u_HD)):
            own = slice(head * self.spec.d_head, (head + 1) * self.spec.d_head)
            x_LL = seen.x_LL
            held_HDD[head, own] = torch.linalg.solve(x_LL[own, own], x_LL[own] @ wanted_LD)
        self.set_circuit_(held_HDD, u_HD)

    def lr_multiplier(self) -> float:
        # Unscaled, one step moves the scores 1/(2 σ√d) times as far as standard's; matched, half.
        return 2.0 if self.spec.init == "matched" else 2 * self.spec.length


class NoK(QK):
    """No W_k: head h's key is its slice of x, B_h = W_q,h E_hᵀ. Start and speed as in NoQ."""

    factors = 1
    has_places = True
    match = "spread"
    equation = "B_h = W_q E_hᵀ, k is a slice of x"
    params = "d²"
    removes = "W_k"
    source = "Karbevski & Mijoski"
    cached = "x"

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.w_q = matrix(spec.d_model, spec.heads * spec.d_head)
        self.b_q = vector(spec, spec.heads * spec.d_head)
        if spec.init == "matched":
            self.scale *= spec.length
        else:
            self.match = "none"

    def queries(self, x_BTD: Tensor) -> Tensor:
        return split_heads(project(x_BTD, self.w_q, self.b_q), self.spec.heads)

    def keys(self, y_BSD: Tensor) -> Tensor:
        return split_heads(y_BSD, self.spec.heads)

    @torch.no_grad()
    def set_circuit_(self, b_HDD: Tensor, u_HD: Tensor | None = None) -> None:
        """Only the columns (and entries of u) of the head's own slice can be held."""
        heads, k = self.spec.heads, self.spec.d_head
        own = [slice(h * k, (h + 1) * k) for h in range(heads)]
        self.w_q.copy_(side_by_side(torch.stack([b_HDD[h, :, own[h]] for h in range(heads)])))
        if self.b_q is not None:
            zero_HD = torch.zeros_like(b_HDD[..., 0])
            u_HD = zero_HD if u_HD is None else u_HD
            self.b_q.copy_(torch.cat([u_HD[h, own[h]] for h in range(heads)]))

    @torch.no_grad()
    def set_nearest_(self, b_HDD: Tensor, u_HD: Tensor | None, seen: Seen) -> None:
        """As NoQ's, on the other side."""
        held_HLD = torch.zeros_like(with_bias(b_HDD, u_HD))
        for head, wanted_LD in enumerate(with_bias(b_HDD, u_HD)):
            own = slice(head * self.spec.d_head, (head + 1) * self.spec.d_head)
            keys_DD = seen.keys()
            guess_DL = torch.linalg.solve(keys_DD[own, own], keys_DD[own] @ wanted_LD.mT)
            held_HLD[head, :, own] = guess_DL.mT
        self.set_circuit_(held_HLD[:, :-1], None if u_HD is None else held_HLD[:, -1])

    def lr_multiplier(self) -> float:
        return 2.0 if self.spec.init == "matched" else 2 * self.spec.length

    def bias_lr_multiplier(self) -> float:
        return 1.0 if self.spec.init == "matched" else self.spec.length


class NoQK(QK):
    """Neither: slices on both sides, B_h = E_h E_hᵀ, nothing to learn.

    The scale gives two different tokens standard's spread; a token scores itself √k times as much,
    as in shared_qk, so the match is `none`.
    """

    factors = 1
    has_places = True
    match = "none"
    equation = "B_h = E_h E_hᵀ, q = k = a slice of x"
    params = "0"
    removes = "W_q, W_k"
    source = "Karbevski & Mijoski"
    cached = "x"

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.only_own_scores_differ = spec.init == "matched"
        if spec.init == "matched":
            self.scale = spec.score_std / math.sqrt(spec.d_head)

    def queries(self, x_BTD: Tensor) -> Tensor:
        return split_heads(x_BTD, self.spec.heads)

    def keys(self, y_BSD: Tensor) -> Tensor:
        return split_heads(y_BSD, self.spec.heads)
