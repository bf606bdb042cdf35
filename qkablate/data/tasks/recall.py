"""Multi-query associative recall, as in the zoology line of work (Arora et al. 2023)."""

import numpy as np

from qkablate.data.batches import IGNORE
from qkablate.data.tasks.base import Examples, Task, distinct, octave, octaves

_POWER = (
    0.01  # queries come at a gap g with probability ∝ g ** (_POWER - 1): near ones are frequent
)


class Recall(Task):
    """k1 v1 k2 v2 … and later k2 → v2.

    A sequence begins with pairs of a key and its value. Later every key comes once more, at random
    places among values that mean nothing, and is to be answered with its own value. Half of the
    vocabulary are keys, half are values. How many pairs there are is drawn for each sequence from
    1, 2, 4, … up to `data.pairs`.
    """

    name = "recall"
    what = "multi-query associative recall: a key comes again, its value is the answer"
    harder = "data.pairs, model.context, data.vocab_size"

    def size(self) -> int:
        size, pairs = self.number("vocab_size"), self.number("pairs")
        if 3 * pairs > self.length:
            raise self.refuse(
                "pairs",
                pairs,
                f"pairs and as many queries do not fit into model.context={self.length};"
                f" {self.length // 3} do",
            )
        if size // 2 < pairs:
            raise self.refuse("vocab_size", size, f"has fewer keys than data.pairs={pairs}")
        self._keys, self._pairs = size // 2, pairs
        self._sizes = np.array([*(2**i for i in range(pairs.bit_length()) if 2**i < pairs), pairs])
        return size

    def draw(self, rng: np.random.Generator, count: int) -> Examples:
        length, pairs, keys = self.length, self._pairs, self._keys
        pairs_N1 = rng.choice(self._sizes, size=(count, 1))
        keys_NP = distinct(rng, count, pairs, keys)
        values_NP = rng.integers(keys, self.vocabulary, size=(count, pairs))
        tokens_NT = rng.integers(keys, self.vocabulary, size=(count, length))
        there_NP = np.arange(pairs) < pairs_N1
        row_N1 = np.arange(count)[:, None]
        for offset, part_NP in ((0, keys_NP), (1, values_NP)):
            head_NP = tokens_NT[:, offset : 2 * pairs : 2]
            head_NP[there_NP] = part_NP[there_NP]
        # Different places, drawn by weight: the greatest of log-weights plus Gumbel noise.
        gap_NT = np.arange(length) - 2 * pairs_N1 + 1
        weight_NT = (_POWER - 1) * np.log(np.maximum(gap_NT, 1)) + rng.gumbel(size=gap_NT.shape)
        weight_NT[gap_NT < 1] = -np.inf
        where_NP = np.argpartition(-weight_NT, pairs - 1, axis=1)[:, :pairs]
        # The likeliest places first, so that those of the pairs that are there come before others.
        weight_NP = weight_NT[row_N1, where_NP]
        where_NP = where_NP[row_N1, np.argsort(-weight_NP, axis=1)]
        # Which key stands at which place: at random among those that are there.
        shuffle_NP = np.where(there_NP, rng.random(there_NP.shape), 2.0)
        which_NP = np.argsort(shuffle_NP, axis=1)
        asked_NP, answer_NP = keys_NP[row_N1, which_NP], values_NP[row_N1, which_NP]
        rows, columns = np.nonzero(there_NP)
        tokens_NT[rows, where_NP[rows, columns]] = asked_NP[rows, columns]
        return Examples(
            tokens_NT,
            np.where(there_NP, answer_NP, IGNORE),
            np.where(there_NP, where_NP, 0),
            {"pairs": pairs_N1, "gap": octaves(where_NP - 2 * which_NP)},
        )

    def word(self, token: int) -> str:
        return f"k{token}" if token < self._keys else f"v{token - self._keys}"

    def label(self, name: str, index: int) -> str:
        return str(index) if name == "pairs" else octave(index)
