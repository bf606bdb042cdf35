"""Sums of decimal numbers.

Shape suffixes: N pairs, D digits, the lowest first; 2 numbers.
"""

import numpy as np

from qkablate.data.batches import PAD
from qkablate.data.tasks.base import Examples
from qkablate.data.tasks.padded import PaddedTask

_PLUS, _END = 10, 11


class Add(PaddedTask):
    """Sums in reading order: 9 5 + 7 > 1 0 2 end.

    The longer number has 1 to `data.digits` digits, each equally often, and the other one as many
    at most. Held out are numbers of up to `data.extra_digits` more.
    """

    name = "add"
    summary = "the sum of two decimal numbers, also longer ones than in training"
    difficulty = "data.digits, data.extra_digits"

    def setup(self) -> int:
        self._digits, extra = self.setting("digits"), self.setting("extra_digits")
        self._most = most = self._digits + extra
        return self.prepare(
            end=_END, source=2 * most + 1, answers=most + 2, has_held_out=bool(extra)
        )

    def draw(self, rng: np.random.Generator, held_out_N: np.ndarray) -> Examples:
        count, most, digits = len(held_out_N), self._most, self._digits
        longest_N = rng.integers(
            np.where(held_out_N, digits + 1, 1), np.where(held_out_N, most, digits) + 1
        )
        lengths_N2 = np.stack([longest_N, rng.integers(1, longest_N + 1)], axis=1)
        lengths_N21 = rng.permuted(lengths_N2, axis=1)[..., None]
        places_D = np.arange(most)
        numbers_N2D = rng.integers(10, size=(count, 2, most))
        # No zero at the beginning of a number of several digits.
        leading_N2D = (places_D == lengths_N21 - 1) & (lengths_N21 > 1)
        digits_N2D = rng.integers(1, 10, size=numbers_N2D.shape)
        numbers_N2D = np.where(leading_N2D, digits_N2D, numbers_N2D)
        numbers_N2D = np.where(places_D < lengths_N21, numbers_N2D, 0)
        written_N2D = np.where(places_D < lengths_N21, numbers_N2D, PAD)[..., ::-1]
        plus_N1 = np.full((count, 1), _PLUS)
        source_NS = np.concatenate([written_N2D[:, 0], plus_N1, written_N2D[:, 1]], axis=1)
        slices = {"pair": held_out_N.astype(np.int64)[:, None], "digits": longest_N[:, None]}
        return self.join_padded(source_NS, _written_sums(numbers_N2D), slices)

    def format_token(self, token: int) -> str:
        return {_PLUS: "+", _END: "end", _END + 1: ">"}.get(token, str(token))


def _written_sums(numbers_N2D: np.ndarray) -> np.ndarray:
    """Return the digits of the sums, the highest first, after padding."""
    sums_ND = np.pad(numbers_N2D.sum(axis=1), ((0, 0), (0, 1)))
    for place in range(sums_ND.shape[1] - 1):
        sums_ND[:, place + 1] += sums_ND[:, place] // 10
        sums_ND[:, place] %= 10
    sums_ND = sums_ND[:, ::-1]
    is_leading_ND = np.cumsum(sums_ND, axis=1) == 0
    is_leading_ND[:, -1] = False  # the sum of 0 and 0
    return np.where(is_leading_ND, PAD, sums_ND)
