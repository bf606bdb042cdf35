"""What an evaluation adds up.

Shape suffixes: N windows, A answers.
"""

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from qkablate.data.batches import IGNORE, Batch


@dataclass
class Sums:
    """Of some answers."""

    count: int = 0
    loss: float = 0.0
    hits: int = 0

    @property
    def mean(self) -> float:
        return self.loss / self.count

    @property
    def accuracy(self) -> float:
        return self.hits / self.count

    def merge(self, other: "Sums") -> None:
        self.count += other.count
        self.loss += other.loss
        self.hits += other.hits


@dataclass
class Tally:
    """Of all answers, and of each slice of them."""

    all: Sums = field(default_factory=Sums)
    slices: dict[str, dict[int, Sums]] = field(default_factory=lambda: defaultdict(dict))

    def add(self, loss: float, count: int) -> None:
        self.all.loss += loss
        self.all.count += count

    def merge(self, other: "Tally") -> None:
        """Add what another process has read."""
        self.all.merge(other.all)
        for name, slices in other.slices.items():
            for i, sums in slices.items():
                self.slices[name].setdefault(i, Sums()).merge(sums)

    def grade(self, batch: Batch, losses_NA: np.ndarray, hits_NA: np.ndarray) -> None:
        """Add graded answers; those that don't count have a target of -100."""
        counts_NA = batch.targets_NA.numpy() != IGNORE
        losses, hits = losses_NA[counts_NA].astype(np.float64), hits_NA[counts_NA]
        _add(self.all, losses, hits)
        for name, slice_NA in (batch.slices or {}).items():
            ids = np.broadcast_to(slice_NA, counts_NA.shape)[counts_NA]
            for i in np.unique(ids):
                sums = self.slices[name].setdefault(int(i), Sums())
                _add(sums, losses[ids == i], hits[ids == i])


def _add(sums: Sums, losses: np.ndarray, hits: np.ndarray) -> None:
    sums.count += len(losses)
    sums.loss += float(losses.sum())
    sums.hits += int(hits.sum())
