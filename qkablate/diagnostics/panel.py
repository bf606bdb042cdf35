"""The panel: all diagnostics of a model at one moment, as a row of metrics holds them."""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qkablate.attention import Attention
from qkablate.diagnostics import circuits, patterns
from qkablate.models.gpt import GPT
from qkablate.randomness import stream

TOKENS = 1024  # of each reading, in as many sequences as that makes
LENGTH = 512  # of a sequence; of a longer context its first positions
DIGITS = 5
_NUMBERS = 2**24  # of the matrices that are looked at together


class Panel:
    """Looks at one model, again and again, without touching it."""

    def __init__(
        self,
        model: GPT,
        tokens_BT: Tensor,
        *,
        starts: Iterable[Attention],
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """`tokens`: what the attention is looked at with; `starts`: the layers as they began,
        where that is known; `autocast`: of the training, for what computes the streams that
        attention reads.
        """
        self.model, self.tokens_BT, self.autocast = model, tokens_BT, autocast
        self.repeats_BT = repeated(tokens_BT)
        # What the matrices were at the start, kept on the CPU: a copy of the attention's weights.
        self.starts: dict[str, list[Any]] = {side: [] for side in ("qk", "ov")}
        for layer in starts:
            for side, own in self.starts.items():
                matrix = _matrix(side, layer.to(tokens_BT.device))
                own.append(matrix and matrix.to("cpu"))

    @torch.no_grad()
    def row(self) -> dict[str, dict[str, list[Any]]]:
        """{"qk": {measure: [[value per head] per layer]}, "ov": …, "attention": …}; None for a
        layer that has no such measure, and for a number that is none.
        """
        kind, training = self.tokens_BT.device.type, self.model.training
        self.model.eval()
        try:
            with torch.autocast(kind, enabled=False):
                row = {side: self._circuits(side) for side in self.starts}
                row["attention"] = self._attention()
        finally:
            self.model.train(training)
        return row

    def _circuits(self, side: str) -> dict[str, list[Any]]:
        layers, starts = self.model.attentions(), self.starts[side]
        row: dict[str, list[Any]] = {name: [None] * len(layers) for name in circuits.MEASURES}
        if (one := _matrix(side, layers[0])) is None:
            return row
        # On the model's own device, but for one that has no fp64.
        device = "cpu" if self.tokens_BT.device.type == "mps" else self.tokens_BT.device
        spec, factors = layers[0].qk.spec, getattr(layers[0], side).factors
        size = max(1, _NUMBERS // sum(t.numel() for t in vars(one).values()))
        for first in range(0, len(layers), size):
            numbers = range(first, min(first + size, len(layers)))
            found = {number: _matrix(side, layers[number]) for number in numbers}
            found = {number: matrix for number, matrix in found.items() if _is_finite(matrix)}
            if not found:
                continue
            matrix = circuits.stacked([*found.values()]).to(device, torch.float64)
            start = circuits.stacked([starts[number] for number in found]) if starts else None
            try:
                values = circuits.measures(
                    matrix,
                    start and start.to(device, torch.float64),
                    rank=spec.d_head,
                    two_factors=factors == 2,
                )
            except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # no decomposition found
                continue
            for name, value in values.items():
                if value is not None:
                    for number, own_H in zip(found, value.cpu().split(spec.heads), strict=True):
                        row[name][number] = rounded(own_H.tolist())
        return row

    def _attention(self) -> dict[str, list[Any]]:
        row: dict[str, list[Any]] = {name: [] for name in patterns.MEASURES}
        for tokens_BT, look in (
            (self.tokens_BT, patterns.patterns),
            (self.repeats_BT, patterns.repeat_patterns),
        ):
            with self.autocast():
                for layer, x_BTD in self.model.streams(tokens_BT):
                    with torch.autocast(tokens_BT.device.type, enabled=False):
                        for name, value_H in look(patterns.scores(layer, x_BTD)).items():
                            row[name].append(rounded(value_H.tolist()))
        return row


def repeated(tokens_BT: Tensor) -> Tensor:
    """Blocks of random tokens, each twice in a row: of half the length, of tokens among the given
    ones, without a token twice in a block where there are as many. The same whatever asks.
    """
    rows, length = tokens_BT.shape
    block = max(1, length // 2)
    known = np.unique(tokens_BT.cpu().numpy())
    rng = stream(0, "mechanism", "repeats")
    few = len(known) < block
    blocks_BT = np.stack([rng.choice(known, block, replace=few) for _ in range(rows)])
    return torch.from_numpy(np.tile(blocks_BT, 2)).to(tokens_BT)


def rounded(value: Any) -> Any:
    """To the digits that are kept; None for what is no number."""
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


def _matrix(side: str, layer: Attention) -> circuits.Matrix | None:
    if side == "qk":
        return circuits.qk_matrix(layer.qk)
    return circuits.ov_matrix(layer.ov, layer.qk)


def _is_finite(matrix: circuits.Matrix | None) -> bool:
    return matrix is not None and all(bool(t.isfinite().all()) for t in vars(matrix).values())
