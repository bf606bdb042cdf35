"""Batches by step: the windows of a step depend on (seed, step) alone.

Shape suffixes: N windows, T context, A answers.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from qkablate.randomness import named_generator

if TYPE_CHECKING:  # data is prepared and shown without importing torch
    from torch import Tensor

IGNORE = -100  # a target that does not count
# Fills sources of different lengths up to one shape. It is no token, so that it takes no place in
# any vocabulary, and a source says where it ends without lengths or a mask beside it. Targets are
# filled with a token, whose predictions do not count; PAD marks them for inspection alone.
PAD = -1
DOCUMENT = "document"  # the slice of the answers of each document of a text
MAX_DOCUMENT_GROUPS = 1000


class Batch(NamedTuple):
    """Inputs and targets of one forward pass."""

    inputs: "tuple[Tensor, ...]"  # of the model; the last are the tokens that it predicts
    targets_NA: "Tensor"
    positions_NA: "Tensor | None" = None  # the positions with a target; None: all, in order
    slices: dict[str, np.ndarray] | None = None  # by name, the slice that each target counts in
    guessed_NA: np.ndarray | None = None  # targets that nothing determines; None: none
    weight: float = 1.0  # of its mean loss in that of a step
    windows_NW: "Tensor | None" = None  # inputs and targets in one, if they overlap: W = T + 1

    @property
    def tokens_NT(self) -> "Tensor":  # noqa: N802 - shape suffix
        """Tokens of the sequence whose positions the targets belong to."""
        return self.inputs[-1]

    @property
    def marked_inputs(self) -> "tuple[Tensor, ...]":
        """The inputs with PAD in targets, too, as `Model.attention_inputs` reads them."""
        if len(self.inputs) == 1:
            return self.inputs
        return *self.inputs[:-1], self.tokens_NT.masked_fill(self.targets_NA == IGNORE, PAD)


def predict_windows(windows_NW: "Tensor") -> Batch:
    """Return the batch that predicts each token of a window from those before it."""
    return Batch((windows_NW[:, :-1],), windows_NW[:, 1:], windows_NW=windows_NW)


def weigh(batches: Sequence[Batch]) -> list[Batch]:
    """Return the batches of a step with weights that make all its answers count the same."""
    counts = [int((batch.targets_NA != IGNORE).sum()) for batch in batches]
    mean = sum(counts) / len(counts)
    return [batch._replace(weight=n / mean) for batch, n in zip(batches, counts, strict=True)]


class RandomWindows:
    """Random windows of a corpus."""

    def __init__(
        self, tokens: np.ndarray, seed: int, batch_size: int, grad_accum: int, context: int
    ) -> None:
        self.seed, self.batch_size, self.grad_accum = seed, batch_size, grad_accum
        self._windows = sliding_window_view(tokens, context + 1)  # a view: nothing is read yet

    def step(self, step: int) -> list[Batch]:
        """Return the micro-batches of a step."""
        count = self.batch_size * self.grad_accum
        generator = named_generator(self.seed, "batch", step)
        starts_N = generator.integers(len(self._windows), size=count)
        windows_NW = _to_tensor(self._windows[starts_N])
        return [predict_windows(part_NW) for part_NW in windows_NW.split(self.batch_size)]


def spread_windows(tokens: np.ndarray, *, count: int, context: int) -> Batch:
    """Return `count` whole windows, or as many as there are, spread evenly over the tokens."""
    windows_NW = sliding_window_view(tokens, context + 1)[::context]
    chosen_NW = _to_tensor(windows_NW[evenly_spaced(count, len(windows_NW))])
    return predict_windows(chosen_NW)


def evenly_spaced(count: int, below: int) -> np.ndarray:
    """Return `count` evenly spaced integers below `below`, or all of them."""
    count = min(count, below)
    return (2 * np.arange(count, dtype=np.int64) + 1) * below // (2 * max(1, count))


def group_neighbors(count: int) -> np.ndarray:
    """Return the group of each of some documents: of very many, neighbors are counted as one."""
    return np.arange(count) * min(count, MAX_DOCUMENT_GROUPS) // count


def sequential_batches(
    tokens: np.ndarray,
    *,
    batch_size: int,
    context: int,
    limit: int | None = None,
    groups: np.ndarray | None = None,
) -> Iterator[Batch]:
    """Yield the whole split in order: every token but the first is predicted exactly once.

    With a `limit`, yield as many windows of it, evenly spaced. All batches have the same shape; the
    last one is padded with targets that do not count. With the document of each token in `groups`,
    the answers are also counted by document.
    """
    import torch

    windows = -(-(len(tokens) - 1) // context)
    is_whole = limit is None or limit >= len(tokens) - 1
    count = windows if is_whole or limit is None else max(1, limit // context)
    starts = evenly_spaced(count, windows) * context
    for first in range(0, len(starts), batch_size):
        starts_N = starts[first : first + batch_size]
        starts_N = np.pad(starts_N, (0, batch_size - len(starts_N)), constant_values=len(tokens))
        index_NT = starts_N[:, None] + np.arange(context)
        known_NT = index_NT + 1 < len(tokens)  # the others are padding
        index_NT[~known_NT] = 0
        inputs_NT = np.where(known_NT, tokens[index_NT], 0).astype(np.int64)
        targets_NA = np.where(known_NT, tokens[index_NT + 1].astype(np.int64), IGNORE)
        slices = None
        if groups is not None:
            slices = {DOCUMENT: np.where(known_NT, groups[index_NT + 1], 0)}
        yield Batch((torch.from_numpy(inputs_NT),), torch.from_numpy(targets_NA), slices=slices)


def _to_tensor(tokens: np.ndarray) -> "Tensor":
    import torch

    return torch.from_numpy(tokens.astype(np.int64))
