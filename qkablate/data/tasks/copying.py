"""Selective copying (Gu & Dao 2023), forwards and backwards."""

import numpy as np

from qkablate.data.tasks.base import Examples, Task, octave


class Copy(Task):
    """Selective copying: · · c · a · · b > c a b.

    `data.copy_length` tokens are at random positions among noise. After the marker > they are to be
    repeated in order. Tokens may occur twice, so the last one does not always determine the next.
    """

    name = "copy"
    summary = "selective copying: repeat the tokens among noise, in order"
    difficulty = "data.copy_length, model.context"
    step = 1

    def setup(self) -> int:
        size, copy_length = self.setting("vocab_size"), self.setting("copy_length")
        if 2 * copy_length > self.length:
            raise self.error(
                "copy_length",
                copy_length,
                f"tokens and their copy do not fit into model.context={self.length};"
                f" the maximum is {self.length // 2}",
            )
        self._copy_length, self._symbols = copy_length, size
        self._noise, self._marker, self.chance = size, size + 1, 1 / size
        return size + 2

    def generate(self, rng: np.random.Generator, count: int) -> Examples:
        copy_length, field = self._copy_length, self.length - self._copy_length
        source_NP = rng.integers(self._symbols, size=(count, copy_length))
        random_NF = rng.random((count, field))
        positions_NP = np.sort(
            np.argpartition(random_NF, copy_length - 1, axis=1)[:, :copy_length], axis=1
        )
        tokens_NT = np.full((count, self.length), self._noise)
        np.put_along_axis(tokens_NT, positions_NP, source_NP, axis=1)
        copy_NP = np.ascontiguousarray(source_NP[:, :: self.step])
        tokens_NT[:, field] = self._marker
        tokens_NT[:, field + 1 :] = copy_NP[:, :-1]
        answer_NP = np.tile(np.arange(field, self.length), (count, 1))
        return Examples(
            tokens_NT, copy_NP, answer_NP, {"position": octave(np.arange(1, copy_length + 1))[None]}
        )

    def format_token(self, token: int) -> str:
        return {self._noise: "·", self._marker: ">"}.get(token, f"s{token}")


class Reverse(Copy):
    """Selective copying in reverse order: · · c · a · · b > b a c."""

    name = "reverse"
    summary = "selective copying in reverse order"
    step = -1
