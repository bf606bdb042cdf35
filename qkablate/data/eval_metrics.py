"""Totals of an evaluation, over all answers and over slices of them.

Shape suffixes: N windows, A answers.
"""

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from qkablate.data.batches import IGNORE, Batch


@dataclass
class AnswerSums:
    """Number, total loss and hits of some answers."""

    count: int = 0
    loss: float = 0.0
    hits: int = 0

    @property
    def mean(self) -> float:
        return self.loss / self.count

    @property
    def accuracy(self) -> float:
        return self.hits / self.count if self.count else 0.0

    def merge(self, other: "AnswerSums") -> None:
        self.count += other.count
        self.loss += other.loss
        self.hits += other.hits

    def add(self, losses: np.ndarray, hits: np.ndarray) -> None:
        self.merge(AnswerSums(len(losses), float(losses.sum()), int(hits.sum())))

    def add_sequences(self, right_N: np.ndarray) -> None:
        self.merge(AnswerSums(len(right_N), hits=int(right_N.sum())))


@dataclass
class EvalMetrics:
    """Sums over all answers, and over each slice of them."""

    all: AnswerSums = field(default_factory=AnswerSums)
    # Sequences: one is right if all its answers are that something determines.
    sequences: AnswerSums = field(default_factory=AnswerSums)
    slices: dict[str, dict[int, AnswerSums]] = field(default_factory=lambda: defaultdict(dict))
    # Sequences again, in the slices that each lies in as a whole.
    sequence_slices: dict[str, dict[int, AnswerSums]] = field(
        default_factory=lambda: defaultdict(dict)
    )

    def merge(self, other: "EvalMetrics") -> None:
        """Add the sums of another process."""
        self.all.merge(other.all)
        self.sequences.merge(other.sequences)
        for mine, others in (
            (self.slices, other.slices),
            (self.sequence_slices, other.sequence_slices),
        ):
            for name, slices in others.items():
                for index, sums in slices.items():
                    mine[name].setdefault(index, AnswerSums()).merge(sums)

    def add_loss(self, loss: float, count: int) -> None:
        """Add the total loss of answers whose hits and slices are not counted."""
        self.all.merge(AnswerSums(count, loss))

    def add_answers(self, batch: Batch, losses_NA: np.ndarray, hits_NA: np.ndarray) -> None:
        """Add the answers of a batch that have a target."""
        counts_NA = batch.targets_NA.numpy() != IGNORE
        losses, hits = losses_NA[counts_NA].astype(np.float64), hits_NA[counts_NA]
        self.all.add(losses, hits)
        asked_NA = counts_NA if batch.guessed_NA is None else counts_NA & ~batch.guessed_NA
        asked_N = asked_NA.any(axis=1)
        right_N = (hits_NA.astype(bool) | ~asked_NA).all(axis=1)[asked_N]
        self.sequences.add_sequences(right_N)
        for name, slice_NA in (batch.slices or {}).items():
            if slice_NA.shape[1] == 1 < counts_NA.shape[1]:
                indices_N = slice_NA[asked_N, 0]
                for i in np.unique(indices_N):
                    sums = self.sequence_slices[name].setdefault(int(i), AnswerSums())
                    sums.add_sequences(right_N[indices_N == i])
            indices = np.broadcast_to(slice_NA, counts_NA.shape)[counts_NA]
            for i in np.unique(indices):
                sums = self.slices[name].setdefault(int(i), AnswerSums())
                sums.add(losses[indices == i], hits[indices == i])
