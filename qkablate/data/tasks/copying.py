"""Selective copying (Gu & Dao 2023): what stands among noise is written out, forwards or
backwards.
"""

import numpy as np

from qkablate.data.tasks.base import Examples, Task, octaves


class Copy(Task):
    """· · c · a · · b > c a b

    `data.payload` tokens stand at random places among noise. After the sign > they are to be
    written in their order. Tokens may come twice, so the last one written does not always tell the
    next.
    """

    name = "copy"
    what = "selective copying: write out what stood among noise, in its order"
    harder = "data.payload, model.context"
    step = 1

    def size(self) -> int:
        size, payload = self.number("vocab_size"), self.number("payload")
        if 2 * payload > self.length:
            raise self.refuse(
                "payload",
                payload,
                f"tokens to read and to write do not fit into model.context={self.length};"
                f" {self.length // 2} do",
            )
        self._payload, self._symbols = payload, size
        self._noise, self._sign = size, size + 1
        return size + 2

    def draw(self, rng: np.random.Generator, count: int) -> Examples:
        payload, field = self._payload, self.length - self._payload
        read_NP = rng.integers(self._symbols, size=(count, payload))
        places_NF = rng.random((count, field))
        where_NP = np.sort(np.argpartition(places_NF, payload - 1, axis=1)[:, :payload], axis=1)
        tokens_NT = np.full((count, self.length), self._noise)
        np.put_along_axis(tokens_NT, where_NP, read_NP, axis=1)
        written_NP = np.ascontiguousarray(read_NP[:, :: self.step])
        tokens_NT[:, field] = self._sign
        tokens_NT[:, field + 1 :] = written_NP[:, :-1]
        answers_NP = np.tile(np.arange(field, self.length), (count, 1))
        return Examples(
            tokens_NT, written_NP, answers_NP, {"place": octaves(np.arange(1, payload + 1))[None]}
        )

    def word(self, token: int) -> str:
        return {self._noise: "·", self._sign: ">"}.get(token, f"s{token}")


class Reverse(Copy):
    """· · c · a · · b > b a c: the same, backwards."""

    name = "reverse"
    what = "selective copying, backwards: the last one first"
    step = -1
