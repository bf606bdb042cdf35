"""Selective copying (Gu & Dao 2023), forwards, backwards and in order of the symbols."""

import numpy as np

from qkablate.data.tasks.base import Examples, Task, octave


class Copy(Task):
    """Selective copying: · · c · a · · b > c a b.

    `data.copy_length` tokens are at random positions among noise. After the marker > they are to be
    repeated in order. Tokens may occur twice, so the last one does not always determine the next.
    As a pair, what stands before the marker is the source, without noise if it is as short.
    """

    name = "copy"
    summary = "selective copying: repeat the tokens among noise, in order"
    difficulty = "data.copy_length, model.context"
    has_pairs = True

    def setup(self) -> int:
        size, self._copy_length = self.setting("vocab_size"), self.setting("copy_length")
        self.check_lengths("copy_length", self._copy_length)
        self._symbols, self._noise, self.marker = size, size, size + 1
        self._field = {
            "decoder": self.length - self._copy_length,
            "encoder": self.length,
            "encoder_decoder": self.source,
        }[self.form]
        self.chance = self.best_guess()
        return size + 2

    def best_guess(self) -> float:
        """Return the accuracy of the best guess that does not depend on the source."""
        return 1 / self._symbols

    def answer(self, source_NP: np.ndarray) -> np.ndarray:
        """Return the answers to the tokens among the noise."""
        return source_NP

    def generate(self, rng: np.random.Generator, count: int) -> Examples:
        copy_length, field = self._copy_length, self._field
        source_NP = rng.integers(self._symbols, size=(count, copy_length))
        random_NF = rng.random((count, field))
        positions_NP = np.sort(
            np.argpartition(random_NF, copy_length - 1, axis=1)[:, :copy_length], axis=1
        )
        tokens_NF = np.full((count, field), self._noise)
        np.put_along_axis(tokens_NF, positions_NP, source_NP, axis=1)
        answer_NP = np.ascontiguousarray(self.answer(source_NP))
        slices = {"position": octave(np.arange(1, copy_length + 1))[None]}
        return self.join(tokens_NF, answer_NP, self.marker, slices=slices)

    def format_token(self, token: int) -> str:
        return {self._noise: "·", self.marker: ">"}.get(token, f"s{token}")


class Reverse(Copy):
    """Selective copying in reverse order: · · c · a · · b > b a c."""

    name = "reverse"
    summary = "selective copying in reverse order"

    def answer(self, source_NP: np.ndarray) -> np.ndarray:
        return source_NP[:, ::-1]


class Sort(Copy):
    """Selective copying in ascending order of the symbols: · · c · a · · b > a b c."""

    name = "sort"
    summary = "selective copying in ascending order of the symbols"

    def answer(self, source_NP: np.ndarray) -> np.ndarray:
        return np.sort(source_NP, axis=1)

    def best_guess(self) -> float:
        from scipy.stats import binom  # it takes longer to import than all of this package

        n, size = self._copy_length, self._symbols
        below_S = np.arange(size + 1) / size  # P(a symbol is smaller than the s-th)
        chances = []
        for rank in range(1, n + 1):  # of the order statistic at each position
            at_most_S = binom.sf(rank - 1, n, below_S)  # as many symbols or more are smaller
            chances.append(np.diff(at_most_S).max())
        return float(np.mean(chances))
