"""Batches by step: which windows a step sees depends on (seed, step) alone.

Shape suffixes: N windows, T context, A answers.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from qkablate.randomness import stream

if TYPE_CHECKING:  # text is prepared and looked at without it
    from torch import Tensor

IGNORE = -100  # a target that does not count


class Batch(NamedTuple):
    """What one forward pass reads, and what it is to answer."""

    tokens_NT: "Tensor"
    targets_NA: "Tensor"
    where_NA: "Tensor | None" = None  # which positions answer; None: all, in their order
    slices: dict[str, np.ndarray] | None = None  # of each answer, the slice it counts in; by name


class Windows:
    """Random windows of a corpus."""

    def __init__(
        self, tokens: np.ndarray, *, seed: int, batch_size: int, accumulate: int, context: int
    ) -> None:
        self.seed, self.batch_size, self.accumulate = seed, batch_size, accumulate
        self._windows = sliding_window_view(tokens, context + 1)  # a view: nothing is read yet

    def step(self, step: int) -> list[Batch]:
        """The micro-batches of this step."""
        import torch

        count = self.batch_size * self.accumulate
        starts_N = stream(self.seed, "batch", step).integers(len(self._windows), size=count)
        windows_NT = torch.from_numpy(self._windows[starts_N].astype(np.int64))
        return [Batch(part[:, :-1], part[:, 1:]) for part in windows_NT.split(self.batch_size)]


def spread(tokens: np.ndarray, *, count: int, context: int) -> Batch:
    """So many whole windows, or as many as there are, evenly from first to last."""
    import torch

    windows_NT = sliding_window_view(tokens, context + 1)[::context]
    found_NT = torch.from_numpy(windows_NT[evenly(count, len(windows_NT))].astype(np.int64))
    return Batch(found_NT[:, :-1], found_NT[:, 1:])


def evenly(count: int, among: int) -> np.ndarray:
    """So many whole numbers below `among`, or all of them."""
    count = min(count, among)
    return (2 * np.arange(count, dtype=np.int64) + 1) * among // (2 * max(1, count))


def whole(tokens: np.ndarray, *, batch_size: int, context: int) -> Iterator[Batch]:
    """The whole split, once, in order: every token but the first is predicted exactly once.

    All batches have one shape; what is missing at the end is filled with targets that don't count.
    """
    import torch

    predicted = len(tokens) - 1
    step = batch_size * context
    for first in range(0, predicted, step):
        part = tokens[first : min(first + step, predicted) + 1]
        inputs, targets = np.zeros(step, np.int64), np.full(step, IGNORE, np.int64)
        inputs[: len(part) - 1], targets[: len(part) - 1] = part[:-1], part[1:]
        yield Batch(
            torch.from_numpy(inputs).view(-1, context), torch.from_numpy(targets).view(-1, context)
        )
