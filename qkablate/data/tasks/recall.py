"""Multi-query associative recall, as in the zoology line of work (Arora et al. 2023)."""

import numpy as np

from qkablate.data.batches import IGNORE
from qkablate.data.tasks.base import Examples, Task, draw_distinct, octave

_POWER = 0.01  # the gap g before a query has probability ∝ g ** (_POWER - 1): short ones prevail


class Recall(Task):
    """Recall: k1 v1 k2 v2 …, and later k2 → v2.

    A sequence begins with pairs of a key and its value. Later every key occurs once more, at random
    positions among random values, and its value is the target. Half of the vocabulary are keys,
    half are values. The number of pairs is drawn for each sequence from 1, 2, 4, … up to
    `data.pairs`.
    """

    name = "recall"
    summary = "multi-query associative recall: a key is repeated, its value is the answer"
    difficulty = "data.pairs, model.context, data.vocab_size"

    def setup(self) -> int:
        size, pairs = self.setting("vocab_size"), self.setting("pairs")
        if 3 * pairs > self.length:
            raise self.error(
                "pairs",
                pairs,
                f"pairs and as many queries do not fit into model.context={self.length};"
                f" the maximum is {self.length // 3}",
            )
        if size // 2 < pairs:
            raise self.error("vocab_size", size, f"has fewer keys than data.pairs={pairs}")
        self._keys, self._pairs = size // 2, pairs
        self.chance = 1 / (size - self._keys)
        self._sizes = np.array([*(2**i for i in range(pairs.bit_length()) if 2**i < pairs), pairs])
        return size

    def generate(self, rng: np.random.Generator, count: int) -> Examples:
        length, pairs, keys = self.length, self._pairs, self._keys
        pairs_N1 = rng.choice(self._sizes, size=(count, 1))
        keys_NP = draw_distinct(rng, count, pairs, keys)
        values_NP = rng.integers(keys, self.vocabulary, size=(count, pairs))
        tokens_NT = rng.integers(keys, self.vocabulary, size=(count, length))
        used_NP = np.arange(pairs) < pairs_N1
        row_N1 = np.arange(count)[:, None]
        for offset, part_NP in ((0, keys_NP), (1, values_NP)):
            head_NP = tokens_NT[:, offset : 2 * pairs : 2]
            head_NP[used_NP] = part_NP[used_NP]
        # Distinct positions, drawn by weight: the greatest log-weights plus Gumbel noise.
        gap_NT = np.arange(length) - 2 * pairs_N1 + 1
        weight_NT = (_POWER - 1) * np.log(np.maximum(gap_NT, 1)) + rng.gumbel(size=gap_NT.shape)
        weight_NT[gap_NT < 1] = -np.inf
        positions_NP = np.argpartition(-weight_NT, pairs - 1, axis=1)[:, :pairs]
        # The greatest first, so that the pairs in use get valid positions.
        weight_NP = weight_NT[row_N1, positions_NP]
        positions_NP = positions_NP[row_N1, np.argsort(-weight_NP, axis=1)]
        # Random assignment of the keys in use to the positions.
        shuffle_NP = np.where(used_NP, rng.random(used_NP.shape), 2.0)
        key_NP = np.argsort(shuffle_NP, axis=1)
        query_NP, answer_NP = keys_NP[row_N1, key_NP], values_NP[row_N1, key_NP]
        rows, columns = np.nonzero(used_NP)
        tokens_NT[rows, positions_NP[rows, columns]] = query_NP[rows, columns]
        return Examples(
            tokens_NT,
            np.where(used_NP, answer_NP, IGNORE),
            np.where(used_NP, positions_NP, 0),
            {"pairs": pairs_N1, "gap": octave(positions_NP - 2 * key_NP)},
        )

    def format_token(self, token: int) -> str:
        return f"k{token}" if token < self._keys else f"v{token - self._keys}"
