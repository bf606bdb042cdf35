"""Repeated random segments (Olsson et al. 2022)."""

import numpy as np

from qkablate.data.eval_metrics import Tally
from qkablate.data.tasks.base import Examples, Task, distinct, together

_OCCURRENCES = ("first", "second", "later")


class Induction(Task):
    """a b c d a b c d a b …: what came after this token the last time?

    A random segment of different tokens is repeated until the sequence is full. Its length is
    drawn for each sequence, from half of `data.segment` to all of it, so that no fixed distance
    answers. Every next token is trained on; the first time nothing tells it, from the second on
    everything does. The accuracy is that from the second time on; the induction score is how much
    lower the loss is the second time, in nats: ln(vocab_size) at most.
    """

    name = "induction"
    what = "repeated random segments: loss the first and the second time, induction score"
    harder = "data.segment, data.vocab_size"

    def size(self) -> int:
        size, segment = self.number("vocab_size"), self.number("segment")
        if 2 * segment > self.length + 1:
            raise self.refuse(
                "segment", segment, f"does not fit twice into model.context={self.length}"
            )
        if segment > size:
            raise self.refuse("segment", segment, f"is more than data.vocab_size={size} tokens")
        self._segment = segment
        return size

    def draw(self, rng: np.random.Generator, count: int) -> Examples:
        segment_NS = distinct(rng, count, self._segment, self.vocabulary)
        period_N1 = rng.integers((self._segment + 1) // 2, self._segment + 1, size=(count, 1))
        place_W = np.arange(self.length + 1)
        tokens_NW = np.take_along_axis(segment_NS, place_W % period_N1, axis=1)
        # Which time this token comes after the one before it.
        occurrence_NT = np.minimum((place_W[1:] - 1) // period_N1, 2)
        return Examples(
            np.ascontiguousarray(tokens_NW[:, :-1]),
            np.ascontiguousarray(tokens_NW[:, 1:]),
            slices={"occurrence": occurrence_NT},
        )

    def measures(self, split: str, tally: Tally) -> dict[str, float]:
        found = super().measures(split, tally)
        occurrences = tally.slices["occurrence"]
        again = together([sums for index, sums in occurrences.items() if index])
        found["accuracy"] = again.accuracy
        found["induction_score"] = occurrences[0].mean - occurrences[1].mean
        return found

    def word(self, token: int) -> str:
        return f"t{token}"

    def label(self, name: str, index: int) -> str:
        return _OCCURRENCES[index]
