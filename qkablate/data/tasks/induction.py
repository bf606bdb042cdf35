"""Repeated random segments (Olsson et al. 2022)."""

import numpy as np

from qkablate.data.eval_metrics import AnswerSums, EvalMetrics
from qkablate.data.tasks.base import Examples, Task, draw_distinct


class Induction(Task):
    """Induction: a b c d a b c d a b …, in which each token follows the same one as before.

    A random segment of distinct tokens is repeated until the sequence is full. Its length is drawn
    for each sequence, from half of `data.segment` to all of it, so that no fixed distance gives the
    answer. Every next token is a target: unpredictable in the first segment, determined from the
    second on. The accuracy counts from the second on; the induction score is the loss of the first
    minus that of the second, in nats: ln(vocab_size) at most.
    """

    name = "induction"
    summary = "repeated random segments: loss of the first and the second, induction score"
    difficulty = "data.segment, data.vocab_size"
    slice_labels = ("first", "second", "later")

    def setup(self) -> int:
        size, segment = self.setting("vocab_size"), self.setting("segment")
        if 2 * segment > self.length + 1:
            raise self.error(
                "segment", segment, f"does not fit twice into model.context={self.length}"
            )
        if segment > size:
            raise self.error("segment", segment, f"is more than data.vocab_size={size} tokens")
        self._segment, self.chance = segment, 1 / size
        return size

    def generate(self, rng: np.random.Generator, count: int) -> Examples:
        segment_NS = draw_distinct(rng, count, self._segment, self.vocabulary)
        period_N1 = rng.integers((self._segment + 1) // 2, self._segment + 1, size=(count, 1))
        position_W = np.arange(self.length + 1)
        tokens_NW = np.take_along_axis(segment_NS, position_W % period_N1, axis=1)
        # Number of earlier times that this token followed the one before it.
        occurrence_NT = np.minimum((position_W[1:] - 1) // period_N1, 2)
        return Examples(
            np.ascontiguousarray(tokens_NW[:, :-1]),
            np.ascontiguousarray(tokens_NW[:, 1:]),
            slices={"occurrence": occurrence_NT},
            guessed_NA=occurrence_NT == 0,
        )

    def metrics(self, split: str, totals: EvalMetrics) -> dict[str, float]:
        metrics, repeated = super().metrics(split, totals), AnswerSums()
        occurrences = totals.slices["occurrence"]
        for index, sums in occurrences.items():
            if index:
                repeated.merge(sums)
        metrics["accuracy"] = repeated.accuracy
        metrics["induction_score"] = occurrences[0].mean - occurrences[1].mean
        return metrics

    def format_token(self, token: int) -> str:
        return f"t{token}"
