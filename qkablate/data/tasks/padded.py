"""Pairs of different lengths, padded to one shape.

Shape suffixes: N pairs, S source, T context, A answers, V vocabulary.
"""

from typing import ClassVar

import numpy as np

from qkablate.data.batches import IGNORE, PAD
from qkablate.data.tasks.base import Examples, Task
from qkablate.errors import ImpossibleConfig
from qkablate.randomness import named_generator

_CHANCE_PAIRS = 4096  # from which the accuracy of the best guess is measured
_HELD_OUT_EVERY = 4  # pairs of the test split


class PaddedTask(Task):
    """Base of the tasks whose sources and targets vary in length; an end token closes a target.

    Every fourth pair of the test split is of a kind that training never shows; the slice `pair`
    tells them apart.
    """

    has_pairs = True
    end: int
    pair_labels: ClassVar[tuple[str, ...]] = ("known", "held_out")

    def draw(self, rng: np.random.Generator, held_out_N: np.ndarray) -> Examples:
        """Draw a pair for each entry, of a kind that is held out where it is true."""
        raise NotImplementedError

    def prepare(self, *, end: int, source: int, answers: int, has_held_out: bool) -> int:
        """Check the longest lengths, measure `chance` and return the size of the vocabulary.

        The token after the end token is the marker before a target.
        """
        self.end, self.marker = end, end + 1
        self._answers, self._has_held_out = answers, has_held_out
        self._check_lengths(source, answers)
        rng = named_generator(0, self.name, "chance")
        targets_NA = self.generate_test(rng, _CHANCE_PAIRS).targets_NA
        counts_AV = [np.bincount(targets_N[targets_N != IGNORE]) for targets_N in targets_NA.T]
        hits = sum(counts_V.max(initial=0) for counts_V in counts_AV)
        self.chance = float(hits / (targets_NA != IGNORE).sum())
        return end + 2

    def generate(self, rng: np.random.Generator, count: int) -> Examples:
        return self.draw(rng, np.zeros(count, bool))

    def generate_test(self, rng: np.random.Generator, count: int) -> Examples:
        held_out_N = np.arange(1, count + 1) % _HELD_OUT_EVERY == 0
        return self.draw(rng, held_out_N & self._has_held_out)

    def join_padded(
        self, source_NS: np.ndarray, answer_NA: np.ndarray, slices: dict[str, np.ndarray]
    ) -> Examples:
        """Return pairs as the model reads them; PAD may be anywhere in sources and answers.

        In one sequence nothing is between a source and its answer. The decoder reads the end token
        after the answer, where nothing is asked of it.
        """
        end_N1 = np.full((len(answer_NA), 1), self.end)
        source_NS = _pad_right(source_NS)
        answer_NA = _pad_right(np.concatenate([answer_NA, end_N1], axis=1))
        targets_NA = np.where(answer_NA == PAD, IGNORE, answer_NA)
        known_NA = np.concatenate([end_N1 + 1, answer_NA[:, :-1]], axis=1)
        if self.form == "encoder":
            return Examples(
                _resize(source_NS, self.length, PAD),
                _resize(targets_NA, self.length, IGNORE),
                slices=slices,
            )
        if self.form == "encoder_decoder":
            return Examples(
                _resize(np.where(known_NA == PAD, self.end, known_NA), self.length, self.end),
                _resize(targets_NA, self.length, IGNORE),
                slices=slices,
                sources_NS=_resize(source_NS, self.source, PAD),
            )
        tokens_NT = _pad_right(np.concatenate([source_NS, known_NA], axis=1))
        tokens_NT = np.where(tokens_NT == PAD, self.end, tokens_NT)
        first_N1 = (source_NS != PAD).sum(axis=1, keepdims=True)
        positions_NA = np.minimum(first_N1 + np.arange(self._answers), self.length - 1)
        tokens_NT = _resize(tokens_NT, self.length, self.end)
        targets_NA = _resize(targets_NA, self._answers, IGNORE)
        return Examples(tokens_NT, targets_NA, positions_NA, slices)

    def format_slice(self, name: str, index: int) -> str:
        return self.pair_labels[index] if name == "pair" else str(index)

    def _check_lengths(self, source: int, answers: int) -> None:
        required = {
            "decoder": {"context": source + answers},
            "encoder": {"context": max(source, answers)},
            "encoder_decoder": {"context": answers, "source": source},
        }[self.form]
        for key, tokens in required.items():
            given = self.source if key == "source" else self.length
            if given < tokens:
                raise ImpossibleConfig(
                    f"model.{key}: {given} is too short for data={self.name}, whose longest pair"
                    f" has {source} tokens of source and {answers} of target; use"
                    f" model.{key}={tokens} or more"
                )


def _pad_right(tokens_NT: np.ndarray) -> np.ndarray:
    """Return the tokens of each row in order, followed by the padding."""
    return np.take_along_axis(tokens_NT, np.argsort(tokens_NT == PAD, 1, kind="stable"), axis=1)


def _resize(tokens_NT: np.ndarray, length: int, fill: int) -> np.ndarray:
    """Return rows of this length; what is cut off is padding."""
    missing = max(0, length - tokens_NT.shape[1])
    padded_NT = np.pad(tokens_NT, ((0, 0), (0, missing)), constant_values=fill)
    return np.ascontiguousarray(padded_NT[:, :length])
