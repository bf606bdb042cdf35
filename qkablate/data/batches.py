"""Batches by step: which windows a step sees depends on (seed, step) alone.

Shape suffixes: N windows, T context.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from qkablate.randomness import stream

IGNORE = -100  # a target that does not count


class Batches:
    """Random windows of the training split."""

    def __init__(
        self, tokens: np.ndarray, *, seed: int, batch_size: int, accumulate: int, context: int
    ) -> None:
        self.tokens, self.seed, self.context = tokens, seed, context
        self.batch_size, self.accumulate = batch_size, accumulate
        self._window = np.arange(context + 1)

    def step(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """The (tokens, targets) of each micro-step of this step."""
        count = self.batch_size * self.accumulate
        starts_N = stream(self.seed, "batch", step).integers(
            len(self.tokens) - self.context, size=count
        )
        windows_NT = torch.from_numpy(
            self.tokens[starts_N[:, None] + self._window].astype(np.int64)
        )
        return [(part[:, :-1], part[:, 1:]) for part in windows_NT.split(self.batch_size)]


def windows(
    tokens: np.ndarray, *, batch_size: int, context: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """The whole split, once, in order: every token but the first is predicted exactly once.

    All batches have one shape; what is missing at the end is filled with targets that don't count.
    """
    predicted = len(tokens) - 1
    count = -(-predicted // context)  # windows, the last one perhaps short
    padded = -(-count // batch_size) * batch_size * context
    inputs, targets = np.zeros(padded, np.int64), np.full(padded, IGNORE, np.int64)
    inputs[:predicted], targets[:predicted] = tokens[:-1], tokens[1:]
    inputs_NT = torch.from_numpy(inputs).view(-1, context)
    targets_NT = torch.from_numpy(targets).view(-1, context)
    yield from zip(inputs_NT.split(batch_size), targets_NT.split(batch_size), strict=True)
