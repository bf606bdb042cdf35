"""Scores that do not depend on content: queries and keys have width zero.

Shape suffixes as in base.py, and N for positions.
"""

import math

import torch
from torch import Tensor, nn

from qkablate.attention.qk.base import QK
from qkablate.attention.spec import Draw, Spec


class Uniform(QK):
    """All scores are 0, so every visible position has the same weight: a lower bound."""

    factors = 1
    match = "none"
    equation = "score = 0"
    params = "0"
    removes = "W_q, W_k, scores"
    source = "lower bound"
    cached = ""
    no_rope_reason = "there are no queries and keys to rotate"

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.width, self.scale = 0, 1.0

    def queries(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.new_empty(x_BTD.shape[0], self.spec.heads, x_BTD.shape[1], 0)

    def keys(self, y_BSD: Tensor) -> Tensor:
        return self.queries(y_BSD)

    @property
    def no_circuit_reason(self) -> str:
        return "the scores do not depend on x"


class StaticScores(Uniform):
    """A learned T × T table per head (the random Synthesizer of Tay et al., 2020).

    Positions attend to positions regardless of content, up to the context of the model. The table
    is initialized with standard's spread. One Adam step lowers the loss over causal scores by
    η Σ|gradient| over its T²/2 entries; matching standard's 2 d² entries takes
    2√2 d² σ√d / (h T √k) of the learning rate.
    """

    match = "spread"
    naive_match = "none"
    equation = "score(i, j) = a learned table"
    params = "h T²"
    removes = "W_q, W_k, content"
    source = "Tay et al. 2020"

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        assert spec.context is not None
        self.table = nn.Parameter(torch.empty(spec.heads, spec.context, spec.context))

    @torch.no_grad()
    def init_(self, draw: Draw) -> None:
        super().init_(draw)
        if self.spec.init == "matched":
            self.table.mul_(self.spec.score_std / self.spec.sigma)

    def score_bias(self, first: int, queries: int, keys: int) -> Tensor | None:
        context = self.table.shape[-1]
        if max(first + queries, keys) > context:
            raise ValueError(
                f"static_scores has {context} positions, not {max(first + queries, keys)}"
            )
        return self.table[:, first : first + queries, :keys]

    def lr_multiplier(self) -> float:
        spec = self.spec
        moved = spec.heads * self.table.shape[-1] * math.sqrt(spec.d_head)
        return float(2 * math.sqrt(2) * spec.d_model**2 * spec.projection_std / moved)
