"""The panel: all diagnostics of a model at one moment, as a row of metrics holds them."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qkablate.attention import Attention
from qkablate.mechanism import circuits, patterns
from qkablate.model import GPT
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
        seed: int,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """`tokens`: what the attention is looked at with; `seed`: what the model started from;
        `autocast`: of the training, for what computes the streams that attention reads."""
        self.model, self.tokens_BT, self.autocast = model, tokens_BT, autocast
        self.repeats_BT = repeated(tokens_BT)
        device = tokens_BT.device
        # Kept beside the model, on the CPU: what they were at the start.
        self.starts = [
            {side: m and m.to("cpu") for side, m in _matrices(layer.to(device)).items()}
            for layer in model.starts(seed)
        ]

    @torch.no_grad()
    def row(self) -> dict[str, dict[str, list[Any]]]:
        """{"qk": {measure: [[value per head] per layer]}, "ov": …, "attention": …}; None for a
        layer that has no such measure, and for a number that is none."""
        kind, training = self.tokens_BT.device.type, self.model.training
        self.model.eval()
        try:
            with torch.autocast(kind, enabled=False):
                layers = self.model.attentions()
                found = [_matrices(layer) for layer in layers]
                row = {side: self._circuits(side, found, layers) for side in ("qk", "ov")}
                row["attention"] = self._attention()
        finally:
            self.model.train(training)
        return row

    def _circuits(
        self, side: str, found: list[dict[str, Any]], layers: list[Attention]
    ) -> dict[str, list[Any]]:
        row: dict[str, list[Any]] = {name: [None] * len(layers) for name in circuits.MEASURES}
        own = [number for number, matrices in enumerate(found) if _is_finite(matrices[side])]
        circuit: Any = getattr(layers[0], side)
        spec = circuit.spec
        while own:
            size = sum(t.numel() for t in vars(found[own[0]][side]).values())
            together, own = _first(own, max(1, _NUMBERS // size))
            device = "cpu" if self.tokens_BT.device.type == "mps" else self.tokens_BT.device
            matrix, start = (
                circuits.stacked([kept[number][side] for number in together]).to(
                    device, torch.float64
                )
                for kept in (found, self.starts)
            )
            try:
                values = circuits.measures(
                    matrix, start, rank=spec.d_head, two_factors=circuit.factors == 2
                )
            except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # no decomposition found
                continue
            for name, value in values.items():
                if value is not None:
                    for number, own_H in zip(together, value.split(spec.heads), strict=True):
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
    ones, without a token twice in a block where there are as many. The same whatever asks."""
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


def _matrices(layer: Attention) -> dict[str, circuits.Matrix | None]:
    return {
        "qk": circuits.qk_matrix(layer.qk),
        "ov": circuits.ov_matrix(layer.ov, layer.qk),
    }


def _is_finite(matrix: circuits.Matrix | None) -> bool:
    return matrix is not None and all(bool(t.isfinite().all()) for t in vars(matrix).values())


def _first(items: list[int], count: int) -> tuple[list[int], list[int]]:
    return items[:count], items[count:]
